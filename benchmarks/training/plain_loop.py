"""The loop that anyone writes in fifty lines, to be measured beside ours.

transformers with sdpa, `fully_shard` a layer, bfloat16 over float32 masters, full checkpointing, the head in checkpointed
chunks, clipping, fused AdamW; samples padded to the longest of their micro-batch, which has the row's tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from benchmarks.training.samples import Samples
from telescope.backends.base import World
from telescope.backends.common import ranks
from telescope.maths.dealing import assign

CHUNK = 1024
Step = Callable[[int], dict[str, float]]
"""Trains the step of this number; gives what it knows of its phases, in seconds."""


def plain(row: int, folder: Path, world: World, samples: Samples) -> tuple[Step, Callable[[], None]]:
    """One step of the loop that anyone writes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers import AutoModelForCausalLM

    ranks.join(world, 600.0)
    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").train()
    lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    mesh = init_device_mesh(world.device.partition(":")[0], (world.size,))
    shard = functools.partial(
        fully_shard, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    )
    for layer in lm.model.layers:
        shard(layer)
    model = Padded(lm, samples.prompt)
    shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0, fused=True)
    batches = list(padded(samples, row, world))

    def step(_: int) -> dict[str, float]:
        for ids, lengths in batches:
            model(ids.to(world.device), lengths.to(world.device)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return {}

    return step, ranks.leave


class Padded(torch.nn.Module):
    """Mean negative log-prob of what is no prompt and no padding."""

    def __init__(self, lm: Any, prompt: int) -> None:
        super().__init__()
        self.lm, self._prompt = lm, prompt

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """ids [B, L], lengths [B]."""
        places = torch.arange(ids.shape[1], device=ids.device)[None]
        hidden = self.lm.model(input_ids=ids, attention_mask=(places < lengths[:, None]).long(), use_cache=False)[0]
        counted = ((places >= self._prompt) & (places < lengths[:, None]))[:, 1:]
        states, targets = hidden[:, :-1][counted], ids[:, 1:][counted]
        total: Tensor = states.new_zeros((), dtype=torch.float32)
        for some, wanted in zip(torch.split(states, CHUNK), torch.split(targets, CHUNK), strict=True):
            total = total + checkpoint(negative, some, self.lm.lm_head.weight, wanted, use_reentrant=False)
        return total / max(len(targets), 1)


def negative(states: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """Sum of -log p(target); states [n, H], head [V, H]."""
    return F.cross_entropy(F.linear(states, head).float(), targets, reduction="sum")


def padded(samples: Samples, row: int, world: World) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's micro-batches, longest samples first; as many as the rank with most has, its last one again if need be."""
    dealt = [cut(samples, list(share), row) for share in assign([float(length) for length in samples.lengths], world.size)]
    mine = dealt[world.rank]
    for number in range(max(len(each) for each in dealt)):
        picked = mine[min(number, len(mine) - 1)]
        ids = np.zeros((len(picked), max(samples.lengths[i] for i in picked)), np.int64)
        for place, i in enumerate(picked):
            ids[place, : samples.lengths[i]] = samples.ids[i]
        yield torch.from_numpy(ids), torch.tensor([samples.lengths[i] for i in picked])


def cut(samples: Samples, mine: list[int], row: int) -> list[list[int]]:
    """Samples by length, into batches whose padded size is at most `row`."""
    batches: list[list[int]] = []
    for i in sorted(mine, key=lambda i: -samples.lengths[i]):
        if batches and (len(batches[-1]) + 1) * samples.lengths[batches[-1][0]] <= row:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches
