"""Whether a trainer rank and a server fit on a card, what would make them fit, and what room they leave.

Owns which setting becomes which number of bytes. Refuses to know times (forecast.py) and to print (report.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

import msgspec

from telescope.config.automatic import Decision, RankCard, Surroundings, decide
from telescope.config.models import ModelCounts
from telescope.config.run import RunConfig
from telescope.inference.main import lanes
from telescope.inference.vllm.options import CPU_MAX_NUM_SEQS, GPU_MAX_NUM_SEQS
from telescope.maths.memory import (
    BYTES,
    RUNTIME_BYTES,
    ModelShape,
    ServerMemory,
    TrainerMemory,
    layers_again,
    server_memory,
)
from telescope.planning.cards import GIB, GpuCard
from telescope.weights.base import RunPlacement, Transport, TransportRefused
from telescope.weights.transport_choice import choose, transport_named

SPARE_SHARE = 1 / 8
"""Of the layers: fewer that need not compute again are not worth a remark (an eighth of them is 3 % of a step)."""


class PlanRefused(ValueError):
    """The combination can't work; the text is one whole sentence with the numbers and the remedy."""


def max_seqs(config: RunConfig, device: str) -> int:
    """Sequences in one engine step."""
    if config.inference.engine == "fake":
        return lanes(config)
    return config.inference.max_num_seqs or min(lanes(config), CPU_MAX_NUM_SEQS if device == "cpu" else GPU_MAX_NUM_SEQS)


def shares_a_card(config: RunConfig) -> bool:
    """Whether a server and a rank are on one card, as far as settings say so; `cluster=one_gpu` alone depends on the host."""
    named = _named_transport(config)
    handed = named is not None and named.cost.trainer_version
    return handed or config.inference.sleep_while_training != "off"


def estimate_server(config: RunConfig, shape: ModelShape, card: GpuCard) -> ServerMemory:
    """Bytes of one server on this card."""
    return server_memory(
        shape,
        card_bytes=card.memory,
        utilization=config.inference.gpu_memory_utilization,
        bytes_per_value=served_bytes(config, gpu=True),
        staging=config.weight_sync.staging == "full" and config.model.lora is None,
        bucket_bytes=config.weight_sync.bucket_bytes if transport_of(config).cost.server_buckets else None,
        batched_tokens=config.inference.max_num_batched_tokens or 8192,
        sequences=max_seqs(config, "gpu"),
        parallel=config.inference.tensor_parallel_size,
    )


def estimate_rank(
    config: RunConfig, shape: ModelShape, ranks: int | None = None, seq_len: int | None = None
) -> TrainerMemory | None:
    """Bytes of one trainer rank; None for a backend whose memory is not known here."""
    handed = _hands_on_the_card(config) and config.model.lora is None
    return config.backend.rank_memory(
        shape,
        config.model,
        config.trainer,
        ranks=ranks or config.cluster.trainer_num_workers,
        longest=config.inference.max_model_len,
        reference=config.algorithm.needs_reference,
        handed_bytes=served_bytes(config, gpu=True) if handed else 0,
        seq_len=seq_len,
    )


def check_model(config: RunConfig, shape: ModelShape) -> None:
    """Raises `PlanRefused` where the backend's settings can't be with a model of this shape: of one that lies elsewhere it is
    not known earlier."""
    for _, sentence in config.backend.model_errors(_counts(shape)):
        raise PlanRefused(sentence)


def _counts(shape: ModelShape) -> ModelCounts:
    return ModelCounts(shape.layers, shape.heads, shape.kv_heads)


def check_memory(config: RunConfig, shape: ModelShape, card: GpuCard) -> None:
    """Raises `PlanRefused` where a rank or a server can't hold what it must."""
    server, rank = estimate_server(config, shape, card), estimate_rank(config, shape)
    need = config.inference.max_model_len
    if server.kv_tokens < need:
        raise PlanRefused(
            f"A server needs {_gib(server.weights + server.staging + server.overhead)} for weights and steps of "
            f"the {_gib(server.budget)} that inference.gpu_memory_utilization={config.inference.gpu_memory_utilization} leaves "
            f"it on an {card.name}: room for {server.kv_tokens:,} tokens of KV cache, and one sequence may have "
            f"inference.max_model_len={need:,}. Raise the utilization, lower max_model_len, or take a smaller model."
        )
    if rank is not None and shares_a_card(config):
        _check_shared(config, server, rank, card)
    if rank is not None and rank.needed > card.memory:
        ranks = config.cluster.trainer_num_workers
        raise PlanRefused(
            f"A trainer rank needs about {_gib(rank.needed)}, and an {card.name} has {_gib(card.memory)}: weights, gradients "
            f"and moments {_gib(rank.weights + rank.gradients + rank.moments)} on cluster.trainer_num_workers={ranks}, "
            f"activations {_gib(rank.kept)} at trainer.seq_len={config.trainer.row_tokens:,}. {_remedy(config, shape, card)}"
        )


