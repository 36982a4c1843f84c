"""What holds for all tests: properties are judged by what they say, never by how long a busy machine took to try one; and who
has tested ends, whatever a failed test has left open."""

from __future__ import annotations

import faulthandler

import pytest
import zmq
from hypothesis import HealthCheck, settings

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

END_S = 60.0


def _leave_open(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """In place of a wait, for ever, for sockets that a failed test has left: it would stop all tests after it."""


zmq.Context.__del__ = _leave_open  # type: ignore[method-assign]


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    """A socket that a failed test did not close keeps an interpreter from ending, for ever: then where it waits is printed and
    the exit code is 1."""
    faulthandler.dump_traceback_later(END_S, exit=True)
