"""What the head's supervisor and those of other nodes say to each other, and their sockets.

A node says all that it knows in every report, the head all that is not yet obeyed in every message of orders: what gets lost
with a connection is said again a beat later, and what comes twice changes nothing. Always CURVE; both keys follow from one
secret that all hosts have (docs/launching.md), and exactly the nodes of the run are let in. Decides nothing.

Not a session of telescope.wire: a supervisor waits in one `select` without threads or an event loop, nodes meet before there is
a run to name in a hello, and a second process of one name is turned away here where the hub takes it for a restart. The sockets
themselves are opened as the hub's and its links' are (telescope/wire/security.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import zmq
from zmq.utils import z85

from telescope._launch.hosts.node_identity import make_node_name
from telescope._launch.process_plan import Host, ProcessPlan
from telescope.records import Record
from telescope.wire.security import Keys, answer_zap, protect_client, protect_server

HEAD = "head"
MAX_MESSAGE_BYTES = 16 << 20
"""Bytes of a message: a configuration and the last lines of logs are far smaller."""


class AssignRun(Record, frozen=True, tag=True):
    """The run that a node takes part in. Its files are written where the node does not see the run directory."""

    run_id: str
    run_dir: str
    """The head's."""
    silent_s: float
    files: dict[str, str]
    """Text by path in the run directory."""


class StartProcess(Record, frozen=True, tag=True):
    process: ProcessPlan
    extra: dict[str, str]
    incarnation: int


class StopProcess(Record, frozen=True, tag=True):
    name: str
    grace_s: float
    number: int


class KillProcess(Record, frozen=True, tag=True):
    name: str


class AskStack(Record, frozen=True, tag=True):
    """It is given up as silent: where its threads are goes to its log."""

    name: str


class KillShim(Record, frozen=True, tag=True):
    """The shim does not follow: kill it, and sweep up what it held."""

    name: str


class WriteFile(Record, frozen=True, tag=True):
    """A file of the run that came to be later: where the hub is."""

    path: str
    text: str


class EndNode(Record, frozen=True, tag=True):
    """The run is over, or this node is not wanted: end what is left and leave with this exit code."""

    code: int
    reason: str


NodeOrder = AssignRun | StartProcess | StopProcess | KillProcess | AskStack | KillShim | WriteFile | EndNode


class NodeOrders(Record, frozen=True):
    """Head to node: the orders from `first` on, which the node has not said to have obeyed."""

    head: str
    """This start of the head: a later one at the same address knows nothing of these orders."""
    first: int
    orders: tuple[NodeOrder, ...]


class ProcessState(Record, frozen=True):
    """One process as its node sees it."""

    incarnation: int
    pid: int | None = None
    status: int | None = None
    """Exit code, or minus the signal; null while it lives."""
    ago_s: float = 0.0
    """How long ago it ended: clocks of two hosts are not the same."""
    shim_died: bool = False
    gone: bool = False
    sentence: str = ""
    """Why it could not be started, or what it wrote about its own end."""
    started: bool = True
    log: str = ""
    """The last of its log, where the head can't read the file: when it has ended, or was asked for its stacks."""


class NodeReport(Record, frozen=True):
    """Node to head."""

    node: int
    incarnation: str
    config_hash: str
    host: Host
    head: str = ""
    """Whose orders it obeys; empty before it has heard any."""
    obeyed: int = 0
    """Orders of that head, in all."""
    port: int = 0
    """One that is kept free here, for the trainer ranks to meet."""
    shared: bool = True
    """It sees the head's run directory."""
    interrupted: int = 0
    """The signal that its user sent it."""
    failed: str = ""
    """Why it can't take part."""
    over: bool = False
    """It has obeyed `EndNode`."""
    processes: dict[str, ProcessState] = msgspec.field(default_factory=dict)


def derive_keys(key: bytes, name: str) -> Keys:
    """The CURVE pair of the head or of a node: BLAKE2b of its name under the hosts' key."""
    digest = hashlib.blake2b(name.encode(), key=key, digest_size=32, person=b"telescope-node").digest()
    secret = z85.encode(digest)
    return Keys(name, bytes(zmq.curve_public(secret)), secret)


