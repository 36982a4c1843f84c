"""backend=megatron in a whole configuration: it is composed without torch, and its ranks are checked with all else."""

from __future__ import annotations

import json
from pathlib import Path

from tests.config.conftest import compose_one

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
    staged = "which is not built for models with experts, as this one is: set it to 1"
    assert staged in problems(ranks, "backend.pipeline_parallel_size=2", num_experts=8)
    assert staged not in problems(ranks, "backend.pipeline_parallel_size=2")


def test_adapters_are_refused_with_the_backend_that_trains_them():
    found = compose_one(*TWO, "model.lora={rank: 4, alpha: 8}")
    assert "backend=megatron trains no adapters: set model.lora=null, or backend=fsdp" in str(found.problems)
