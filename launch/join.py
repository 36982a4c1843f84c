"""The supervisor of a node that is not the head: does what the head orders, says what becomes of it, and leaves nothing behind.

`python -m telescope._launch.join --run-dir DIR --node 1` takes part in the run of a directory that all hosts see; the plain
command and torchrun come here through `telescope.run`. Owns this host's processes of the run and its own end when the head is
not heard. Decides nothing else.

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

from telescope._launch import child
from telescope._launch.address import KeptPort, NoAddress, endpoint, interface_of, local_address
from telescope._launch.household import Household
from telescope._launch.local import this_host
from telescope._launch.meet import Meeting, find
from telescope._launch.plan import Host
from telescope._launch.remote import BEAT_S, own_words
from telescope._launch.signals import INTERRUPTS, Signals
from telescope._launch.standing import Standing, end_with_parent
from telescope._launch.talk import Assign, End, GiveUp, Kill, Leave, NodeTalk, Order, Orders, Report, Start, State, Write
from telescope.exit_codes import COMPONENT_FAILED, ERROR
from telescope.runlog import temporary
from telescope.runlog.attempts import put_aside
from telescope.runlog.identity import RunIdentity, read_identity
from telescope.runlog.layout import RunDirectory, RunDirectoryInUse, write_atomically
from telescope.weights.transports import shared_memory

GRACE_S = 4.0
"""For this host's processes when the head is lost, or the run is over and one is still there."""
LAST_WORD_S = 2.0
SILENT_S = 12.0
"""Until the head has said what its own deadline is."""


class CannotJoin(ValueError):
    """This node can't take part in the run. The text says why."""


@dataclass(frozen=True)
class Invitation:
    """What a node brings along. `run_dir` is its own; null: a new one below runs/, if it sees no other."""

    standing: Standing
    config_hash: str
    """Empty: it has no settings of its own, and takes the head's."""
    run_dir: Path | None
    interface: str | None
    timeout_s: float
    """Until the head is there, and again until the run begins."""


def join(invitation: Invitation, say: Callable[[str], None]) -> int:
    """Take part in a run, in the foreground, from the main thread. Gives the exit code."""
    standing = invitation.standing
    try:
        meeting = _meeting(invitation)
        address = local_address(invitation.interface, meeting.address)
    except (NoAddress, TimeoutError) as error:
        say(f"{standing.name}: {error}")
        return ERROR
    host = msgspec.structs.replace(this_host(), address=address, interface=interface_of(address))
    say(f"{standing.name} ({host.name}, {address}) joins the run at {meeting.endpoint}.")
    talk = NodeTalk(meeting.endpoint, meeting.key, standing.rank)
    with Signals() as wakeup, contextlib.closing(KeptPort(address)) as port:
        if standing.under_torchrun:
            end_with_parent()
        node = _Node(invitation, host, talk, wakeup, port.number, say)
        try:
            return node.run()
        finally:
            node.home.close()
            temporary.sweep()  # folders of processes that were killed, and shared memory that is noted in them
            shared_memory.sweep()
            talk.close(LAST_WORD_S)


def _meeting(invitation: Invitation) -> Meeting:
    standing = invitation.standing
    if standing.key is not None and standing.head is not None:
        return Meeting(endpoint(*standing.head), standing.key)
    if invitation.run_dir is None:  # `standing` has refused this
        raise CannotJoin("a node without a key file needs the run directory")
    return find(RunDirectory(invitation.run_dir), invitation.timeout_s)


