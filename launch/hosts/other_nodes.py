"""The head's view of the other nodes and of their processes. supervisor.py decides about these as about its own.

Owns gathering the nodes, what each has been ordered and has said, and when one is lost. A node that is not heard for
`silent_s` is lost with all its processes, and does the same on its side: it ends what it has.
"""

from __future__ import annotations

import secrets
import select
import time
from collections.abc import Callable, Sequence

from telescope._launch.causes import read_tail_text
from telescope._launch.child_processes import ProcessEnd
from telescope._launch.hosts.node_identity import make_node_name
from telescope._launch.hosts.node_protocol import (
    AskStack,
    AssignRun,
    EndNode,
    HeadSocket,
    KillProcess,
    KillShim,
    NodeOrder,
    NodeOrders,
    NodeReport,
    ProcessState,
    StartProcess,
    StopProcess,
    WriteFile,
)
from telescope._launch.process_plan import Host, ProcessPlan
from telescope.runlog.layout import RunDirectory, write_atomically

BEAT_S = 1.0
"""At least so often both sides say what there is."""
RELEASE_S = 5.0
"""For the nodes to obey the last order, beyond what their processes take."""
LOST = -9
"""What a process on a lost node counts as: killed, by its own node."""


class NodesMissing(TimeoutError):
    """Not every node came, or one that came can't take part. The text names it."""


class RemoteProcess:
    """One process of another node. A `ManagedProcess` like a local one, without descriptors."""

    def __init__(self, plan: ProcessPlan, node: OtherNode, incarnation: int) -> None:
        self.plan, self.node, self.incarnation = plan, node, incarnation
        self.fence_reason = ""
        self.kill_shim_at = float("inf")
        self.pid: int | None = None
        self.end: ProcessEnd | None = None
        self.gone = False
        self.ordered = False
        self.told = ""
        """The end of its log, as far as its node has told it."""

    @property
    def name(self) -> str:
        return self.plan.name

    @property
    def ended(self) -> bool:
        return self.end is not None

    def leave(self, grace_s: float, number: int) -> None:
        self.ordered = True
        self.node.order(StopProcess(self.name, grace_s, number))

    def kill(self) -> None:
        self.ordered = True
        self.node.order(KillProcess(self.name))

    def fence(self, reason: str, timeout_s: float) -> None:
        self.fence_reason = reason
        self.kill_shim_at = time.monotonic() + timeout_s
        self.kill()

    def ask_stack(self) -> None:
        self.node.order(AskStack(self.name))

    def kill_shim(self) -> None:
        self.node.order(KillShim(self.name))

    def read_reports(self) -> bool:
        return True  # they come with the node's

    def update(self, state: ProcessState, now: float) -> None:
        """What its node says of it; of an earlier incarnation nothing counts."""
        if state.incarnation != self.incarnation:
            return
        self.pid, self.gone = state.pid, state.gone
        if self.end is None and (state.status is not None or not state.started):
            status = 1 if state.status is None else state.status
            self.end = ProcessEnd(status, now - state.ago_s, state.shim_died, self.ordered)

    def mark_lost(self, now: float) -> None:
        """Its node is lost. Not the cause of anything: that is the node."""
        if self.end is None:
            self.end = ProcessEnd(LOST, now, ordered=True)
        self.gone = True