def _check_shared(config: RunConfig, server: ServerMemory, rank: TrainerMemory, card: GpuCard) -> None:
    """A rank beside a server: all of it where that is awake, what it keeps between its steps where that sleeps in them."""
    part = card.memory - server.budget
    asleep = config.inference.sleep_while_training != "off"
    need = rank.between_steps + RUNTIME_BYTES if asleep else rank.needed
    if need > part:
        handed = f", {_gib(rank.handed)} of it to hand versions to the server" if rank.handed else ""
        when = " between its steps" if asleep else ""
        remedy = "lower it" if asleep else "lower it, set cluster=one_gpu_in_turns, which gives a step the whole card"
        raise PlanRefused(
            f"A trainer rank needs about {_gib(need)}{when}{handed}, and inference.gpu_memory_utilization="
            f"{config.inference.gpu_memory_utilization:g} leaves it {_gib(part)} of the {card.name} that it shares: {remedy}, "
            "or take a smaller model."
        )
    room = card.memory - server.staging - RUNTIME_BYTES
    if asleep and rank.needed > room:
        raise PlanRefused(
            f"A trainer rank needs about {_gib(rank.needed)} in its steps, and while the server sleeps {_gib(room)} of the "
            f"{card.name} are free: set weight_sync.staging=none, shorten rows (trainer.seq_len), or take a smaller model."
        )


def _remedy(config: RunConfig, shape: ModelShape, card: GpuCard) -> str:
    """What would make it fit, one setting each; worked out, not guessed."""
    ranks = config.cluster.trainer_num_workers
    found: list[str] = []
    for more in (2, 4, 8):
        if _fits(divide(config, config.cluster.inference_num_workers, more * ranks), shape, card.memory):
            found.append(f"cluster.trainer_num_workers={more * ranks}")
            break
    if (fewest := find_fewest_again(config, shape, card.memory)) is not None:
        found.append(write_settings(fewest))
    for name, value in (*REMEDIES, *_finer_cuts(config, shape)):
        changed = _with(config, {name: value})
        if changed is not None and _fits(changed, shape, card.memory):
            found.append(write_settings({name: value}))
    if not found:
        last = ", with backend.offload=parameters" if "offload" in type(config.backend).model_fields else ""
        return f"No one setting makes room: give it more ranks and shorter rows (trainer.seq_len){last}."
    return f"It would fit with {', or '.join(found)}; or with shorter rows."


def find_fewest_again(config: RunConfig, shape: ModelShape, room: int) -> dict[str, bool | int | str | None] | None:
    """What of the backend's settings to change so that a rank fits into `room` bytes and as few layers as possible compute
    again, in the way that is set, else in the way that keeps least; empty where nothing is to be changed. None where they do
    not fit at all."""
    backend = config.backend
    known = type(backend).model_fields
    if "gradient_checkpointing" not in known:
        return None
    now = backend.checkpointing
    ways: tuple[bool | str, ...] = ("selective", "full") if now == "selective" else (now or "full",)
    all_of_them: dict[str, bool | int | str | None] = {"checkpointed_layers": None} if "checkpointed_layers" in known else {}
    tried: list[dict[str, bool | int | str | None]] = [{"gradient_checkpointing": False, **all_of_them}]
    for way in ways:
        if all_of_them:
            tried += ({"gradient_checkpointing": way, "checkpointed_layers": number} for number in range(1, shape.layers))
        tried.append({"gradient_checkpointing": way, **all_of_them})
    for settings in tried:
        changed = _with(config, settings)
        if changed is not None and _fits(changed, shape, room):
            return {name: value for name, value in settings.items() if value != getattr(backend, name)}
    return None


def _with(config: RunConfig, settings: Mapping[str, object]) -> RunConfig | None:
    """With these of the backend's settings; None where they do not go with the others."""
    try:
        changed = type(config.backend).model_validate({**config.backend.model_dump(), **settings}, strict=True)
    except ValueError:
        return None
    told = changed.run_errors(
        ranks=config.cluster.trainer_num_workers, adapters=config.model.lora is not None, on_cpu=False
    )  # fmt: skip
    return None if any(True for _ in told) else config.model_copy(update={"backend": changed})


