"""The run's keys: one CURVE pair a process, made by the launcher, in a folder that only its owner can read.

Owns key files and the answer to ZeroMQ's question who may connect (ZAP, RFC 27): exactly the processes whose public keys lie in
the folder, each under its own name. Secrets are never printed: not by repr, not in errors, not in logs.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from telescope.runlog.layout import RunDirectory

Z85_KEY_CHARACTERS = 40
"""A key of 32 bytes."""
ZAP = "inproc://zeromq.zap.01"
ZMTP_BEAT_MS, ZMTP_DEAD_MS = 5_000, 15_000
HANDSHAKE_MS = 3_000
"""Who has not proved by then that it is of the run is cut off, and its descriptor is free again. A peer tries again."""


class BadKeys(OSError):
    """A key is missing, unreadable, or readable by others. The text names the file and the remedy."""


@dataclass(frozen=True)
class Keys:
    """One process's pair, both in Z85."""

    name: str
    public: bytes
    secret: bytes = field(repr=False)


def make_keys(run_directory: RunDirectory, names: Iterable[str]) -> None:
    """Make a pair for each process, in the run directory's 0700 wire folder. Raises `FileExistsError` rather than replace."""
    folder = run_directory.hub_json.parent
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.chmod(0o700)
    for name in names:
        public, secret = zmq.curve_keypair()
        _write_new(run_directory.secret_key(name), secret)
        _write_new(run_directory.public_key(name), public)


def load_keys(run_directory: RunDirectory, name: str) -> Keys:
    """This process's pair. Raises `BadKeys`, also where the secret is open to others: it is then no secret."""
    secret_path = run_directory.secret_key(name)
    try:
        mode = secret_path.stat().st_mode
    except OSError as error:
        raise BadKeys(
            f"{name} has no key at {secret_path} ({error.strerror}): the launcher makes one for each process"
        ) from error
    if mode & 0o077:
        raise BadKeys(f"{secret_path} is open to others (mode {mode & 0o777:o}): chmod 600 it and start a new run")
    return Keys(name, _read_key(run_directory.public_key(name)), _read_key(secret_path))


def allow_list(run_directory: RunDirectory, hub: str) -> dict[bytes, str]:
    """Raw 32-byte public key -> process name, of every process of the run but the hub itself."""
    paths = sorted(run_directory.hub_json.parent.glob("*.key"))
    return {z85.decode(_read_key(path)): path.stem for path in paths if path.stem != hub}


def list_direct_keys(run_directory: RunDirectory) -> dict[bytes, str]:
    """The same of those who may come to a server's own port: the run's environment workers."""
    return {key: name for key, name in allow_list(run_directory, "").items() if name.startswith("worker-")}


def protect_server(router: zmq.Socket[bytes], zap: zmq.Socket[bytes], keys: Keys) -> None:
    """Before the bind. Only those come in whom the reader of `zap` answers with 200 (`answer_zap`), each known by name; a
    handshake has its time, and a dead connection is noticed."""
    zap.linger = 0
    zap.bind(ZAP)  # before the ROUTER: without it anyone with the public key would be let in
    router.curve_server, router.curve_publickey, router.curve_secretkey = True, keys.public, keys.secret
    router.router_mandatory = True
    router.handshake_ivl = HANDSHAKE_MS
    _watch_connections(router)


def protect_client(dealer: zmq.Socket[bytes], keys: Keys, server_key: bytes) -> None:
    """Before the connect. It talks to nobody but who has the secret to `server_key` (Z85)."""
    dealer.curve_serverkey = server_key
    dealer.curve_publickey, dealer.curve_secretkey = keys.public, keys.secret
    _watch_connections(dealer)


def _watch_connections(socket: zmq.Socket[bytes]) -> None:
    socket.heartbeat_ivl, socket.heartbeat_timeout, socket.heartbeat_ttl = ZMTP_BEAT_MS, ZMTP_DEAD_MS, ZMTP_DEAD_MS


def answer_zap(request: Sequence[bytes], allowed: Mapping[bytes, str]) -> list[bytes]:
    """Reply to one ZAP request `[version, id, domain, address, identity, mechanism, key]`: 200 with the process's name as
    user id, or 400."""
    request_id = request[1] if len(request) > 1 else b""
    name = allowed.get(request[6]) if len(request) == 7 and request[0] == b"1.0" and request[5] == b"CURVE" else None
    if name is None:
        return [b"1.0", request_id, b"400", b"not on the allow-list", b"", b""]
    return [b"1.0", request_id, b"200", b"OK", name.encode(), b""]


def _write_new(path: Path, key: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(key)


def _read_key(path: Path) -> bytes:
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        raise BadKeys(f"the key {path} cannot be read: {error.strerror}") from error
    if len(key) != Z85_KEY_CHARACTERS:
        raise BadKeys(f"the key {path} has {len(key)} characters, expected {Z85_KEY_CHARACTERS}: start a new run")
    return key
