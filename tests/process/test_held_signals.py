"""What a command does about signals while something must not be left half done."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from telescope._launch.child_processes import CaughtSignals
from telescope._launch.held_signals import hold_signals, raise_on_signals
from telescope.runlog import temporary
from telescope.wire.process import Interrupted


@pytest.fixture
def ignored() -> Iterator[None]:
    """As nohup, and a script's shell for its background jobs, start a process."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGHUP, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_signal_is_raised_and_the_handlers_are_back_behind_it() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted) as raised, raise_on_signals():
        signal.raise_signal(signal.SIGTERM)
    assert raised.value.number == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_ignored_hang_up_stays_so_and_a_stop_is_answered(ignored: None) -> None:
    with hold_signals() as held:
        signal.raise_signal(signal.SIGHUP)
        assert held.number is None
        signal.raise_signal(signal.SIGINT)
        assert (held.number, held.exit_code) == (signal.SIGINT, 130)
    with raise_on_signals():
        signal.raise_signal(signal.SIGHUP)
        with pytest.raises(Interrupted) as raised:
            signal.raise_signal(signal.SIGINT)
    assert raised.value.number == signal.SIGINT
    assert signal.getsignal(signal.SIGHUP) is signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_in_a_thread_nothing_is_answered() -> None:
    seen: list[object] = []

    def look() -> None:
        with raise_on_signals(), hold_signals():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join(60)
    assert seen == [signal.getsignal(signal.SIGTERM)]


def test_a_run_that_is_over_leaves_no_descriptor_open() -> None:
    """A search of hundreds of points supervises them one after another, in one process."""
    before = sorted(os.listdir("/proc/self/fd"))
    with CaughtSignals() as wakeup, temporary.open_folder() as folder:
        signal.raise_signal(signal.SIGTERM)
        assert wakeup.arrived() == [signal.SIGTERM]
        assert folder.exists()
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert not folder.exists()
