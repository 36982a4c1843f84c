from __future__ import annotations

import json
from pathlib import Path

import pytest

from telescope.config.run import RunConfig, as_json
from telescope.config.validate import setting_paths, validate
from telescope.config.words import in_words
from tests.config.conftest import compose_one, sentences


@pytest.fixture
def container(plugin_path) -> dict:
    return {
        "plugin_path": list(plugin_path),
        "algorithm": {"name": "flat"},
        "backend": {"name": "toy"},
        "environments": {"echo": {"name": "echo", "kwargs": {}}},
    }


def said(container) -> list[str]:
    config, problems = validate(container)
    assert config is None
    assert problems
    return [problem.sentence for problem in problems]


def test_a_right_container_has_no_problems(container):
    config, problems = validate(container)
    assert config is not None
    assert problems == []


@pytest.mark.parametrize(
    ("section", "key", "value", "sentence"),
    [
        ("trainer", "learning_rat", 1, "trainer.learning_rat=1: there is no such setting. Did you mean trainer.learning_rate?"),
        ("trainer", "learning_rate", "fast", "trainer.learning_rate='fast' must be a number"),
        ("trainer", "learning_rate", "1e-5", "trainer.learning_rate='1e-5' must be a number"),
        ("trainer", "warmup_steps", 1.5, "trainer.warmup_steps=1.5 must be a whole number"),
        ("trainer", "warmup_steps", True, "trainer.warmup_steps=true must be a whole number"),
        ("trainer", "grad_clip", 0, "trainer.grad_clip=0 must be above 0.0"),
        ("trainer", "min_lr_ratio", 1.5, "trainer.min_lr_ratio=1.5 must be at most 1.0"),
        ("trainer", "betas", [0.9], "trainer.betas=[0.9] must be a list of 2: a number, a number"),
        ("trainer", "betas", [0.9, "x"], 'trainer.betas=[0.9, "x"] must be a list of 2: a number, a number'),
        (
            "trainer",
            "lr_scheduler",
            "cosin",
            "trainer.lr_scheduler='cosin' must be none | constant | linear | cosine. Did you mean cosine?",
        ),
        ("rollout", "group_size", None, "rollout.group_size=null must be a whole number"),
        ("model", "trust_remote_code", "yes", "model.trust_remote_code='yes' must be true or false"),
        ("inference", "max_num_seqs", "many", "inference.max_num_seqs='many' must be a whole number or null"),
        ("cluster", "env", {"A": 1}, "cluster.env.A=1 must be text"),
        ("algorithm", "slop", 1, "algorithm.slop=1: there is no such setting. Did you mean algorithm.slope?"),
        ("algorithm", "slope", 0, "algorithm.slope=0 must be above 0.0"),
        ("backend", "size", "big", "backend.size='big' must be a whole number"),
        ("trainer", "seq_len", 4, "trainer.seq_len=4 must be at least 8"),
        ("trainer", "seq_len", "long", "trainer.seq_len='long' must be auto or a whole number"),
        (
            "orchestrator",
            "group_size",
            4,
            "orchestrator.group_size=4: there is no such setting. Did you mean rollout.group_size?",
        ),
    ],
)
def test_one_mistake_is_one_sentence(container, section, key, value, sentence):
    container.setdefault(section, {})[key] = value
    assert said(container) == [sentence]


def test_mistakes_of_an_environments_own_settings_have_their_full_path(container):
    container["environments"]["echo"]["kwargs"] = {"time": 3, "tone": "lout"}
    assert said(container) == [
        "environments.echo.kwargs.tone='lout' must be plain | loud. Did you mean loud?",
        "environments.echo.kwargs.time=3: there is no such setting. Did you mean environments.echo.kwargs.times?",
    ]


def test_mistakes_of_several_environments_are_listed_together(container):
    container["environments"]["other"] = {"name": "ecko"}
    container["environments"]["echo"]["weight"] = 0
    container["environments"]["echo"]["kwargs"] = {"times": "x"}
    assert said(container) == [
        "environments.echo.weight=0 must be above 0.0",
        "environments.echo.kwargs.times='x' must be a whole number",
        "environments.other.name: there is no environment 'ecko'. Did you mean echo?",
    ]


