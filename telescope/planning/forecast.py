"""From a run's configuration to what the simulator needs, and to the best split of GPUs.

Owns which setting becomes which number of it; bytes are memory.py's. Refuses to print (report.py does) and to read files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from telescope.backends.fsdp import FSDP
from telescope.backends.fsdp.sizing import too_short
from telescope.config.cluster import MOST_WORKERS
from telescope.config.run import RunConfig
from telescope.inference.main import lanes
from telescope.maths.dealing import assign
from telescope.maths.memory import BYTES, ModelShape
from telescope.maths.packing import rows_needed
from telescope.maths.short_rows import MEAN_SHARE, PROMPT_TOKENS, ShortRows
from telescope.orchestrator.main import make_flow_settings
from telescope.planning.calibration import Calibration
from telescope.planning.cards import GpuCard, PlannedWork, derive_latencies
from telescope.planning.latencies import Distribution, Latencies, lognormal
from telescope.planning.memory import (
    PlanRefused,
    divide,
    estimate_rank,
    estimate_server,
    max_seqs,
    room_of,
    served_bytes,
    transport_of,
)
from telescope.planning.simulator import SimulatedCluster, SimulatedRun, simulate

SIGMA = 0.8
"""Of the logarithm of a completion's length, where none is known."""
FEWEST_STEPS = 12
"""Simulated, where the run has as many: enough for a settled part behind the filling of the pipeline."""
MOST_SPLITS = 24


