"""Which attention kernels can work on this machine, in which order they are taken, and the flash ones under one signature.

Owns the choice behind `backend.attention`. Refuses an explicit choice that can't work, with the reason. What the kernels
compute of a packed row is attention.py's.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

Kind = Literal["flash3", "cudnn", "flash2", "varlen", "flex", "sdpa"]
"""In the order in which `auto` takes the first that works."""
FLASH: tuple[Kind, ...] = ("flash3", "flash2", "varlen")
Setting = Literal["auto", "flash", "flash3", "cudnn", "flash2", "varlen", "flex", "sdpa"]
PACKAGES: dict[Kind, str] = {"flash3": "flash_attn_interface", "flash2": "flash_attn"}
WORDS: dict[Kind, str] = {
    "flash3": "flash3 (FlashAttention 3)",
    "cudnn": "cudnn (cuDNN's for long samples, varlen for the others)",
    "flash2": "flash2 (the flash_attn package)",
    "varlen": "varlen (torch's own)",
    "flex": "flex (compiled FlexAttention)",
    "sdpa": "sdpa (samples of like length stacked)",
}
HALF = (torch.bfloat16, torch.float16)
AMPERE, HOPPER = 8, 9
"""Major compute capabilities."""

Lengths = Callable[[Tensor, Tensor, Tensor, Tensor, int, float | None, int], Tensor]
"""(query [T, Hq, D], key, value [T, Hkv, D], boundaries [S + 1] int32, longest, scale, tokens seen to the left or -1) ->
[T, Hq, D], causal within each segment."""


@dataclass(frozen=True)
class Machine:
    """What decides which kernels work."""

    device: str
    dtype: torch.dtype
    capability: int = 0
    """Major compute capability of the GPU; 0 on a CPU."""
    packages: frozenset[str] = frozenset()
    """Of `PACKAGES`, those that are installed."""
    cudnn: bool = True
    """Whether torch has it."""

    @property
    def gpu(self) -> bool:
        return self.device.startswith("cuda")


def machine(device: str, dtype: torch.dtype) -> Machine:
    """This one."""
    installed = frozenset(name for name in PACKAGES.values() if importlib.util.find_spec(name) is not None)
    capability = torch.cuda.get_device_capability(device)[0] if device.startswith("cuda") else 0
    cudnn: bool = torch.backends.cudnn.is_available()  # type: ignore[no-untyped-call]
    return Machine(device, dtype, capability, installed, cudnn)


def choose(setting: Setting, here: Machine) -> Kind:
    """The kernel that the setting means on this machine. Raises `ValueError` where it can't work."""
    among: tuple[Kind, ...]
    if setting == "auto":
        among = get_args(Kind)
    elif setting == "flash":
        among = FLASH
    else:
        among = (setting,)
    for kind in among:
        if obstacle(kind, here) is None:
            return kind
    raise ValueError(f"backend.attention={setting} {obstacle(among[-1], here)}: use {choose('auto', here)}, or auto")


def obstacle(kind: Kind, here: Machine) -> str | None:
    """Why a kernel can't work on this machine; None where it can. `sdpa` always can."""
    if kind == "sdpa":
        return None
    if kind == "flex":
        return None if here.gpu else f"trains on a GPU only, not on {here.device}"
    if not here.gpu or here.dtype not in HALF:
        name = str(here.dtype).removeprefix("torch.")
        return f"computes in bfloat16 or float16 on a GPU, not {name} on {here.device}"
    least = HOPPER if kind in ("flash3", "cudnn") else AMPERE
    if here.capability < least or (kind == "flash3" and here.capability > HOPPER):
        exactly = " exactly" if kind == "flash3" else " at least"
        return f"needs a GPU of compute capability{exactly} {least}, and this one has {here.capability}"
    if kind == "cudnn" and not here.cudnn:
        return "needs a torch that has cuDNN"
    package = PACKAGES.get(kind)
    if package is not None and package not in here.packages:
        return f"needs the package {package}, which is not installed"
    return None


@functools.cache
def by_lengths(kind: Kind) -> Lengths:
    """One of the flash kernels."""
    return _built_in() if kind in ("varlen", "cudnn") else _installed(PACKAGES[kind])


def _installed(package: str) -> Lengths:
    function: Callable[..., Any] = importlib.import_module(package).flash_attn_varlen_func

    def run(q: Tensor, k: Tensor, v: Tensor, at: Tensor, longest: int, scale: float | None, window: int) -> Tensor:
        found = function(q, k, v, at, at, longest, longest, softmax_scale=scale, causal=True, window_size=(window, 0))
        result: Tensor = found[0] if isinstance(found, tuple) else found  # early versions of FlashAttention 3 say more
        return result

    return run


def _built_in() -> Lengths:
    from torch.nn.attention.varlen import varlen_attn

    # torch 2.11 shares key heads among query heads unasked; later ones want to be told
    sharing: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}

    def run(q: Tensor, k: Tensor, v: Tensor, at: Tensor, longest: int, scale: float | None, window: int) -> Tensor:
        result = varlen_attn(q, k, v, at, at, longest, longest, scale=scale, window_size=(window, 0), **sharing)
        assert isinstance(result, Tensor)  # a tuple only where more is asked for
        return result

    return run
