"""The loss by hand, in plain transformers, sample by sample."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from telescope.backends.base import TrainShard


def token_mean(plain: Any, shard: TrainShard) -> torch.Tensor:
    """GRPO's token mean: the sum over sampled tokens (from the fifth on) of -log p times the advantage, over their count."""
    loss, end = torch.zeros(()), 0
    for item in shard.items:
        start, end = end, end + item.length
        ids = torch.from_numpy(shard.ids[start:end].astype(np.int64))
        logp = plain(ids[None]).logits[0, 3:-1].log_softmax(-1).gather(1, ids[4:, None])
        loss = loss - logp.sum() * item.advantage / shard.denominators[0].tokens
    return loss
