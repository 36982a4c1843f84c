"""A server that computes another model than the trainer is told of at the first step that can tell."""

from __future__ import annotations

import pytest

from telescope.algorithms.grpo import GRPO
from telescope.backends.fsdp import FSDP
from telescope.config.run import RunConfig
from telescope.config.sections import EnvironmentEntry, InferenceSettings, ModelSettings, TrainerSettings
from telescope.orchestrator.training_health import ParityCheck

FRESH = {"staleness_max": 0.0}


def config(**changes: object) -> RunConfig:
    entries = {"reverse_letters": EnvironmentEntry(name="reverse_letters")}
    settings = {"model": ModelSettings(name="tiny_reverse"), "backend": FSDP(mixed_precision_dtype=None)} | changes
    return RunConfig(environments=entries, algorithm=GRPO(), **settings)


def test_0_19_nats_at_the_first_step_are_told_once_with_the_command_that_looks_closer():
    parity = ParityCheck.from_config(config(), "cpu")
    said = parity.judge(1, FRESH | {"logprob_difference": 0.19666})
    assert "step 1: the servers' log-probs" in said
    assert "are 0.197 nats from the trainer's (mean of |difference|; 0.001 is expected at most)" in said
    assert "`python -m telescope doctor logprobs`" in said
    assert parity.judge(2, FRESH | {"logprob_difference": 0.19666}) == ""


@pytest.mark.parametrize("metrics", [
    {"staleness_max": 0.0, "logprob_difference": 1e-3},
    {"staleness_max": 1.0, "logprob_difference": 5.0},  # the policy has moved since
    {"logprob_difference": 5.0},
    {"staleness_max": 0.0},
])  # fmt: skip
def test_a_gap_that_may_be_or_that_cannot_be_judged_is_not_told(metrics: dict[str, float]):
    parity = ParityCheck.from_config(config(), "cpu")
    assert parity.judge(1, metrics) == ""
    assert parity.judge(2, FRESH | {"logprob_difference": 1.1e-3}) != ""


def test_a_difference_that_is_no_number_is_no_agreement():
    assert "are nan nats from the trainer's" in ParityCheck.from_config(config(), "gpu").judge(
        1, FRESH | {"logprob_difference": float("nan")}
    )


def test_minibatches_move_the_policy_within_a_step_and_a_made_up_engine_has_none():
    moving = ParityCheck.from_config(config(trainer=TrainerSettings(number_of_minibatches=2)), "cpu")
    assert moving.judge(1, FRESH | {"logprob_difference": 0.09}) == ""
    assert moving.judge(1, FRESH | {"logprob_difference": 0.11}) != ""
    made_up = ParityCheck.from_config(config(inference=InferenceSettings(engine="fake")), "cpu")
    assert made_up.judge(1, FRESH | {"logprob_difference": 9.0}) == ""
