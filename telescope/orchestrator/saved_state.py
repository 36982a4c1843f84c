"""The orchestrator's part of a checkpoint: the core's snapshot, the scored rollouts with their arrays, the summary's counters.

    orchestrator/state.msgpack   everything but arrays, and the digest of the other file
    orchestrator/arrays.bin      ids, mask, logprobs, versions of one rollout after another, little-endian, and behind them its
                                 routing where that was recorded
    orchestrator/rows.json       how far the run directory's rows had come (runlog/attempts.py)

Owns these bytes, and where an attempt begins: at step 1, or where a checkpoint was made. Refuses to decide when they are
written; the core says whether it can go on from them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from telescope.flow.core import Core
from telescope.flow.early_stop import SavedEarlyStop
from telescope.flow.evals import SavedEvals, SavedRound
from telescope.flow.events import WorkerJoined
from telescope.flow.replay import JournalDamaged, decode_line, read_opening
from telescope.flow.settings import FlowSettings
from telescope.flow.snapshot import Snapshot
from telescope.maths import routing
from telescope.orchestrator.cohorts import Cohort, CohortMeans
from telescope.orchestrator.eval_scores import EvalProgress, SampleScore
from telescope.orchestrator.failure_rates import SavedFailureRates
from telescope.orchestrator.rollout_store import Rollout
from telescope.records import Record, RolloutOrder, Trajectory
from telescope.runlog.attempts import CountedRows, Lineage, read_lineage, write_rows
from telescope.runlog.checkpoints import CheckpointUnreadable, orchestrator_part, read_resume
from telescope.runlog.eval_rows import OVER
from telescope.runlog.files import DamagedFile
from telescope.runlog.journal import journal_lines
from telescope.runlog.layout import RunDirectory
from telescope.runlog.reader import rows
from telescope.wire.messages import RolloutResult

FORMAT = 5
STATE, ARRAYS, ROWS = "state.msgpack", "arrays.bin", "rows.json"
COLUMNS = (("ids", "<i4"), ("mask", "u1"), ("logprobs", "<f4"), ("versions", "<i4"))
TOKEN_BYTES = sum(np.dtype(kind).itemsize for _, kind in COLUMNS)


class SavedRouting(Record):
    """Of an array [tokens, layers, experts]: numpy's dtype, little-endian, and the last two axes."""

    dtype: Literal["|u1", "<i2"]
    layers: int
    experts: int

    @property
    def token_bytes(self) -> int:
        return np.dtype(self.dtype).itemsize * self.layers * self.experts


class SavedRollout(Record):
    """One that was scored. Its arrays are those of its branches (`result.branch_lengths`), in the order of the rollouts."""

    order: RolloutOrder
    result: RolloutResult
    length_penalty: float
    normalised: float | None
    routed: SavedRouting | None = None
    """Behind its other arrays lies which experts its tokens went to; None: that was not recorded."""


class SavedEvalScores(Record):
    """Evals under way, and of each eval the rows of the latest complete round and of the first."""

    under_way: tuple[EvalProgress, ...] = ()
    latest: tuple[dict[str, Any], ...] = ()
    first: tuple[dict[str, Any], ...] = ()


class SummaryCounters(Record):
    """What the summary adds up over a run. `cohorts`: those that have not been reported; `first_cohorts`, `last_cohorts` and
    `cohorts_ended` of those that have; `rows_dropped`, `rows_unlogged` of all writers; `restarts` by server."""

    tokens: dict[str, int] = msgspec.field(default_factory=dict)
    seconds: dict[str, float] = msgspec.field(default_factory=dict)
    out_of_range: dict[str, int] = msgspec.field(default_factory=dict)
    updates_skipped: int = 0
    rows_dropped: int = 0
    rows_unlogged: int = 0
    restarts: dict[str, int] = msgspec.field(default_factory=dict)
    failures: SavedFailureRates = SavedFailureRates({}, {})
    cohorts: tuple[Cohort, ...] = ()
    first_cohorts: tuple[CohortMeans, ...] = ()
    last_cohorts: tuple[CohortMeans, ...] = ()
    cohorts_ended: int = 0
    evals: SavedEvalScores = SavedEvalScores()


