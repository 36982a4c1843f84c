"""The supervisor of a node that is not the head: does what the head orders, reports what becomes of it, leaves nothing behind.

`python -m telescope._launch.hosts.node --run-dir DIR --node 1` takes part in the run of a directory that all hosts see; the
plain command and torchrun come here through `telescope.run`. Owns this host's processes of the run and its own end when the
head is not heard. Decides nothing else.

Exit codes: that of the run; 1 if it can't take part, 70 if the head is lost, 128 + n interrupted by signal n.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from telescope._launch import shim
from telescope._launch.causes import read_tail_text
from telescope._launch.child_processes import CaughtSignals, ChildProcesses, LocalProcess
from telescope._launch.hosts.address import KeptPort, NoAddress, find_interface, find_local_address, format_endpoint
from telescope._launch.hosts.head_rendezvous import HeadAddress, find_head
from telescope._launch.hosts.node_identity import NodeIdentity, end_with_parent
from telescope._launch.hosts.node_protocol import (
    AskStack,
    AssignRun,
    EndNode,
    KillProcess,
    KillShim,
    NodeOrder,
    NodeOrders,
    NodeReport,
    NodeSocket,
    ProcessState,
    StartProcess,
    StopProcess,
    WriteFile,
)
from telescope._launch.hosts.other_nodes import BEAT_S, read_last_words
from telescope._launch.process_plan import Host
from telescope._launch.stacks import read_stacks
from telescope._launch.this_host import inspect_this_host
from telescope._launch.unblocked_output import unblock_output
from telescope.exit_codes import COMPONENT_FAILED, ERROR
from telescope.runlog import temporary
from telescope.runlog.attempts import put_aside
from telescope.runlog.files import DamagedFile
from telescope.runlog.identity import RunIdentity, read_identity
from telescope.runlog.layout import RunDirectory, RunDirectoryInUse, write_atomically
from telescope.weights.transports import shared_memory

GRACE_S = 4.0
"""For this host's processes when the head is lost, or the run is over and one is still there."""
LAST_WORD_S = 2.0
STACK_S, STACK_LOOK_S = 2.0, 0.1
"""How long, and how often, a node looks for the stacks of a process that was asked for them."""
STACK_BYTES = 262_144
"""Of its log, which hold them; a report may be much larger."""
SILENT_S = 12.0
"""Until the head has said what its own deadline is."""


class CannotJoin(ValueError):
    """This node can't take part in the run. The text says why."""


@dataclass(frozen=True)
class NodeOptions:
    """What a node brings along. `run_dir` is its own; null: a new one below runs/, if it sees no other."""

    identity: NodeIdentity
    config_hash: str
    """Empty: it has no settings of its own, and takes the head's."""
    run_dir: Path | None
    interface: str | None
    timeout_s: float
    """Until the head is there, and again until the run begins."""


@unblock_output()
def run_node(options: NodeOptions, say: Callable[[str], None]) -> int:
    """Take part in a run, in the foreground, from the main thread. Gives the exit code."""
    identity = options.identity
    try:
        head = _find_head(options)
        address = find_local_address(options.interface, head.address)
    except (NoAddress, TimeoutError) as error:
        say(f"{identity.name}: {error}")
        return ERROR
    host = msgspec.structs.replace(inspect_this_host(), address=address, interface=find_interface(address))
    say(f"{identity.name} ({host.name}, {address}) joins the run at {head.endpoint}.")
    socket = NodeSocket(head.endpoint, head.key, identity.rank)
    with CaughtSignals() as wakeup, contextlib.closing(KeptPort(address)) as port:
        if identity.under_torchrun:
            end_with_parent()
        node = _NodeSupervisor(options, host, socket, wakeup, port.number, say)
        try:
            return node.run()
        finally:
            node.children.close()
            temporary.sweep()  # folders of processes that were killed, and shared memory that is noted in them
            shared_memory.sweep()
            socket.close(LAST_WORD_S)


def _find_head(options: NodeOptions) -> HeadAddress:
    identity = options.identity
    if identity.key is not None and identity.head is not None:
        return HeadAddress(format_endpoint(*identity.head), identity.key)
    if options.run_dir is None:  # `identify_node` has refused this
        raise CannotJoin("a node without a key file needs the run directory")
    return find_head(RunDirectory(options.run_dir), options.timeout_s)


