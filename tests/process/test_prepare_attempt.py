"""Another attempt in an old run directory: what it may change, where it begins, and which rows count afterwards."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from telescope._launch import prepare_attempt
from telescope._launch.hosts.node_identity import NodeIdentity
from telescope._launch.next_commands import find_way_on
from telescope._launch.process_plan import Host, make_plan
from telescope._launch.slurm import batch_job
from telescope.cli import start
from telescope.cli.resume import go_on as go_on_with_settings_of
from telescope.config.resume import find_obstacles_to_resume, remark_on_resume
from telescope.config.run import RunConfig, _hash_of, dump_run
from telescope.config.sections import TrainerSettings
from telescope.flow.early_stop import SavedEarlyStop
from telescope.flow.evals import SavedEvals, SavedRound
from telescope.flow.settings import EvalRules
from telescope.orchestrator.saved_state import FORMAT
from telescope.runlog import attempts, checkpoints, http_key
from telescope.runlog.attempts import CountedRows, Lineage, read_lineage, write_rows
from telescope.runlog.holder import hold
from telescope.runlog.identity import new_identity, read_identity, write_identity
from telescope.runlog.layout import RunDirectory
from telescope.runlog.reader import rows
from telescope.runlog.writer import RunLog

SETTINGS = {
    "environments": {"countdown": {"name": "countdown"}},
    "algorithm": {"name": "grpo"},
    "backend": {"name": "fake"},
    "checkpoint": {"every": 2},
    "number_of_steps": 9,
}


def config(**changes: Any) -> RunConfig:
    return RunConfig.model_validate_json(json.dumps(SETTINGS | changes), strict=True)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory.create(tmp_path / "run")
    write_identity(directory, new_identity("x", datetime.now(UTC), "0" * 16))
    return directory


def checkpoint(run: RunDirectory, step: int, before: tuple[CountedRows, ...] = (), **changes: Any) -> Path:
    partial = checkpoints.begin(run.checkpoints, step, read_identity(run).attempt)
    write_rows(checkpoints.orchestrator_part(partial) / prepare_attempt.ROWS, before)
    facts = {
        "format": 1, "step": step, "version": step, "run_id": read_identity(run).run_id, "attempt": "a", "config_hash": "",
        "world_size": 1, "training_state": True, "nbytes": 0, "seconds": 0.0, "written": checkpoints.now(), **changes,
    }  # fmt: skip
    return checkpoints.finish(partial, checkpoints.Complete(**facts))


def log_steps(run: RunDirectory, *steps: int) -> int:
    """The number of the last row."""
    log = RunLog(run, "orchestrator")
    for step in steps:
        log.append("step_metrics", {"step": step, "metrics": {"loss": float(step)}})
    last = log.last_row
    log.close()
    return last


def log_spans(run: RunDirectory, *steps: int) -> None:
    log = RunLog(run, "trainer-0", seals_at_end=False)
    for step in steps:
        log.append("spans", {"step": step, "process": "trainer-0", "name": "clip", "started_ns": 1, "seconds": 0.5})
    log.close()


def write_settings(path: Path, settings: dict[str, Any]) -> None:
    """As whoever began the run would have, with a hash that fits."""
    kept = {name: value for name, value in settings.items() if name not in ("format", "config_hash")}
    path.write_text(json.dumps({"format": 1, "config_hash": _hash_of(kept), **kept}))


def go_on(run: RunDirectory, step: int | None = None) -> prepare_attempt.ResumePoint:
    source = prepare_attempt.find_resume_point(run, config(), step)
    number = prepare_attempt.begin_attempt(run, "f" * 16, "second")
    prepare_attempt.begin_at(run, config(), source, number)
    return source


def test_an_attempt_begins_at_the_latest_checkpoint_and_finds_an_empty_house(run: RunDirectory):
    run.config_json.write_text("old settings")
    first, run_id = read_identity(run).attempt, read_identity(run).run_id
    for step in (2, 4):
        checkpoint(run, step)
    source = go_on(run)
    assert (source.step, source.folder.name) == (4, "step_00000004")
    assert checkpoints.read_resume(run) == checkpoints.Resume(1, 4, str(source.folder))
    assert [(one.number, one.attempt) for one in attempts.read_attempts(run)] == [(1, first), (2, "second")]
    assert (read_identity(run).run_id, read_identity(run).config_hash) == (run_id, "f" * 16)
    assert (run.earlier_attempt(1) / "config.json").read_text() == "old settings"
    assert list(run.journal.parent.iterdir()) == []
    attempts.note_end(run, 75)
    assert attempts.read_attempts(run)[-1].why == "stopped"


def test_a_run_whose_directory_is_gone_does_not_go_on_though_its_checkpoints_lie_elsewhere(run: RunDirectory, tmp_path: Path):
    place = {"every": 2, "dir": str(tmp_path / "checkpoints"), "max_restarts": 1}
    ours = config(run_dir=str(run.path), checkpoint=place)
    order = start.RunOrder(ours, make_plan(ours, (Host("a", cpus=4),)), NodeIdentity(1, 0), (), (), datetime.now(UTC))
    run.config_json.write_text("{}")
    checkpoint(run, 2)
    run.checkpoints.rename(tmp_path / "checkpoints")
    again = start._after_failure(order, 70)
    assert again is not None
    assert again.by_itself
    assert find_way_on(order.config) == 2
    run.path.rename(tmp_path / "elsewhere")
    run.path.mkdir()  # by the last words of the supervisor
    assert start._after_failure(order, 70) is None
    assert find_way_on(order.config) == 0


@pytest.mark.parametrize(("code", "why"), [(0, "done"), (75, "stopped"), (143, "stopped"), (70, "failed"), (None, "")])
def test_the_first_attempts_end_is_written_down_when_the_second_begins(run: RunDirectory, code: int | None, why: str):
    """Nobody wrote lines for it while it was the only one; what was killed has no end."""
    if code is not None:
        run.exit_json.write_text(json.dumps({"exit_code": code}))
        os.utime(run.exit_json, (1_000_000_000, 1_000_000_000))
    checkpoint(run, 2)
    go_on(run)
    first, second = attempts.read_attempts(run)
    ended = "2001-09-09T01:46:40+00:00" if code is not None else ""
    assert (first.number, first.why, first.exit_code, first.ended) == (1, why, code, ended)
    assert (second.number, second.why) == (2, "")


def test_an_earlier_step_sets_the_later_ones_aside(run: RunDirectory):
    for step in (2, 4, 6):
        checkpoint(run, step)
    go_on(run, 2)
    assert checkpoints.steps(run.checkpoints) == [2]
    assert sorted(path.name for path in run.checkpoints.glob("*before*")) == [
        "step_00000004.before-second", "step_00000006.before-second",
    ]  # fmt: skip


def test_rows_of_steps_that_are_trained_anew_count_once_and_the_last_attempt_wins(run: RunDirectory):
    last = log_steps(run, 1, 2)
    checkpoint(run, 2, read_lineage(run).up_to(last, 2))
    go_on(run)
    assert read_lineage(run) == Lineage(2, 2, (CountedRows(1, last, 2),))
    log_steps(run, 3, 4)
    assert [row["step"] for row in rows(run, "step_metrics")] == [1, 2, 3, 4]


def test_a_dead_attempts_future_is_left_out(run: RunDirectory):
    log_steps(run, 1, 2, 3)
    checkpoint(run, 2, (CountedRows(1, 2),))  # the third row came after the checkpoint
    go_on(run)
    log_steps(run, 3)
    found = rows(run, "step_metrics")
    assert [row["step"] for row in found] == [1, 2, 3]
    assert found[-1]["seq"] == 1


def test_rows_that_trainer_ranks_write_themselves_count_by_their_step(run: RunDirectory):
    """They have numbers of their own, many more than the orchestrator's."""
    last = log_steps(run, 1, 2)
    log_spans(run, 1, 1, 1, 2, 3)
    checkpoint(run, 2, read_lineage(run).up_to(last, 2))
    log_steps(run, 3)
    go_on(run)
    log_spans(run, 3, 4)
    assert [row["step"] for row in rows(run, "spans")] == [1, 1, 1, 2, 3, 4]


