"""The checkpoint under way: every rank writes its part, a thread writes the orchestrator's, and one rename makes them whole.

Owns who has yet to write and the deadline of the whole. Refuses to decide when one is due (flow/checkpoint_schedule.py) and
what is in it (saved_state.py, the backends). A save that fails is told once and costs the run nothing but the checkpoint.
"""

from __future__ import annotations

import logging
import shlex
import shutil
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from telescope.config.end_saves import NOTHING, EndSaves, SaveBytes, SaveContent, format_bytes
from telescope.flow import events
from telescope.flow.commands import EndRun
from telescope.orchestrator.peers import ProtocolViolations
from telescope.orchestrator.recorder import Recorder
from telescope.orchestrator.saved_state import OrchestratorState, write_state
from telescope.runlog import checkpoints
from telescope.wire.hub import Hub
from telescope.wire.messages import CheckpointError, CheckpointStaged, CheckpointWritten, SaveCheckpoint
from telescope.wire.peer_events import Delivery

log = logging.getLogger(__name__)

SaveAnswer = CheckpointStaged | CheckpointWritten | CheckpointError


@dataclass(frozen=True)
class SaveNeeds:
    """What is known of a save before it is made."""

    nbytes: SaveBytes
    bytes_per_s: float | None
    """Of the disk; None: not known."""


@dataclass(frozen=True)
class SaveRules:
    """What the configuration and the attempt say about checkpoints."""

    directory: Path
    run_id: str
    attempt: str
    config_hash: str
    timeout_s: float
    training_state: bool = True
    """Of those that are made while the run goes on; false: the weights alone."""
    at_end: EndSaves = NOTHING
    needs: SaveNeeds | None = None
    """None: not known."""
    every: int = 0
    """Steps between those that are made while the run goes on; 0: none are."""
    keep_last: int | None = None
    keep_every: int | None = None


@dataclass
class _Save:
    step: int
    folder: Path
    deadline: float
    training_state: bool
    waiting: set[str]
    """Ranks that have not said how their part went."""
    stalled: set[str]
    """Ranks that have not said that training goes on."""
    began: float = field(default_factory=time.monotonic)
    numbers: dict[str, int] = field(default_factory=dict)
    own: Future[int] | None = None
    completing: Future[None] | None = None
    nbytes: int = 0
    stall_s: float = 0.0
    failure: str = ""


