"""Ports for programs that are told one before they open it, when others open theirs at the same time."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack

LOW, HIGH = 10_000, 29_000
"""Below what Linux gives to whoever asks for any port (32768 to 60999), so none of these becomes another's by chance."""


def free_ports(count: int, address: str = "127.0.0.1") -> list[int]:
    """Different ones, free at this address a moment ago."""
    chosen: list[int] = []
    with ExitStack() as held:
        for port in random.SystemRandom().sample(range(LOW, HIGH), HIGH - LOW):
            if len(chosen) == count:
                break
            try:
                held.enter_context(socket.create_server((address, port), reuse_port=False))
            except OSError:
                continue
            chosen.append(port)
    return chosen


def free_port(address: str = "127.0.0.1") -> int:
    return free_ports(1, address)[0]
