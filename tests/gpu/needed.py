"""What a check needs of its machine, said in one sentence before it does anything."""

from __future__ import annotations

import os
import sys

from telescope._launch.this_host import inspect_this_host

UNUSABLE = 2
"""Exit code of a check that can't be made here; 1 is one that found something wrong."""


def need_gpus(count: int = 1, *, instead: str = "") -> None:
    """End the process where fewer GPUs are visible, or PyTorch uses none. `instead`: how to try the script without them.

    From now on PyTorch asks the driver whether there are GPUs, as vLLM has it do: CUDA, once asked, survives no fork."""
    import torch

    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

    found, why = len(inspect_this_host().gpus), ""
    if found < count:
        why = f"this check needs {count} GPU{'s' * (count > 1)}, and this machine shows {found}"
    elif torch.version.cuda is None:
        why = f"this check needs a PyTorch built with CUDA, and this one is {torch.__version__}"
    if why:
        sys.stderr.write(f"{why}{f': {instead}' if instead else ''}\n")
        raise SystemExit(UNUSABLE)
