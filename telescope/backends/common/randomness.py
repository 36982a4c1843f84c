"""The states of this process's random generators as a tensor, and back: Python's, numpy's, torch's and its GPU's."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor


def as_bytes(value: Any) -> Tensor:
    """[n] uint8: the value as JSON."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def from_bytes(tensor: Tensor) -> Any:
    return json.loads(tensor.cpu().numpy().tobytes())


def state(device: str) -> Tensor:
    """[n] uint8."""
    version, words, gauss = random.getstate()
    legacy = np.random.get_state(legacy=False)
    return as_bytes(
        {
            "python": [version, list(words), gauss],
            "numpy": {**legacy, "state": {"key": legacy["state"]["key"].tolist(), "pos": legacy["state"]["pos"]}},
            "torch": torch.get_rng_state().tolist(),
            "cuda": torch.cuda.get_rng_state(device).tolist() if device.startswith("cuda") else None,
        }
    )


def restore(tensor: Tensor, device: str) -> None:
    """A GPU's state is left alone where either side has none."""
    found = from_bytes(tensor)
    version, words, gauss = found["python"]
    random.setstate((version, tuple(words), gauss))
    legacy = found["numpy"]
    np.random.set_state({**legacy, "state": {**legacy["state"], "key": np.array(legacy["state"]["key"], np.uint32)}})
    torch.set_rng_state(torch.tensor(found["torch"], dtype=torch.uint8))
    if device.startswith("cuda") and found["cuda"] is not None:
        torch.cuda.set_rng_state(torch.tensor(found["cuda"], dtype=torch.uint8), device)
