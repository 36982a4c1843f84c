"""What a GPU is good for, and the latencies that follow from it where no run has been measured. Derived, so "uncalibrated".

Peak figures are those of the vendor's data sheets; the shares of them that are reached, and the fixed costs, are stated here
one by one and explained in docs/planning.md.
"""

from __future__ import annotations

import msgspec

from telescope.maths.flops import forward_flops_per_token
from telescope.maths.memory import (
    Checkpointing,
    ModelShape,
    Offload,
    Optimizer,
    moment_bytes,
)
from telescope.maths.row_times import READ_SHARE, RowTime, time_row
from telescope.planning.latencies import Distribution, EngineTimes, Latencies, constant
from telescope.weights.base import TransportCost

GIB = 2**30


class GpuCard(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    memory: int
    """Bytes that a process can have."""
    flops: float
    """Dense bfloat16 operations a second, peak."""
    bandwidth: float
    """Of its memory, bytes a second, peak."""
    link: float
    """To the other cards of its host, bytes a second, each way, peak."""


CARDS = {
    "h100": GpuCard(name="H100", memory=79 * GIB, flops=989e12, bandwidth=3.35e12, link=450e9),
    "h200": GpuCard(name="H200", memory=140 * GIB, flops=989e12, bandwidth=4.8e12, link=450e9),
}

PREFILL_SHARE = 0.5
"""Of the peak operations, when prompts are read."""
DECODE_SHARE = 0.6
"""Of the peak operations, in the products of a decode step."""
LINK_SHARE = 0.7
"""Of the links' bandwidth, in collectives of the trainer."""
BUS_S = 50e9
"""Bytes a second between a card and its host, each way: PCIe 5 with 16 lanes, less a fifth. Not measured."""
HOST_S = 100e9
"""Bytes a second of a rank's part of its host's memory, in an update by its processors. Not measured."""
STEP_OVERHEAD_S = 0.9e-3
"""Of a decode step: launches and scheduling. With SEQUENCE_S, the two points of a 3B model on one H200 (64 sequences in 3.7 ms,
256 in 7.7 ms) are met."""
SEQUENCE_S = 10e-6
"""Of a sequence in a decode step: sampling and its log-prob over the whole vocabulary, and its share of the bookkeeping."""
TRAIN_OVERHEAD_S = 0.2
"""Of a train step: tensors prepared, counts exchanged."""


class PlannedWork(msgspec.Struct, frozen=True, kw_only=True):
    """What of a configuration the latencies depend on."""

    shape: ModelShape
    completion_tokens: Distribution
    prompt_tokens: Distribution
    row_tokens: float
    """Of a packed row, a rank's part: what it has of samples, not what it has room for."""
    ranks: int
    kv_tokens: float
    max_seqs: int
    checkpointing: Checkpointing = True
    checkpointed_layers: int | None = None
    compiled: bool = False
    adapters: bool = False
    replicas: int = 1
    optimizer: Optimizer = "adamw"
    offload: Offload = "none"
    compute_bytes: int = 2
    weight_bytes: int = 4
    updates: int = 1
    """Of the optimiser, a step."""
    epochs: int = 1
    parallel: int = 1
    """Cards a server."""
    sending: TransportCost
    """How weights reach the servers."""
    sent_share: float = 1.0
    """Of the weights' bytes, what an update sends: next to nothing of it for adapters."""


def derive_latencies(card: GpuCard, work: PlannedWork) -> Latencies:
    """Uncalibrated times of one server and one rank on this card."""
    shape = work.shape
    weights = shape.parameters * work.compute_bytes
    read = card.bandwidth * READ_SHARE * work.parallel
    flops = card.flops * work.parallel
    engine = EngineTimes(
        step_s=weights / read + STEP_OVERHEAD_S,
        sequence_s=forward_flops_per_token(shape) / (flops * DECODE_SHARE) + SEQUENCE_S,
        kv_token_s=shape.kv_bytes_per_token(work.compute_bytes) / read,
        prefill_token_s=forward_flops_per_token(shape, work.prompt_tokens.mean / 2) / (flops * PREFILL_SHARE),
        kv_tokens=max(1.0, work.kv_tokens),
        max_seqs=work.max_seqs,
    )
    row_s = time_planned_row(card, work).seconds + _collectives_s(card, work) + _bus_s(work)
    return Latencies(
        prompt_tokens=work.prompt_tokens,
        completion_tokens=work.completion_tokens,
        engine=engine,
        request_s=0.005,
        reward_s=constant(0.02),
        train_step_s=TRAIN_OVERHEAD_S + work.updates * _optimizer_s(card, work),
        train_token_s=work.epochs * row_s / work.row_tokens,
        sync_s=work.sending.fixed_s + work.sent_share * weights / work.sending.bytes_s,
        pause_s=work.sending.pause_s,
    )


def time_planned_row(card: GpuCard, work: PlannedWork) -> RowTime:
    """Of a rank's part of a row, without what ranks send each other."""
    return time_row(
        work.shape,
        tokens=work.row_tokens,
        length=work.prompt_tokens.mean + work.completion_tokens.mean,
        flops=card.flops,
        bandwidth=card.bandwidth,
        compiled=work.compiled,
        checkpointing=work.checkpointing,
        checkpointed_layers=work.checkpointed_layers,
        frozen=work.adapters,
    )


def _optimizer_s(card: GpuCard, work: PlannedWork) -> float:
    """The optimiser reads weight, gradient and moments of each parameter of the share, and writes weight and moments. Moments
    that come from host memory cross the bus twice besides; where everything is there, the host's processors do it."""
    share = _share(work)
    moments = moment_bytes(work.shape, work.optimizer, work.weight_bytes, work.ranks // work.replicas)
    touched = 3 * work.weight_bytes * share + 2 * moments
    match work.offload:
        case "none":
            return touched / (card.bandwidth * READ_SHARE)
        case "optimizer":
            return touched / (card.bandwidth * READ_SHARE) + 2 * moments / BUS_S
        case "parameters":
            return touched / HOST_S


def _bus_s(work: PlannedWork) -> float:
    """Of one row, with weights in host memory: its shares come for forward and for backward, and the gradients go back."""
    return 3 * work.weight_bytes * _share(work) / BUS_S if work.offload == "parameters" else 0.0


def _share(work: PlannedWork) -> float:
    return work.shape.parameters * work.replicas / work.ranks


def _collectives_s(card: GpuCard, work: PlannedWork) -> float:
    """Of one row: weights gathered for forward and again for backward, gradients summed in float32. Nothing on one rank; of
    replicas each rank's share of the gradients is summed over them besides."""
    if work.ranks == 1:
        return 0.0
    shards = work.ranks // work.replicas
    moved = work.shape.parameters * (2 * work.compute_bytes + 4) * (shards - 1) / shards
    summed = 2 * 4 * _share(work) * (work.replicas - 1) / work.replicas
    return (moved + summed) / (card.link * LINK_SHARE)