class SavedState(Record):
    format: int
    core: Snapshot
    rollouts: tuple[SavedRollout, ...]
    counters: SummaryCounters
    arrays_digest: str


class _Format(msgspec.Struct):
    """What every version of the file begins with; the rest may differ."""

    format: int


class _EvalsOfCore(msgspec.Struct):
    """Of a snapshot, the evals and what follows from them; the rest is passed over."""

    evals: SavedEvals = SavedEvals()
    early_stop: SavedEarlyStop = SavedEarlyStop()


class _EvalsOfState(msgspec.Struct):
    core: _EvalsOfCore


class OrchestratorState(NamedTuple):
    """All that is to be written, as it is at the checkpoint; nothing in it changes afterwards."""

    core: Snapshot
    rollouts: tuple[Rollout, ...]
    counters: SummaryCounters
    rows: tuple[CountedRows, ...]


def write_state(folder: Path, state: OrchestratorState) -> int:
    """Write it below a partial checkpoint. Gives its bytes. Raises OSError."""
    place = orchestrator_part(folder)
    digest, nbytes = hashlib.blake2b(digest_size=16), 0
    with (place / ARRAYS).open("wb") as file:
        for rollout in state.rollouts:
            for name, kind in COLUMNS:
                for branch in rollout.branches:
                    data = getattr(branch, name).astype(kind, copy=False).tobytes()
                    digest.update(data)
                    nbytes += file.write(data)
            if (routed := _join_routing(rollout)) is not None:
                data = routed.astype(routed.dtype.newbyteorder("<"), copy=False).tobytes()
                digest.update(data)
                nbytes += file.write(data)
    saved = tuple(
        SavedRollout(one.order, one.result, one.length_penalty, one.normalised, _describe_routing(_join_routing(one)))
        for one in state.rollouts
    )
    text = msgspec.msgpack.encode(SavedState(FORMAT, state.core, saved, state.counters, digest.hexdigest()))
    nbytes += (place / STATE).write_bytes(text)
    write_rows(place / ROWS, state.rows)
    return nbytes


def _join_routing(rollout: Rollout) -> np.ndarray | None:
    return routing.joined([branch.routed for branch in rollout.branches], [len(branch.ids) for branch in rollout.branches])


def _describe_routing(routed: np.ndarray | None) -> SavedRouting | None:
    if routed is None:
        return None
    _, layers, experts = routed.shape
    return SavedRouting("|u1" if routed.dtype == np.uint8 else "<i2", layers, experts)


def read_state(folder: Path) -> tuple[SavedState, list[Rollout]]:
    """Of a complete checkpoint. Raises `CheckpointUnreadable`, which names the file and the remedy."""
    refuse_another_format(folder)
    place = orchestrator_part(folder)
    try:
        encoded, data = (place / STATE).read_bytes(), (place / ARRAYS).read_bytes()
    except OSError as error:
        raise CheckpointUnreadable(
            f"{error.filename} can't be read ({error.strerror}): a checkpoint of weights alone has no such file, and no run "
            "can go on from one; resume from another step"
        ) from error
    state = _decode(place / STATE, encoded)
    expected = sum(
        sum(one.result.branch_lengths) * (TOKEN_BYTES + (one.routed.token_bytes if one.routed else 0)) for one in state.rollouts
    )
    if hashlib.blake2b(data, digest_size=16).hexdigest() != state.arrays_digest or len(data) != expected:
        raise _make_damaged_error(place / ARRAYS, f"its {len(data)} bytes are not those that were written")
    if missing := state.core.rollout_ids - {rollout.order.rollout_id for rollout in state.rollouts}:
        raise _make_damaged_error(place / STATE, f"it lacks rollout {min(missing)}")
    return state, list(_restore_rollouts(state.rollouts, data))