def test_an_attempt_that_begins_at_step_1_again_counts_alone(run: RunDirectory):
    log_steps(run, 1, 2)
    attempts.note_first(run)
    attempts.begin(run, "12", "12.1", ())
    log_steps(run, 1)
    assert [row["step"] for row in rows(run, "step_metrics")] == [1]
    assert read_lineage(run) == Lineage(2)


@pytest.mark.parametrize(
    ("changes", "step", "sentence"),
    [
        ({"run_id": "another"}, None, "is of another run"),
        ({"training_state": False}, None, "holds weights alone"),
        ({"training_state": False}, 2, "holds weights alone"),
        ({}, 7, "no complete checkpoint of step 7; there are those of the steps 2"),
    ],
)
def test_a_checkpoint_that_cannot_be_gone_on_from_is_refused(
    run: RunDirectory, changes: dict[str, Any], step: int | None, sentence: str
):
    checkpoint(run, 2, **changes)
    with pytest.raises(prepare_attempt.CannotResume, match=sentence):
        prepare_attempt.find_resume_point(run, config(), step)


def test_weights_alone_are_passed_over_for_an_earlier_checkpoint_that_has_the_state(
    run: RunDirectory, caplog: pytest.LogCaptureFixture
):
    """As a run leaves them that was stopped after step 2, went on and ended."""
    checkpoint(run, 2)
    checkpoint(run, 6, training_state=False)
    assert prepare_attempt.find_resume_point(run, config()).step == 2
    assert "the checkpoint of step 6 holds weights alone, and the run goes on from that of step 2" in caplog.text
    with pytest.raises(
        prepare_attempt.CannotResume, match=r"begin a new run with the exported model; resume from another step \(2\)"
    ):
        prepare_attempt.find_resume_point(run, config(), 6)
    with pytest.raises(prepare_attempt.CannotResume, match=r"resume from another step \(2\)"):  # else it would train again
        prepare_attempt.find_resume_point(run, config(number_of_steps=6))


