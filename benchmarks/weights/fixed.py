"""What a weight update costs whatever its size: torch operators and the CPU time of both ends' threads, on any machine.

    python -m benchmarks.weights.fixed                                 # the tensors of Qwen2.5-0.5B, 1/32 as wide, over gloo
    python -m benchmarks.weights.fixed --shapes 0.5B 3B --profile 25   # and the functions that take longest

The layout has as many tensors and as many buckets as the real one, whose tensors are as large in proportion to what digests
look at in one go, and so few bytes that moving them costs next to nothing.
Both ends are those of a run, each a thread of this process; `policy` is the path of the FSDP backend's names, `dict` that of
`benchmarks.weights.wire`. On a GPU every operator that is no view is at least one kernel launch.

- operators: calls that reach torch's dispatcher in one update, and those of them that are views
- CPU ms: `time.thread_time` of the end's own thread, the median over `--updates`
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from msgspec import structs
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.shapes import SHAPES, model_config, random_tensors
from benchmarks.weights.movers import Model
from telescope.backends.fsdp import gather
from telescope.config.sections import WeightSyncSettings
from telescope.maths.memory import ModelShape
from telescope.records import WeightGroup, WeightManifest
from telescope.weights import sampled_digest
from telescope.weights.base import ServerEnd, TrainerEnd
from telescope.weights.buckets import buckets
from telescope.weights.transport_choice import transport_named

NARROWER, WARM_UP = 32, 3
FULL = {"WORDS_AT_ONCE": sampled_digest.WORDS_AT_ONCE, "TOGETHER": sampled_digest.TOGETHER}
MIB = 1 << 20


class Count(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Operators of the thread that enters it, by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.views: Counter[str] = Counter()
        self.others: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        (self.views if func.is_view else self.others)[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def narrow(shape: ModelShape) -> ModelShape:
    """As many tensors, each side 1/32 as long."""
    sides = ("hidden", "intermediate", "head_dim", "vocabulary")
    return structs.replace(shape, **{side: max(2, getattr(shape, side) // NARROWER) for side in sides})


class PolicySource(Model):
    """The same through what the FSDP backend does for the names of a model's files."""

    def __init__(self, shape: ModelShape) -> None:
        from transformers import AutoModelForCausalLM

        from telescope.backends.fsdp.policy import Policy

        self.device = "cpu"
        self._policy = Policy(AutoModelForCausalLM.from_config(model_config(shape)).float(), "sdpa")
        self.parameters = dict(self._policy.by_name())
        self._packer = gather.Packer(lambda: self._policy.published(1), 0, 1)


def dict_source(shape: ModelShape) -> Model:
    model = Model.__new__(Model)
    model.device, model.parameters = "cpu", random_tensors(shape, "cpu", torch.float32, seed=0)
    model._packer = gather.Packer(lambda: model.parameters, 0, 1)
    return model


class Pieces(WeightSyncSettings):
    """Of so many bytes, where settings count in MB."""

    most_bytes: int

    @property
    def bucket_bytes(self) -> int:
        return self.most_bytes


