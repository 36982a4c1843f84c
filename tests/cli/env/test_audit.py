"""The tokens that a run keeps are those it trained, and the audit prints them as they are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from telescope.algorithms.rloo import RLOO
from telescope.cli.env import main
from telescope.cli.env.audit import NothingToShow, Recomputer, choose, list_advantages
from telescope.cli.env.check_policies import load_model
from telescope.compose.load import load_points, places_for
from telescope.config.models import EMBEDDED
from telescope.config.run import dump_run, load_run
from telescope.flow.commands import TrainOnBatch
from telescope.maths.support import WHOLE, Support
from telescope.orchestrator import recorder
from telescope.orchestrator.batch import Recipe, TrainBatch, make_batch
from telescope.orchestrator.recorder import Recorder
from telescope.orchestrator.rollout_store import RolloutStore
from telescope.records import PromptRef, RolloutOrder, Sampling
from telescope.runlog.layout import RunDirectory
from telescope.runlog.reader import rows
from telescope.runlog.writer import RunLog
from tests.config.older import as_an_earlier_version_wrote
from tests.orchestrator.test_batch import recorded
from tests.orchestrator.test_rollout_store import make


@pytest.fixture
async def batch() -> TrainBatch:
    """Step 60: group 2 of rollouts 20 (two branches) and 21 (one), then group 5 of rollouts 50 and 51."""
    store = RolloutStore()
    for rollout_id, reward, answers in ((20, 1.0, 2), (21, 0.0, 1)):
        store.add(await recorded(rollout_id, reward, answers))
    for rollout_id, reward in ((50, 1.0), (51, 0.0)):
        store.add(make(rollout_id, 5, reward))
    command = TrainOnBatch(60, (2, 5), ((20, 21), (50, 51)), baseline_group_ids=(), baseline_rollout_ids=())
    return make_batch(command, store, Recipe(RLOO(), group_size=2, max_tokens=10), ranks=1)


@pytest.fixture
def run(tmp_path: Path, batch: TrainBatch) -> Iterator[RunDirectory]:
    run = RunDirectory.create(tmp_path / "run")
    (point,) = load_points(["experiment=fake"], places_for(None), {})
    assert point.config is not None
    run.config_json.write_text(dump_run(point.config))
    log = RunLog(run, "orchestrator")
    Recorder(run, log, None, number_of_steps=60, token_groups=1).record_batch(batch)
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
    batch: TrainBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(recorder.make_token_rows(batch, 0)) == []
    assert len(list(recorder.make_token_rows(batch, 9))) == 5
    monkeypatch.setattr(recorder, "MAX_TOKENS", 11)
    assert [row["rollout_id"] for row in recorder.make_token_rows(batch, 9)] == [21, 50]


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


def test_each_token_is_printed_with_the_advantage_of_its_turn() -> None:
    row = {"mask": [0, 1, 1, 0, 1], "advantage": 0.5, "turns": [[2, 1.0], [1, -0.5]], "filtered": []}
    assert list_advantages(row) == [1.0, 1.0, -0.5]
    assert list_advantages({**row, "turns": []}) == [0.5, 0.5, 0.5]
    assert list_advantages({key: value for key, value in row.items() if key != "turns"}) == [0.5, 0.5, 0.5]  # an older run
    assert list_advantages({**row, "filtered": ["overlong"]}) == [0.0, 0.0, 0.0]


def test_the_audit_shows_a_step_or_else_the_latest_and_may_leave_prompts_out(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", str(run.path), "--step", "60", "--sampled-only"]) == 0
    said = capsys.readouterr().out
    assert [line.split()[5] for line in said.splitlines() if line.startswith("step")] == ["20", "20", "21"]
    assert "<|user|>" not in said
    assert main(["audit", str(run.path)]) == 0
    assert "rollout 21" not in capsys.readouterr().out


def test_a_run_of_an_earlier_version_is_shown(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    run.config_json.write_text(as_an_earlier_version_wrote(load_run(run.config_json)))
    assert main(["audit", str(run.path)]) == 0
    assert "rollout 20" in capsys.readouterr().out


def test_what_was_not_kept_is_said_with_what_was(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(run.path), "--rollout", "50"]) == 1
    assert capsys.readouterr().err == "the tokens of rollout 50 were not kept; there are those of 20, 21\n"
    assert main(["audit", str(run.path / "logs")]) == 1
    assert "logs has no config.json: it is not a run directory" in capsys.readouterr().err
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


def test_recomputed_log_probs_stand_beside_those_of_their_version_alone(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of `ab` → `a<eos>` the first token is of version 0, the second of version 1. It was sampled at 0.7, which is not the
    run's temperature."""
    assert main(["audit", str(run.path), "--rollout", "20", "--recompute"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["#", "id", "mask", "version", "log-prob", "version", "0", "|diff|", "advantage", "text"]
    assert lines[2].split() == ["0", "4", "0", "·", "·", "·", "·", "·", "'<|user|>'"]
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED / "tiny", dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = float(model(torch.tensor([[4, 71, 72, 5]])).logits[0, -1].div(0.7).log_softmax(-1)[71])
    first = lines[6].split()
    assert (first[:5], first[7:]) == (["4", "71", "1", "0", "-1.00000"], ["+1.0000", "'a'"])
    assert float(first[5]) == pytest.approx(expected, abs=1e-5)
    assert float(first[6]) == pytest.approx(abs(expected + 1), rel=0.05)
    assert lines[7].split() == ["5", "1", "1", "1", "-1.01000", "·", "·", "+1.0000", "'<eos>'"]
    assert lines[8].startswith("1 of its 2 sampled tokens recomputed: |difference| ")
    assert lines[8].endswith(" at most")


def test_other_weights_are_compared_with_the_tokens_of_their_version(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(EMBEDDED / "tiny")
    assert main(["audit", str(run.path), "--rollout", "20", "--weights", folder, "--version", "10"]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if "of its 2" in line or "of that version" in line]
    assert said[0] == "none of its 2 sampled tokens is of that version"
    assert said[1].startswith("1 of its 2 sampled tokens recomputed")
    assert main(["audit", str(run.path), "--weights", str(run.path), "--version", "10"]) == 1
    assert str(run.path) in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["audit", str(run.path), "--weights", folder])
    assert ended.value.code == 2


async def test_what_transformers_sampled_is_recomputed_to_five_digits() -> None:
    policy = load_model(EMBEDDED / "tiny", [1])
    prompt = np.array([4, 71, 72, 73, 5], np.int32)
    drawn = await policy.answer(RolloutOrder(0, 0, 0, 0, PromptRef("task", "train", 0), 3), 0, prompt, Sampling(0.7, 12, 3))
    row = {"ids": [*prompt, *drawn.ids], "mask": [0] * 5 + [1] * len(drawn.ids), "versions": drawn.versions}
    again = Recomputer.load(EMBEDDED / "tiny", 0, 0.7, WHOLE)
    np.testing.assert_allclose(again.logprobs(row), drawn.logprobs, atol=1e-5)


def test_recomputed_log_probs_are_those_among_the_tokens_that_could_be_sampled() -> None:
    def each(support: Support) -> np.ndarray:
        again = Recomputer.load(EMBEDDED / "tiny", 0, 1.0, support)
        rows = ({"ids": [4, 71, 72, 5, token], "mask": [0, 0, 0, 0, 1], "versions": [0]} for token in range(128))
        return np.concatenate([again.logprobs(row) for row in rows])

    whole, cut = each(WHOLE), each(Support(top_k=5))
    likeliest = np.argsort(whole)[-5:]
    assert np.exp(whole).sum() == pytest.approx(1, abs=1e-5)
    assert np.exp(cut[likeliest]).sum() == pytest.approx(1, abs=1e-5)
