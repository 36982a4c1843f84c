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
