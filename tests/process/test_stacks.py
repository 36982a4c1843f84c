"""Which thread of a silent process is told, and in which words."""

from __future__ import annotations

import faulthandler
import sys
import tempfile
import threading

from telescope._launch.stacks import read_stacks

HELD = """worker log
Thread 0x00007f01 (most recent call first):
  File "/usr/lib/python3.11/selectors.py", line 468 in select
  File "/usr/lib/python3.11/asyncio/base_events.py", line 1898 in _run_once

Thread 0x00007f02 (most recent call first):
  File "/usr/lib/python3.11/re/__init__.py", line 166 in match
  File "/home/me/plugins/environments/hard.py", line 12 in reward
  File "/src/telescope/environments/rubric.py", line 90 in score
  File "/usr/lib/python3.11/concurrent/futures/thread.py", line 58 in run

Current thread 0x00007f03 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait
"""


def test_the_thread_in_an_environments_code_is_told_with_the_environment():
    found = read_stacks(HELD)
    assert found is not None
    assert found.describe() == (
        "it was at /home/me/plugins/environments/hard.py:12 (reward), in /usr/lib/python3.11/re/__init__.py:166 (match)"
    )
    assert found.find_environment([("countdown", "countdown"), ("mine", "hard")]) == "mine"
    assert found.find_environment([("countdown", "countdown")]) == ""


def test_where_all_threads_wait_that_is_said():
    waiting = HELD.replace("re/__init__.py", "queue.py")
    found = read_stacks(waiting)
    assert found is not None
    assert not found.busy
    assert found.describe().startswith("all of its threads were waiting; it was at ")


def test_of_two_dumps_the_last_counts_and_without_one_there_is_nothing_to_tell():
    later = HELD.replace("line 12 in reward", "line 99 in reward")
    found = read_stacks(HELD + "more of the log\n" + later)
    assert found is not None
    assert found.place.line == 99
    assert read_stacks("a log\nwithout any\n") is None
    assert read_stacks("") is None


def test_the_form_is_that_of_this_python():
    with tempfile.TemporaryFile("w+") as file:
        thread = threading.Thread(target=lambda: faulthandler.dump_traceback(file, all_threads=True))
        thread.start()
        thread.join()
        file.seek(0)
        found = read_stacks(file.read())
    assert found is not None
    assert any(frame.file == __file__ for frame in found.frames), sys.version