def refuse_another_format(folder: Path) -> None:
    """Raises `CheckpointUnreadable` where another Telescope wrote the part; of one that is missing or damaged, `read_state`
    speaks. Its other files may have other names, so this comes first."""
    file = orchestrator_part(folder) / STATE
    try:
        written = msgspec.msgpack.decode(file.read_bytes(), type=_Format).format
    except (OSError, msgspec.DecodeError, ValueError):
        return
    if written != FORMAT:
        raise CheckpointUnreadable(
            f"{file} has format {written}, and this Telescope reads {FORMAT}: resume with the Telescope that wrote it; its "
            "weights can be exported with any"
        )


def read_evals_under_way(folder: Path) -> frozenset[tuple[str, int]]:
    """(name, step) of each eval that a checkpoint holds; none where it is of weights alone. Raises `CheckpointUnreadable`."""
    return frozenset((one.rules.name, one.step) for one in _read_evals(folder).evals.rounds)


def read_early_stop(folder: Path) -> SavedEarlyStop:
    """Whether the run that made the checkpoint was to end early. Raises `CheckpointUnreadable`."""
    return _read_evals(folder).early_stop


def _read_evals(folder: Path) -> _EvalsOfCore:
    file = orchestrator_part(folder) / STATE
    try:
        return msgspec.msgpack.decode(file.read_bytes(), type=_EvalsOfState).core
    except FileNotFoundError:
        return _EvalsOfCore()
    except (OSError, msgspec.DecodeError, ValueError) as error:
        raise _make_damaged_error(file, str(error)) from error


def _decode(file: Path, encoded: bytes) -> SavedState:
    try:
        return msgspec.msgpack.decode(encoded, type=SavedState)
    except (msgspec.DecodeError, ValueError) as error:
        raise _make_damaged_error(file, str(error)) from error


def _restore_rollouts(rollouts: Iterable[SavedRollout], data: bytes) -> Iterable[Rollout]:
    offset = 0
    for saved in rollouts:
        lengths = saved.result.branch_lengths
        ends, columns = np.cumsum(lengths)[:-1], []
        for _, kind in COLUMNS:
            array = np.frombuffer(data, kind, sum(lengths), offset)
            offset += array.nbytes
            columns.append(np.split(array, ends))
        if saved.routed is not None:
            shape = (sum(lengths), saved.routed.layers, saved.routed.experts)
            array = np.frombuffer(data, saved.routed.dtype, math.prod(shape), offset).reshape(shape)
            offset += array.nbytes
            columns.append(np.split(array, ends))
        branches = tuple(Trajectory(*piece) for piece in zip(*columns, strict=True))
        yield Rollout(
            saved.order,
            answer=saved.result,
            told=True,
            taken=True,
            branches=branches,
            length_penalty=saved.length_penalty,
            normalised=saved.normalised,
        )


def _make_damaged_error(file: Path, how: str) -> CheckpointUnreadable:
    folder = file.parents[1]
    return CheckpointUnreadable(f"{file} is damaged ({how}): remove the folder {folder} and resume from an earlier step")


class CannotGoOn(ValueError):
    """The run's settings do not fit the checkpoint."""


@dataclass(frozen=True)
class RunStart:
    core: Core
    lineage: Lineage
    rollouts: tuple[Rollout, ...] = ()
    counters: SummaryCounters = SummaryCounters()  # noqa: RUF009 immutable
    history: tuple[Mapping[str, Any], ...] = ()
    """Metrics of the steps before, in order."""


def start_run(run: RunDirectory, settings: FlowSettings) -> RunStart:
    """Raises `CheckpointUnreadable`, and `CannotGoOn` with a sentence."""
    resume, lineage = read_resume(run), read_lineage(run)
    if not settings.trains and lineage.before:
        return _go_on_with_evals(run, settings, lineage)
    if resume is None:
        return RunStart(Core(settings), lineage)
    state, rollouts = read_state(Path(resume.folder))
    try:
        core = Core.restore(settings, state.core)
    except ValueError as error:
        raise CannotGoOn(str(error)) from error
    steps = {row["step"]: row["metrics"] for row in rows(run, "step_metrics") if row["step"] <= resume.step}
    history = tuple(steps[step] for step in sorted(steps))
    return RunStart(core, lineage, tuple(rollouts), state.counters, history)


