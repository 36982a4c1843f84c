"""What a process has loaded is set aside from Python's collector of cycles."""

from __future__ import annotations

import subprocess
import sys

FROZEN = """
import gc, weakref
from telescope.wire.process import freeze_heap

class Thing:
    pass

kept = [Thing() for _ in range(1000)]
cycle = Thing()
cycle.itself = cycle
gone = weakref.ref(cycle)
del cycle
freeze_heap()
assert gone() is None, "garbage was set aside for good"
assert gc.get_freeze_count() >= 1000, gc.get_freeze_count()
assert not any(isinstance(each, Thing) for each in gc.get_objects()), "the collector still looks through them"
kept_one = weakref.ref(kept[0])
del kept[0]
assert kept_one() is None, "what nobody refers to is freed as ever"
later = Thing()
later.itself = later
gone = weakref.ref(later)
del later
gc.collect()
assert gone() is None, "later cycles are still found"
"""


def test_loaded_objects_are_set_aside_and_garbage_is_not():
    subprocess.run([sys.executable, "-c", FROZEN], check=True, timeout=120)