class OtherNode:
    """What one other node has said, and what it has not yet obeyed."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.report: NodeReport | None = None
        self.heard_at = time.monotonic()
        self.lost = ""
        self.has_new_orders = False
        self._obeyed = 0
        self._orders: list[NodeOrder] = []

    @property
    def title(self) -> str:
        """`node-1 (gpu-box-7)`"""
        return make_node_name(self.rank) + (f" ({self.report.host.name})" if self.report else "")

    @property
    def caught_up(self) -> bool:
        """It has obeyed every order."""
        return not self._orders

    def order(self, order: NodeOrder) -> None:
        self._orders.append(order)
        self.has_new_orders = True

    def update(self, report: NodeReport, now: float) -> None:
        self.report, self.heard_at = report, now
        del self._orders[: max(0, report.obeyed - self._obeyed)]
        self._obeyed = max(self._obeyed, report.obeyed)

    def orders(self, head: str) -> NodeOrders:
        return NodeOrders(head, self._obeyed + 1, tuple(self._orders))


class OtherNodes:
    """All other nodes of a run, at the head."""

    def __init__(self, socket: HeadSocket, count: int, config_hash: str, silent_s: float, say: Callable[[str], None]) -> None:
        """`count`: nodes, the head among them. `say` tells the user."""
        self._socket = socket
        self._say = say
        self._head = secrets.token_hex(8)
        self._refused: set[tuple[int, str]] = set()
        self._config_hash = config_hash
        self._silent_s = silent_s
        self._nodes = {rank: OtherNode(rank) for rank in range(1, count)}
        self._processes: list[RemoteProcess] = []
        self._beat_at = 0.0
        self._run: RunDirectory | None = None
        self._hub_sent = False
        self.interrupted = 0
        """The signal with which a node's user wants the run to end."""

    @property
    def descriptors(self) -> tuple[int, ...]:
        return self._socket.descriptors

    @property
    def shared(self) -> bool:
        """All see the head's run directory."""
        return all(node.report is not None and node.report.shared for node in self._nodes.values())

    @property
    def next_beat_s(self) -> float:
        return max(0.0, self._beat_at - time.monotonic())

    # ---- before the run ----------------------------------------------------------------------------------------------

    def gather(self, timeout_s: float) -> tuple[Host, ...]:
        """The hosts of nodes 1, 2, …, once all have come. Raises `NodesMissing`, with the names, after `timeout_s`."""
        self._until(lambda: all(node.report for node in self._nodes.values()), timeout_s)
        missing = [node.title for node in self._nodes.values() if not node.report]
        if missing:
            raise NodesMissing(
                f"{', '.join(missing)} did not come within cluster.placement_timeout_s={timeout_s:g} s: start the same command "
                "on every host, and look whether they reach the head"
            )
        return tuple(node.report.host for node in self._nodes.values() if node.report)

    def assign(self, run: RunDirectory, files: Callable[[int, bool], dict[str, str]], run_id: str) -> dict[int, int]:
        """Tell every node what the run is, and wait until each is ready. Gives each one's kept port. Raises `NodesMissing`.

        `files(node, shared)`: what a node needs in its run directory.
        """
        self._run = run
        for rank, node in self._nodes.items():
            shared = node.report is not None and node.report.shared
            node.order(AssignRun(run_id, str(run.path), self._silent_s, files(rank, shared)))
        limit_s = max(self._silent_s, 4 * BEAT_S)
        self._until(lambda: all(node.caught_up for node in self._nodes.values()), limit_s)
        for node in self._nodes.values():
            if not node.caught_up or node.report is None:
                raise NodesMissing(f"{node.title} came and then did not take up the run within {limit_s:g} s")
        return {rank: node.report.port for rank, node in self._nodes.items() if node.report}

    def _until(self, done: Callable[[], bool], timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            self.pump()
            for node in self._nodes.values():
                if why := self._refusal(node):
                    raise NodesMissing(why)
            if done():
                return
            select.select(self.descriptors, [], [], min(self.next_beat_s, max(0.0, end - time.monotonic())))

    def _refusal(self, node: OtherNode) -> str:
        report = node.report
        if report is None:
            return ""
        if report.failed:
            return f"{node.title} can't take part: {report.failed}"
        if report.interrupted:
            return f"{node.title} was interrupted"
        if report.config_hash not in ("", self._config_hash):
            return (
                f"{node.title} was started with other settings (hash {report.config_hash}, here {self._config_hash}): start "
                "the same command on every host; only cluster.node_rank and its addresses may differ"
            )
        return ""

    # ---- the run -----------------------------------------------------------------------------------------------------

    def begin(self, plan: ProcessPlan, extra: dict[str, str], incarnation: int) -> RemoteProcess:
        node = self._nodes[plan.node]
        node.order(StartProcess(plan, extra, incarnation))
        process = RemoteProcess(plan, node, incarnation)
        self._processes = [other for other in self._processes if other.name != plan.name] + [process]
        return process

    def pump(self) -> None:
        """Say what is to be said, and take in what was. Call it last before a `select` on `descriptors`."""
        now = time.monotonic()
        self._send_hub_address()
        due = now >= self._beat_at
        for rank, node in self._nodes.items():
            if (due or node.has_new_orders) and not node.lost:
                self._socket.send(rank, node.orders(self._head))
                node.has_new_orders = False
        if due:
            self._beat_at = now + BEAT_S
        for report, route in self._socket.receive():
            node = self._nodes[report.node]
            if node.lost:
                continue
            if why := self._find_stranger(node, report):
                self._refuse(report, why)
                continue
            self._socket.set_route(report.node, route)
            self._take_report(node, report, time.monotonic())

    def _find_stranger(self, node: OtherNode, report: NodeReport) -> str:
        """Why a report is not that of the run's node, though its key is right; empty where it is."""
        if report.obeyed and report.head != self._head:
            return "still belongs to an earlier run with this key, whose head is gone; it ends by itself when it notices"
        if node.report is not None and node.report.incarnation != report.incarnation:
            return f"is a second command with cluster.node_rank={report.node}; the first one is in the run"
        return ""

    def _refuse(self, report: NodeReport, why: str) -> None:
        """Not answered, whoever it is: it hears nothing, and ends with a sentence of its own."""
        if (report.node, report.incarnation) not in self._refused:
            self._refused.add((report.node, report.incarnation))
            self._say(f"{make_node_name(report.node)} ({report.host.name}) is not answered: it {why}.")

    def _take_report(self, node: OtherNode, report: NodeReport, now: float) -> None:
        if node.report is None:
            self._say(f"{make_node_name(report.node)} ({report.host.name}) has come.")
        node.update(report, now)
        self.interrupted = self.interrupted or report.interrupted
        for process in self._processes:
            state = report.processes.get(process.name)
            if state is not None and process.node is node:
                self._keep_last_words(process, state, report.shared)
                process.update(state, now)

    def _keep_last_words(self, process: RemoteProcess, state: ProcessState, shared: bool) -> None:
        """What it wrote about its end, or about where it is, goes where the head looks for it, before the head looks."""
        badly = state.status not in (None, 0) or not state.started
        told = badly or (state.status is None and state.log not in ("", process.told))
        if self._run is None or shared or process.ended or state.incarnation != process.incarnation or not told:
            return
        process.told = state.log
        try:
            if state.sentence:
                write_atomically(self._run.failure(process.name), state.sentence + "\n")
            write_atomically(self._run.log(process.name, process.incarnation), state.log)
        except OSError:
            return  # a full disk: the sentence is lost, the end is not

    def take_lost(self, now: float) -> tuple[str, str] | None:
        """Name and sentence of a node that is lost now: it fell silent, or said that it can't go on."""
        for node in self._nodes.values():
            if node.lost or (node.report is not None and node.report.over):
                continue
            quiet_s = now - node.heard_at
            failed = node.report.failed if node.report else ""
            if quiet_s >= self._silent_s or failed:
                node.lost = failed or f"was not heard for {quiet_s:.0f} s: it died, or its link was cut"
                for process in self._processes:
                    if process.node is node:
                        process.mark_lost(now)
                return make_node_name(node.rank), f"{node.title} {node.lost}"
        return None

    def find_node(self, process: str) -> str:
        """The node of a process that is not the head's, e.g. `node-1 (gpu-box-7)`; else empty."""
        return next((other.node.title for other in self._processes if other.name == process), "")

    def _send_hub_address(self) -> None:
        """Nodes that do not see the run directory learn from us where the hub is."""
        if self._hub_sent or self._run is None or not self._run.hub_json.exists():
            return
        self._hub_sent = True
        path = str(self._run.hub_json.relative_to(self._run.path))
        text = self._run.hub_json.read_text(encoding="utf-8")
        for node in self._nodes.values():
            if node.report is not None and not node.report.shared:
                node.order(WriteFile(path, text))

    # ---- after the run -----------------------------------------------------------------------------------------------

    def end(self, code: int, reason: str) -> list[str]:
        """Let every node go, and wait until it has left. Gives the names of those that did not say so."""
        for node in self._nodes.values():
            node.order(EndNode(code, reason))
        deadline = time.monotonic() + RELEASE_S
        while time.monotonic() < deadline:
            self.pump()
            if not self._list_staying():
                break
            select.select(self.descriptors, [], [], min(self.next_beat_s, max(0.0, deadline - time.monotonic())))
        self._socket.close()
        return [node.title for node in self._list_staying()]

    def _list_staying(self) -> Sequence[OtherNode]:
        return [node for node in self._nodes.values() if not node.lost and node.report and not node.report.over]


def read_last_words(run: RunDirectory, process: str, incarnation: int, shared: bool) -> tuple[str, str]:
    """On a node: the sentence of a process that has ended and the last of its log, for a head that can't read them here."""
    if shared:
        return "", ""
    try:
        sentence = run.failure(process).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        sentence = ""
    return sentence, read_tail_text(run.log(process, incarnation))
