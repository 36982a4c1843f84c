"""The tokens that a run keeps are those it trained, and the audit prints them as they are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from telescope.algorithms.rloo import RLOO
from telescope.compose.load import load_points, places_for
from telescope.config.run import dump_run
from telescope.env.__main__ import main
from telescope.env.audit import NothingToShow, choose
from telescope.flow.commands import Train
from telescope.orchestrator import kept_tokens
from telescope.orchestrator.batch import Batch, Recipe, cut
from telescope.orchestrator.record import Recorder
from telescope.orchestrator.shelf import Shelf
from telescope.runlog.layout import RunDirectory
from telescope.runlog.reader import rows
from telescope.runlog.writer import RunLog
from tests.orchestrator.test_batch import recorded
from tests.orchestrator.test_shelf import make


@pytest.fixture
async def batch() -> Batch:
    """Step 60: group 2 of rollouts 20 (two branches) and 21 (one), then group 5 of rollouts 50 and 51."""
    shelf = Shelf()
    for rollout_id, reward, answers in ((20, 1.0, 2), (21, 0.0, 1)):
        shelf.put(await recorded(rollout_id, reward, answers))
    for rollout_id, reward in ((50, 1.0), (51, 0.0)):
        shelf.put(make(rollout_id, 5, reward))
    command = Train(60, (2, 5), ((20, 21), (50, 51)), baseline_group_ids=(), baseline_rollout_ids=())
    return cut(command, shelf, Recipe(RLOO(), group_size=2, max_tokens=10), ranks=1)


@pytest.fixture
def run(tmp_path: Path, batch: Batch) -> Iterator[RunDirectory]:
    run = RunDirectory.create(tmp_path / "run")
    (point,) = load_points(["experiment=fake"], places_for(None), {})
    assert point.config is not None
    run.config_json.write_text(dump_run(point.config))
    log = RunLog(run, "orchestrator")
    Recorder(run, log, None, number_of_steps=60, token_groups=1).batch(batch)
    log.close()
    return run


def test_a_step_keeps_the_tokens_of_its_first_groups(run: RunDirectory) -> None:
    kept = rows(run, "tokens")
    assert [(row["step"], row["rollout_id"], row["branch"], row["advantage"]) for row in kept] == [
        (60, 20, 0, 1.0),
        (60, 20, 1, 1.0),
        (60, 21, 0, -1.0),
    ]
    assert kept[1]["ids"] == [4, 71, 72, 5, 72, 1]
    assert kept[1]["mask"] == [0, 0, 0, 0, 1, 1]
    assert (kept[1]["versions"], kept[1]["logprobs"]) == ([10, 11], [-2.0, -2.01])


def test_none_are_kept_where_none_are_wanted_and_never_more_than_a_step_may_keep(
    batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(kept_tokens.token_rows(batch, 0)) == []
    assert len(list(kept_tokens.token_rows(batch, 9))) == 5
    monkeypatch.setattr(kept_tokens, "MAX_TOKENS", 11)
    assert [row["rollout_id"] for row in kept_tokens.token_rows(batch, 9)] == [21, 50]


def test_the_audit_prints_every_token_of_every_branch(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(run.path), "--rollout", "20"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "step 60  group 2  rollout 20  branch 0: 6 tokens, 2 sampled, reward 1, advantage +1.0000"
    assert [line.split() for line in lines[1:8]] == [
        ["#", "id", "mask", "version", "log-prob", "advantage", "text"],
        ["0", "4", "0", "·", "·", "·", "'<|user|>'"],
        ["1", "71", "0", "·", "·", "·", "'a'"],
        ["2", "72", "0", "·", "·", "·", "'b'"],
        ["3", "5", "0", "·", "·", "·", "'<|assistant|>'"],
        ["4", "71", "1", "0", "-1.00000", "+1.0000", "'a'"],
        ["5", "1", "1", "1", "-1.01000", "+1.0000", "'<eos>'"],
    ]
    assert lines[9].startswith("step 60  group 2  rollout 20  branch 1: 6 tokens")
    assert lines[15].split() == ["4", "72", "1", "10", "-2.00000", "+1.0000", "'b'"]


def test_the_audit_shows_a_step_or_else_the_latest_and_may_leave_prompts_out(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", str(run.path), "--step", "60", "--sampled-only"]) == 0
    said = capsys.readouterr().out
    assert [line.split()[5] for line in said.splitlines() if line.startswith("step")] == ["20", "20", "21"]
    assert "<|user|>" not in said
    assert main(["audit", str(run.path)]) == 0
    assert "rollout 21" not in capsys.readouterr().out


def test_what_was_not_kept_is_said_with_what_was(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(run.path), "--rollout", "50"]) == 1
    assert capsys.readouterr().err == "the tokens of rollout 50 were not kept; there are those of 20, 21\n"
    assert main(["audit", str(run.path / "logs")]) == 1
    assert "keeps no tokens: it is no run directory" in capsys.readouterr().err
    many = [{"step": step, "rollout_id": step} for step in range(1, 41)]
    with pytest.raises(NothingToShow, match=r"1, 2, 3, 4, 5, 6, …, 38, 39, 40 \(40 in all\)"):
        choose(many, step=99, rollout=None, folder="run")


def test_a_model_that_is_not_here_leaves_the_texts_out(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    (point,) = load_points(["experiment=fake", "model.name=/nowhere"], places_for(None), {})
    config = point.config
    if config is None:  # the check refuses the name: write the file as a run would have it
        (whole,) = load_points(["experiment=fake"], places_for(None), {})
        assert whole.config is not None
        config = whole.config.model_copy(update={"model": whole.config.model.model_copy(update={"name": "/nowhere"})})
    run.config_json.write_text(dump_run(config))
    assert main(["audit", str(run.path)]) == 0
    out, err = capsys.readouterr()
    assert err.startswith("texts are left out: model.name='/nowhere'")
    assert " 71    1" in out
