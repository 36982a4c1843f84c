"""Where the hub is: `hub.json` in the run directory, written by the hub, waited for by the links. Knows no sockets."""

from __future__ import annotations

import time

import msgspec

from telescope.runlog.layout import RunDirectory, write_atomically

POLL_S = 0.05
"""Between two looks at the file. A shared file system gives no other notice of it."""


class HubAddress(msgspec.Struct, frozen=True):
    """`public_key` in Z85; `endpoint` like `tcp://10.0.0.7:41873`. Fields that a later version adds are passed over."""

    attempt: str
    endpoint: str
    public_key: str
    host: str
    pid: int


class HubNotFound(TimeoutError):
    """No hub of this attempt has written its address in time. The text says what was found instead."""


def publish_address(run_directory: RunDirectory, address: HubAddress) -> None:
    write_atomically(run_directory.hub_json, msgspec.json.encode(address).decode(), mode=0o600)


def find_hub(run_directory: RunDirectory, attempt: str, deadline_s: float) -> HubAddress:
    """Wait for the hub of this attempt; files of another attempt are skipped. Raises `HubNotFound` after `deadline_s`."""
    end = time.monotonic() + deadline_s
    while True:
        found, seen = _look(run_directory, attempt)
        if found is not None:
            return found
        left = end - time.monotonic()
        if left <= 0:
            raise HubNotFound(f"no hub of attempt {attempt} after {deadline_s:g} s: {seen}")
        time.sleep(min(POLL_S, left))


def _look(run_directory: RunDirectory, attempt: str) -> tuple[HubAddress | None, str]:
    path = run_directory.hub_json
    try:
        address = msgspec.json.decode(path.read_bytes(), type=HubAddress)
    except FileNotFoundError:
        return None, f"{path} does not exist; did the orchestrator start?"
    except (OSError, msgspec.MsgspecError) as error:
        return None, f"{path} cannot be read ({error})"
    if address.attempt != attempt:
        return None, f"{path} is of attempt {address.attempt}"
    return address, ""
