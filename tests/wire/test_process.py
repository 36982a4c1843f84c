"""The edge of a process: what a signal does, and how an error becomes a sentence with its cause in the log."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys

import pytest

from telescope.wire.link import LinkLost, WireRefused
from telescope.wire.process import KnownErrors, ProcessSignals

KNOWN = KnownErrors(errors=(WireRefused,), gone=(LinkLost,))
STUBBORN = """
import asyncio, time
from telescope.wire.process import ProcessSignals

async def main():
    came = ProcessSignals().watch_on_loop()
    print("ready", flush=True)
    print(await came, flush=True)
    try:
        while True:
            time.sleep(0.01)  # clean-up that never ends, and that an exception would not end either
    except BaseException:
        print("an exception came", flush=True)

asyncio.run(main())
"""
KEPT = """
import asyncio, os, signal

signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))  # as the shim does before it starts the interpreter
os.kill(os.getpid(), signal.SIGTERM)

from telescope.wire.process import ProcessSignals

signals = ProcessSignals(held=True)
signals.watch()  # lets it in; with held=False it would be raised here
print("still here" if not signal.sigpending() else "not let in", flush=True)

async def main():
    async with asyncio.timeout(60):
        print(int(await signals.watch_on_loop()), flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_kills(second: int):
    process = subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "2\n"
    process.send_signal(second)
    rest, _ = process.communicate(timeout=60)
    assert (process.returncode, rest) == (-second, "")


def test_a_signal_kept_from_before_the_first_line_is_heard_on_the_loop_and_ends_nothing_before():
    process = subprocess.run([sys.executable, "-c", KEPT], capture_output=True, text=True, timeout=60)
    assert (process.returncode, process.stdout) == (0, "still here\n15\n"), process.stderr


async def test_two_signals_in_one_turn_of_the_loop_are_one(caplog: pytest.LogCaptureFixture):
    old = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        came = ProcessSignals().watch_on_loop()
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert await asyncio.wait_for(came, 60) == signal.SIGINT
        await asyncio.sleep(0)
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
    assert [record.getMessage() for record in caplog.records] == []


@pytest.mark.parametrize(
    ("error", "sentence", "code", "traced"),
    [
        (WireRefused("the run's key is another"), "worker-0: the run's key is another", 1, False),
        (LinkLost("the hub is silent"), "worker-0: the hub is silent", 70, False),
        (ValueError("no such dataset"), "worker-0: no such dataset", 1, True),
        (OSError(28, "No space left on device"), "worker-0: [Errno 28] No space left on device", 1, True),
        (KeyError("reward"), "worker-0 ended with KeyError: 'reward'", 1, True),
    ],
)
def test_an_error_that_is_not_ours_leaves_its_traceback_in_the_log(
    error: Exception, sentence: str, code: int, traced: bool, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.INFO):
        try:
            raise error
        except Exception as raised:  # noqa: BLE001 as the process edge does
            said = KNOWN.describe_end("worker-0", raised)
    assert said == (sentence, code)
    assert ("test_process.py" in caplog.text and "Traceback" in caplog.text) is traced


@pytest.mark.parametrize(
    "done", ["sys.stdout.close(); sys.stderr.close()", "sys.stdout = sys.stderr = None", "os.close(1); os.close(2)"]
)
def test_a_process_whose_output_is_gone_leaves_with_its_code(done: str):
    """As an environment may do it."""
    code = f"import os, sys\nfrom telescope.wire.process import leave\nprint('said')\n{done}\nleave(7)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode == 7