# ---- a run that does not train has no checkpoints: its rows tell what was played


def _go_on_with_evals(run: RunDirectory, settings: FlowSettings, lineage: Lineage) -> RunStart:
    """The evals as an earlier attempt began them, with the scores of its rows. A sample without a scored row is played, one
    that was given up too; an eval that no attempt has begun begins. Raises `CheckpointUnreadable`, and `CannotGoOn` with a
    sentence."""
    try:
        begun = _read_begun_evals(run, lineage)
        ended = [row for row in rows(run, "evals") if row["state"] in OVER]
        scored = {row["rollout_id"]: row for row in rows(run, "eval_samples") if row["status"] == "scored"}
    except (DamagedFile, JournalDamaged) as error:
        raise CheckpointUnreadable(f"{error}: what was played can't be told from it; remove {run.path}") from error
    if begun is None:
        return RunStart(Core(settings), lineage)
    over = {(row["eval"], row["step"]) for row in ended}
    rounds, under_way = [], []
    for one in begun.evals.rounds:
        if (one.rules.name, one.step) in over:
            continue
        size = one.prompts * one.rules.num_samples
        known = [number for number in range(one.first_id, one.first_id + size) if number in scored]
        rounds.append(msgspec.structs.replace(one, scored=tuple(known), failed=()))
        under_way.append(_make_progress(one, {number: scored[number] for number in known}))
    complete = tuple(row for row in ended if row["state"] == "complete")
    names = {name for name, _ in over} | {one.rules.name for one in rounds}
    known_rules = tuple(rules for rules in begun.settings.evals if rules.name in names)
    if not known_rules:
        return RunStart(Core(settings), lineage)
    snapshot = msgspec.structs.replace(
        begun,
        settings=msgspec.structs.replace(settings, evals=known_rules),
        evals=msgspec.structs.replace(begun.evals, rounds=tuple(rounds)),
    )
    scores = SavedEvalScores(tuple(under_way), complete, complete)
    try:
        core = Core.restore(settings, snapshot)
    except ValueError as error:
        raise CannotGoOn(str(error)) from error
    return RunStart(core, lineage, counters=SummaryCounters(evals=scores))


def _read_begun_evals(run: RunDirectory, lineage: Lineage) -> Snapshot | None:
    """The core of the latest earlier attempt that came so far, when its evals had begun, with those it went on with. None: none
    came so far. Raises `DamagedFile` and `JournalDamaged`."""
    for part in reversed(lineage.before):
        journal = RunDirectory(run.earlier_attempt(part.attempt)).journal
        if not journal.exists():
            continue
        lines = journal_lines(journal)
        if (first := next(lines, None)) is None:
            continue
        opening = read_opening(first)
        core = opening.core()
        for number, text in enumerate(lines, start=2):
            line = decode_line(text, number)
            core.handle(line.event, line.now)
            if isinstance(line.event, WorkerJoined) and not core.ended:
                return _with_rounds_of(core.snapshot(), opening.snapshot)
        if opening.snapshot is not None:
            return opening.snapshot
    return None


def _with_rounds_of(snapshot: Snapshot, before: Snapshot | None) -> Snapshot:
    """With the rounds that ended as soon as they went on: the row that says so may be lost."""
    playing = {one.rules.name for one in snapshot.evals.rounds}
    ended = () if before is None else tuple(one for one in before.evals.rounds if one.rules.name not in playing)
    return msgspec.structs.replace(
        snapshot, evals=msgspec.structs.replace(snapshot.evals, rounds=(*ended, *snapshot.evals.rounds))
    )


def _make_progress(one: SavedRound, scored: Mapping[int, Mapping[str, Any]]) -> EvalProgress:
    scores = {
        number: SampleScore(
            row["reward"],
            row.get("metrics") or {},
            row["completion_tokens"],
            row["finish_reason"] == "length",
            row.get("version_first", -1),
            row.get("version_last", -1),
        )
        for number, row in scored.items()
    }
    return EvalProgress(one.rules.name, one.step, one.prompts, one.rules.num_samples, one.first_id, scores)
