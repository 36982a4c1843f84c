"""Names of the older Telescope and of other trainers are told what they are called here, and never a wrong neighbour."""

from __future__ import annotations

import re

import pytest

from telescope.config import plugins
from telescope.config.foreign_names import NAMES
from telescope.config.validate import setting_paths
from tests.config.conftest import compose_one, sentences

GROUPS = {"algorithm", "backend"}
SETTING = re.compile(r"\b[a-z_]+(?:\.[a-z_]+)+\b")


def every_setting() -> set[str]:
    return {
        path
        for name in plugins.files(plugins.ALGORITHMS)
        for backend in ("fsdp", "megatron")
        for path in setting_paths({"algorithm": {"name": name}, "backend": {"name": backend}, "environments": {}})
    } | GROUPS


def test_each_hint_names_a_setting_that_there_is():
    known = every_setting()
    for name, told in NAMES.items():
        named = SETTING.findall(told) or ([told] if re.fullmatch("[a-z_]+", told) else [])
        assert set(named) <= known, (name, told)
        assert named or told[0].isupper() or told.partition("=")[0] in known, (name, told)


def test_a_name_of_the_table_is_not_one_of_ours_at_that_place():
    """Else the hint would never be shown."""
    known = every_setting()
    assert {name for name in NAMES if name in known} == set()


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("megatron_tensor_parallel_size=2", "It is backend.tensor_parallel_size here."),
        ("megatron_fp8=true", "It is backend.fp8 here."),
        ("megatron_optimizer_cpu_offload=true", "It is backend.optimizer_cpu_offload here."),
        ("megatron_main_params_dtype=float32", "It is model.dtype here."),
        ("megatron_global_batch_size=8", "The Megatron backend does not have it yet."),
        ("inference_num_workers=2", "It is cluster.inference_num_workers here."),
        ("checkpoint_every=5", "It is checkpoint.every here."),
        ("clip_ratio_c=3", "It is algorithm.dual_clip_c here."),
        ("kl_penalty_tau=0.1", "It is algorithm.kl_rollout_coef here."),
        ("wandb_upload_code=true", "Nothing is to be set: W&B gets numbers and the configuration."),
        ("weight_broadcast_mode=per_tensor", "It is weight_sync.mode here."),
        ("lr=1e-5", "It is trainer.learning_rate here."),
        ("trainer.lr=1e-5", "It is trainer.learning_rate here."),
        ("batch_size=4", "It is orchestrator.prompts_batch_size_for_trainer (prompts) and rollout.group_size"),
        ("max_grad_norm=1", "It is trainer.grad_clip here."),
        ("weight_decay=0", "Did you mean trainer.weight_decay?"),  # not its neighbour weight_sync
        ("number_of_minibatches=2", "Did you mean trainer.number_of_minibatches?"),
        ("weight=2", "Settings of an environment stand at environments.<name>."),
    ],
)
def test_the_hint_comes_with_the_refusal(typed: str, told: str):
    assert f"there is no such setting. {told}" in sentences(compose_one(typed))


def test_staleness_is_switched_off_by_null_and_minus_one_says_so():
    assert compose_one("orchestrator.max_off_policy_steps=null").config.orchestrator.max_off_policy_steps is None
    assert "must be at least 1, or null" in sentences(compose_one("orchestrator.max_off_policy_steps=-1"))
