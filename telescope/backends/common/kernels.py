"""The flash kernels under one signature, and a look at what this machine has for all of them.

Which of them works where, and which is taken, is attention_choice.py's; what they compute of a packed row is attention.py's.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from telescope.backends.common.attention_choice import PACKAGES, WORDS, KernelHost, Kind, choose, installed, obstacle

__all__ = ["WORDS", "KernelHost", "Kind", "Lengths", "by_lengths", "choose", "machine", "obstacle"]


class Lengths(Protocol):
    """A kernel: query [U, Hq, D], key and value [T, Hkv, D] -> [U, Hq, D], causal within each segment."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, at: tuple[Tensor, int], keys_at: tuple[Tensor, int], scale: float | None,
        window: int,
    ) -> Tensor:  # fmt: skip
        """at: boundaries [S + 1] int32 and the longest segment, of queries; keys_at: likewise of keys, of which a segment may
        have more: its queries are then the last of it. window: tokens seen to the left, or -1."""


def machine(device: str, dtype: torch.dtype) -> KernelHost:
    """This one."""
    capability = torch.cuda.get_device_capability(device)[0] if device.startswith("cuda") else 0
    cudnn: bool = torch.backends.cudnn.is_available()  # type: ignore[no-untyped-call]
    return KernelHost(device, str(dtype).removeprefix("torch."), capability, installed(), cudnn)


@functools.cache
def by_lengths(kind: Kind) -> Lengths:
    """One of the flash kernels."""
    return _built_in() if kind in ("varlen", "cudnn") else _installed(PACKAGES[kind])


def _installed(package: str) -> Lengths:
    function: Callable[..., Any] = importlib.import_module(package).flash_attn_varlen_func

    def run(
        q: Tensor, k: Tensor, v: Tensor, at: tuple[Tensor, int], keys_at: tuple[Tensor, int], scale: float | None, window: int
    ) -> Tensor:
        told = at[0], keys_at[0], at[1], keys_at[1]
        found = function(q, k, v, *told, softmax_scale=scale, causal=True, window_size=(window, 0))
        result: Tensor = found[0] if isinstance(found, tuple) else found  # early versions of FlashAttention 3 say more
        return result

    return run


def _built_in() -> Lengths:
    from torch.nn.attention.varlen import varlen_attn

    # torch 2.11 shares key heads among query heads unasked; later ones want to be told
    sharing: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}

    def run(
        q: Tensor, k: Tensor, v: Tensor, at: tuple[Tensor, int], keys_at: tuple[Tensor, int], scale: float | None, window: int
    ) -> Tensor:
        told = at[0], keys_at[0], at[1], keys_at[1]
        result = varlen_attn(q, k, v, *told, scale=scale, window_size=(window, 0), **sharing)
        assert isinstance(result, Tensor)  # a tuple only where more is asked for
        return result

    return run
