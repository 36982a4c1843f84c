"""Which thread of a silent process is told, and in which words."""

from __future__ import annotations

import signal
import subprocess
import sys

from telescope._launch.stacks import read_crash, read_stacks

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


TOKENIZING = """Thread 0x00007f01 (most recent call first):
  File "/x/.venv/lib/python3.11/site-packages/transformers/tokenization_utils_tokenizers.py", line 1063 in _encode_plus
  File "/src/telescope/environments/template.py", line 243 in _encode

"""


def test_a_thread_that_waits_for_the_interpreter_does_not_hide_the_one_that_holds_it():
    held_in_a_thread = read_stacks(TOKENIZING + HELD.removeprefix("worker log\n"))
    assert held_in_a_thread is not None
    assert (held_in_a_thread.place.file, held_in_a_thread.place.line) == ("/home/me/plugins/environments/hard.py", 12)
    two = TOKENIZING.replace("telescope/environments", "mine") + TOKENIZING.replace(
        "src/telescope/environments/template", "hard"
    )
    held_by_the_main_thread = read_stacks(two)
    assert held_by_the_main_thread is not None
    assert held_by_the_main_thread.place.file == "/hard.py"


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


ASKED = """
import faulthandler, sys, threading

def work():
    faulthandler.dump_traceback(sys.stderr, all_threads=True)

thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


def test_the_form_is_that_of_this_python():
    """In a process of its own: this one has threads of other tests."""
    asked = subprocess.run([sys.executable, "-c", ASKED], capture_output=True, text=True, timeout=60, check=True)
    found = read_stacks(asked.stderr)
    assert found is not None
    assert (found.frames[0].function, found.busy) == ("work", True), asked.stderr


CRASHES = """
import faulthandler, os, sys, threading
faulthandler.enable(file=sys.stderr, all_threads=True)

def crash():
    {crash}

thread = threading.Thread(target=crash)
thread.start()
threading.Event().wait(60)
"""


def crash_in(crash: str) -> tuple[int, str]:
    ended = subprocess.run([sys.executable, "-c", CRASHES.format(crash=crash)], capture_output=True, text=True, timeout=60)
    return ended.returncode, ended.stderr


def test_a_crash_is_told_of_the_thread_that_crashed_in_the_form_of_this_python():
    status, log = crash_in("faulthandler._sigsegv()")
    assert status == -signal.SIGSEGV
    found = read_crash("before\n" + log)
    assert found is not None
    assert (found.place.function, found.busy) == ("crash", True)


def test_a_thread_without_python_that_aborts_leaves_those_that_were_at_work():
    """As a library's own thread does, once somebody has closed its descriptors."""
    log = (
        'Fatal Python error: Aborted\n\nThread 0x01 (most recent call first):\n  File "/x/hard.py", line 3 in reward\n\n'
        'Thread 0x02 (most recent call first):\n  File "/usr/lib/python3.11/threading.py", line 324 in wait\n'
    )
    found = read_crash(log)
    assert found is not None
    assert found.describe() == "it was at /x/hard.py:3 (reward)"
    assert read_crash("Fatal Python error: Aborted\n\n<no Python frame>\n") is None
    assert read_crash(HELD) is None