def write_settings(settings: Mapping[str, object]) -> str:
    """Of the backend, as on a command line: `backend.gradient_checkpointing=full backend.checkpointed_layers=12`."""
    return " ".join(f"backend.{name}={json.dumps(value).strip(chr(34))}" for name, value in settings.items())


def _finer_cuts(config: RunConfig, shape: ModelShape) -> Iterator[tuple[str, int]]:
    """Of the model or its rows over ranks that are there, for a backend that cuts them; not each of them can be."""
    for size in (2, 4, 8):
        if config.trainer.pad_to_multiple_of % size == 0 or config.backend.fills_rows:
            yield "context_parallel_size", size
        if shape.kv_heads % size == 0 and shape.intermediate % size == 0:
            yield "tensor_parallel_size", size
        yield "pipeline_parallel_size", size


REMEDIES: tuple[tuple[str, bool | str], ...] = (
    ("recompute_pointwise", True),
    ("optimizer", "adamw_8bit"),
    ("offload", "optimizer"),
    ("optimizer_cpu_offload", True),
    ("offload", "parameters"),
)


def _fits(config: RunConfig, shape: ModelShape, room: int) -> bool:
    """Whether the backend can be with the model, and a rank of it takes no more than `room` bytes."""
    if any(True for _ in config.backend.model_errors(_counts(shape))):
        return False
    rank = estimate_rank(config, shape)
    return rank is not None and rank.needed <= room


def transport_of(config: RunConfig) -> Transport:
    """What `auto` means for servers and ranks with cards of their own; one card for both only where it is asked for. Raises
    `PlanRefused` for a transport that is not one of cards."""
    placement = RunPlacement(on_gpu=True, gpus="same" if _hands_on_the_card(config) else "apart")
    try:
        return choose(config, placement)
    except TransportRefused as error:
        raise PlanRefused(str(error)) from error


def _hands_on_the_card(config: RunConfig) -> bool:
    """Whether a version lies on the card that server and rank share; false for a run on CPUs, whatever its transport."""
    named = _named_transport(config)
    return (named is None or named.cost.trainer_version) and shares_a_card(config)


def _named_transport(config: RunConfig) -> Transport | None:
    """None where `auto` chooses by where processes run."""
    sync = config.weight_sync
    return None if sync.transport == "auto" else transport_named(sync.transport, config.plugin_path, sync.transport_kwargs)


def room_of(config: RunConfig, shape: ModelShape, card: GpuCard) -> int:
    """Bytes of the card that a rank may take."""
    return card.memory - (estimate_server(config, shape, card).budget if shares_a_card(config) else 0)


class SpareMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory that layers which compute again leave unused."""

    needed: int
    room: int
    layers: int
    again: int
    """Layers that compute again now, and with `settings`."""
    fewest: int
    settings: dict[str, bool | int | str | None]
    """Of the backend."""


def find_spare_memory(config: RunConfig, shape: ModelShape, card: GpuCard) -> SpareMemory | None:
    """None where layers that compute again leave no room for an eighth of them to keep everything."""
    rank, backend, room = estimate_rank(config, shape), config.backend, room_of(config, shape, card)
    settings = find_fewest_again(config, shape, room)
    if rank is None or not settings or rank.needed > room:
        return None
    now = backend.model_dump()
    again, fewest = (
        layers_again(shape.layers, found["gradient_checkpointing"], found.get("checkpointed_layers"))
        for found in (now, now | settings)
    )
    if again - fewest < SPARE_SHARE * shape.layers:
        return None
    return SpareMemory(needed=rank.needed, room=room, layers=shape.layers, again=again, fewest=fewest, settings=settings)


def decide_for(config: RunConfig, shape: ModelShape | None, card: GpuCard) -> Decision:
    """What `auto` becomes where ranks have cards of this kind. `shape`: None where nothing tells it."""
    room = card.memory if shape is None else room_of(config, shape, card)
    known = RankCard(name=card.name, room=room, flops=config.trainer.peak_flops or card.flops, bandwidth=card.bandwidth)
    handed = served_bytes(config, gpu=True) if _hands_on_the_card(config) else 0
    return decide(config, Surroundings(device="gpu", card=known, handed_bytes=handed))


def divide(config: RunConfig, servers: int, ranks: int) -> RunConfig:
    shares = config.cluster.model_copy(update={"inference_num_workers": servers, "trainer_num_workers": ranks})
    return config.model_copy(update={"cluster": shares})


def served_bytes(config: RunConfig, *, gpu: bool) -> int:
    if config.inference.dtype != "auto":
        return BYTES[config.inference.dtype]
    return 2 if gpu else BYTES[config.model.dtype]


def _gib(nbytes: float) -> str:
    return f"{nbytes / GIB:.1f} GiB"
