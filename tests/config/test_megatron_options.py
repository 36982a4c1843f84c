"""backend=megatron in a whole configuration: it is composed without torch, and its ranks are checked with all else."""

from __future__ import annotations

import json
from pathlib import Path

from tests.config.conftest import compose_one, sentences

TWO = ("backend=megatron", "backend.tensor_parallel_size=2", "cluster.trainer_num_workers=4")


def test_ranks_that_hold_a_model_together_need_rows_of_no_multiple():
    """They do not share rows out, as those of backend.context_parallel_size do."""
    found = compose_one(*TWO, "trainer.pad_to_multiple_of=1")
    assert found.config is not None, found.problems
    assert found.config.backend.ranks_a_shard == 2


def test_ranks_that_are_no_multiple_are_refused_with_both_settings():
    found = compose_one(*TWO, "backend.tensor_parallel_size=3")
    assert "backend.tensor_parallel_size=3 must divide cluster.trainer_num_workers=4" in str(found.problems)
    assert "context_parallel_size" not in str(found.problems)


def test_stages_are_checked_with_the_ranks_and_with_the_model():
    found = compose_one(*TWO, "backend.pipeline_parallel_size=2")
    assert found.config is not None, found.problems
    assert found.config.backend.ranks_a_shard == 4
    found = compose_one(*TWO, "backend.pipeline_parallel_size=4")
    assert "backend.pipeline_parallel_size=4 must divide cluster.trainer_num_workers=4" in str(found.problems)
    deep = ("model=tiny", "backend.pipeline_parallel_size=64", "cluster.trainer_num_workers=128")
    assert "backend.pipeline_parallel_size=64 is more than the" in str(compose_one(*TWO, *deep).problems)


def test_ranks_that_share_rows_need_rows_of_no_multiple_either_as_these_are_filled_up():
    found = compose_one(*TWO, "backend.context_parallel_size=2", "trainer.pad_to_multiple_of=1")
    assert found.config is not None, found.problems
    assert (found.config.backend.ranks_a_shard, found.config.backend.ranks_a_row) == (4, 2)
    found = compose_one(*TWO, "backend.context_parallel_size=4")
    assert "backend.tensor_parallel_size=2 times backend.context_parallel_size=4 must divide" in str(found.problems)


def test_heads_and_experts_of_a_model_that_lies_here_are_checked_at_the_command_line(tmp_path: Path):
    def problems(*overrides: str, **config: int) -> str:
        sizes = {"num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", **sizes, **config}))
        return str(compose_one("model=any", f"model.name={tmp_path}", "backend=megatron", *overrides).problems)

    ranks = "cluster.trainer_num_workers=8"
    assert "backend.context_parallel_size=8 must divide the model's 4 attention heads" in problems(
        ranks, "backend.context_parallel_size=8"
    )
    assert "backend.tensor_parallel_size=4 must divide the model's 2 key-value heads" in problems(
        ranks, "backend.tensor_parallel_size=4"
    )
    shared = "backend.expert_parallel_size=4 must divide the model's 6 experts: set it to one of 1, 2, 3, 6"
    four = (ranks, "backend.pipeline_parallel_size=2", "backend.expert_parallel_size=4")
    assert shared in problems(*four, num_experts=6)
    assert "expert_parallel_size" not in problems(*four, num_experts=8)
    assert "deals out experts, and this model has none: set it to 1" in problems(*four)
    whole_rows = (ranks, "backend.tensor_parallel_size=2", "backend.sequence_parallel=false")
    assert "each would send all of them to its experts" in problems(*whole_rows, num_experts=8)
    assert "sequence_parallel" not in problems(*whole_rows)


def test_moments_whose_bits_would_give_back_what_a_step_takes_are_refused():
    """bfloat16 has 8 bits, so from a moment less than its 256th part can't be taken for sure."""
    aware = ("backend=megatron", "backend.use_precision_aware_optimizer=true")
    both = (*aware, "backend.exp_avg_dtype=bfloat16", "backend.exp_avg_sq_dtype=bfloat16")
    assert compose_one(*both, "trainer.betas=[0.9, 0.996]").config is not None
    assert compose_one(*both[:-1], "trainer.betas=[0.9, 0.999]").config is not None
    said = sentences(compose_one(*both, "trainer.betas=[0.9, 0.9962]"))
    assert "backend.exp_avg_sq_dtype=bfloat16 keeps 8 bits of a moment" in said
    assert "backend.exp_avg_dtype" not in said
    assert "set trainer.betas=[0.9, 0.95], say, or backend.exp_avg_sq_dtype=float32" in said
    said = sentences(compose_one(*both, "trainer.betas=[0.9, 0.95]", "model.dtype=bfloat16"))
    assert "steps and moments are in that precision: set model.dtype=float32, or use_precision_aware_optimizer=false" in said


def test_adapters_are_refused_with_the_backend_that_trains_them():
    found = compose_one(*TWO, "model.lora={rank: 4, alpha: 8}")
    assert "backend=megatron trains no adapters: set model.lora=null, or backend=fsdp" in str(found.problems)
