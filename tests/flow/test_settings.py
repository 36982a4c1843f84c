"""A setting has one name, from the command line to the core."""

from __future__ import annotations

from telescope.config.evals import EvalSettings
from telescope.config.run import RunConfig
from telescope.config.sections import CheckpointSettings, OrchestratorSettings, RolloutSettings
from telescope.flow.settings import FlowSettings

COMPUTED = {
    "split", "curricula", "rollout_deadline_s", "cancel_deadline_s", "absence_deadline_s", "weights_while_training",
    "failed_batches_limit", "discarded_batches_limit", "evals_hold_training", "trains", "eval_servers", "checkpoint_with",
    "stop_measure", "stop_lower",
}  # fmt: skip
"""Not settings of a run, or made of several."""


def test_the_core_calls_each_setting_by_the_name_that_a_user_types():
    typed = {
        name for section in (RunConfig, OrchestratorSettings, RolloutSettings, EvalSettings) for name in section.model_fields
    }
    typed |= {f"checkpoint_{name}" for name in CheckpointSettings.model_fields}
    assert set(FlowSettings.__struct_fields__) - typed == COMPUTED