def test_a_section_at_the_top_that_is_none_gets_the_nearest_name(container):
    assert said({**container, "trainr": {"x": 1}}) == [
        'trainr={"x": 1}: there is no such setting. Did you mean trainer?'
    ]  # fmt: skip


def test_a_setting_without_its_section_gets_the_section(container):
    assert said({**container, "learning_rate": 1}) == [
        "learning_rate=1: there is no such setting. Did you mean trainer.learning_rate?"
    ]


def test_a_typo_does_not_hide_an_impossible_combination(container):
    container["rollout"] = {"max_token": 5, "max_tokens": 5000}
    assert said(container) == [
        "rollout.max_token=5: there is no such setting. Did you mean rollout.max_tokens?",
        "rollout.max_tokens=5000 must be below inference.max_model_len=4096, which holds the prompt too: lower "
        "rollout.max_tokens, or raise inference.max_model_len",
    ]


def test_a_combination_with_a_broken_setting_is_not_judged(container):
    container["rollout"] = {"max_tokens": 5000}
    container["inference"] = {"max_model_len": "long"}
    assert said(container) == ["inference.max_model_len='long' must be a whole number"]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"inference": {"max_model_len": 8192}, "trainer": {"seq_len": 4096}},
            "inference.max_model_len=8192 must not be above trainer.seq_len=4096",
        ),
        (
            {"trainer": {"seq_len": 4100}},
            "trainer.seq_len=4100 must be a multiple of trainer.pad_to_multiple_of=64: set trainer.seq_len=4160",
        ),
        (
            {"rollout": {"group_size": 1, "min_group_size": 1}},
            "rollout.group_size=1 must be at least 2: Flat compares rollouts of one prompt",
        ),
        (
            {"rollout": {"group_size": 4, "min_group_size": 5}},
            "rollout.min_group_size=5 must not be above rollout.group_size=4",
        ),
        ({"trainer": {"warmup_steps": 301}}, "trainer.warmup_steps=301 must not be above number_of_steps=300"),
        (
            {"trainer": {"warmup_steps": 3, "lr_scheduler": "none"}},
            "trainer.warmup_steps=3 does nothing with trainer.lr_scheduler=none",
        ),
        ({"trainer": {"min_lr_ratio": 0.1}}, "trainer.min_lr_ratio=0.1 does nothing with trainer.lr_scheduler=constant"),
        (
            {"trainer": {"number_of_minibatches": 17}},
            "trainer.number_of_minibatches=17 must not be above orchestrator.prompts_batch_size_for_trainer=16: a",
        ),
        (
            {"rollout": {"max_tokens": 10}, "environments": {"countdown": {"name": "countdown", "max_tokens": 11}}},
            "environments.countdown.max_tokens=11 must not be above rollout.max_tokens=10",
        ),
        (
            {
                "environments": {"countdown": {"name": "countdown", "max_tokens": 5}},
                "algorithm": {"name": "flat", "overlong_buffer_tokens": 7},
            },
            "algorithm.overlong_buffer_tokens=7 must be below environments.countdown.max_tokens=5",
        ),
        (
            {"rollout": {"max_tokens": 10}, "algorithm": {"name": "flat", "overlong_buffer_tokens": 10}},
            "algorithm.overlong_buffer_tokens=10 must be below rollout.max_tokens=10",
        ),
        ({"trainer": {"betas": [0.9, 1.0]}}, "trainer.betas=[0.9, 1.0] must lie in [0, 1)"),
        ({"inference": {"base_port": 65535}}, "inference.base_port=65535 leaves no ports for 2 servers"),
        (
            {"inference": {"tensor_parallel_size": 3}},
            "inference.tensor_parallel_size=3 must divide cluster.inference_num_workers=2: a server has so many of these "
            "workers; ask for 3 workers",
        ),
        ({"inference": {"api_key": "sk-123"}}, "inference.api_key must not stand in a configuration"),
        (
            {"inference": {"quantization": "fp8"}, "cluster": {"device": "cpu"}},
            "inference.quantization=fp8 needs a GPU, and cluster.device=cpu: leave it out",
        ),
        (
            {"inference": {"quantization": "fp8"}, "weight_sync": {"staging": "none"}},
            "inference.quantization=fp8 quantises a whole version at once, and weight_sync.staging=none never has one",
        ),
        (
            {"weight_sync": {"in_flight": "recompute", "reset_prefix_cache": False}},
            "weight_sync.in_flight=recompute computes running requests anew because their keys and values are old",
        ),
        (
            {"weight_sync": {"transport": "shared_memory", "bucket_mb": 64}},
            "weight_sync.bucket_mb=64 does nothing with weight_sync.transport=shared_memory: leave it out, or set "
            "weight_sync.transport=nccl",
        ),
        (
            {"weight_sync": {"transport": "disk", "init_timeout_s": 5}},
            "weight_sync.init_timeout_s=5.0 does nothing with weight_sync.transport=disk",
        ),
        (
            {"weight_sync": {"transport": "nccl", "dir": "/w"}},
            "weight_sync.dir=/w does nothing with weight_sync.transport=nccl",
        ),
        (
            {"weight_sync": {"transport": "gloo"}, "cluster": {"device": "gpu"}},
            "weight_sync.transport=gloo is for CPUs, and cluster.device=gpu: set weight_sync.transport=auto",
        ),
        ({"weight_sync": {"pin_memory": False}}, "weight_sync.pin_memory=false is about the memory of weight_sync.cpu_staging"),
        (
            {"weight_sync": {"mode": "per_tensor", "bucket_mb": 64}},
            "weight_sync.bucket_mb=64 does nothing with weight_sync.mode=per_tensor",
        ),
        (
            {"model": {"lora": {"rank": 4}}, "weight_sync": {"transport": "nccl"}, "backend": {"name": "fsdp"}},
            "weight_sync.transport=nccl fills the model's own parameters, and model.lora pushes adapters",
        ),
        (
            {"model": {"lora": {}}, "backend": {"name": "fake"}},
            "backend=fake trains no adapters: set model.lora=null, or backend=fsdp",
        ),
        (
            {"backend": {"name": "fsdp", "context_parallel_size": 4}, "cluster": {"trainer_num_workers": 6}},
            "backend.context_parallel_size=4 must divide cluster.trainer_num_workers=6: so many ranks share each packed "
            "row; set cluster.trainer_num_workers=8",
        ),
        (
            {"backend": {"name": "fsdp", "context_parallel_size": 2}, "trainer": {"pad_to_multiple_of": 1}},
            "trainer.pad_to_multiple_of=1 must be a multiple of backend.context_parallel_size=2, as each packed row is cut "
            "into so many equal parts: set trainer.pad_to_multiple_of=2",
        ),
        (
            {
                "backend": {"name": "fsdp", "context_parallel_size": 8},
                "cluster": {"trainer_num_workers": 8},
                "model": {"name": "tiny"},
            },
            "backend.context_parallel_size=8 must divide the model's 4 attention heads: set it to one of 1, 2, 4",
        ),
        (
            {"backend": {"name": "fsdp", "checkpointed_layers": 3}, "model": {"name": "tiny"}},
            "backend.checkpointed_layers=3 is more than the 2 layers of the model: set fewer, or leave it out",
        ),
        ({"cluster": {"env": {"A=B": "x"}}}, "cluster.env: 'A=B' can't name an environment variable"),
    ],
)
def test_what_does_not_go_together_is_refused_with_the_remedy(container, settings, sentence):
    (only,) = said({**container, **settings})
    assert only.startswith(sentence)


