"""The sending process of the weight benchmark: random weights of a shape, published by the run's own publishers.

Reads one JSON order a line from stdin and answers each with one line on stdout: `{"publish": 3}`, `{"send": 3, "group": …}`,
`{"fill": 0.8}` (take so much of the GPU and give it back), `{"stop": true}`. The first line it prints says that the model
folder is written. Each version has other weights than the one before, unless its order says `"redraw": false`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks.shapes import SHAPES, random_tensors, write_folder
from telescope.config.sections import WeightSyncSettings
from telescope.records import WeightGroup
from telescope.weights.base import TrainerEnd
from telescope.weights.buckets import Bucket, ModelTensor
from telescope.weights.transport_choice import transport_named


class Model:
    """What a publisher asks of a backend, over plain tensors on one device."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def layout(self) -> Sequence[ModelTensor]:
        return [ModelTensor(name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in self.tensors.items()]

    def pack(self, bucket: Bucket, out: torch.Tensor | None) -> None:
        if out is None:
            return
        rows = [out[spec.offset - bucket.start :][: spec.nbytes].view(getattr(torch, spec.dtype)) for spec in bucket.specs]
        torch._foreach_copy_(rows, [self.tensors[spec.name].reshape(-1) for spec in bucket.specs])

    def weights(self, dtype: str | None = None) -> Iterator[tuple[str, Any]]:
        kind = getattr(torch, dtype) if dtype else None
        for name, tensor in self.tensors.items():
            yield name, tensor.to(kind or tensor.dtype).cpu()

    def redraw(self) -> None:
        """Other weights at the same place: the layers' matrices in another order of rows."""
        for name, tensor in self.tensors.items():
            if "proj" in name:
                tensor.copy_(tensor.roll(1, 0))


def main() -> int:
    asked = json.loads(sys.argv[1])
    device, dtype = asked["device"], getattr(torch, asked["dtype"])
    model = Model(random_tensors(SHAPES[asked["shape"]], device, dtype, seed=0))
    write_folder(Path(asked["folder"]), SHAPES[asked["shape"]], model.tensors)
    sync = WeightSyncSettings.model_validate(asked["weight_sync"])
    end = TrainerEnd(asked["run"], Path(asked["directory"]), device, sync)
    publisher = transport_named(asked["transport"]).publisher(model, end)
    say({"ready": True, "parameters": sum(t.numel() for t in model.tensors.values())})
    for line in sys.stdin:
        order = json.loads(line)
        started = time.perf_counter()
        answer: dict[str, Any] = {}
        if "publish" in order:
            if order.get("redraw", True):
                model.redraw()
            answer["manifest"] = msgspec.to_builtins(publisher.publish(order["publish"]))
        elif "send" in order:
            group = msgspec.convert(order["group"], WeightGroup)
            answer["checksum"] = publisher.send(order["send"], group)
        elif "fill" in order:
            answer["bytes"] = fill(device, order["fill"])
        elif "stop" in order:
            break
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        say(answer | {"seconds": time.perf_counter() - started})
    publisher.close()
    return 0


def fill(device: str, share: float) -> int:
    """Have this share of the whole GPU, as a training step would, and give it back. Raises `torch.OutOfMemoryError`."""
    if not device.startswith("cuda"):
        return 0
    nbytes = int(torch.cuda.get_device_properties(device).total_memory * share)
    taken = torch.ones(nbytes, dtype=torch.uint8, device=device)
    found = int(taken[-1]) * nbytes
    del taken
    torch.cuda.empty_cache()
    return found


def say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    sys.exit(main())