@pytest.mark.parametrize("step", [None, 2])
def test_a_checkpoint_of_an_older_telescope_is_refused_before_the_directory_changes(run: RunDirectory, step: int | None):
    """Else the older one, which is the remedy, would find settings there that it does not know."""
    partial = checkpoints.orchestrator_part(checkpoint(run, 2))
    (partial / "state.msgpack").write_bytes(msgspec.msgpack.encode({"format": 1, "rollouts": []}))
    with pytest.raises(prepare_attempt.CannotResume, match="has format 1, and this Telescope reads 5: resume with the"):
        prepare_attempt.find_resume_point(run, config(), step)
    with pytest.raises(prepare_attempt.CannotResume, match="has format 1"):
        prepare_attempt.find_latest(run, config())


def test_a_run_that_is_done_needs_more_steps(run: RunDirectory):
    checkpoint(run, 9)
    with pytest.raises(prepare_attempt.CannotResume, match="has trained its number_of_steps=9: give a larger"):
        prepare_attempt.find_resume_point(run, config())
    assert prepare_attempt.find_resume_point(run, config(number_of_steps=10)).step == 9


def hold_evals(folder: Path, *names: str) -> None:
    """As a checkpoint of step 9 does in whose time these were under way."""
    rounds = tuple(
        SavedRound(
            rules=EvalRules(name=name, environment="countdown"), step=9, first_id=0, prompts=1, digest="d", scored=(), failed=()
        )
        for name in names
    )
    state = {"format": FORMAT, "core": {"step": 9, "evals": SavedEvals(rounds=rounds)}, "rollouts": []}
    (checkpoints.orchestrator_part(folder) / "state.msgpack").write_bytes(msgspec.msgpack.encode(state))


def end_eval(run: RunDirectory, writer: str, state: str) -> None:
    log = RunLog(run, writer)
    log.append("evals", {"eval": "countdown", "step": 9, "state": state})
    log.close()


def test_an_eval_that_a_finished_run_has_gained_does_not_begin_it_again(run: RunDirectory):
    hold_evals(checkpoint(run, 9))
    for gained in ({"eval": {"every": 3}}, {"evals": {"countdown": {}}}):
        with pytest.raises(prepare_attempt.CannotResume, match="has trained its number_of_steps=9"):
            prepare_attempt.find_resume_point(run, config(**gained))


