"""The orchestrator's part of a checkpoint: read back as it was written, refused where it is damaged, whole or not there."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from telescope.config.end_saves import EndSaves, SaveBytes
from telescope.flow import commands, events
from telescope.flow import commands as do
from telescope.flow.core import Core
from telescope.flow.settings import EvalRules, FlowSettings
from telescope.orchestrator import saved_state
from telescope.orchestrator.checkpoints import CheckpointCoordinator, SaveNeeds, SaveRules
from telescope.orchestrator.loop import Orchestrator
from telescope.orchestrator.weight_coordinator import UpdateRules
from telescope.records import WeightManifest
from telescope.runlog import checkpoints
from telescope.runlog.attempts import ALL_ROWS, CountedRows, Lineage, write_lineage
from telescope.runlog.layout import RunDirectory
from telescope.runlog.writer import RunLog
from telescope.wire.messages import CheckpointError, CheckpointStaged, CheckpointWritten, SaveCheckpoint
from tests.deadlines import refuse_late
from tests.flow.harness import World
from tests.flow.harness import settings as flow_settings
from tests.flow.test_evals_alone import MATH, Table, alone
from tests.orchestrator.test_rollout_store import make

RANKS = ("trainer-0", "trainer-1")
LIMIT_S = 60.0
DONE = commands.EndRun("all 1 steps are trained", ok=True)
STOPPED = commands.EndRun("interrupted by SIGINT", ok=False)


@pytest.fixture(scope="module")
def part() -> saved_state.OrchestratorState:
    """Of a simulated run; its rollouts have two branches of unlike length."""
    snapshot = World(flow_settings(number_of_steps=2, checkpoint_every=1), seed=5).run().checkpoints[0].snapshot
    rollouts = tuple(make(rollout_id, rollout_id // 3) for rollout_id in sorted(snapshot.rollout_ids))
    assert rollouts
    return saved_state.OrchestratorState(
        snapshot, rollouts, saved_state.SummaryCounters(tokens={"completion": 7}, cohorts_ended=4), (CountedRows(1, 12),)
    )


def written(folder: Path, part: saved_state.OrchestratorState) -> Path:
    place = checkpoints.begin(folder, 1, "a")
    assert saved_state.write_state(place, part) > 0
    return place


@pytest.mark.parametrize("dtype", [np.uint8, np.int16])
def test_recorded_routing_is_read_back_beside_rollouts_that_have_none(
    tmp_path: Path, part: saved_state.OrchestratorState, dtype: type[np.generic]
):
    """Of a rollout's two branches one may have none: it is marked then."""
    plain, routed = part.rollouts[:2]
    first, *others = routed.branches
    record = np.arange(len(first.ids) * 6, dtype=dtype).reshape(len(first.ids), 3, 2)
    with_record = replace(routed, branches=(msgspec.structs.replace(first, routed=record), *others))
    _, found = saved_state.read_state(written(tmp_path, part._replace(rollouts=(plain, with_record, *part.rollouts[2:]))))
    assert all(branch.routed is None for branch in found[0].branches)
    np.testing.assert_array_equal(found[1].branches[0].routed, record)
    assert found[1].branches[0].routed.dtype == dtype
    assert all((branch.routed == np.iinfo(dtype).max).all() for branch in found[1].branches[1:])
    np.testing.assert_array_equal(found[2].branches[0].ids, part.rollouts[2].branches[0].ids)


def test_what_is_written_is_read_to_the_bit(tmp_path: Path, part: saved_state.OrchestratorState):
    state, rollouts = saved_state.read_state(written(tmp_path, part))
    assert state.core == part.core
    assert state.counters == part.counters
    assert len(rollouts) == len(part.rollouts)
    for one, other in zip(rollouts, part.rollouts, strict=True):
        assert (one.order, one.result, one.reward) == (other.order, other.result, other.reward)
        for branch, known in zip(one.branches, other.branches, strict=True):
            for name in ("ids", "mask", "logprobs", "versions"):
                array, expected = getattr(branch, name), getattr(known, name)
                assert array.dtype == expected.dtype
                np.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize("name", [saved_state.STATE, saved_state.ARRAYS])
