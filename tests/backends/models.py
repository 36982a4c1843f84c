"""Small models with drawn weights."""

from __future__ import annotations

from pathlib import Path

import torch


def random_model(folder: Path, **changes: object) -> str:
    """A small Qwen3 with drawn weights, saved as its makers would."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(1)
    sizes = {
        "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "initializer_range": 0.2,
    }  # fmt: skip
    Qwen3ForCausalLM(Qwen3Config(**{**sizes, **changes})).save_pretrained(folder)
    return str(folder)


def random_experts(folder: Path, kind: str = "qwen3_moe", seed: int = 2, **changes: object) -> str:
    """A small model whose layers have four experts, of which a token takes two; its files have a matrix for each."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    sizes = {
        "vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "initializer_range": 0.2,
        "num_experts_per_tok": 2, "tie_word_embeddings": False, "eos_token_id": 2,
    }  # fmt: skip
    own = {
        "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 24, "norm_topk_prob": True},
        "mixtral": {"num_local_experts": 4},
        "glm4_moe": {
            "n_routed_experts": 4, "moe_intermediate_size": 24, "first_k_dense_replace": 1, "n_shared_experts": 1, "n_group": 1,
            "topk_group": 1,
        },
    }  # fmt: skip
    config = AutoConfig.for_model(kind, **{**sizes, **own.get(kind, {}), **changes})
    lm = AutoModelForCausalLM.from_config(config)
    for name, buffer in lm.named_buffers():
        if name.endswith("e_score_correction_bias"):  # zeros when drawn
            buffer.normal_(0, 0.3)
    lm.save_pretrained(folder)
    return str(folder)


def random_other(folder: Path, kind: str, **changes: object) -> str:
    """A small model of another kind, by transformers' name of it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    sizes = {
        "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.2,
    }  # fmt: skip
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**sizes, **changes})).save_pretrained(folder)
    return str(folder)
