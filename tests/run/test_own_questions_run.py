"""A whole run with real processes over a file of a user's own: trained on, evaluated, and kept in the run directory."""

from __future__ import annotations

import json
from pathlib import Path

from tests.run.conftest import Start


def test_a_run_over_20_lines_of_a_file_trains_on_18_and_evaluates_the_other_2(start: Start, tmp_path: Path):
    file, code = tmp_path / "words.jsonl", tmp_path / "score.py"
    file.write_text("".join(json.dumps({"question": f"rev {n}", "answer": str(n)[::-1]}) + "\n" for n in range(20, 40)))
    code.write_text("def score(completion, answer):\n    return len(completion) / (len(completion) + len(answer))\n")
    run = start(
        *("experiment=fake", "env=[questions]", "number_of_steps=2", "eval.every=1", "rollout.group_size=2"),
        *(f"environments.questions.kwargs.{each}" for each in (f"path={file}", "scoring=function", f"function={code}")),
        *("orchestrator.prompts_batch_size_for_trainer=2", "orchestrator.discard_group_zero_advantage=false"),
    )
    assert run.wait() == 0, run.said()
    assert run.summary()["steps"] == 2
    kept = json.loads((run.directory.path / "config.json").read_text())["environments"]["questions"]["kwargs"]
    assert (kept["path"], kept["function"]) == (str(file), f"{code}:score")
    trained = {row["index"] for row in run.rows("rollouts")}
    assert trained <= set(range(18))
    assert all(0 <= row["reward"] < 1 for row in run.rows("rollouts") if row["status"] == "scored")
    assert {row["scored"] for row in run.rows("evals") if row["state"] == "complete"} == {2}
    assert run.left_after(60) == []