class _NodeSupervisor:
    """The life of this node, as a loop over orders, signals and reports."""

    def __init__(
        self,
        options: NodeOptions,
        host: Host,
        socket: NodeSocket,
        wakeup: shim.Wakeup,
        port: int,
        say: Callable[[str], None],
    ) -> None:
        self._options, self._socket, self._wakeup, self._say = options, socket, wakeup, say
        self.children = ChildProcesses((wakeup.reader, *socket.descriptors), say)
        shared = options.identity.key is None
        self._directory = RunDirectory(options.run_dir) if shared and options.run_dir else None
        self._report = NodeReport(
            options.identity.rank,
            secrets.token_hex(8),
            options.config_hash,
            host,
            port=port,
            shared=shared,
        )
        self._states: dict[str, ProcessState] = {}
        self._stacks_until: dict[str, float] = {}
        """When no more is looked for what a process writes that was asked where it is."""
        self._obeyed = 0
        self._silent_s = SILENT_S
        self._assigned = False
        self._heard_at = time.monotonic()
        self._sent_at = float("-inf")
        self._end: EndNode | None = None
        self._kill_at = float("inf")

    def run(self) -> int:
        changed = True
        while True:
            now = time.monotonic()
            if changed or now - self._sent_at >= BEAT_S:
                self._send_report(now)
            changed = self._listen()
            self.children.wait(0.0 if changed else self._wait_s())
            changed |= self._notice_signals() | self._notice_ends()
            if self._end is not None and not self.children.alive:
                self._send_report(time.monotonic(), over=True)
                return self._announce_end(self._end)
            self._check_deadlines(time.monotonic())

    def _wait_s(self) -> float:
        now = time.monotonic()
        looks_at = now + STACK_LOOK_S if any(now < until for until in self._stacks_until.values()) else float("inf")
        return max(0.0, min(self._sent_at + BEAT_S, self._kill_at, looks_at) - now)

    # ---- speaking and listening --------------------------------------------------------------------------------------

    def _send_report(self, now: float, over: bool = False) -> None:
        self._sent_at = now
        states = {name: self._add_age(state, name, now) for name, state in self._states.items()}
        self._report = msgspec.structs.replace(self._report, obeyed=self._obeyed, processes=states, over=over)
        self._socket.send(self._report)

    def _add_age(self, state: ProcessState, name: str, now: float) -> ProcessState:
        process = self.children.processes.get(name)
        if process is None or process.end is None:
            return state
        return msgspec.structs.replace(state, ago_s=max(0.0, now - process.end.at))

    def _listen(self) -> bool:
        """Whether there was something to obey."""
        before = self._obeyed
        for orders in self._socket.receive():
            if self._is_our_head(orders.head):
                self._heard_at = time.monotonic()
                self._obey_new(orders)
        return self._obeyed != before

    def _is_our_head(self, head: str) -> bool:
        """The head of the run that this node is in, or of any as long as it is in none. Another one at the same address is
        the head of a later run: to this node its own is silent."""
        if not self._obeyed and head != self._report.head:
            self._report = msgspec.structs.replace(self._report, head=head)
        return head == self._report.head

    def _obey_new(self, orders: NodeOrders) -> None:
        for number, order in enumerate(orders.orders, orders.first):
            if number == self._obeyed + 1:
                self._obeyed = number
                try:
                    self._obey(order)
                except (OSError, RunDirectoryInUse, CannotJoin) as error:
                    self._fail(str(error))

    def _obey(self, order: NodeOrder) -> None:
        match order:
            case AssignRun():
                self._assign(order)
            case StartProcess():
                self._start(order)
            case StopProcess(name, grace_s, number) if name in self.children.processes:
                self.children.processes[name].leave(grace_s, number)
            case KillProcess(name) if name in self.children.processes:
                self.children.processes[name].kill()
            case AskStack(name) if name in self.children.processes:
                self.children.processes[name].ask_stack()
                self._stacks_until[name] = time.monotonic() + STACK_S
            case KillShim(name) if name in self.children.processes:
                self.children.processes[name].kill_shim()
            case WriteFile(path, text):
                self._write(path, text)
            case EndNode():
                self._finish(order)
            case _:
                return  # about a process that could not be started

    # ---- doing -------------------------------------------------------------------------------------------------------

    def _assign(self, order: AssignRun) -> None:
        self._silent_s, self._assigned = order.silent_s, True
        path = self._options.run_dir or Path("runs", f"{Path(order.run_dir).name}_{self._options.identity.name}")
        directory = RunDirectory(path.absolute())
        self._directory = directory
        shared = is_heads_directory(directory, order)
        if not shared and self._report.shared:
            raise CannotJoin(f"{directory.path} is the directory of another run")
        self._report = msgspec.structs.replace(self._report, shared=shared)
        if not shared:
            make_own_directory(directory, order.run_id)
            for name, text in order.files.items():
                self._write(name, text)
        self._say(f"{self._options.identity.name} takes part; its run directory: {directory.path}")

    def _write(self, name: str, text: str) -> None:
        if self._directory is None or self._report.shared:
            return
        path = self._directory.path / name
        if not path.resolve().is_relative_to(self._directory.path.resolve()):
            raise CannotJoin(f"the head names a file outside the run directory: {name}")
        write_atomically(path, text, mode=0o600)

    def _start(self, order: StartProcess) -> None:
        if self._directory is None:
            raise CannotJoin("the head starts a process of a run that it has not told of")
        name = order.process.name
        if order.incarnation > 1 and not self._report.shared and self._directory.failure(name).exists():
            self._directory.failure(name).replace(self._directory.earlier_failure(name, order.incarnation - 1))
        sentence = self.children.begin(order.process, self._directory, order.extra, order.incarnation)
        self._states[name] = ProcessState(order.incarnation, started=not sentence, sentence=sentence, gone=bool(sentence))
        if sentence:
            self.children.processes.pop(name, None)
            write_atomically(self._directory.failure(name), sentence + "\n")

    def _finish(self, order: EndNode) -> None:
        self._end = order
        for process in self.children.alive:
            process.leave(GRACE_S)
        self._kill_at = time.monotonic() + GRACE_S

    def _fail(self, why: str) -> None:
        """Tell the head, which ends the run; if it does not, its silence ends this node."""
        self._say(f"{self._options.identity.name}: {why}")
        self._report = msgspec.structs.replace(self._report, failed=why)
        self._finish(EndNode(ERROR, why))

    # ---- noticing ----------------------------------------------------------------------------------------------------

    def _notice_signals(self) -> bool:
        for number in self._wakeup.arrived():
            if number not in shim.ENDING_SIGNALS:
                continue
            first = not self._report.interrupted
            self._report = msgspec.structs.replace(self._report, interrupted=number)
            if first and self._assigned:
                self._say("Stopping: the head ends the run. Ctrl-C again ends this node at once.")
                return True
            for process in self.children.alive:
                process.kill()
            self._end = EndNode(128 + number, "interrupted")
            return True
        return False

    def _notice_ends(self) -> bool:
        """Whether a process has begun or ended since it was last looked at."""
        before = dict(self._states)
        for name, process in self.children.processes.items():
            end = process.end
            if end is None:
                self._states[name] = ProcessState(process.incarnation, process.pid, log=self._read_stacks(name, process))
                continue
            state = self._states[name]
            if state.status is None or state.gone != process.gone:
                words = (
                    read_last_words(self._directory, name, process.incarnation, self._report.shared)
                    if self._directory
                    else ("", "")
                )
                self._states[name] = ProcessState(
                    process.incarnation,
                    process.pid,
                    end.status,
                    shim_died=end.shim_died,
                    gone=process.gone,
                    sentence=words[0],
                    log=words[1],
                )
        return before != self._states

    def _read_stacks(self, name: str, process: LocalProcess) -> str:
        """The end of the log of a process that was asked where it is, for a head that can't read it; empty for any other."""
        if self._report.shared or self._directory is None or name not in self._stacks_until:
            return ""
        if time.monotonic() >= self._stacks_until[name]:
            return self._states[name].log
        try:
            text = read_tail_text(self._directory.log(name, process.incarnation), STACK_BYTES)
        except OSError:
            return ""
        return text if read_stacks(text) is not None else ""

    def _check_deadlines(self, now: float) -> None:
        if now >= self._kill_at:
            for process in self.children.alive:
                process.kill_shim()
            self._kill_at = now + GRACE_S
        if self._end is not None:
            return
        limit_s = self._silent_s if self._assigned else self._options.timeout_s
        if now - self._heard_at >= limit_s:
            why = f"the head was not heard for {limit_s:g} s: it died, or the link to it was cut"
            self._say(f"{self._options.identity.name}: {why}")
            self._finish(EndNode(COMPONENT_FAILED if self._assigned else ERROR, why))

    def _announce_end(self, end: EndNode) -> int:
        if end.code:
            self._say(f"{self._options.identity.name}: the run ended with exit code {end.code}. {end.reason}".rstrip())
        return end.code