class Ends:
    """A sender and a receiver over gloo."""

    def __init__(self, source: Model, bucket_bytes: int) -> None:
        self.source = source
        sync = Pieces(most_bytes=bucket_bytes, init_timeout_s=60.0, update_timeout_s=60.0)
        gloo = transport_named("gloo")
        self.sender = gloo.publisher(source, TrainerEnd("run", Path("."), "cpu", sync, "bfloat16"))
        self.receiver = gloo.receiver(ServerEnd("run", "server-0/0", "cpu", 60.0))
        self.version = 0
        self.staging = torch.zeros(0, dtype=torch.uint8)

    def update(self, around: Callable[[str, Callable[[], str]], object]) -> WeightManifest:
        """`around` is given the name of each end and its part, which runs in that end's thread."""
        self.version += 1
        self.source.change()
        manifest, group = self.sender.publish(self.version), WeightGroup(0, ("trainer-0", "server-0/0"))
        assert manifest is not None
        if self.staging.numel() != manifest.nbytes:
            self.staging = torch.zeros(manifest.nbytes, dtype=torch.uint8)
        told: dict[str, str] = {}

        def send() -> str:
            return told.setdefault("sent", self.sender.send(self.version, group))

        def receive() -> str:
            return told.setdefault("received", self.receiver.receive(manifest, group, self.staging, 60.0))

        threads = [threading.Thread(target=around, args=end) for end in (("receiver", receive), ("sender", send))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if told.get("sent", "no") != told.get("received"):
            raise SystemExit(f"the ends disagree: {told}")
        return manifest

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()


def measure(name: str, source: Model, bucket_bytes: int, given: argparse.Namespace) -> None:
    ends = Ends(source, bucket_bytes)
    counts: dict[str, Count] = {}
    seconds: dict[str, list[float]] = {"sender": [], "receiver": []}

    def count(end: str, part: Callable[[], str]) -> None:
        with Count() as counts[end]:
            part()

    def clock(end: str, part: Callable[[], str]) -> None:
        started = time.thread_time()
        part()
        seconds[end].append(time.thread_time() - started)

    for _ in range(WARM_UP):
        manifest = ends.update(lambda end, part: part())
    cut = len(buckets(manifest.tensors, manifest.bucket_bytes))
    ends.update(count)
    for _ in range(given.updates):
        ends.update(clock)
    for end, taken in seconds.items():
        found = counts[end]
        views, others = found.views.total(), found.others.total()
        most = ", ".join(f"{what} {number}" for what, number in (found.views + found.others).most_common(6))
        print(
            f"{name:14} {len(manifest.tensors):5} {cut:5} {end:9} {views + others:6} {views:6} {others:6} "
            f"{statistics.median(taken) * 1e3:8.2f} {min(taken) * 1e3:8.2f}  {most}",
            flush=True,
        )
    for end in ("sender", "receiver") if given.profile else ():
        profile(ends, end, given)
    ends.close()


def profile(ends: Ends, wanted: str, given: argparse.Namespace) -> None:
    watched = cProfile.Profile()

    def around(end: str, part: Callable[[], str]) -> None:
        if end == wanted:
            watched.runcall(part)
        else:
            part()

    for _ in range(given.updates):
        ends.update(around)
    pstats.Stats(watched).sort_stats("tottime").print_stats(given.profile)


def as_at_full_width(shape: ModelShape, narrowed: ModelShape) -> None:
    """Let digests take a narrow tensor for as large as the real one is: how many operators see to it depends on that."""
    for name, words in FULL.items():
        setattr(sampled_digest, name, words * narrowed.parameters // shape.parameters)


def bucket_bytes_of(shape: ModelShape, narrowed: ModelShape, mib: int) -> int:
    """So that the narrow layout falls into about as many buckets as the real one."""
    return mib * MIB * narrowed.parameters // shape.parameters


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["0.5B"])
    parser.add_argument("--sources", nargs="+", choices=["dict", "policy"], default=["dict", "policy"])
    parser.add_argument("--bucket-mb", nargs="+", type=int, default=[256], help="of the real shape; 0: each tensor for itself")
    parser.add_argument("--updates", type=int, default=15)
    parser.add_argument("--profile", type=int, default=0, help="print so many functions of each end")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}")
    print(f"{'source':14} tens. buck. {'end':9}  oper.  views others   CPU ms     best  most")
    for shape in given.shapes:
        for mib in given.bucket_mb:
            for source in given.sources:
                narrowed = narrow(SHAPES[shape])
                as_at_full_width(SHAPES[shape], narrowed)
                model = dict_source(narrowed) if source == "dict" else PolicySource(narrowed)
                measure(f"{shape} {source} {mib}", model, bucket_bytes_of(SHAPES[shape], narrowed, mib), given)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may not outlive the interpreter