def cluster_of(config: RunConfig) -> SimulatedCluster:
    """Who plays, as the simulator sees it."""
    return SimulatedCluster(
        servers=max(1, config.cluster.inference_num_workers // config.inference.tensor_parallel_size),
        ranks=config.cluster.trainer_num_workers,
        server_capacity=lanes(config),
        workers=config.cluster.env_num_workers,
        worker_capacity=config.cluster.rollouts_per_env_worker,
        max_tokens=min(config.rollout.max_tokens, config.inference.max_model_len),
        prefix_caching=config.inference.enable_prefix_caching,
        reset_prefix_cache=config.weight_sync.reset_prefix_cache,
        abort_at_update=config.weight_sync.in_flight == "abort",
        recompute_at_update=config.weight_sync.in_flight == "recompute",
    )


def kv_tokens(config: RunConfig, shape: ModelShape | None, card: GpuCard | None) -> float:
    """Tokens that one server's KV cache holds; infinite where nothing is known of it."""
    if shape is None or config.inference.engine == "fake":
        return float("inf")
    if card is not None:
        return float(max(1, estimate_server(config, shape, card).kv_tokens))
    return config.inference.cpu_kv_cache_mb * 2**20 / shape.kv_bytes_per_token(served_bytes(config, gpu=False))


def assume_latencies(config: RunConfig, shape: ModelShape, card: GpuCard, completion_tokens: float | None = None) -> Latencies:
    """Uncalibrated latencies on this card, for log-normal completions of this mean (default: 0.4 of max_tokens)."""
    most, longest = config.rollout.max_tokens, config.inference.max_model_len
    completions = lognormal(completion_tokens or max(1.0, MEAN_SHARE * most), SIGMA, most)
    prompts = lognormal(min(PROMPT_TOKENS, longest / 4), 0.3, longest)
    backend = config.backend
    common = ("gradient_checkpointing", "mixed_precision_dtype", "compile")
    alike = {name: getattr(backend, name) for name in common if hasattr(backend, name)}
    fsdp = backend if isinstance(backend, FSDP) else FSDP(**alike)
    work = PlannedWork(
        shape=shape,
        completion_tokens=completions,
        prompt_tokens=prompts,
        row_tokens=pack_step(config, prompts, completions).row_tokens / backend.ranks_a_shard,
        ranks=config.cluster.trainer_num_workers,
        kv_tokens=kv_tokens(config, shape, card),
        max_seqs=max_seqs(config, "gpu"),
        checkpointing=fsdp.checkpointing,
        checkpointed_layers=fsdp.checkpointed_layers,
        compiled=fsdp.compiles,
        adapters=config.model.lora is not None,
        compute_bytes=BYTES[fsdp.mixed_precision_dtype or config.model.dtype],
        weight_bytes=BYTES[config.model.dtype],
        replicas=fsdp.replicas,
        optimizer=fsdp.optimizer,
        offload=fsdp.offload,
        updates=config.trainer.number_of_minibatches * config.trainer.epochs_per_batch,
        epochs=config.trainer.epochs_per_batch,
        parallel=config.inference.tensor_parallel_size,
        sending=transport_of(config).cost,
        sent_share=0.0 if config.model.lora is not None else 1.0,
    )
    return derive_latencies(card, work)


def adapt_latencies(calibration: Calibration, config: RunConfig, shape: ModelShape | None, card: GpuCard | None) -> Latencies:
    """The calibrated load with the room that this configuration's servers have, as often over the batch as it says, and as many
    groups of equal rewards as come in groups of its size."""
    latencies = calibration.latencies
    engine = msgspec.structs.replace(
        latencies.engine, kv_tokens=kv_tokens(config, shape, card), max_seqs=max_seqs(config, "cpu" if card is None else "gpu")
    )
    return msgspec.structs.replace(
        latencies,
        engine=engine,
        train_token_s=latencies.train_token_s * config.trainer.epochs_per_batch,
        equal_share=_equal_share(calibration, config.rollout.group_size),
    )


def _equal_share(calibration: Calibration, group_size: int) -> float:
    shares = calibration.equal_shares
    if group_size == calibration.settings.group_size or not shares or group_size < 2:
        return calibration.latencies.equal_share
    return shares[min(group_size - 2, len(shares) - 1)]


def forecast(config: RunConfig, latencies: Latencies) -> SimulatedRun:
    """Simulate the run, or as many of its steps as settle."""
    settings = make_flow_settings(config)
    steps = min(settings.number_of_steps, max(FEWEST_STEPS, 4 * (settings.max_async_rollout + 1)))
    return simulate(msgspec.structs.replace(settings, number_of_steps=steps), cluster_of(config), latencies)


class PackedStep(msgspec.Struct, frozen=True):
    """The rows of a step's batch on the fullest rank; ranks that share rows are one."""

    rows: int
    row_tokens: float
    """Of samples, on average."""


def pack_step(config: RunConfig, prompts: Distribution, completions: Distribution) -> PackedStep:
    """For lengths drawn evenly from these distributions."""
    count = config.orchestrator.prompts_batch_size_for_trainer * config.rollout.group_size
    most, cut = config.trainer.row_tokens, config.rollout.max_tokens
    shown = min(count, 2048)
    lengths = [
        min(most, max(1, round(prompts.mean + min(cut, completions.at((place + 0.5) / shown))))) for place in range(shown)
    ]
    ranks = config.cluster.trainer_num_workers // config.backend.ranks_a_shard
    if count > shown:
        tokens = count * sum(lengths) / shown / ranks
        rows = -(-round(tokens) // most)
        return PackedStep(rows, tokens / rows)
    shares = assign([float(length) for length in lengths], ranks)
    held = [[lengths[item] for item in share] for share in shares if share]
    packed = [(rows_needed(own, seq_len=most), sum(own)) for own in held]
    rows, tokens = max(packed)
    return PackedStep(rows, tokens / rows)


def find_short_rows(config: RunConfig, latencies: Latencies, shape: ModelShape, card: GpuCard) -> ShortRows | None:
    """Where rows are so short that cards of this kind would wait for their host."""
    if not isinstance(config.backend, FSDP):
        return None
    length = (
        latencies.prompt_tokens.mean
        + latencies.turns.mean * latencies.completion_tokens.clipped(config.rollout.max_tokens).mean
    )
    rollouts = config.orchestrator.prompts_batch_size_for_trainer * config.rollout.group_size

    room = room_of(config, shape, card)

    def fits(row: int) -> bool:
        rank = estimate_rank(config, shape, seq_len=row)
        return rank is not None and rank.needed <= room

    return too_short(
        config.backend,
        shape,
        config.model,
        config.trainer,
        ranks=config.cluster.trainer_num_workers,
        length=length,
        tokens=rollouts * length / config.trainer.number_of_minibatches,
        peak=card.flops,
        fits=fits,
    )


class Split(msgspec.Struct, frozen=True):
    """So many GPUs for servers (`tensor_parallel_size` each), the rest for trainer ranks; `outcome` or why not."""

    servers: int
    ranks: int
    outcome: SimulatedRun | None
    problem: str = ""


def try_splits(config: RunConfig, gpus: int, load_of: Callable[[RunConfig], Latencies]) -> Iterator[Split]:
    """Every division of `gpus` that a run may have (or an even choice of them), simulated. Raises `PlanRefused`: none."""
    if gpus < 2:
        raise PlanRefused(f"gpus={gpus} can't be divided: inference and training need one each, so at least 2")
    if gpus > 2 * MOST_WORKERS:
        raise PlanRefused(f"gpus={gpus} are more than a run may have: {MOST_WORKERS} for servers and as many for ranks")
    cards = config.inference.tensor_parallel_size
    possible = [
        servers
        for servers in range(cards, gpus, cards)
        if max(servers, gpus - servers) <= MOST_WORKERS and _can_train(config, gpus - servers)
    ]
    if not possible:
        raise PlanRefused(
            f"gpus={gpus} can't be divided: no number of servers of inference.tensor_parallel_size={cards} leaves as many "
            f"ranks as the settings of backend={config.backend_name} allow: give another --gpus"
        )
    for servers in pick_evenly(possible, MOST_SPLITS):
        divided = divide(config, servers, gpus - servers)
        try:
            yield Split(servers, gpus - servers, forecast(divided, load_of(divided)))
        except PlanRefused as error:
            yield Split(servers, gpus - servers, None, str(error))


def pick_evenly(values: Sequence[int], most: int) -> list[int]:
    """At most so many of them, the first and the last among these: `evenly(range(1, 10), 3) == [1, 5, 9]`."""
    if len(values) <= most:
        return list(values)
    return [values[round(place * (len(values) - 1) / (most - 1))] for place in range(most)]


def _can_train(config: RunConfig, ranks: int) -> bool:
    """Whether the backend's settings go with so many ranks."""
    adapters, on_cpu = config.model.lora is not None, config.cluster.device == "cpu"
    return ranks % config.backend.ranks_a_shard == 0 and not any(
        config.backend.run_errors(ranks=ranks, adapters=adapters, on_cpu=on_cpu)
    )


def choose_split(divisions: list[Split]) -> Split | None:
    """That of most trained tokens a second."""
    possible = [split for split in divisions if split.outcome is not None and split.outcome.ok]
    return max(possible, key=lambda split: split.outcome.tokens_per_s if split.outcome else 0.0, default=None)
