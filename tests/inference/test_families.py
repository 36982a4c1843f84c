"""Models of other makers in the real engine: fused in their files or not, tied or not, with windows, with biases. What the
trainer publishes after a step is what vLLM computes with; what vLLM has no place for is refused."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from telescope.inference.engine import WeightsRefused
from tests.gpu.check_moe import CLOSE, check
from tests.inference.models import make_family
from tests.inference.test_expert_engine import train_one_step

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

FAMILIES = {
    "phi3, q, k and v fused in its files": ("phi3", {}),
    "glm4, gate and up fused in its files": ("glm4", {}),
    "gemma3, tied, windows and full attention": ("gemma3_text", {
        "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 20,
        "tie_word_embeddings": True, "initializer_range": 0.08}),
    "mistral with a window": ("mistral", {"sliding_window": 16}),
    "llama, tied, with all biases": ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "starcoder2, tied, norms with biases": ("starcoder2", {"tie_word_embeddings": True}),
    "olmo2, norms behind the layers": ("olmo2", {}),
    "gpt-neox, by vLLM's way for any model of transformers, q, k and v fused head by head": ("gpt_neox", {}),
    "gpt-neox, attention and mlp one after the other, a head turned as a whole": ("gpt_neox", {
        "use_parallel_residual": False, "rope_parameters": {
            "rope_type": "default", "partial_rotary_factor": 1.0, "rope_theta": 10000.0}}),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_a_version_after_a_step_is_what_the_engine_computes_with(vllm_variables, tmp_path: Path, family: str):
    kind, changes = FAMILIES[family]
    old = make_family(tmp_path / "old", kind, 0, **changes)
    train_one_step(old, tmp_path / "trained")
    facts = asyncio.run(check([old, tmp_path / "trained"], "cpu", "full", "float32", kind))
    assert len(facts) == 6
    assert CLOSE["float32"] == 1e-3
    assert not [fact for fact in facts if not fact[1]]


def test_a_bias_that_the_engine_has_no_place_for_is_refused_with_its_name(vllm_variables, tmp_path: Path):
    """vLLM's Qwen3 has no bias behind attention and leaves it out without a word: its log-probs are another model's."""
    old = make_family(tmp_path / "old", "qwen3", 0, attention_bias=True)
    train_one_step(old, tmp_path / "trained")
    said = (
        r"the engine computes nothing with 2 tensors, so what is trained is not what samples: model\.layers\.0\.self_attn\.o_"
    )
    with pytest.raises(WeightsRefused, match=said):
        asyncio.run(check([old, tmp_path / "trained"], "cpu", "full", "float32", "qwen3"))