def test_a_damaged_file_is_named_with_the_remedy(tmp_path: Path, part: saved_state.OrchestratorState, name: str):
    folder = written(tmp_path, part)
    file = checkpoints.orchestrator_part(folder) / name
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0xFF
    file.write_bytes(data[:-1])
    with pytest.raises(checkpoints.CheckpointUnreadable, match=f"{name} is damaged .*: remove the folder"):
        saved_state.read_state(folder)


def test_a_checkpoint_of_another_format_is_refused_with_the_remedy(tmp_path: Path, part: saved_state.OrchestratorState):
    folder = written(tmp_path, part)
    place = checkpoints.orchestrator_part(folder)
    (place / saved_state.STATE).write_bytes(msgspec.msgpack.encode({"format": 1, "rollouts": [{"done": {}}]}))
    (place / saved_state.ARRAYS).rename(place / "shelf.bin")  # as format 1 calls it: the format is told before a file is missed
    with pytest.raises(checkpoints.CheckpointUnreadable, match="has format 1, and this Telescope reads 5: resume with the"):
        saved_state.read_state(folder)


def test_weights_alone_are_nothing_to_go_on_from(tmp_path: Path):
    with pytest.raises(checkpoints.CheckpointUnreadable, match="weights alone has no such file"):
        saved_state.read_state(checkpoints.begin(tmp_path, 1, "a"))


