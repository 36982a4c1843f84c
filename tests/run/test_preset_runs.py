"""Shipped experiments as their users start them, for two steps: real processes, workers that load the environment, prompts that
fit, answers that are scored. Engine and backend are fakes: that the real trainer trains on what these environments give, with a
real tiny model's answers, is shown in tests/environments/test_presets_play.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.environments.datasets_at_home import write_all
from tests.run.conftest import Start

TINY = ("model=tiny", "inference.max_model_len=4096", "trainer.seq_len=8192")
OWN_MODEL = ("reverse_letters", "guess_letter")
"""They name an embedded model themselves."""
TOGETHER = (
    ("gsm8k", "hendrycks_math", "dapo_math", "deepscaler"),
    ("hendrycks_math_evals", "qwen_countdown"),
    ("math500", "aime_2024", "aime_2025", "gpqa_diamond"),
    ("code_generation", "i3_code", "textarena", "wordle", "reasoning_gym"),
    ("countdown", "smollm2_countdown", "reverse_letters", "guess_letter"),
)
"""Started at once, as most of a run of two steps is waiting for its processes. The presets that tests of their own run whole:
letter_agent, look_up, tau_retail, hendrycks_math_python, textworld, verifiers."""
SMALL = (
    *("inference=fake", "backend=fake", "number_of_steps=2", "rollout.group_size=2", "rollout.max_tokens=16"),
    *("orchestrator.prompts_batch_size_for_trainer=2", "orchestrator.discard_group_zero_advantage=false"),
    "logging.use_wandb=false",
)


def environment_of(experiment: str) -> str:
    return experiment.removeprefix("smollm2_").removeprefix("qwen_").removesuffix("_evals")


def settings(experiment: str, copies: dict[str, Path]) -> list[str]:
    environment = environment_of(experiment)
    data = [f"+environments.{environment}.kwargs.data_dir={copies[environment]}"] if environment in copies else []
    data += [f"+evals.math500.kwargs.data_dir={copies['math500']}"] if experiment == "hendrycks_math_evals" else []
    held_out = [f"+environments.{experiment}.kwargs.held_out=2"] if experiment in ("dapo_math", "deepscaler", "i3_code") else []
    return [f"experiment={experiment}", *SMALL, *(() if experiment in OWN_MODEL else TINY), *data, *held_out]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("experiments", TOGETHER, ids="+".join)
def test_a_shipped_experiment_runs_two_steps(start: Start, tmp_path: Path, experiments: tuple[str, ...]):
    copies = write_all(tmp_path / "copies")
    runs = {experiment: start(*settings(experiment, copies)) for experiment in experiments}
    for experiment, run in runs.items():
        assert run.wait(500) == 0, (experiment, run.said()[-4000:])
        summary = run.summary()
        assert (summary["steps"], summary["rollouts"]["failed"]) == (2, 0), experiment
        rows = run.rows("rollouts")
        assert {row["environment"] for row in rows} == {environment_of(experiment)}
        assert {row["status"] for row in rows} <= {"scored", "ignored", "cancelled"}
        assert run.left_after(60) == [], experiment