def test_what_keeps_router_replay_from_a_record_of_every_token_is_refused(tmp_path: Path):
    def problems(*overrides: str, experts: int = 8, backend: str = "fsdp") -> str:
        sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_experts": experts}
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", **sizes}))
        own = ("model=any", f"model.name={tmp_path}", f"backend={backend}", "trainer.router_replay=true")
        return sentences(compose_one(*own, *overrides))

    assert "router_replay" not in problems()
    assert "router_replay" not in problems("inference.vllm.enable_return_routed_experts=false")
    for argument, value in (
        ("enable_return_routed_experts", "true"), ("speculative_config", "{method: ngram}"), ("kv_transfer_config", "{a: b}"),
    ):  # fmt: skip
        found = problems(f"inference.vllm.{argument}={value}")
        assert f"inference.vllm.{argument}=" in found
        assert "leave it out, or set trainer.router_replay=false" in found
    assert "inference.engine=fake has none: set it to false, or use inference=vllm" in problems("inference=fake")
    assert "backend=fake trains no model: set it to false, or use backend=fsdp" in problems(backend="fake")
    dense = f"is for models with experts, and by its config.json model.name={tmp_path} has none: set it to false"
    assert dense in problems(experts=0)
    assert "cluster.trainer_num_workers=0 trains none: leave it out" in problems("cluster.trainer_num_workers=0")