class CurveSocket:
    """A socket whose every read ends in `EAGAIN`, so that its descriptor wakes a `select` when there is more."""

    def __init__(self, kind: int) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(kind)
        self._socket.linger = 0
        self._socket.maxmsgsize = MAX_MESSAGE_BYTES

    @property
    def descriptors(self) -> tuple[int, ...]:
        return (int(self._socket.getsockopt(zmq.FD)),)

    def close(self, linger_s: float = 0.0) -> None:
        self._socket.close(linger=int(linger_s * 1000))
        self._context.term()

    def _frames(self, source: Any) -> Iterator[list[Any]]:
        while True:
            try:
                yield source.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return


class NodeSocket(CurveSocket):
    """A node's end."""

    def __init__(self, endpoint: str, key: bytes, rank: int) -> None:
        super().__init__(zmq.DEALER)
        protect_client(self._socket, derive_keys(key, make_node_name(rank)), derive_keys(key, HEAD).public)
        self._socket.ipv6 = "[" in endpoint
        self._socket.sndhwm, self._socket.immediate = 4, True  # old reports are worth nothing
        self._socket.connect(endpoint)

    def send(self, report: NodeReport) -> None:
        """Dropped where the head can't be reached: the next one says it all."""
        try:
            self._socket.send(msgspec.json.encode(report), zmq.NOBLOCK)
        except zmq.Again:
            return

    def receive(self) -> list[NodeOrders]:
        """What came since the last call. Call it last before a `select`."""
        found = []
        for frames in self._frames(self._socket):
            try:
                found.append(msgspec.json.decode(frames[-1].bytes, type=NodeOrders))
            except msgspec.MsgspecError:
                continue  # a head of another version: its silence is noticed
        return found


class HeadSocket(CurveSocket):
    """The head's end: nodes by the name that their key has, wherever they come from."""

    def __init__(self, endpoint: str, key: bytes, ranks: Sequence[int]) -> None:
        """`endpoint`: `tcp://10.0.0.1:29400`, or with `*` for any free port. Raises `zmq.ZMQError`."""
        super().__init__(zmq.ROUTER)
        self._nodes = {make_node_name(rank): rank for rank in ranks}
        self._allowed = {z85.decode(derive_keys(key, name).public): name for name in self._nodes}
        self._routes: dict[int, bytes] = {}
        self._zap = self._context.socket(zmq.REP)
        protect_server(self._socket, self._zap, derive_keys(key, HEAD))
        self._socket.ipv6 = "[" in endpoint
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError:
            self.close()
            raise
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\x00")

    @property
    def descriptors(self) -> tuple[int, ...]:
        return (*super().descriptors, int(self._zap.getsockopt(zmq.FD)))

    def close(self, linger_s: float = 0.0) -> None:
        self._zap.close(linger=0)
        super().close(linger_s)

    def send(self, node: int, orders: NodeOrders) -> None:
        """Dropped where the node is not there: it is said again."""
        route = self._routes.get(node)
        if route is None:
            return
        try:
            self._socket.send_multipart([route, msgspec.json.encode(orders)], zmq.NOBLOCK)
        except (zmq.Again, zmq.ZMQError):
            return  # ROUTER_MANDATORY: no such connection any more

    def set_route(self, node: int, route: bytes) -> None:
        """What is said to the node goes by this route from now on: only who calls decides whether a report counts."""
        self._routes[node] = route

    def receive(self) -> list[tuple[NodeReport, bytes]]:
        """What came since the last call, each from the node that it says, and the way back. Call it last before a `select`."""
        found: list[tuple[NodeReport, bytes]] = []
        quiet = False
        while not quiet:
            quiet = True
            for frames in self._frames(self._zap):
                quiet = False
                self._zap.send_multipart(answer_zap([frame.bytes for frame in frames], self._allowed))
            for frames in self._frames(self._socket):
                quiet = False
                report = self._read(frames)
                if report is not None:
                    found.append((report, frames[0].bytes))
        return found

    def _read(self, frames: Sequence[Any]) -> NodeReport | None:
        node = self._nodes.get(frames[-1].get("User-Id"))
        try:
            report = msgspec.json.decode(frames[-1].bytes, type=NodeReport)
        except msgspec.MsgspecError:
            return None
        return report if report.node == node else None  # else it says to be another than its key does