class Listener:
    """A hub and a recorder that write down what they are told."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, Any]] = []
        self.rows: list[tuple[int, str]] = []
        self.metrics: dict[str, float] = {}
        self.alerts: list[str] = []

    def send(self, peer: str, body: Any) -> int:
        self.sent.append((peer, body))
        return len(self.sent)

    def add_to_next_step(self, metrics: dict[str, float]) -> None:
        self.metrics |= metrics

    def protect_checkpoints(self, completing: int) -> frozenset[int]:
        return frozenset()

    def record_checkpoint(self, step: int, state: str, **_: Any) -> None:
        self.rows.append((step, state))

    def alert(self, level: str, source: str, message: str, *, shown: bool = True) -> None:
        self.alerts.append(message)

    def note(self, peer: str, sentence: str) -> None:
        self.alerts.append(f"{peer}: {sentence}")


class Said:
    def __init__(self, peer: str, answers: int) -> None:
        self.peer, self.answers = peer, answers


def make_coordinator(
    folder: Path, last_step: int = 0, leaving: commands.EndRun | None = None, left_s: float = 120.0, **changes: Any
) -> tuple[CheckpointCoordinator, Listener]:
    listener: Any = Listener()
    rules = SaveRules(folder, "run", "a", "hash", **{"timeout_s": 100.0, **changes})
    coordinator = CheckpointCoordinator(
        *(listener, listener, listener, RANKS, rules, lambda: last_step, lambda: leaving, lambda: left_s)
    )
    return coordinator, listener


def say(coordinator: CheckpointCoordinator, peer: str, body: Any, answers: int | None = None) -> None:
    """`answers`: the number of an order; None: the one that this rank got first."""
    delivery: Any = Said(peer, 1 + RANKS.index(peer) if answers is None else answers)
    coordinator.hear(delivery, body)


def end_of(coordinator: CheckpointCoordinator, now: float = 0.0) -> list[Any]:
    """The event that a save comes to; threads write meanwhile."""
    deadline = time.monotonic() + LIMIT_S
    while not (found := list(coordinator.take_events())):
        refuse_late(deadline)
        coordinator.tick(now)
        time.sleep(0.005)
    return found


def test_a_checkpoint_is_complete_when_every_part_is_written(tmp_path: Path, part: saved_state.OrchestratorState):
    coordinator, listener = make_coordinator(tmp_path, keep_last=1)
    coordinator.begin(1, part, 0.0)
    assert [(peer, type(body)) for peer, body in listener.sent] == [(rank, SaveCheckpoint) for rank in RANKS]
    assert coordinator.stalled == set(RANKS)
    say(coordinator, "trainer-0", CheckpointStaged(1, 0.25))
    assert coordinator.stalled == {"trainer-1"}
    say(coordinator, "trainer-0", CheckpointWritten(1, 1000, 0.5))
    for _ in range(20):
        coordinator.tick(1.0)
    assert checkpoints.steps(tmp_path) == []
    say(coordinator, "trainer-1", CheckpointWritten(1, 500, 0.5))
    assert coordinator.stalled == set()
    assert end_of(coordinator) == [events.CheckpointDone(1)]
    facts = checkpoints.read(checkpoints.find(tmp_path))
    assert (facts.step, facts.world_size, facts.training_state) == (1, 2, True)
    assert facts.nbytes > 1500
    assert listener.metrics["checkpoint/stall_s"] == 0.25
    assert listener.rows == [(1, "complete")]
    state, _ = saved_state.read_state(checkpoints.find(tmp_path))
    assert state.core == part.core


def make_orchestrator(folder: Path, core: Any = None) -> Orchestrator:
    core = core or SimpleNamespace(leaving=None)
    listener: Any = Listener()
    config: Any = SimpleNamespace(inference=SimpleNamespace(sleep_while_training="off"))
    peers: Any = SimpleNamespace(ranks=RANKS)
    unused: Any = SimpleNamespace(find_dying=None, append=lambda _: None)
    return Orchestrator(
        config,
        hub=listener,
        core=core,
        peers=peers,
        servers=unused,
        journal=unused,
        recorder=listener,
        recipe=unused,
        updates=UpdateRules(1.0, 1),
        saves=SaveRules(folder, "run", "a", "hash", timeout_s=100.0),
    )


def test_the_coordinator_of_updates_knows_which_ranks_copy_their_state(tmp_path: Path, part: saved_state.OrchestratorState):
    orchestrator = make_orchestrator(tmp_path)
    coordinator, weights = orchestrator.checkpoints, orchestrator.weights
    coordinator.begin(1, part, 0.0)
    say(coordinator, "trainer-1", CheckpointStaged(1, 0.25))
    manifest = WeightManifest(1, "gloo", "tcp://x:1/w", (), 8, "")
    weights.join("server-0", 0)
    weights._manifest = manifest
    weights.begin(1, 0.0)
    assert weights.doing == "weights of version 1: being held until ranks have copied their state for a checkpoint"
    say(coordinator, "trainer-0", CheckpointStaged(1, 0.25))
    weights.tick(0.1)
    assert weights.doing == "weights of version 1: being prepared"


def test_a_rank_that_cannot_write_costs_the_checkpoint_and_leaves_nothing(tmp_path: Path, part: saved_state.OrchestratorState):
    coordinator, listener = make_coordinator(tmp_path)
    coordinator.begin(1, part, 0.0)
    say(coordinator, "trainer-1", CheckpointError(1, "No space left on device"))
    say(coordinator, "trainer-0", CheckpointWritten(1, 500, 0.5))
    cause = "trainer-1 could not write its part: No space left on device"
    assert end_of(coordinator) == [events.CheckpointFailed(1, cause)]
    assert listener.alerts == [f"the checkpoint of step 1 failed, and the run goes on: {cause}"]
    assert list(tmp_path.iterdir()) == []


def test_who_lost_the_last_checkpoint_is_told_what_brings_it_back(tmp_path: Path):
    """Only what is on the disk counts: the attempts before this one may have saved too."""
    coordinator, _ = make_coordinator(tmp_path / "saves", last_step=60)
    mend = f"Mend that first (free space in {tmp_path}/saves, or whatever it was)"
    assert coordinator.describe_remedy(60, "/runs/a b") == (
        f"{mend}. No run can go on from here, for there is no earlier checkpoint: give the run's command again, with another "
        "run_dir"
    )
    for step in (20, 40):
        place = checkpoints.begin(tmp_path / "saves", step, "a")
        checkpoints.finish(place, checkpoints.Complete(1, step, step, "run", "a", "hash", 1, True, 0, 0.0, checkpoints.now()))
    assert coordinator.describe_remedy(60, "/runs/a b") == (
        f"{mend}, then `telescope runs resume '/runs/a b'` goes on from the checkpoint of step 40, trains steps 41 to 60 again "
        "and saves"
    )
    assert "trains step 41 again" in coordinator.describe_remedy(41, "/runs/a")
    alone, _ = make_coordinator(tmp_path / "alone", last_step=60)
    place = checkpoints.begin(tmp_path / "alone", 40, "a")
    checkpoints.finish(place, checkpoints.Complete(1, 40, 40, "run", "a", "hash", 1, False, 0, 0.0, checkpoints.now()))
    assert "the checkpoint of step 40 can be exported, but has weights alone" in alone.describe_remedy(60, "/runs/a")


def test_a_folder_of_checkpoints_that_cannot_be_read_does_not_hide_the_remedy(tmp_path: Path):
    loop = tmp_path / "saves"
    loop.symlink_to(loop)
    coordinator, _ = make_coordinator(loop, last_step=60)
    said = coordinator.describe_remedy(60, "/runs/a")
    assert "`telescope runs resume /runs/a` then goes on from the latest checkpoint, if there is one: now none can be" in said
    assert "Too many levels of symbolic links" in said


def test_of_the_last_checkpoint_nobody_says_that_the_run_goes_on(tmp_path: Path, part: saved_state.OrchestratorState):
    coordinator, listener = make_coordinator(tmp_path, last_step=1)
    coordinator.begin(1, part, 0.0)
    for rank in RANKS:
        say(coordinator, rank, CheckpointError(1, "full"))
    end_of(coordinator)
    assert listener.alerts == ["the checkpoint of step 1, the last, failed: trainer-0 could not write its part: full"]


def test_of_a_stops_checkpoint_nobody_says_that_the_run_goes_on(tmp_path: Path, part: saved_state.OrchestratorState):
    coordinator, listener = make_coordinator(tmp_path, last_step=9, leaving=STOPPED)
    coordinator.begin(1, part, 0.0)
    for rank in RANKS:
        say(coordinator, rank, CheckpointError(1, "full"))
    end_of(coordinator)
    cause = "trainer-0 could not write its part: full"
    assert listener.alerts == [f"the checkpoint of step 1 failed, and the run stops: {cause}"]


# ---- what is saved at the end

AUTO = EndSaves("weights", "state", gives_way=True)
EB = 10**18
"""Bytes that no disk has."""


@pytest.mark.parametrize(
    ("leaving", "rules", "whole"),
    [
        (None, {"at_end": AUTO}, True),
        (DONE, {"at_end": AUTO}, False),
        (STOPPED, {"at_end": AUTO}, True),
        (DONE, {"at_end": EndSaves("state", "state")}, True),
        (STOPPED, {"at_end": EndSaves("weights", "weights")}, False),
        (DONE, {}, True),  # nothing is asked for at the end: it is due by the steps
        (DONE, {"training_state": False}, False),
        (None, {"training_state": False, "at_end": EndSaves("weights", "weights")}, False),
        (STOPPED, {"at_end": EndSaves("weights", "weights"), "every": 1}, True),  # due by the steps all the same
        (DONE, {"at_end": EndSaves("weights", "weights"), "every": 2}, False),
        (STOPPED, {"at_end": AUTO, "needs": SaveNeeds(SaveBytes(1, 3 * EB), None)}, False),
        (STOPPED, {"at_end": AUTO, "needs": SaveNeeds(SaveBytes(100, 300), None), "left_s": 0.0}, True),
        (STOPPED, {"at_end": AUTO, "needs": SaveNeeds(SaveBytes(100, 300), 10.0), "left_s": 31.0}, True),
        (STOPPED, {"at_end": AUTO, "needs": SaveNeeds(SaveBytes(100, 300), 10.0), "left_s": 29.0}, False),
        (STOPPED, {"at_end": EndSaves("state", "state"), "needs": SaveNeeds(SaveBytes(100, 3 * EB), 1.0)}, True),
    ],
)
def test_the_training_state_is_saved_where_it_is_asked_for_and_fits(
    tmp_path: Path, part: saved_state.OrchestratorState, leaving: Any, rules: dict[str, Any], whole: bool
):
    save_by(tmp_path, part, leaving, rules)
    facts = checkpoints.read(checkpoints.find(tmp_path))
    assert facts.training_state is whole
    assert (checkpoints.orchestrator_part(checkpoints.find(tmp_path)) / saved_state.STATE).exists() is whole
    assert checkpoints.steps_with_state(tmp_path) == ([1] if whole else [])


def save_by(folder: Path, part: saved_state.OrchestratorState, leaving: Any, rules: dict[str, Any]) -> Listener:
    coordinator, listener = make_coordinator(folder, leaving=leaving, **rules)
    coordinator.begin(1, part, 0.0)
    orders = {body.training_state for _, body in listener.sent}
    for rank in RANKS:
        say(coordinator, rank, CheckpointWritten(1, 500, 0.5))
    assert end_of(coordinator) == [events.CheckpointDone(1)]
    assert orders == {checkpoints.read(checkpoints.find(folder)).training_state} == {coordinator.can_go_on(1)}
    assert coordinator.can_go_on(0)  # the one that the attempt began with has all
    return listener


def test_who_stops_is_told_why_only_the_weights_are_saved(tmp_path: Path, part: saved_state.OrchestratorState):
    needs = SaveNeeds(SaveBytes(10**9, 3 * 10**9), 1e7)
    listener = save_by(tmp_path, part, STOPPED, {"at_end": AUTO, "needs": needs, "left_s": 87.4})
    assert listener.alerts == [
        "the checkpoint of step 1 has the weights alone: the training state takes 3.0 GB, about 300 s on this disk, and the "
        "stop has 87 s left (checkpoint.stop_timeout_s)"
    ]


def test_what_is_known_not_to_fit_is_not_begun(tmp_path: Path, part: saved_state.OrchestratorState):
    """It would fill the disk on which the run's last rows are to be written."""
    coordinator, listener = make_coordinator(
        tmp_path, last_step=1, leaving=DONE, at_end=AUTO, needs=SaveNeeds(SaveBytes(EB, 3 * EB), None)
    )
    coordinator.begin(1, part, 0.0)
    (failed,) = coordinator.take_events()
    assert isinstance(failed, events.CheckpointFailed)
    assert failed.cause.startswith(f"{tmp_path}: the weights take 1000000000.0 GB, and ")
    assert (listener.sent, list(tmp_path.iterdir())) == ([], [])


