"""Names of the older Telescope and of other trainers are told what they are called here, and never a wrong neighbour."""

from __future__ import annotations

import re

import pytest

from telescope.cli.migrate_values import CONVERSIONS
from telescope.config import plugins
from telescope.config.foreign_names import HINTS, TABLE, find_entry
from telescope.config.validate import setting_paths
from tests.config.conftest import compose_one, sentences

GROUPS = {"algorithm", "backend"}
SETTING = re.compile(r"\b[a-z_]+(?:\.[a-z_0-9]+)+\b")


def every_setting() -> set[str]:
    return {
        path
        for name in plugins.files(plugins.ALGORITHMS)
        for backend in ("fsdp", "megatron")
        for path in setting_paths({"algorithm": {"name": name}, "backend": {"name": backend}, "environments": {}})
    } | GROUPS


def test_each_entry_names_settings_that_there_are():
    known = every_setting()
    for entry in TABLE:
        named = SETTING.findall(f"{entry.here} {entry.said}")
        assert set(named) <= known, entry
        if entry.here and "<" not in entry.here:
            assert SETTING.search(entry.here) or entry.here in known, entry
        if not entry.here:
            assert entry.said[0].isupper() or entry.said.startswith("`"), entry


def test_a_name_stands_once_in_its_system():
    names = [(entry.system, entry.name) for entry in TABLE]
    assert sorted(names) == sorted(set(names))


def test_a_name_with_a_hint_is_not_one_of_ours_at_that_place():
    """Else the hint would never be shown."""
    assert HINTS.keys() & every_setting() == set()


def test_a_value_is_converted_for_names_of_the_table_alone():
    for system, conversions in CONVERSIONS.items():
        for name in conversions:
            entry = find_entry(system, name)
            assert entry is not None, name
            assert entry.name == name


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("rollout.num_generations=8", "It is rollout.group_size here."),
        ("trainer.lr_warmup_steps=5", "It is trainer.warmup_steps here."),
        ("vllm_mode=colocate", "GPUs are shared out by cluster"),
        ("megatron_tensor_parallel_size=2", "It is backend.tensor_parallel_size here."),
        ("megatron_fp8=true", "It is backend.fp8 here."),
        ("megatron_optimizer_cpu_offload=true", "It is backend.optimizer_cpu_offload here."),
        ("megatron_main_params_dtype=float32", "Weights are updated in model.dtype."),
        ("megatron_global_batch_size=8", "The Megatron backend does not have it."),
        ("inference_num_workers=2", "Did you mean cluster.inference_num_workers?"),
        ("checkpoint_every=5", "It is checkpoint.every here."),
        ("clip_ratio_c=3", "It is algorithm.dual_clip_c here."),
        ("kl_penalty_tau=0.1", "It is algorithm.kl_rollout_coef here."),
        (
            "wandb_upload_code=true",
            "Nothing is to be set: W&B gets numbers and the configuration; logs stay in the run directory.",
        ),
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
