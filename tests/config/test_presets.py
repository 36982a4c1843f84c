from __future__ import annotations

from pathlib import Path

import pytest

from telescope.compose.options import GROUPS, HIDDEN_GROUPS
from telescope.config.run import RunConfig
from telescope.config.sections import (
    ClusterSettings,
    InferenceSettings,
    LoggingSettings,
    ModelSettings,
    OrchestratorSettings,
    RolloutSettings,
    TrainerSettings,
    WeightSyncSettings,
)
from tests.config.conftest import compose_one, sentences

CONF = Path(__file__).parents[2] / "conf"
PRESETS = sorted(path.relative_to(CONF) for path in CONF.rglob("*.yaml"))
# what a preset needs beside it, where it is not a whole choice of its own
COMPANY = {
    "inference/fake.yaml": ["backend=fake"],
    "backend/fake.yaml": ["inference=fake"],
    "model/any.yaml": ["model.name=a/b"],
}


@pytest.mark.parametrize("preset", [str(path) for path in PRESETS])
def test_every_preset_composes(preset):
    group, _, name = preset.removesuffix(".yaml").rpartition("/")
    if group == "model_backend":
        model, _, backend = name.rpartition("_")
        overrides = [f"model={model}", f"backend={backend}"]
    else:
        overrides = [f"{group}={name}", *COMPANY.get(preset, [])] if group else []
    point = compose_one(*overrides)
    assert point.config is not None, sentences(point)


def test_every_folder_of_presets_is_a_group():
    folders = {path.name for path in CONF.iterdir() if path.is_dir() and not path.name.startswith("__")}
    assert folders <= {*GROUPS, *HIDDEN_GROUPS}


def test_the_default_is_the_quickstart():
    config = compose_one().config
    assert (config.model.name, config.algorithm_name, config.backend_name) == ("tiny", "grpo", "fsdp")
    assert (config.number_of_steps, config.trainer.learning_rate, config.trainer.betas) == (60, 1.5e-4, (0.9, 0.95))
    assert (config.orchestrator.prompts_batch_size_for_trainer, config.rollout.group_size) == (32, 8)
    assert (config.inference.max_model_len, config.trainer.seq_len) == (256, 2048)
    assert config.backend.mixed_precision_dtype is None
    assert list(config.environments) == ["countdown"]
    assert (config.cluster.inference_num_workers, config.cluster.trainer_num_workers) == (1, 1)
    assert config.cluster.trainer_cpus_per_worker == 0.5


def test_another_model_takes_the_recipe_of_the_tiny_one_away():
    config = compose_one("model=qwen2.5-3b").config
    assert (config.model.name, config.trainer.learning_rate, config.number_of_steps) == ("Qwen/Qwen2.5-3B", 1e-6, 300)
    assert config.trainer == TrainerSettings()
    assert config.rollout == RolloutSettings()
    assert config.orchestrator == OrchestratorSettings()
    assert config.inference == InferenceSettings()
    assert config.backend == type(config.backend)()


def test_the_recipe_of_the_tiny_model_says_nothing_of_the_algorithm():
    for name in ("tiny", "tiny_reverse", "tiny_turns"):
        assert "algorithm:" not in (CONF / "model" / f"{name}.yaml").read_text()
    config = compose_one("algorithm=cispo", "model=tiny").config
    assert config.algorithm == type(config.algorithm)()


def test_the_command_line_wins_over_the_recipe():
    config = compose_one("trainer.learning_rate=3e-4", "backend.mixed_precision_dtype=bfloat16", "model=tiny").config
    assert (config.trainer.learning_rate, config.backend.mixed_precision_dtype) == (3e-4, "bfloat16")


@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce_pp", "dr_grpo"])
def test_presets_without_a_ratio_turn_tis_on_and_class_defaults_leave_it_off(name):
    config = compose_one(f"algorithm={name}").config
    assert config.algorithm.use_tis
    assert not type(config.algorithm)().use_tis