def is_heads_directory(directory: RunDirectory, order: AssignRun) -> bool:
    """Whether it is the head's own directory. One that this host had of an earlier attempt of the same run is not."""
    sent = order.files.get(directory.run_json.name)  # nothing where the node said that it sees it
    found = _read_identity(directory)
    if found is None or found.run_id != order.run_id:
        return False
    return sent is None or msgspec.json.decode(sent, type=RunIdentity).attempt == found.attempt


def make_own_directory(directory: RunDirectory, run_id: str) -> None:
    """A directory for what of the run is on this host; what an earlier attempt left in it goes aside. Raises OSError and
    `RunDirectoryInUse`."""
    found = _read_identity(directory)
    if found is None or found.run_id != run_id:
        RunDirectory.create(directory.path)
        return
    number = next(number for number in itertools.count(1) if not directory.earlier_attempt(number).exists())
    put_aside(directory, number)


def _read_identity(directory: RunDirectory) -> RunIdentity | None:
    try:
        return read_identity(directory)
    except (OSError, DamagedFile):
        return None


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command for launchers that have made the run directory; its settings are the head's."""
    parser = argparse.ArgumentParser(prog="telescope._launch.hosts.node", description="Take part in a run as one of its nodes.")
    parser.add_argument("--run-dir", type=Path, required=True, help="the run's directory, which all hosts see")
    parser.add_argument("--node", type=int, required=True, help="this node's number, from 1")
    parser.add_argument("--interface", help="address or network interface for the run's sockets")
    parser.add_argument("--timeout-s", type=float, default=900.0, help="until the head is there")
    given = parser.parse_args(arguments)
    if given.node < 1:
        parser.error("--node counts from 1: node 0 is the head")
    identity = NodeIdentity(given.node + 1, given.node)
    options = NodeOptions(identity, "", given.run_dir.absolute(), given.interface, given.timeout_s)
    return run_node(options, _say)


if __name__ == "__main__":
    sys.exit(main())