def test_weights_alone_do_not_have_the_last_state_deleted(tmp_path: Path, part: saved_state.OrchestratorState):
    coordinator, _ = make_coordinator(tmp_path, leaving=DONE, at_end=EndSaves("weights", "weights"), keep_last=1)
    for step, whole in ((1, True), (2, True), (3, False)):
        place = checkpoints.begin(tmp_path, step, "a")
        facts = checkpoints.Complete(1, step, step, "run", "a", "hash", 1, whole, 0, 0.0, checkpoints.now())
        checkpoints.finish(place, facts)
    coordinator.begin(4, part, 0.0)
    for rank in RANKS:
        say(coordinator, rank, CheckpointWritten(4, 500, 0.5))
    end_of(coordinator)
    assert checkpoints.steps(tmp_path) == [2, 4]


def test_in_a_run_that_ends_early_the_last_checkpoint_is_that_of_its_last_step(
    tmp_path: Path, part: saved_state.OrchestratorState
):
    core = SimpleNamespace(last_step=60, leaving=None)
    orchestrator = make_orchestrator(tmp_path, core)
    core.last_step = 1
    coordinator, listener = orchestrator.checkpoints, orchestrator.checkpoints._recorder
    coordinator.begin(1, part, 0.0)
    for rank in RANKS:
        say(coordinator, rank, CheckpointError(1, "full"))
    end_of(coordinator)
    assert listener.alerts == ["the checkpoint of step 1, the last, failed: trainer-0 could not write its part: full"]  # type: ignore[attr-defined]