@pytest.mark.parametrize(("state", "goes_on"), [("", True), ("cut off", True), ("changed", False), ("complete", False)])
def test_a_run_that_was_ended_in_its_last_eval_goes_on_with_it_once(run: RunDirectory, state: str, goes_on: bool):
    """What a checkpoint holds counts: one that an earlier resume has cut off is owed by nobody."""
    ours = config(eval={"every": 3})
    hold_evals(checkpoint(run, 9), "countdown")
    if state:
        end_eval(run, "orchestrator", state)
    assert prepare_attempt.has_played_all(run, ours, 9) is not goes_on
    if goes_on:
        assert prepare_attempt.find_resume_point(run, ours).step == 9
    assert prepare_attempt.has_played_all(run, config(), 9), "no eval is left to play it"


def test_an_eval_that_was_cut_off_at_an_earlier_step_is_owed_by_nobody(run: RunDirectory):
    log = RunLog(run, "orchestrator")
    log.append("evals", {"eval": "countdown", "step": 6, "state": "cut off"})
    log.close()
    hold_evals(checkpoint(run, 9))
    assert prepare_attempt.has_played_all(run, config(eval={"every": 3}), 9)


@pytest.mark.parametrize(("limit", "last", "ended"), [(2, 5, True), (3, 5, False), (None, 5, False), (2, 6, False)])
@pytest.mark.parametrize("measure", ["the reward of countdown", "pass@4 of countdown"])
def test_a_run_that_ended_early_has_played_all_unless_its_limit_is_raised_or_it_goes_by_another_measure(
    run: RunDirectory, limit: int | None, last: int, ended: bool, measure: str
):
    ended = ended and measure == "the reward of countdown"
    early = SavedEarlyStop(measure=measure, best=0.5, best_step=3, without_gain=2, last_step=last)
    state = {"format": FORMAT, "core": {"step": 5, "early_stop": early}, "rollouts": []}
    folder = checkpoint(run, 5)
    (checkpoints.orchestrator_part(folder) / "state.msgpack").write_bytes(msgspec.msgpack.encode(state))
    ours = config(eval={"every": 1, "stop_after": limit})
    assert prepare_attempt.has_played_all(run, ours, 5) is ended
    if ended:
        with pytest.raises(prepare_attempt.CannotResume, match=r"has ended with step 5 by eval\.stop_after=2: set it to null"):
            prepare_attempt.find_resume_point(run, ours)


def test_a_run_that_is_watched_is_left_alone(run: RunDirectory):
    hold(run)
    with pytest.raises(prepare_attempt.CannotResume, match="is still watched by process"):
        prepare_attempt.refuse_alive(run)
    run.exit_json.write_text("{}")
    with pytest.raises(prepare_attempt.CannotResume, match="is still watched by process"):
        prepare_attempt.refuse_alive(run)
    run.exit_json.write_text('{"exit_code": 0}')
    prepare_attempt.refuse_alive(run)


def test_two_who_resume_at_once_are_one(run: RunDirectory):
    with prepare_attempt.lock_attempts(run):
        with (
            pytest.raises(prepare_attempt.CannotResume, match="is being resumed by another process"),
            prepare_attempt.lock_attempts(run),
        ):
            pass
        hold(run)
    with prepare_attempt.lock_attempts(run), pytest.raises(prepare_attempt.CannotResume, match="is still watched by process"):
        prepare_attempt.refuse_alive(run)


def test_rows_that_are_damaged_are_refused_before_anything_is_touched(run: RunDirectory):
    folder = checkpoint(run, 2)
    rows_file = checkpoints.orchestrator_part(folder) / prepare_attempt.ROWS
    rows_file.write_bytes(b"\xff" * rows_file.stat().st_size)
    with pytest.raises(prepare_attempt.CannotResume, match=r"rows\.json is damaged"):
        prepare_attempt.find_resume_point(run, config(checkpoint={"verify": False}))


