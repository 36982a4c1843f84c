"""Whose failure it is, through a whole run with real processes (fake engine and backend): what each kind costs."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from tests.run.conftest import Start, WholeRun

PICKY = '''
from collections import Counter
from telescope.environments.base import Prompt, Reward, SingleTurn
from telescope.environments.failures import InfrastructureError, PolicyError

scored = Counter()

class Picky(SingleTurn):
    """Of each prompt's eight samples two raise in their reward, one is down at its first try, one is the policy's fault."""

    reward_in_thread = False
    splits = ("train",)

    def prompts(self, split):
        return [Prompt(({"role": "user", "content": f"use {n} 2 3 make 9"},), answer=str(n)) for n in range(1, 90)]

    def reward(self, prompt, answer):
        scored[prompt.answer] += 1
        match scored[prompt.answer]:
            case 1 | 2:
                raise KeyError("gold")
            case 3:
                raise InfrastructureError("the judge is down, key s3cr3t-of-the-judge")
            case 4:
                raise PolicyError("a bad call", tag="bad_call", total=-1.0)
        number = float(scored[prompt.answer])
        return Reward(number, {"number": number}, tags=("fine",), info={"api_key": "x", "n": number})
'''


def test_a_reward_function_that_raises_for_2_of_8_samples_costs_2_samples(start: Start, tmp_path: Path, monkeypatch) -> None:
    home = tmp_path / "mine" / "plugins" / "environments"
    home.mkdir(parents=True)
    (home / "picky.py").write_text(PICKY)
    monkeypatch.setenv("JUDGE_API_KEY", "s3cr3t-of-the-judge")
    run = start(
        "--config-dir", str(tmp_path / "mine"), "experiment=fake", "env=[picky]", "number_of_steps=2", "rollout.group_size=8",
        "orchestrator.prompts_batch_size_for_trainer=2", "orchestrator.max_async_rollout=0", "cluster.env_num_workers=1",
        "rollout.retry_backoff_s=0.1",
    )  # fmt: skip
    assert run.wait() == 0, run.said()
    rows = run.rows("rollouts")
    groups = {row["group_id"] for row in rows}
    assert len(groups) == 4
    for group in groups:
        own = [row for row in rows if row["group_id"] == group]
        assert Counter((row["status"], row.get("failure")) for row in own) == {
            ("scored", None): 6, ("error", "grader"): 2, ("error", "infrastructure"): 1,
        }  # fmt: skip
        rewards = sorted(row["reward"] for row in own if row["status"] == "scored")
        assert rewards == [-1.0, 5.0, 6.0, 7.0, 8.0, 9.0]  # none is 0: what could not be scored has no score
        assert [row["tags"] for row in own if row.get("reward") == -1.0] == [["bad_call"]]
    graded = [row for row in rows if row.get("failure") == "grader"]
    assert {row["attempt"] for row in graded} == {0}
    assert all("KeyError: 'gold'" in row["cause"] for row in graded)
    assert {row["info"]["api_key"] for row in rows if row.get("tags") == ["fine"]} == {"<redacted>"}
    assert all("s3cr3t" not in row["cause"] for row in rows if row.get("failure") == "infrastructure")
    for batch in run.rows("batches"):
        assert len(batch["rollout_ids"]) == 12
    summary = run.summary()
    assert summary["failures"] == {"grader": 8, "infrastructure": 4}
    assert (summary["rollouts"]["failed"], summary["rollouts"]["retried"]) == (8, 4)
    for row in run.rows("step_metrics"):
        metrics = row["metrics"]
        assert (metrics["rollouts/failed/grader"], metrics["rollouts/failed/infrastructure"]) == (4.0, 2.0)
    for row in run.rows("policy"):
        assert row["metrics"]["tag/bad_call"] == 2 / 12
        assert row["metrics"]["reward/policy/unfinished"] == row["metrics"]["reward/policy/rollouts"] / 3


QUIZ = """
from telescope.environments.base import Prompt, Reward, SingleTurn

class Quiz(SingleTurn):
    splits = ("train",)

    def prompts(self, split):
        return [Prompt(({"role": "user", "content": f"use {n} 2 3 make 9"},), answer=str(n)) for n in range(1, 400)]

    def reward(self, prompt, answer):
        if CONDITION:
            raise KeyError("gold")
        return Reward(TOTAL)
"""


def start_quiz(start: Start, home: Path, condition: str, total: str) -> WholeRun:
    """A run of 20 steps whose rewards raise under a condition."""
    folder = home / "plugins" / "environments"
    folder.mkdir(parents=True)
    (folder / "quiz.py").write_text(QUIZ.replace("CONDITION", condition).replace("TOTAL", total))
    return start("--config-dir", str(home), "experiment=fake", "env=[quiz]", "number_of_steps=20")


def test_a_reward_that_raises_now_and_then_is_told_while_it_happens(start: Start, tmp_path: Path) -> None:
    run = start_quiz(start, tmp_path / "mine", "len(answer) % 5 == 0", "float(len(answer))")
    assert run.wait() == 0, run.said()
    told = [row["message"] for row in run.rows("alerts") if row["source"] == "environments.quiz"]
    assert told, run.said()
    assert "rollouts of environments.quiz got no score (" in told[0]
    assert re.search(r"KeyError: 'gold' \(.*quiz\.py line 12\)$", told[0]), told[0]
    assert "rollouts of environments.quiz got no score (" in run.said()


def test_the_last_sentence_has_the_evidence_there_is(start: Start, tmp_path: Path) -> None:
    """A quarter of the rewards raises, the rest are equal: that the task is too easy or too hard is not all there is to say."""
    run = start_quiz(start, tmp_path / "mine", "int(prompt.answer) % 4 == 0", "0.0")
    assert run.wait() == 70, run.said()
    reason = run.summary()["exit_reason"]
    assert "groups in a row had equal rewards" in reason
    assert re.search(r"; in all, [\d,]+ of [\d,]+ rollouts of environments\.quiz got no score \(\d+%\), .*KeyError", reason)
