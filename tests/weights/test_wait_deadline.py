"""A deadline for waits that have none of their own: late ones are broken off, others are left alone."""

from __future__ import annotations

import threading

from telescope.weights.transports.nccl import WaitDeadline

PATIENCE_S, LONG_S, SHORT_S = 60.0, 3600.0, 0.05


class Waiter:
    """Waits for what only its deadline ends."""

    def __init__(self, seconds: float) -> None:
        self.ended, self.calls = threading.Event(), []
        self.deadline = WaitDeadline(self.late, seconds)

    def late(self) -> None:
        self.calls.append(threading.current_thread().name)
        self.ended.set()

    def wait(self, seconds: float = LONG_S) -> bool:
        """The time is set once it waits, so that no busy machine can be late before."""
        with self.deadline.waiting():
            self.deadline.limit(seconds)
            return self.ended.wait(PATIENCE_S)


def deadline_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "nccl-deadline"}


def test_a_wait_is_broken_off_from_another_thread_when_the_time_is_up():
    waiter = Waiter(LONG_S)
    assert waiter.wait(SHORT_S)
    assert waiter.calls == ["nccl-deadline"]


def test_a_wait_that_begins_after_the_time_is_broken_off_at_once_by_itself():
    waiter = Waiter(-1.0)
    with waiter.deadline.waiting():
        assert waiter.calls == [threading.current_thread().name]


def test_waits_that_end_in_time_are_let_go_and_a_time_that_nobody_waits_for_may_pass():
    waiter = Waiter(LONG_S)
    for _ in range(3):
        with waiter.deadline.waiting():
            pass
    waiter.deadline.limit(SHORT_S)
    while not waiter.deadline.is_up:
        threading.Event().wait(SHORT_S)
    assert waiter.calls == []
    waiter.deadline.limit(LONG_S)
    assert waiter.wait(SHORT_S)
    assert waiter.calls == ["nccl-deadline"]


def test_a_nearer_limit_reaches_a_wait_that_is_under_way():
    waiter, begun, found = Waiter(LONG_S), threading.Event(), []

    def wait() -> None:
        with waiter.deadline.waiting():
            begun.set()
            found.append(waiter.ended.wait(PATIENCE_S))

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    assert begun.wait(PATIENCE_S)
    waiter.deadline.limit(SHORT_S)
    thread.join(PATIENCE_S)
    assert found == [True]


def test_one_thread_looks_on_for_all_waits_and_ends_when_it_is_stopped():
    before, waiter = deadline_threads(), Waiter(LONG_S)
    for _ in range(5):
        with waiter.deadline.waiting():
            pass
    (thread,) = deadline_threads() - before
    waiter.deadline.stop()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    with waiter.deadline.waiting():
        pass
    assert not deadline_threads() - before
