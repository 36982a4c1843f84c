"""What a process has loaded is set aside from Python's collector of cycles."""

from __future__ import annotations

import subprocess
import sys

FROZEN = """
import gc, weakref
from telescope.wire.heap import freeze_heap

class Thing:
    pass

kept, before = [Thing() for _ in range(1000)], len(gc.get_objects())
cycle = Thing()
cycle.itself = cycle
gone = weakref.ref(cycle)
del cycle
freeze_heap()
assert gone() is None, "garbage was set aside for good"
assert gc.get_freeze_count() > before - 100, gc.get_freeze_count()
assert len(gc.get_objects()) < 200, len(gc.get_objects())
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