def test_an_algorithms_own_rules_are_said_with_its_section():
    point = compose_one("algorithm=gspo", "algorithm.use_tis=true", "trainer.lr=1")
    assert "algorithm: use_tis=true is not possible with GSPO" in sentences(point)
    assert "trainer.lr=1: there is no such setting" in sentences(point)


def test_corrections_are_a_list_that_the_command_line_can_give():
    listed = "algorithm.corrections=[{name:icepop,low:0.25},{name:geometric_mask}]"
    point = compose_one("algorithm=grpo", "algorithm.use_tis=false", listed)
    assert point.config is not None, sentences(point)
    icepop, mask = point.config.algorithm.corrections
    assert (icepop.name, icepop.low, icepop.high, mask.name) == ("icepop", 0.25, 5.0, "geometric_mask")
    assert RunConfig.model_validate_json(json.dumps(as_json(point.config))) == point.config
    wrong = compose_one("algorithm.corrections=[{name:icepop,lo:0.25}]")
    assert sentences(wrong) == (
        "algorithm.corrections: corrections[0] (icepop, whose settings are low, high): there is no setting lo"
    )


def test_a_ratio_of_one_is_warned_of_by_the_number_of_updates():
    still = ("algorithm=gspo", "algorithm.ppo_clip_ref_logprobs=batch")
    assert "the ratio is always 1" in " ".join(compose_one(*still).warnings)
    assert compose_one(*still, "trainer.number_of_minibatches=2").warnings == ()


def test_one_sample_a_prompt_runs_where_the_algorithm_compares_none():
    point = compose_one("algorithm=reinforce_pp", "rollout.group_size=1", "rollout.min_group_size=1")
    assert point.config is not None, sentences(point)


def test_asynchronous_training_without_a_correction_is_warned_of():
    assert "without any correction" in " ".join(compose_one("algorithm.use_tis=false").warnings)
    assert compose_one("algorithm.use_tis=false", "orchestrator.max_async_rollout=0").warnings == ()
    assert compose_one().warnings == ()


def test_a_learning_rate_of_zero_is_warned_of():
    assert compose_one("trainer.learning_rate=0").warnings == ("trainer.learning_rate=0: the weights will not change",)


def test_master_weights_of_8_bits_are_warned_of_with_what_stands_still():
    (warning,) = compose_one("model.dtype=bfloat16", "trainer.learning_rate=1e-6").warnings
    assert "at trainer.learning_rate=1e-06 a step of AdamW's leaves those above 0.00051 as they are" in warning
    (still,) = compose_one("model.dtype=bfloat16", "trainer.learning_rate=0").warnings
    assert still == "trainer.learning_rate=0: the weights will not change"
    assert compose_one("model.dtype=bfloat16", "model.lora={rank:4,alpha:8}").warnings == ()
    assert compose_one("model.dtype=float16", "model.lora={rank:4,alpha:8}").warnings == ()


def test_types_in_words():
    assert in_words(tuple[float, float]) == "a list of 2: a number, a number"
    assert in_words(tuple[str, ...]) == "a list, each item text"
    assert in_words(int | None) == "a whole number or null"
    assert in_words(bool | None) == "true, false or null"
    assert in_words(dict[str, str]) == "a mapping, each value text"


def test_the_paths_of_all_settings_include_those_of_plugins(container):
    paths = setting_paths(container)
    assert {"seed", "trainer.betas", "algorithm.slope", "backend.size", "environments.echo.kwargs.times"} <= set(paths)