class CheckpointCoordinator:
    """Drives one save at a time; `take_events` gives its end to the loop. Each `begin` has one, within twice the deadline.
    `find_last`: the run's last step, as far as is known; `find_leaving`: how the run ends, once it is to; `find_time_left`:
    seconds until one that is told to stop ends, saved or not."""

    def __init__(
        self,
        hub: Hub,
        recorder: Recorder,
        violations: ProtocolViolations,
        ranks: tuple[str, ...],
        rules: SaveRules | None,
        find_last: Callable[[], int],
        find_leaving: Callable[[], EndRun | None],
        find_time_left: Callable[[], float],
    ) -> None:
        self._hub, self._recorder, self._violations = hub, recorder, violations
        self._ranks, self._rules = ranks, rules
        self._find_last, self._find_leaving, self._find_time_left = find_last, find_leaving, find_time_left
        self._save: _Save | None = None
        self._events: list[events.AnyEvent] = []
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._weights_alone: int | None = None
        """The step of the latest save, where that has nothing else."""

    @property
    def doing(self) -> str:
        return f"writing the checkpoint of step {self._save.step}" if self._save is not None else ""

    @property
    def stalled(self) -> frozenset[str]:
        """Ranks that copy their state off, and hear nothing meanwhile. A save that is given up excuses nobody."""
        return frozenset(self._save.stalled) if self._save is not None else frozenset()

    def can_go_on(self, step: int) -> bool:
        """Whether the complete checkpoint of this step, of this attempt or the one that it began with, has all that a run goes
        on from."""
        return step != self._weights_alone

    def begin(self, step: int, state: OrchestratorState, now: float) -> None:
        """Order the ranks to write, and write `state` from a thread. `now`: monotonic seconds."""
        rules = self._rules
        assert rules is not None  # the core orders none where the configuration asks for none
        try:
            content = self._choose_content(rules, step)
            folder = checkpoints.begin(rules.directory, step, rules.attempt)
        except OSError as error:
            self._report_failure(step, f"{rules.directory}: {error.strerror or error}")
            return
        whole = content == "state"
        save = self._save = _Save(step, folder, now + rules.timeout_s, whole, set(self._ranks), set(self._ranks))
        for rank in self._ranks:
            save.numbers[rank] = self._hub.send(rank, SaveCheckpoint(step=step, folder=str(folder), training_state=whole))
        if whole:
            save.own = self._writer.submit(write_state, folder, state)

    def _choose_content(self, rules: SaveRules, step: int) -> SaveContent:
        """What is saved now. Raises OSError where it is known not to fit on the disk."""
        leaving = self._find_leaving()
        wanted: SaveContent = "nothing" if leaving is None else rules.at_end.done if leaving.ok else rules.at_end.stopped
        if wanted == "nothing" or (rules.every and step % rules.every == 0):  # it is due by the steps
            return "state" if rules.training_state else "weights"
        if not rules.at_end.gives_way or rules.needs is None:
            return wanted
        free = shutil.disk_usage(rules.directory).free
        if wanted == "state" and (why := _find_hindrance(rules.needs, free, self._find_time_left())):
            self._recorder.alert(
                "warning", "checkpoint", f"the checkpoint of step {step} has the weights alone: the training state {why}"
            )
            wanted = "weights"
        if (nbytes := rules.needs.nbytes.of(wanted)) > free:
            raise OSError(f"the {wanted} take {format_bytes(nbytes)}, and {format_bytes(free)} are free")
        return wanted

    def hear(self, delivery: Delivery, body: SaveAnswer) -> None:
        save = self._save
        expected = save is not None and delivery.peer in save.waiting
        # a rank may answer a save that was given up when that of the same step is made once more
        late = save is not None and delivery.answers not in (0, save.numbers.get(delivery.peer))
        if save is None or body.step != save.step or late or not expected:
            self._violations.note(
                delivery.peer, f"its {type(body).__name__} of step {body.step} is of no save under way; ignored"
            )
            return
        save.stalled.discard(delivery.peer)
        match body:
            case CheckpointStaged(stall_s=stall_s):
                save.stall_s = max(save.stall_s, stall_s)
                self._recorder.add_to_next_step({"checkpoint/stall_s": save.stall_s})
                return
            case CheckpointWritten(nbytes=nbytes):
                save.nbytes += nbytes
            case CheckpointError(cause=cause):
                save.failure = save.failure or f"{delivery.peer} could not write its part: {cause}"
        save.waiting.discard(delivery.peer)

    def tick(self, now: float) -> None:
        """Look at the threads and at the deadline; called often."""
        save = self._save
        if save is None:
            return
        if save.completing is None:
            self._collect(save, now)
        elif save.completing.done():
            self._finish(save, save.completing)
        elif now > save.deadline:  # it may yet become whole, and is then as good as any
            self._give_up(save, "it was not forced to the disk within the time that checkpoint.timeout_s gives")

    def take_events(self) -> Iterable[events.AnyEvent]:
        happened, self._events = self._events, []
        return happened

    def describe_remedy(self, lost: int, run_dir: str) -> str:
        """What a user does about the checkpoint of step `lost`, the last, which could not be written: by what is on the disk
        now. The processes that hold the weights are about to leave."""
        rules = self._rules
        assert rules is not None  # without rules no checkpoint is lost
        mend = f"Mend that first (free space in {rules.directory}, or whatever it was)"
        resume = f"`telescope runs resume {shlex.quote(run_dir)}`"
        try:
            before = [step for step in checkpoints.steps(rules.directory) if step < lost]
            whole = [step for step in checkpoints.steps_with_state(rules.directory) if step < lost]
        except OSError as error:  # what kept the checkpoint from being written may keep others from being read
            later = f"{resume} then goes on from the latest checkpoint, if there is one"
            return f"{mend}. {later}: now none can be looked for ({error})"
        if whole:
            return (
                f"{mend}, then {resume} goes on from the checkpoint of step {whole[-1]}, trains "
                f"{_name_steps(whole[-1] + 1, lost)} again and saves"
            )
        there = (
            f"the checkpoint of step {before[-1]} can be exported, but has weights alone"
            if before
            else "there is no earlier checkpoint"
        )
        return f"{mend}. No run can go on from here, for {there}: give the run's command again, with another run_dir"

    @property
    def _timeout_s(self) -> float:
        return self._rules.timeout_s if self._rules is not None else 0.0

    # ---- from part to whole

    def _collect(self, save: _Save, now: float) -> None:
        own_done = save.own is None or save.own.done()
        if save.waiting or not own_done:
            if now > save.deadline:
                late = ", ".join(sorted(save.waiting)) or "the orchestrator"
                self._give_up(save, f"{late} did not write within the time that checkpoint.timeout_s gives")
            return
        if save.own is not None and (error := _find_error(save.own)):
            save.failure = save.failure or f"the orchestrator could not write its part: {error}"
        if save.failure:
            checkpoints.discard(save.folder)
            self._give_up(save, save.failure)
            return
        if save.own is not None:
            save.nbytes += save.own.result()
        save.deadline = now + self._timeout_s
        save.completing = self._writer.submit(self._complete, save, self._recorder.protect_checkpoints(save.step))

    def _complete(self, save: _Save, protected: frozenset[int]) -> None:
        """In the thread: make it whole, then delete what nothing keeps. Raises OSError. One of weights alone takes nobody's
        place from which a run can go on."""
        rules = self._rules
        assert rules is not None
        if not save.training_state:
            protected |= frozenset(checkpoints.steps_with_state(rules.directory)[-1:])
        facts = checkpoints.Complete(
            format=checkpoints.FORMAT,
            step=save.step,
            version=save.step,
            run_id=rules.run_id,
            attempt=rules.attempt,
            config_hash=rules.config_hash,
            world_size=len(self._ranks),
            training_state=save.training_state,
            nbytes=save.nbytes,
            seconds=round(time.monotonic() - save.began, 3),
            written=checkpoints.now(),
        )
        checkpoints.finish(save.folder, facts)
        for step in _delete_old(lambda: checkpoints.retain(rules.directory, rules.keep_last, rules.keep_every, protected)):
            log.info("the checkpoint of step %d is deleted (checkpoint.keep_last)", step)

    def _finish(self, save: _Save, done: Future[None]) -> None:
        if error := _find_error(done):
            checkpoints.discard(save.folder)
            self._give_up(save, f"it could not be completed: {error}")
            return
        self._save, self._weights_alone = None, None if save.training_state else save.step
        seconds = time.monotonic() - save.began
        log.info("checkpoint of step %d: %.1f MB in %.2f s", save.step, save.nbytes / 1e6, seconds)
        self._recorder.add_to_next_step({"checkpoint/seconds": seconds, "checkpoint/bytes": float(save.nbytes)})
        self._recorder.record_checkpoint(save.step, "complete", nbytes=save.nbytes, seconds=seconds, stall_s=save.stall_s)
        self._events.append(events.CheckpointDone(step=save.step))

    def _give_up(self, save: _Save, cause: str) -> None:
        self._save = None
        self._report_failure(save.step, cause, stall_s=save.stall_s)

    def _report_failure(self, step: int, cause: str, stall_s: float = 0.0) -> None:
        leaving = self._find_leaving()
        is_last = step == self._find_last() or (leaving is not None and leaving.ok)
        stops = leaving is not None and not is_last
        how = ", the last, failed" if is_last else " failed, and the run stops" if stops else " failed, and the run goes on"
        sentence = f"the checkpoint of step {step}{how}: {cause}"
        log.error("%s", sentence)
        self._recorder.alert("error", "checkpoint", sentence, shown=not is_last)
        self._recorder.record_checkpoint(step, "failed", stall_s=stall_s, cause=cause)
        self._events.append(events.CheckpointFailed(step=step, cause=cause))


def _find_hindrance(needs: SaveNeeds, free: int, left_s: float) -> str:
    """Why the training state can't be saved now; empty where it can, as far as is known."""
    nbytes, speed = needs.nbytes.state, needs.bytes_per_s
    if nbytes > free:
        return f"takes {format_bytes(nbytes)}, and {format_bytes(free)} are free"
    if speed and nbytes / speed > left_s:
        return (
            f"takes {format_bytes(nbytes)}, about {nbytes / speed:.0f} s on this disk, and the stop has {left_s:.0f} s left "
            "(checkpoint.stop_timeout_s)"
        )
    return ""


def _name_steps(first: int, last: int) -> str:
    return f"step {last}" if first == last else f"steps {first} to {last}"


def _find_error(done: Future[int] | Future[None]) -> str:
    error = done.exception()
    if error is None:
        return ""
    if not isinstance(error, OSError):
        log.error("a part of the checkpoint was not written", exc_info=error)
    return str(error) or type(error).__name__


def _delete_old(delete: Callable[[], list[int]]) -> list[int]:
    """A checkpoint that can't be deleted makes the new one no worse."""
    try:
        return delete()
    except OSError as error:
        log.warning("an old checkpoint can't be deleted: %s", error)
        return []