def test_an_attempt_that_begins_by_itself_passes_over_what_is_damaged_and_keeps_it(run: RunDirectory):
    for step in (2, 4, 6):
        checkpoint(run, step)
    (checkpoints.orchestrator_part(run.checkpoints / "step_00000006") / prepare_attempt.ROWS).unlink()
    (run.checkpoints / "step_00000004" / "complete.json").write_text("{")
    source = prepare_attempt.find_latest(run, config())
    assert source is not None
    assert source.step == 2
    prepare_attempt.begin_at(run, config(), source, prepare_attempt.begin_attempt(run, "f" * 16, "second"))
    assert checkpoints.steps(run.checkpoints) == [2]
    assert len(list(run.checkpoints.glob("*.before-second"))) == 2


def test_a_checkpoint_with_a_flipped_bit_is_passed_over_for_the_one_before_it_unless_nobody_looks(run: RunDirectory, caplog):
    for step in (2, 4):
        checkpoint(run, step)
    file = checkpoints.orchestrator_part(run.checkpoints / "step_00000004") / prepare_attempt.ROWS
    damaged = bytearray(file.read_bytes())
    damaged[0] ^= 1 << 5
    file.write_bytes(damaged)
    source = prepare_attempt.find_latest(run, config())
    assert source is not None
    assert source.step == 2
    assert (
        f"The checkpoint of step 4 is passed over: {file} is damaged: its bytes are not those that were written" in caplog.text
    )
    with pytest.raises(prepare_attempt.CannotResume, match=r"rows\.json is damaged: .* take an earlier step"):
        prepare_attempt.find_resume_point(run, config())
    with pytest.raises(prepare_attempt.CannotResume, match=r"rows\.json is damaged"):
        prepare_attempt.find_resume_point(run, config(checkpoint={"verify": False}))


def test_an_attempt_that_begins_at_step_1_again_leaves_no_checkpoint_that_looks_later(run: RunDirectory):
    (checkpoint(run, 40) / "complete.json").write_text("{")
    with pytest.raises(prepare_attempt.CannotResume, match=r"complete\.json is damaged"):
        prepare_attempt.find_latest(run, config())
    prepare_attempt.begin_anew(run, config())
    assert checkpoints.steps(run.checkpoints) == []
    checkpoint(run, 2)
    assert checkpoints.retain(run.checkpoints, keep_last=1, keep_every=None) == []


def test_settings_that_change_neither_model_nor_data_may_change():
    old = config().model_dump(mode="json")
    new = config(
        number_of_steps=20, cluster={"inference_num_workers": 2}, logging={"wandb_project": "other"}, trainer={"seq_len": 8192}
    )
    assert find_obstacles_to_resume(old, new.model_dump(mode="json")) == []


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model": {"name": "other"}}, "model.name=other was tiny when the run began: the weights are this model's"),
        ({"model": {"lora": {"rank": 8}}}, "model.lora="),
        ({"algorithm": {"name": "rloo"}}, "algorithm.name=rloo was grpo"),
        ({"seed": 3}, "seed=3 was 0"),
        ({"rollout": {"group_size": 4}}, "rollout.group_size=4 was 8"),
        ({"orchestrator": {"max_async_rollout": 0}}, "orchestrator.max_async_rollout=0 was 2"),
        ({"environments": {"a": {"name": "countdown"}}}, "environments are a and were countdown"),
        ({"environments": {"countdown": {"name": "wordle"}}}, "environments.countdown.name=wordle was countdown"),
        ({"environments": {"countdown": {"name": "countdown", "curriculum": {}}}}, "environments.countdown.curriculum="),
    ],
)
def test_settings_that_would_make_another_run_are_refused_with_the_setting(changes: dict[str, Any], sentence: str):
    (said,) = find_obstacles_to_resume(config().model_dump(mode="json"), config(**changes).model_dump(mode="json"))
    assert said.startswith(sentence)


def test_moments_that_go_on_with_fewer_bits_are_told_of():
    def moments(dtype: str) -> dict[str, Any]:
        return {"backend": {"name": "megatron", "exp_avg_dtype": dtype, "exp_avg_sq_dtype": "float32"}}

    said = "backend.exp_avg_dtype=bfloat16 was float32 when the run began: the checkpoint's moments are rounded to it"
    assert remark_on_resume(moments("float32"), moments("bfloat16"), 4) == [said]
    assert remark_on_resume({"backend": {"name": "fsdp"}}, moments("bfloat16"), 4) == [said]
    assert remark_on_resume(moments("bfloat16"), moments("float32"), 4) == []


