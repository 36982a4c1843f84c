"""What is written down of evals: the latest score is that of the latest step, whichever eval has ended last."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from telescope.config.eval_measure import EvalMeasure
from telescope.flow.commands import BeginEval, EndEval
from telescope.orchestrator.best_checkpoint import BestCheckpoint
from telescope.orchestrator.eval_recorder import EvalRecorder
from telescope.orchestrator.eval_scores import EvalProgress, EvalScoring, SampleScore
from telescope.orchestrator.main import _make_best_checkpoint
from telescope.runlog import checkpoints
from telescope.runlog.layout import RunDirectory
from telescope.runlog.writer import RunLog

SCORING = EvalScoring((1,), 0.5, 0.0)


def score(reward: float, version: int) -> SampleScore:
    return SampleScore(reward, {}, 5, truncated=False, version_first=version, version_last=version)


def play(recorder: EvalRecorder, step: int, *rewards: float, version: int | None = None) -> None:
    """Begin and end the eval of `step`; by default by the weights of its step."""
    ids = range(step * 100, step * 100 + len(rewards))
    version = step if version is None else version
    scores = {number: score(reward, version) for number, reward in zip(ids, rewards, strict=True)}
    recorder._tally.begin(EvalProgress("own", step, len(rewards), 1, ids[0], scores))
    recorder.end(EndEval("own", step, "complete", 0, 0), step)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run")


def test_an_eval_of_an_earlier_step_that_ends_last_is_not_the_latest(run: RunDirectory):
    log = RunLog(run, "orchestrator")
    recorder = EvalRecorder(log, None, {"own": SCORING})
    recorder.begin(BeginEval("own", 6, 1, 1, 600))
    for step, reward in ((7, 0.9), (6, 0.1), (4, 0.3)):
        play(recorder, step, reward)
    log.close()
    assert recorder.status["eval_rewards"] == {"own": {"step": 7, "reward": 0.9}}
    summary = recorder.summary["own"]
    assert (summary["step"], summary["reward"], summary["first"]) == (7, 0.9, {"step": 4, "reward": 0.3})
    play_again = EvalRecorder(log, None, {"own": SCORING})
    play_again.restore(recorder.save())
    assert play_again.summary == recorder.summary


def test_a_score_that_does_not_count_for_its_checkpoint_is_told(run: RunDirectory):
    told: list[str] = []
    log = RunLog(run, "orchestrator")
    best = BestCheckpoint(EvalMeasure("own"), exact=True)
    recorder = EvalRecorder(log, None, {"own": SCORING}, best, told.append)
    for step in (2, 4):
        recorder.note_checkpoint(step)
    play(recorder, 2, 0.1)
    play(recorder, 4, 0.9, version=5)
    log.close()
    assert recorder.status["best_checkpoint"]["step"] == 2
    assert [sentence.partition(":")[0] for sentence in told] == ["the eval own of step 4 was played by versions 5 to 5"]


@pytest.mark.parametrize(("measure", "step"), [("own:max", 4), ("own:min", 2)])
def test_a_best_checkpoint_asked_for_at_a_resume_knows_the_scores_and_the_checkpoints_before(
    run: RunDirectory, measure: str, step: int
):
    log = RunLog(run, "orchestrator")
    recorder = EvalRecorder(log, None, {"own": SCORING})
    for played, reward in ((1, 0.0), (2, 0.1), (3, 1.0), (4, 0.9), (6, 0.95)):  # of 1 and 3 there is none any more
        play(recorder, played, reward)
    log.close()
    for made in (2, 4, 6):
        folder = checkpoints.begin(run.checkpoints, made, "a")
        checkpoints.finish(folder, checkpoints.Complete(1, made, made, "run", "a", "hash", 1, True, 0, 0.0, checkpoints.now()))
    config: Any = SimpleNamespace(
        checkpoint=SimpleNamespace(best=EvalMeasure.parse(measure), dir=None), eval_servers=0, number_of_steps=9
    )
    core: Any = SimpleNamespace(saved=object(), version=4)
    best = _make_best_checkpoint(config, run, core)
    assert best is not None
    assert best.described is not None
    assert best.described["step"] == step
    core.saved = None
    fresh = _make_best_checkpoint(config, run, core)
    assert fresh is not None
    assert fresh.described is None
    config.checkpoint.best = None
    assert _make_best_checkpoint(config, run, core) is None
