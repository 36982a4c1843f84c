"""Streams of one's own on a GPU, for copies that neither wait for a model's kernels nor hold them up; on a CPU nothing.

Imports torch within functions: a transport that uses them is imported wherever a run is planned.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def new_stream(device: torch.device) -> torch.cuda.Stream | None:
    """A stream of one's own on a GPU; a CPU has none."""
    import torch

    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


@contextmanager
def on_stream(device: torch.device, stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Within, this thread takes no gradients and queues its work on `stream`, after all that the device's default stream and
    the one this thread is on were given before: a caller that has waited there for a buffer to be free has waited for us, too.
    """
    import torch

    with torch.no_grad():
        if stream is None:
            yield
            return
        torch.cuda.set_device(device)
        stream.wait_stream(torch.cuda.default_stream(device))
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            yield


def wait_for_device(device: torch.device) -> None:
    """Until what this thread has queued on its stream is done."""
    import torch

    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