def test_a_schedule_that_is_spread_over_other_steps_is_told_with_both_rates():
    """Linear from 1 at step 1: to 0 at step 9, or at step 17."""
    trainer = {"lr_scheduler": "linear", "learning_rate": 1.0}
    old = config(trainer=trainer).model_dump(mode="json")
    longer = config(trainer=trainer, number_of_steps=17).model_dump(mode="json")
    assert remark_on_resume(old, longer, 4) == [
        "number_of_steps=17 was 9, and trainer.lr_scheduler=linear is spread over all of them: step 5 runs at a rate of 0.75, "
        "and would have had 0.5"
    ]
    assert "step 10 runs at a rate of 0.438, and would have had 0" in remark_on_resume(old, longer, 9)[0]
    assert remark_on_resume(old, old, 4) == []
    flat, longer = (config(number_of_steps=steps).model_dump(mode="json") for steps in (9, 17))
    assert remark_on_resume(flat, longer, 4) == []
    other_rate = config(trainer={**trainer, "learning_rate": 0.5}, number_of_steps=17)
    assert remark_on_resume(old, other_rate.model_dump(mode="json"), 4) == []
    assert remark_on_resume({}, old, 4) == []


def test_who_goes_on_is_told_of_a_schedule_that_is_spread_anew(run: RunDirectory, caplog):
    run.config_json.write_text(dump_run(config(trainer={"lr_scheduler": "linear"})))
    checkpoint(run, 2)
    order = order_for(run, trainer={"lr_scheduler": "linear"}, number_of_steps=20)
    with ExitStack() as until_held, caplog.at_level("WARNING"):
        start._resume_directory(run.path, order, until_held)
    assert "Warning: number_of_steps=20 was 9" in caplog.text


def queued_again(run: RunDirectory, **changes: Any) -> attempts.Attempt:
    """The job of a run is started once more by Slurm, and its attempt made ready."""
    attempts.note_first(run)
    attempt = attempts.begin(run, "12", "12.1", ("n1",))
    batch_job.go_on(run, config(**changes), attempt)
    return attempt


def test_a_job_that_is_queued_again_goes_on_from_its_latest_checkpoint(run: RunDirectory):
    for step in (2, 4):
        checkpoint(run, step)
    attempt = queued_again(run)
    assert read_lineage(run) == Lineage(attempt.number, 4)
    found = checkpoints.read_resume(run)
    assert found is not None
    assert found.step == 4


def test_a_job_that_begins_at_step_1_again_leaves_no_checkpoint_that_would_be_its_latest(run: RunDirectory):
    """With checkpoint.keep_last=1 the save of step 2 would be deleted at once, for that of step 4 is newer."""
    for step in (2, 4):
        checkpoint(run, step, training_state=False)
    queued_again(run)
    assert checkpoints.read_resume(run) is None
    assert checkpoints.steps(run.checkpoints) == []
    assert sorted(path.name for path in run.checkpoints.iterdir()) == [
        "step_00000002.before-12.1", "step_00000004.before-12.1",
    ]  # fmt: skip


def test_a_job_whose_latest_checkpoint_cannot_be_read_does_not_begin_at_step_1(run: RunDirectory):
    (checkpoint(run, 4) / checkpoints.COMPLETE).write_text("{")
    with pytest.raises(prepare_attempt.CannotResume, match=r"complete\.json is damaged"):
        queued_again(run)
    assert checkpoints.steps(run.checkpoints) == [4]


def test_a_run_that_was_lost_after_its_last_checkpoint_is_done(run: RunDirectory):
    """The node died between that and the end of the processes: to train all again would be a waste, and another model."""
    lost = attempts.begin(run, "12", "12.0", ("n1",))
    checkpoint(run, 4)
    assert batch_job.has_trained_all(run, config()) is None
    checkpoint(run, 9)
    assert batch_job.has_trained_all(run, config()) == lost
    assert batch_job.has_trained_all(run, config(number_of_steps=10)) is None


