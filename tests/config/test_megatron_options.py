"""backend=megatron in a whole configuration: it is composed without torch, and its ranks are checked with all else."""

from __future__ import annotations

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


def test_adapters_are_refused_with_the_backend_that_trains_them():
    found = compose_one(*TWO, "model.lora={rank: 4, alpha: 8}")
    assert "backend=megatron trains no adapters: set model.lora=null, or backend=fsdp" in str(found.problems)
