"""Which attention kernels can work on a machine, and in which order they are taken. Without torch, so that a run can be
refused before it starts.

Owns the choice behind `backend.attention`. Refuses an explicit choice that can't work, with the reason. The kernels themselves
are kernels.py's.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["flash3", "cudnn", "flash2", "varlen", "flex", "sdpa"]
"""In the order in which `auto` takes the first that works."""
FLASH: tuple[Kind, ...] = ("flash3", "flash2", "varlen")
Setting = Literal["auto", "flash", "flash3", "cudnn", "flash2", "varlen", "flex", "sdpa"]
FLASH2_LINE = "pip install --no-build-isolation 'flash-attn>=2.8,<2.9'"
PACKAGES: dict[Kind, str] = {"flash3": "flash_attn_interface", "flash2": "flash_attn"}
WORDS: dict[Kind, str] = {
    "flash3": "flash3 (FlashAttention 3)",
    "cudnn": "cudnn (cuDNN's for long samples, varlen for the others)",
    "flash2": "flash2 (the flash_attn package)",
    "varlen": "varlen (torch's own)",
    "flex": "flex (compiled FlexAttention)",
    "sdpa": "sdpa (samples of like length stacked)",
}
HALF = ("bfloat16", "float16")
AMPERE, HOPPER = 8, 9
"""Major compute capabilities."""


@dataclass(frozen=True)
class KernelHost:
    """What decides which kernels work."""

    device: str
    dtype: str
    """That of the forward pass, e.g. `bfloat16`."""
    capability: int = 0
    """Major compute capability of the GPU; 0 on a CPU."""
    packages: frozenset[str] = frozenset()
    """Of `PACKAGES`, those that are installed."""
    cudnn: bool = True
    """Whether torch has it."""

    @property
    def gpu(self) -> bool:
        return self.device.startswith("cuda")


def installed() -> frozenset[str]:
    """Of `PACKAGES`, those that this Python finds."""
    return frozenset(name for name in PACKAGES.values() if importlib.util.find_spec(name) is not None)


def choose(setting: Setting, here: KernelHost) -> Kind:
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


def refusal(setting: Setting, *, dtype: str, on_gpu: bool, capability: Callable[[], int | None], elsewhere: bool) -> str | None:
    """Why the setting can't work where ranks are to run, with the remedy; None where it can, or where that can't be told.

    `capability` asks for the GPUs' major one; None: not known. `elsewhere`: not in this Python.
    """
    if setting in ("auto", "sdpa"):
        return None  # work everywhere
    known = capability() if on_gpu else None
    packages = frozenset(PACKAGES.values()) if elsewhere else installed()
    device, able = ("cuda:0", HOPPER if known is None else known) if on_gpu else ("cpu", 0)
    try:
        choose(setting, KernelHost(device, dtype, able, packages))
    except ValueError as error:
        return str(error)
    return None


def obstacle(kind: Kind, here: KernelHost) -> str | None:
    """Why a kernel can't work on this machine; None where it can. `sdpa` always can."""
    if kind == "sdpa":
        return None
    if kind == "flex":
        return None if here.gpu else f"trains on a GPU only, not on {here.device}"
    if not here.gpu or here.dtype not in HALF:
        return f"computes in bfloat16 or float16 on a GPU, not {here.dtype} on {here.device}"
    least = HOPPER if kind in ("flash3", "cudnn") else AMPERE
    if here.capability < least or (kind == "flash3" and here.capability > HOPPER):
        exactly = " exactly" if kind == "flash3" else " at least"
        return f"needs a GPU of compute capability{exactly} {least}, and this one has {here.capability}"
    if kind == "cudnn" and not here.cudnn:
        return "needs a torch that has cuDNN"
    package = PACKAGES.get(kind)
    if package is not None and package not in here.packages:
        line = f" (run {FLASH2_LINE}, the extra `flash` of telescope-rl)" if kind == "flash2" else ""
        return f"needs the package {package}, which is not installed{line}"
    return None
