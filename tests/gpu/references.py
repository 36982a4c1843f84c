"""What transformers says of a served answer, for the checks of this folder: each model is loaded once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np


class References:
    """Models of folders on a device in a precision, e.g. `References("cpu", "float32")`. Torch is imported at the first
    question, which on a GPU must come after the engine's fork."""

    def __init__(self, device: str = "cpu", dtype: str = "float32") -> None:
        self._device, self._dtype = device, dtype
        self._models: dict[Path, Any] = {}

    def logprobs(self, folder: Path, prompt: np.ndarray, ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
        """[T] float32: of each token of the answer, given all before it, after temperature."""
        import torch

        tokens = torch.as_tensor(np.concatenate([prompt, ids]).astype(np.int64), device=self._device)[None]
        with torch.no_grad():
            logits = self.model(folder)(tokens).logits[0, len(prompt) - 1 : -1].float() / temperature
            taken = logits.log_softmax(-1).gather(1, tokens[0, len(prompt) :, None])[:, 0]
        return np.asarray(taken.cpu().numpy(), dtype=np.float32)

    def model(self, folder: Path) -> Any:
        import torch
        from transformers import AutoModelForCausalLM

        if folder not in self._models:
            loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, self._dtype))
            self._models[folder] = loaded.to(self._device).eval()
        return self._models[folder]
