"""One backend at a time: its process group is closed after each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.backends.watching import Watching, watch


@pytest.fixture
def build() -> Iterator[Callable[..., Watching]]:
    """`build(job, **settings)`; the backend before is closed first."""
    built: list[Watching] = []

    def make(job, **settings):
        if built:
            built.pop().close()
        built.append(watch(job, **settings))
        return built[-1]

    yield make
    for backend in built:
        backend.close()


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
