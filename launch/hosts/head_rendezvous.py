"""Where nodes that see one run directory find the head: `nodes/head.json` and `nodes/key` in it, for their owner alone."""

from __future__ import annotations

import socket
import time

import msgspec

from telescope.records import Record
from telescope.runlog.layout import RunDirectory, write_atomically

LOOK_S = 0.1
"""Between two looks. A shared file system gives no other notice of a file."""


CONNECT_S = 2.0
"""For one knock at an address that nobody may listen at."""


class HeadFile(Record, frozen=True):
    endpoint: str
    key: str
    """In hexadecimal digits."""


class HeadAddress(Record, frozen=True):
    """Where to go, and what to prove there."""

    endpoint: str
    key: bytes

    @property
    def address(self) -> str:
        return self.endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")


def write_head_file(run: RunDirectory, endpoint: str, key: bytes) -> None:
    run.nodes_json.parent.mkdir(mode=0o700, exist_ok=True)
    write_atomically(run.nodes_json, msgspec.json.encode(HeadFile(endpoint, key.hex())).decode(), mode=0o600)


def find_head(run: RunDirectory, timeout_s: float) -> HeadAddress:
    """Wait until the head has said where it is, and is there: the head of an attempt before may have left its address. Raises
    `TimeoutError` with a sentence."""
    end = time.monotonic() + timeout_s
    while True:
        try:
            found = msgspec.json.decode(run.nodes_json.read_bytes(), type=HeadFile)
            meeting = HeadAddress(found.endpoint, bytes.fromhex(found.key))
            if _listens(meeting):
                return meeting
        except FileNotFoundError:
            pass  # the head is not there yet
        if time.monotonic() >= end:
            raise TimeoutError(
                f"no head within {timeout_s:g} s at {run.nodes_json}: is {run.path} the run directory of all hosts, and did "
                "node 0 start?"
            )
        time.sleep(LOOK_S)


def _listens(meeting: HeadAddress) -> bool:
    try:
        with socket.create_connection((meeting.address, int(meeting.endpoint.rpartition(":")[2])), CONNECT_S):
            return True
    except OSError:
        return False