class _Node:
    """The life of this node, as a loop over orders, signals and reports."""

    def __init__(
        self,
        invitation: Invitation,
        host: Host,
        talk: NodeTalk,
        wakeup: child.Wakeup,
        port: int,
        say: Callable[[str], None],
    ) -> None:
        self._invitation, self._talk, self._wakeup, self._say = invitation, talk, wakeup, say
        self.home = Household((wakeup.reader, *talk.descriptors), say)
        shared = invitation.standing.key is None
        self._directory = RunDirectory(invitation.run_dir) if shared and invitation.run_dir else None
        self._report = Report(
            invitation.standing.rank,
            secrets.token_hex(8),
            invitation.config_hash,
            host,
            port=port,
            shared=shared,
        )
        self._states: dict[str, State] = {}
        self._obeyed = 0
        self._silent_s = SILENT_S
        self._assigned = False
        self._heard_at = time.monotonic()
        self._said_at = float("-inf")
        self._end: End | None = None
        self._kill_at = float("inf")

    def run(self) -> int:
        changed = True
        while True:
            now = time.monotonic()
            if changed or now - self._said_at >= BEAT_S:
                self._tell(now)
            changed = self._listen()
            self.home.wait(0.0 if changed else self._patience_s())
            changed |= self._notice_signals() | self._notice_ends()
            if self._end is not None and not self.home.living:
                self._tell(time.monotonic(), over=True)
                return self._last_words(self._end)
            self._judge(time.monotonic())

    def _patience_s(self) -> float:
        now = time.monotonic()
        return max(0.0, min(self._said_at + BEAT_S, self._kill_at) - now)

    # ---- speaking and listening --------------------------------------------------------------------------------------

    def _tell(self, now: float, over: bool = False) -> None:
        self._said_at = now
        states = {name: self._aged(state, name, now) for name, state in self._states.items()}
        self._report = msgspec.structs.replace(self._report, obeyed=self._obeyed, processes=states, over=over)
        self._talk.say(self._report)

    def _aged(self, state: State, name: str, now: float) -> State:
        process = self.home.processes.get(name)
        if process is None or process.ending is None:
            return state
        return msgspec.structs.replace(state, ago_s=max(0.0, now - process.ending.at))

    def _listen(self) -> bool:
        """Whether there was something to obey."""
        before = self._obeyed
        for orders in self._talk.heard():
            if self._is_ours(orders.head):
                self._heard_at = time.monotonic()
                self._take(orders)
        return self._obeyed != before

    def _is_ours(self, head: str) -> bool:
        """The head of the run that this node is in, or of any as long as it is in none. Another one at the same address is
        the head of a later run: to this node its own is silent."""
        if not self._obeyed and head != self._report.head:
            self._report = msgspec.structs.replace(self._report, head=head)
        return head == self._report.head

    def _take(self, orders: Orders) -> None:
        for number, order in enumerate(orders.orders, orders.first):
            if number == self._obeyed + 1:
                self._obeyed = number
                try:
                    self._obey(order)
                except (OSError, RunDirectoryInUse, CannotJoin) as error:
                    self._fail(str(error))

    def _obey(self, order: Order) -> None:
        match order:
            case Assign():
                self._assign(order)
            case Start():
                self._start(order)
            case Leave(name, grace_s, number) if name in self.home.processes:
                self.home.processes[name].leave(grace_s, number)
            case Kill(name) if name in self.home.processes:
                self.home.processes[name].kill()
            case GiveUp(name) if name in self.home.processes:
                self.home.processes[name].give_up()
            case Write(path, text):
                self._write(path, text)
            case End():
                self._finish(order)
            case _:
                return  # about a process that could not be started

    # ---- doing -------------------------------------------------------------------------------------------------------

    def _assign(self, order: Assign) -> None:
        self._silent_s, self._assigned = order.silent_s, True
        path = self._invitation.run_dir or Path("runs", f"{Path(order.run_dir).name}_{self._invitation.standing.name}")
        directory = RunDirectory(path.absolute())
        self._directory = directory
        shared = sees_the_heads(directory, order)
        if not shared and self._report.shared:
            raise CannotJoin(f"{directory.path} is the directory of another run")
        self._report = msgspec.structs.replace(self._report, shared=shared)
        if not shared:
            make_own(directory, order.run_id)
            for name, text in order.files.items():
                self._write(name, text)
        self._say(f"{self._invitation.standing.name} takes part; its run directory: {directory.path}")

    def _write(self, name: str, text: str) -> None:
        if self._directory is None or self._report.shared:
            return
        path = self._directory.path / name
        if not path.resolve().is_relative_to(self._directory.path.resolve()):
            raise CannotJoin(f"the head names a file outside the run directory: {name}")
        write_atomically(path, text, mode=0o600)

    def _start(self, order: Start) -> None:
        if self._directory is None:
            raise CannotJoin("the head starts a process of a run that it has not told of")
        name = order.process.name
        if order.life > 1 and not self._report.shared and self._directory.failure(name).exists():
            self._directory.failure(name).replace(self._directory.earlier_failure(name, order.life - 1))
        sentence = self.home.begin(order.process, self._directory, order.extra, order.life)
        self._states[name] = State(order.life, started=not sentence, sentence=sentence, gone=bool(sentence))
        if sentence:
            self.home.processes.pop(name, None)
            write_atomically(self._directory.failure(name), sentence + "\n")

    def _finish(self, order: End) -> None:
        self._end = order
        for process in self.home.living:
            process.leave(GRACE_S)
        self._kill_at = time.monotonic() + GRACE_S

    def _fail(self, why: str) -> None:
        """Tell the head, which ends the run; if it does not, its silence ends this node."""
        self._say(f"{self._invitation.standing.name}: {why}")
        self._report = msgspec.structs.replace(self._report, failed=why)
        self._finish(End(ERROR, why))

    # ---- noticing ----------------------------------------------------------------------------------------------------

    def _notice_signals(self) -> bool:
        for number in self._wakeup.arrived():
            if number not in INTERRUPTS:
                continue
            first = not self._report.interrupted
            self._report = msgspec.structs.replace(self._report, interrupted=number)
            if first and self._assigned:
                self._say("Stopping: the head ends the run. Ctrl-C again ends this node at once.")
                return True
            for process in self.home.living:
                process.kill()
            self._end = End(128 + number, "interrupted")
            return True
        return False

    def _notice_ends(self) -> bool:
        """Whether a process has begun or ended since it was last looked at."""
        before = dict(self._states)
        for name, process in self.home.processes.items():
            ending = process.ending
            if ending is None:
                self._states[name] = State(process.life, process.pid)
                continue
            state = self._states[name]
            if state.status is None or state.gone != process.gone:
                words = own_words(self._directory, name, process.life, self._report.shared) if self._directory else ("", "")
                self._states[name] = State(
                    process.life,
                    process.pid,
                    ending.status,
                    shim_died=ending.shim_died,
                    gone=process.gone,
                    sentence=words[0],
                    log=words[1],
                )
        return before != self._states

    def _judge(self, now: float) -> None:
        if now >= self._kill_at:
            for process in self.home.living:
                process.give_up()
            self._kill_at = now + GRACE_S
        if self._end is not None:
            return
        limit_s = self._silent_s if self._assigned else self._invitation.timeout_s
        if now - self._heard_at >= limit_s:
            why = f"the head was not heard for {limit_s:g} s: it died, or the link to it was cut"
            self._say(f"{self._invitation.standing.name}: {why}")
            self._finish(End(COMPONENT_FAILED if self._assigned else ERROR, why))

    def _last_words(self, end: End) -> int:
        if end.code:
            self._say(f"{self._invitation.standing.name}: the run ended with exit code {end.code}. {end.reason}".rstrip())
        return end.code