def test_an_experiment_sets_model_and_environment_together():
    config = compose_one("experiment=reverse_letters").config
    assert (config.model.name, list(config.environments), config.number_of_steps) == ("tiny_reverse", ["reverse_letters"], 40)


def test_the_embedded_recipes_sample_enough_tokens_for_every_answer():
    """One token a character, and the end of sequence: the longest right answer must fit."""
    for overrides in ((), ("experiment=reverse_letters",)):
        config = compose_one(*overrides).config
        (name,) = config.environments
        prompts = config.environment(name).prompts("train")
        longest = max(len(prompts[index].answer) for index in range(500))
        assert longest + 1 <= config.rollout.max_tokens


DEFAULTS = {
    RunConfig: {"number_of_steps": 300, "seed": 0, "debug": False, "run_dir": None},
    ModelSettings: {
        "name": "tiny", "dtype": "float32", "chat_template": None, "enable_thinking": False, "trust_remote_code": False
    },
    ClusterSettings: {
        "inference_num_workers": 2, "trainer_num_workers": 2, "inference_cpus_per_worker": 4.0,
        "trainer_cpus_per_worker": 4.0, "placement_timeout_s": 900,
    },
    OrchestratorSettings: {
        "max_concurrent_prompts_per_server": 32, "prompts_batch_size_for_trainer": 16, "max_async_rollout": 2,
        "take_order": "completion", "max_off_policy_steps": 8, "discard_group_zero_advantage": True,
        "enable_individual_sample_lanes": True, "free_lane_after_generation": True, "adaptive_concurrency": False,
    },
    TrainerSettings: {
        "learning_rate": 1e-6, "weight_decay": 0.0, "betas": (0.9, 0.999), "grad_clip": 1.0, "lr_scheduler": "constant",
        "warmup_steps": 0, "min_lr_ratio": 0.0, "pad_to_multiple_of": 64, "entropy_chunk_size": 1024,
    },
    RolloutSettings: {"group_size": 8, "min_group_size": 2, "temperature": 1.0, "max_tokens": 3700},
    InferenceSettings: {
        "host": None, "base_port": 8100, "gpu_memory_utilization": 0.9, "max_model_len": 4096,
        "scheduling_policy": "priority", "max_num_seqs": None, "max_num_batched_tokens": None, "enable_prefix_caching": True,
    },
    WeightSyncSettings: {"in_flight": "continue"},
    LoggingSettings: {
        "use_wandb": None, "wandb_project": "telescope", "wandb_run_name": None, "wandb_tags": ("telescope",)
    },
}  # fmt: skip


@pytest.mark.parametrize("settings", DEFAULTS, ids=lambda settings: settings.__name__)
def test_class_defaults_are_those_of_the_source_design(settings):
    fields = settings.model_fields
    assert {name: fields[name].get_default(call_default_factory=True) for name in DEFAULTS[settings]} == DEFAULTS[settings]


def test_what_auto_is_before_anybody_decides_is_the_source_designs_default():
    """Rows of 4,096 tokens, not compiled, all layers computed again."""
    for name in ("fsdp", "megatron"):
        backend = compose_one("model=qwen2.5-3b", f"backend={name}").config.backend
        assert (backend.compile, backend.gradient_checkpointing) == ("auto", "auto")
        assert (backend.compiles, backend.checkpointing) == (False, True)
    assert (TrainerSettings().seq_len, TrainerSettings().row_tokens) == ("auto", 4096)
    assert TrainerSettings(pad_to_multiple_of=1000).row_tokens == 5000


def test_one_gpu_splits_the_card_between_server_and_trainer_whatever_the_model():
    for model in ("tiny", "qwen2.5-3b"):
        config = compose_one("cluster=one_gpu", f"model={model}").config
        assert config is not None
        assert (config.cluster.device, config.servers, config.cluster.trainer_num_workers) == ("gpu", 1, 1)
        assert config.inference.gpu_memory_utilization == 0.45
    config = compose_one("cluster=one_gpu", "inference.gpu_memory_utilization=0.3").config
    assert config is not None
    assert config.inference.gpu_memory_utilization == 0.3
