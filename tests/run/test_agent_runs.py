"""Whole runs with an agent program: real workers start it, and it is trained on the very tokens that it was answered with."""

from __future__ import annotations

import re

import pytest

from telescope.cli.env import main as audit
from tests.run.conftest import Start, WholeRun

QUIET = ("logging.use_wandb=false", "orchestrator.discard_group_zero_advantage=false", "logging.token_groups=100")
SMALL = ("orchestrator.prompts_batch_size_for_trainer=2", "rollout.group_size=2", "number_of_steps=2")


def trained_as_sampled(run: WholeRun) -> None:
    """Every rollout that was trained has all that its program was answered with, and it is trained once."""
    rollouts = {row["rollout_id"]: row for row in run.rows("rollouts") if row["status"] == "scored"}
    trained = run.rows("tokens")
    assert len(trained) == len({(row["rollout_id"], row["branch"]) for row in trained}) > 0
    for row in trained:
        rollout = rollouts[row["rollout_id"]]
        assert row["branch"] == 0, "a conversation that goes on is one branch"
        assert rollout["metrics"]["agent_requests"] == rollout["turns"] == rollout["metrics"]["guesses"]
        assert sum(row["mask"]) == rollout["completion_tokens"] == len(row["logprobs"]) == len(row["versions"])


def test_a_run_trains_an_agent_program_on_what_it_asked_for(start: Start):
    run = start("experiment=letter_agent", "inference=fake", "backend=fake", *QUIET, *SMALL)
    assert run.wait() == 0, run.said()
    assert run.summary()["steps"] == 2
    assert run.summary()["rollouts"]["failed"] == 0
    trained_as_sampled(run)
    assert run.left_after(60) == []


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(400)
def test_with_a_real_engine_its_tokens_have_the_log_probs_that_the_model_gives_them(
    start: Start, capsys: pytest.CaptureFixture[str]
):
    run = start("experiment=letter_agent", "inference.http=false", *QUIET, *SMALL, "environments.letter_agent.kwargs.sdk=true")
    assert run.wait(350) == 0, run.said()[-4000:]
    trained_as_sampled(run)
    assert audit(["audit", str(run.directory.path), "--step", "1", "--recompute"]) == 0
    apart = [float(found) for found in re.findall(r"recomputed: .* ([0-9.e+-]+) at most", capsys.readouterr().out)]
    assert len(apart) == 4  # all four rollouts of step 1 were sampled by version 0
    assert max(apart) < 1e-3