def test_a_run_that_was_lost_after_its_last_save_of_weights_is_done_too(run: RunDirectory):
    lost = attempts.begin(run, "12", "12.0", ("n1",))
    partial = checkpoints.begin(run.checkpoints, 9, "a")  # without rows and state, as weights alone are
    run_id = read_identity(run).run_id
    checkpoints.finish(partial, checkpoints.Complete(1, 9, 9, run_id, "a", "", 1, False, 0, 0.0, checkpoints.now()))
    assert batch_job.has_trained_all(run, config()) == lost
    assert batch_job.has_trained_all(run, config(number_of_steps=10)) is None


def test_a_job_that_was_submitted_to_go_on_after_the_last_step_is_not_taken_for_done(run: RunDirectory):
    done = attempts.begin(run, "12", "12.0", ("n1",))
    attempts.end(run, done, "done", 0, requeued=False)
    assert batch_job.is_done(run, "12")
    assert not batch_job.is_done(run, "13")


def submitted(run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    """As job 12, of which squeue says `answer`."""
    attempts.write_submission(run, "12", tmp_path / "script.sh")
    squeue = tmp_path / "bin" / "squeue"
    squeue.parent.mkdir()
    squeue.write_text(f"#!/bin/sh\n{answer}\n")
    squeue.chmod(0o700)
    monkeypatch.setenv("PATH", f"{squeue.parent}:/usr/bin:/bin")


@pytest.mark.parametrize("state", ["PENDING", "RUNNING"])
def test_a_run_whose_job_is_queued_is_not_submitted_once_more(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str
):
    """Between two attempts no process watches it, and exit.json is there."""
    submitted(run, tmp_path, monkeypatch, f"echo '12|{state}'")
    attempts.end(run, attempts.begin(run, "12", "12.0", ("n1",)), "preempted", 70, requeued=True)
    run.exit_json.write_text('{"exit_code": 0}')
    prepare_attempt.refuse_alive(run)
    with pytest.raises(prepare_attempt.CannotResume, match=f"has job 12 in Slurm, which is {state}"):
        prepare_attempt.refuse_queued(run)


def test_a_run_whose_job_nobody_knows_of_is_gone_on_with_once_slurm_says_so(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    submitted(run, tmp_path, monkeypatch, "exit 1")
    attempt = attempts.begin(run, "12", "12.0", ("n1",))
    with pytest.raises(prepare_attempt.CannotResume, match="of which Slurm says nothing"):
        prepare_attempt.refuse_queued(run)
    (tmp_path / "bin" / "squeue").write_text("#!/bin/sh\n")
    prepare_attempt.refuse_queued(run)
    attempts.end(run, attempt, "walltime", 75, requeued=False)
    (tmp_path / "bin" / "squeue").write_text("#!/bin/sh\nexit 1\n")
    prepare_attempt.refuse_queued(run)


def order_for(run: RunDirectory, **changes: Any) -> start.RunOrder:
    resumed = config(run_dir=str(run.path), checkpoint={"every": 2, "resume": True}, **changes)
    return start.RunOrder(resumed, None, NodeIdentity(1, 0), (), (), datetime.now(UTC))


def test_a_run_that_opens_its_http_when_it_is_resumed_has_a_key(run: RunDirectory):
    run.config_json.write_text(dump_run(config()))
    checkpoint(run, 2)
    with ExitStack() as until_held:
        assert start._resume_directory(run.path, order_for(run, inference={"host": "0.0.0.0"}), until_held) == run
    assert len(http_key.read(run)) == 43


def test_a_run_of_one_host_that_goes_on_in_slurm_has_that_attempt_put_aside(run: RunDirectory):
    run.config_json.write_text(dump_run(config()))
    run.summary_json.write_text("{}")
    checkpoint(run, 2)
    with ExitStack() as until_held:
        start._resume_directory(run.path, order_for(run, cluster={"slurm": {}}), until_held)
    attempt = attempts.begin(run, "12", "12.0", ("n1",))
    batch_job.go_on(run, config(checkpoint={"every": 0}), attempt)
    assert attempt.number == 2
    assert read_lineage(run) == Lineage(2, 2)
    assert (run.earlier_attempt(1) / "summary.json").exists()
    assert json.loads((run.earlier_attempt(1) / "config.json").read_text())["cluster"]["slurm"] is None


def test_a_host_that_is_not_the_head_makes_no_attempt_of_its_own(run: RunDirectory, capsys: pytest.CaptureFixture[str]):
    """torchrun gives the command on every host, and all of them see the run directory."""
    several = {"launcher": "bare_metal", "nodes": 2, "node_rank": 0, "placement_timeout_s": 1}
    run.config_json.write_text(dump_run(config(run_dir=str(run.path), cluster=several, inference={"engine": "fake"})))
    checkpoint(run, 2)
    assert go_on_with_settings_of(run.path, ["cluster.node_rank=1"]) == 1
    assert "node-1: no head within 1 s" in capsys.readouterr().err
    assert attempts.read_attempts(run) == []
    assert checkpoints.read_resume(run) is None


def test_a_setting_that_is_younger_than_the_run_can_be_set_when_it_goes_on(run: RunDirectory, monkeypatch):
    began = json.loads(dump_run(config(run_dir=str(run.path), inference={"engine": "fake"})))
    del began["trainer"]["max_broken_steps"]
    write_settings(run.config_json, began)
    checkpoint(run, 2)
    started: list[start.RunOrder] = []
    monkeypatch.setattr("telescope.cli.resume.run_one", lambda order: started.append(order) or 0)
    assert go_on_with_settings_of(run.path, ["trainer.max_broken_steps=5"]) == 0
    assert started[0].config.trainer.max_broken_steps == 5
    assert go_on_with_settings_of(run.path, []) == 0
    assert started[1].config.trainer.max_broken_steps == TrainerSettings().max_broken_steps


def test_another_optimiser_is_refused_also_where_it_would_begin_anew_without_a_sign():
    """A checkpoint of sgd has no moments that another optimiser could miss."""
    old, new = (config(backend={"name": "fsdp", "optimizer": kind}).model_dump(mode="json") for kind in ("sgd", "adamw"))
    assert find_obstacles_to_resume(old, new) == [
        "backend.optimizer=adamw was sgd when the run began: the checkpoint has its moments; set it back, or begin a new run"
    ]


def test_backends_whose_checkpoints_are_alike_read_each_others_where_adamw_wrote_them():
    fsdp, sgd, megatron = (
        config(backend=backend).model_dump(mode="json")
        for backend in ({"name": "fsdp"}, {"name": "fsdp", "optimizer": "sgd"}, {"name": "megatron"})
    )
    assert find_obstacles_to_resume(fsdp, megatron) == find_obstacles_to_resume(megatron, fsdp) == []
    assert find_obstacles_to_resume(sgd, megatron) == [
        "backend.optimizer=adamw was sgd when the run began: the checkpoint has its moments; set it back, or begin a new run"
    ]


def test_router_replay_is_not_switched_on_since_groups_that_wait_have_no_record():
    off, on = (
        config(trainer={"router_replay": replays}, inference={"engine": "vllm"}).model_dump(mode="json")
        for replays in (False, True)
    )
    assert find_obstacles_to_resume(off, on) == [
        "trainer.router_replay=true was false when the run began: of groups that wait no server recorded the experts; set it "
        "back, or begin a new run"
    ]
    assert find_obstacles_to_resume(on, off) == find_obstacles_to_resume(on, on) == []


@pytest.mark.parametrize(("was", "here"), [("float32", "bfloat16"), ("bfloat16", "float16"), ("float16", "bfloat16")])
def test_weights_that_would_be_rounded_to_another_precision_are_refused(was: str, here: str):
    old, new = (config(model={"dtype": dtype, "lora": {"rank": 8}}).model_dump(mode="json") for dtype in (was, here))
    assert find_obstacles_to_resume(old, new) == [
        f"model.dtype={here} was {was} when the run began: the checkpoint's weights and moments would be rounded to it; set it "
        "back, or begin a new run"
    ]


def test_a_precision_that_holds_all_that_was_saved_is_told_and_no_error():
    old, new = (config(model={"dtype": dtype}).model_dump(mode="json") for dtype in ("bfloat16", "float32"))
    assert find_obstacles_to_resume(old, new) == []
    assert [said.partition(":")[0] for said in remark_on_resume(old, new, 3)] == ["model.dtype=float32 was bfloat16"]
    assert find_obstacles_to_resume(new, new) == remark_on_resume(new, new, 3) == remark_on_resume({}, new, 3) == []
