"""The exit code of a run, question by question; the table of docs/configuration.md says what each number means."""

from __future__ import annotations

import signal

import pytest

from telescope._launch.causes import FailureCause
from telescope._launch.supervisor import choose_exit_code

OWN = FailureCause("orchestrator", "the disk is full", "", ())
OTHER = FailureCause("trainer-0", "trainer-0 was killed", "", ())


@pytest.mark.parametrize(("cause", "orchestrator", "warned", "interrupted", "code"), [
    (None, 0, False, None, 0),
    (OWN, 1, False, None, 1),  # an error of its own
    (OWN, 70, False, None, 70),  # it has found another part wanting
    (OTHER, 1, False, None, 70),
    (OTHER, 75, True, signal.SIGTERM, 70),  # a part that failed goes before all else
    (None, 75, False, signal.SIGINT, 75),  # interrupted, and all in a checkpoint
    (None, 130, False, signal.SIGINT, 130),
    (None, -9, False, signal.SIGHUP, 129),
    (None, 0, False, signal.SIGTERM, 0),  # it was done, and told to stop while it saved
    (None, -9, True, None, 75),  # its time was up
    (None, -9, True, signal.SIGTERM, 75),
    (None, 0, True, None, 0),  # it was done before it heard
    (None, 1, False, signal.SIGTERM, 143),  # stopped while it saved, and could not
    (None, None, False, None, 0),
])  # fmt: skip
def test_the_exit_code_follows_from_what_was_seen(
    cause: FailureCause | None, orchestrator: int | None, warned: bool, interrupted: int | None, code: int
):
    assert choose_exit_code(cause, orchestrator, warned=warned, interrupted=interrupted) == code
