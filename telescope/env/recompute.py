"""Log-probs of a run's kept tokens once more, by transformers on this machine's CPU: what the trainer sees of them.

Only tokens that the given version of the weights sampled can be compared; of all others it says nothing. Refuses to look for
weights: the base model is version 0, and a folder of any other version is named by whoever asks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from telescope.maths.support import Support, left_out

if TYPE_CHECKING:
    from torch import Tensor


class Recomputer:
    """One version's weights, in float32."""

    def __init__(self, model: Any, version: int, temperature: float, support: Support) -> None:
        self._model = model
        self.version = version
        self._temperature = temperature
        self._support = support

    @classmethod
    def load(cls, folder: Path, version: int, temperature: float, support: Support) -> Recomputer:
        """Of a Hugging Face folder. Raises OSError where it holds no model."""
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        return cls(model, version, temperature, support)

    def logprobs(self, row: Mapping[str, Any]) -> np.ndarray:
        """[S] float32 of the row's sampled tokens, NaN where another version sampled them."""
        places = np.flatnonzero(np.asarray(row["mask"]))
        mine = np.asarray(row["versions"]) == self.version
        found = np.full(len(places), np.nan, np.float32)
        if mine.any():
            found[mine] = self._score(row["ids"], places[mine])
        return found

    def _score(self, ids: Sequence[int], places: np.ndarray) -> np.ndarray:
        import torch

        given, asked = torch.tensor(ids)[None], torch.from_numpy(places)
        with torch.inference_mode():
            # A token's log-prob stands at the place before it; logits of no other places are made.
            logits: Tensor = self._model(given, use_cache=False, logits_to_keep=asked - 1).logits[0].float() / self._temperature
            targets = given[0, asked]
            if not self._support.is_whole:
                logits = logits.masked_fill(left_out(logits, targets, self._support), -float("inf"))
            scored: np.ndarray = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0].numpy()
        return scored


def difference(row: Mapping[str, Any], found: np.ndarray) -> str:
    """`recomputed with version 0 …` in one line: how far the two are apart."""
    apart = np.abs(found - np.asarray(row["logprobs"], np.float32))
    apart = apart[~np.isnan(apart)]
    if not len(apart):
        return f"none of its {len(found)} sampled tokens is of that version"
    return (
        f"{len(apart)} of its {len(found)} sampled tokens recomputed: |difference| {apart.mean():.2e} in the mean, "
        f"{apart.max():.2e} at most"
    )
