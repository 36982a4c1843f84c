"""Small models with experts to serve, and what transformers' routers choose in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from telescope.backends.fsdp.routers import KNOWN
from tests.backends.models import random_experts
from tests.inference.models import tokenizer

LAYERS, EXPERTS, TOP_K = 3, 8, 2


def make_served_experts(root: Path, seeds: int = 2) -> list[Path]:
    """Folders of a Qwen3-MoE with other weights each, whose tokens are characters. The end token's logit is always 0: at a low
    temperature an answer never ends."""
    from safetensors.torch import load_file, save_file

    torch.set_num_threads(1)  # an engine forks this process, and a fork waits for ever for OpenMP threads that it has not
    folders = []
    for seed in range(seeds):
        folder = Path(
            random_experts(
                root / str(seed), "qwen3_moe", seed, vocab_size=len(tokenizer()), num_hidden_layers=LAYERS, num_experts=EXPERTS,
                num_key_value_heads=4, head_dim=64, hidden_size=128, moe_intermediate_size=64, eos_token_id=1,
            )
        )  # fmt: skip
        tokenizer().save_pretrained(folder)
        state = load_file(folder / "model.safetensors")
        state["lm_head.weight"][1] = 0.0
        save_file(state, folder / "model.safetensors", {"format": "pt"})
        folders.append(folder)
    return folders


class Chosen:
    """Listens to the routers of a model of transformers: for each forward pass the experts [T, L, K] that they choose, and by
    how much the logit of the last of these is ahead of the next one's [T, L]."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._found: list[tuple[torch.Tensor, torch.Tensor]] = []
        routers = [module for module in model.modules() if type(module).__name__ in KNOWN]
        assert len(routers) == LAYERS
        for router in routers:
            router.register_forward_hook(self._behind)

    def _behind(self, router: Any, given: tuple[torch.Tensor, ...], found: tuple[torch.Tensor, ...]) -> None:
        with torch.no_grad():
            logits = F.linear(given[0].reshape(-1, given[0].shape[-1]), router.weight)
            best = logits.topk(TOP_K + 1, dim=-1).values
        self._found.append((found[2].clone(), best[:, -2] - best[:, -1]))

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        found, self._found = self._found, []
        assert len(found) == LAYERS
        return torch.stack([experts for experts, _ in found], 1).numpy(), torch.stack([ahead for _, ahead in found], 1).numpy()


def differ(routed: np.ndarray, experts: np.ndarray) -> np.ndarray:
    """[T, L] bool: where two records [T, L, K] name other experts, in whichever order."""
    return np.asarray((np.sort(routed, -1) != np.sort(experts, -1)).any(-1))