def sees_the_heads(directory: RunDirectory, order: Assign) -> bool:
    """Whether it is the head's own directory. One that this host had of an earlier attempt of the same run is not."""
    told = order.files.get(directory.run_json.name)  # none where the node said that it sees it
    found = _identity(directory)
    if found is None or found.run_id != order.run_id:
        return False
    return told is None or msgspec.json.decode(told, type=RunIdentity).attempt == found.attempt


def make_own(directory: RunDirectory, run_id: str) -> None:
    """A directory for what of the run is on this host; what an earlier attempt left in it goes aside. Raises OSError and
    `RunDirectoryInUse`."""
    found = _identity(directory)
    if found is None or found.run_id != run_id:
        RunDirectory.create(directory.path)
        return
    number = next(number for number in itertools.count(1) if not directory.earlier_attempt(number).exists())
    put_aside(directory, number)


def _identity(directory: RunDirectory) -> RunIdentity | None:
    try:
        return read_identity(directory)
    except (OSError, msgspec.MsgspecError):
        return None


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command for launchers that have made the run directory; its settings are the head's."""
    parser = argparse.ArgumentParser(prog="telescope._launch.join", description="Take part in a run as one of its nodes.")
    parser.add_argument("--run-dir", type=Path, required=True, help="the run's directory, which all hosts see")
    parser.add_argument("--node", type=int, required=True, help="this node's number, from 1")
    parser.add_argument("--interface", help="address or network interface for the run's sockets")
    parser.add_argument("--timeout-s", type=float, default=900.0, help="until the head is there")
    given = parser.parse_args(arguments)
    if given.node < 1:
        parser.error("--node counts from 1: node 0 is the head")
    standing = Standing(given.node + 1, given.node)
    invitation = Invitation(standing, "", given.run_dir.absolute(), given.interface, given.timeout_s)
    return join(invitation, _say)


if __name__ == "__main__":
    sys.exit(main())