def test_an_evals_score_is_heard_before_what_may_order_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Else the checkpoint would hold the eval as ended, and its score would count nowhere after a resume."""
    heard: list[Any] = []

    def handle(event: Any, _: float) -> list[Any]:
        heard.append(event)
        return [commands.EndEval("own", step, "complete", 0, 0) for step in (2, 4)] if event == events.Tick() else []

    orchestrator = make_orchestrator(tmp_path, SimpleNamespace(handle=handle, last_step=9))
    scored = {step: events.EvalScored(eval="own", step=step, score=0.5) for step in (2, 4)}
    monkeypatch.setattr(orchestrator.executor, "execute", lambda command: (scored[command.step],))
    committed = events.UpdateDone(version=1)
    orchestrator._events.extend([events.Tick(), committed])
    while orchestrator._events:
        orchestrator._handle(orchestrator._events.popleft())
    assert heard == [events.Tick(), scored[2], scored[4], committed]


def test_a_folder_that_takes_no_file_fails_the_checkpoint(tmp_path: Path, part: saved_state.OrchestratorState):
    (tmp_path / "file").write_text("in the way")
    coordinator, listener = make_coordinator(tmp_path / "file")
    coordinator.begin(1, part, 0.0)
    (event,) = end_of(coordinator)
    assert isinstance(event, events.CheckpointFailed)
    assert listener.sent == []


def test_a_rank_that_never_answers_is_waited_for_no_longer_than_the_deadline(
    tmp_path: Path, part: saved_state.OrchestratorState
):
    coordinator, _ = make_coordinator(tmp_path)
    coordinator.begin(1, part, 0.0)
    say(coordinator, "trainer-0", CheckpointWritten(1, 500, 0.5))
    coordinator.tick(99.0)
    assert list(coordinator.take_events()) == []
    (event,) = end_of(coordinator, now=101.0)
    assert event == events.CheckpointFailed(1, "trainer-1 did not write within the time that checkpoint.timeout_s gives")
    say(coordinator, "trainer-1", CheckpointWritten(1, 500, 0.5))  # late: noted, and nothing else
    assert list(coordinator.take_events()) == []


def test_an_answer_to_a_save_that_was_given_up_completes_no_later_one_of_the_same_step(
    tmp_path: Path, part: saved_state.OrchestratorState
):
    """A run that is told to stop saves a step again whose first save had failed; a slow rank may still be at that one."""
    coordinator, listener = make_coordinator(tmp_path)
    coordinator.begin(1, part, 0.0)
    say(coordinator, "trainer-0", CheckpointWritten(1, 500, 0.5))
    end_of(coordinator, now=101.0)
    coordinator.begin(1, part, 200.0)
    folders = [body.folder for _, body in listener.sent]
    assert folders[0] != folders[2]  # the slow rank writes into the first one
    say(coordinator, "trainer-0", CheckpointWritten(1, 500, 0.5), answers=3)
    say(coordinator, "trainer-1", CheckpointWritten(1, 500, 0.5), answers=2)
    assert "trainer-1: its CheckpointWritten of step 1 is of no save under way; ignored" in listener.alerts
    for _ in range(20):
        coordinator.tick(201.0)
    assert checkpoints.steps(tmp_path) == []
    say(coordinator, "trainer-1", CheckpointWritten(1, 500, 0.5), answers=4)
    assert end_of(coordinator, now=201.0) == [events.CheckpointDone(1)]


def test_a_disk_that_never_says_that_it_has_all_is_waited_for_no_longer_than_the_deadline(
    tmp_path: Path, part: saved_state.OrchestratorState, monkeypatch: pytest.MonkeyPatch
):
    """Else the next one that is due, and with it training, would wait for ever."""
    lets_go = threading.Event()
    monkeypatch.setattr(checkpoints, "sync_below", lambda _: lets_go.wait(LIMIT_S))
    coordinator, _ = make_coordinator(tmp_path)
    coordinator.begin(1, part, 0.0)
    for rank in RANKS:
        say(coordinator, rank, CheckpointWritten(1, 500, 0.5))
    deadline = time.monotonic() + LIMIT_S
    while not list(tmp_path.glob(f"*/{checkpoints.COMPLETE}")):  # its thread is at the disk
        refuse_late(deadline)
        coordinator.tick(1.0)
        time.sleep(0.005)
    coordinator.tick(100.5)
    assert list(coordinator.take_events()) == []
    try:
        cause = "it was not forced to the disk within the time that checkpoint.timeout_s gives"
        assert end_of(coordinator, now=102.0) == [events.CheckpointFailed(1, cause)]
    finally:
        lets_go.set()


# ---- a run that does not train goes on from its rows


def go_on_with(run: RunDirectory, number: int, lines: list[bytes], **streams: list[dict[str, Any]]) -> None:
    """Attempt `number` has written these, and another one goes on from them."""
    earlier = RunDirectory(run.earlier_attempt(number))
    earlier.journal.parent.mkdir(parents=True)
    earlier.journal.write_bytes(b"".join(line + b"\n" for line in lines))
    log = RunLog(earlier, "orchestrator")
    for stream, found in streams.items():
        for row in found:
            log.append(stream, row)
    log.close()
    write_lineage(run, Lineage(number + 1, 0, tuple(CountedRows(one, ALL_ROWS) for one in range(1, number + 1))))


def scored_row(rollout_id: int) -> dict[str, Any]:
    known = {"eval": "math", "step": 20, "index": 0, "sample": 0, "attempt": 0, "status": "scored", "reward": 1.0}
    return {**known, "rollout_id": rollout_id, "completion_tokens": 3, "finish_reason": "stop"}


def restart(run: RunDirectory, settings: FlowSettings) -> tuple[Table, saved_state.RunStart]:
    start = saved_state.start_run(run, settings)
    return Table(start.core), start


def test_an_eval_of_which_only_its_own_row_is_lost_is_not_played_again(tmp_path: Path):
    run, first = RunDirectory.create(tmp_path / "run"), Table(Core(alone()))
    ids = [order.rollout_id for order in first.orders]
    go_on_with(run, 1, first.lines, eval_samples=[scored_row(number) for number in ids])
    for number in (2, 3):  # whose row is lost, too
        table, start = restart(run, alone())
        assert table.orders == []
        assert [one.state for one in table.of(do.EndEval)] == ["complete"]
        assert [len(one.scores) for one in start.counters.evals.under_way] == [6]
        go_on_with(run, number, table.lines)


def test_an_eval_that_was_added_goes_on_from_the_attempt_that_began_it(tmp_path: Path):
    run, first = RunDirectory.create(tmp_path / "run"), Table(Core(alone()))
    two = alone(evals=(MATH, EvalRules(name="more", environment="math")))
    ids = [order.rollout_id for order in first.orders]
    go_on_with(run, 1, first.lines, eval_samples=[scored_row(number) for number in ids[:2]])
    second, _ = restart(run, two)
    assert [one.eval for one in second.of(do.BeginEval)] == ["more"]
    asked = [order.rollout_id for order in second.orders]
    assert len(asked) == 4 + 3
    go_on_with(run, 2, second.lines, eval_samples=[scored_row(asked[-1])])
    third, _ = restart(run, two)
    assert third.of(do.BeginEval) == []
    assert {order.rollout_id for order in third.orders} == set(asked[:-1])
