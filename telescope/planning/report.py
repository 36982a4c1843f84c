"""The sentences of `python -m telescope plan`: memory, simulated times, splits. Numbers come in, lines go out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from telescope.config.run import RunConfig
from telescope.maths.memory import ModelShape, ServerMemory, TrainerMemory
from telescope.planning.calibration import Calibration
from telescope.planning.cards import GIB, GpuCard
from telescope.planning.forecast import Split
from telescope.planning.latencies import Latencies
from telescope.planning.memory import SpareMemory, typed
from telescope.planning.simulator import SimulatedRun


def describe_rows(config: RunConfig, load: Latencies, rows: int) -> str:
    """How a batch of expected lengths is cut up."""
    updates, seq_len = config.trainer.number_of_minibatches * config.trainer.epochs_per_batch, config.trainer.seq_len
    rollouts = config.orchestrator.prompts_batch_size_for_trainer * config.rollout.group_size
    tokens = load.prompt_tokens.mean + load.turns.mean * load.completion_tokens.clipped(config.rollout.max_tokens).mean
    return (
        f"With lengths of {tokens:,.0f} tokens on average a step trains about {rollouts * tokens:,.0f}, in {rows} row"
        f"{'s' * (rows != 1)} of {seq_len:,} on the fullest rank and {updates} optimiser update{'s' * (updates != 1)}."
    )


def describe_model(config: RunConfig, shape: ModelShape) -> str:
    return (
        f"{config.model.name} has {shape.parameters:,} parameters{_billions(shape.parameters)}: {shape.layers} layers, "
        f"hidden {shape.hidden:,}, vocabulary {shape.vocabulary:,}."
    )


def describe_trainer_memory(memory: TrainerMemory, ranks: int) -> str:
    parts = {
        "weights": memory.weights,
        "gradients": memory.gradients,
        "moments": memory.moments,
        "moments at their step": memory.visiting,
        "gathered copies": memory.gathered,
        "waiting gradients": memory.waiting,
        "activations": memory.kept,
        "one layer at work": memory.at_work,
        "logits": memory.logits,
        "reference": memory.reference,
        "the version handed to the server": memory.handed,
    }
    said = ", ".join(f"{name} {_gib(part)}" for name, part in parts.items() if part)
    host = f" It has {_gib(memory.host)} in its host's memory besides." if memory.host else ""
    return f"A trainer rank of {ranks} needs about {_gib(memory.total)} at its peak; not all at once: {said}.{host}"


def describe_spare(spare: SpareMemory, card: GpuCard) -> str:
    """Where memory would do instead of time."""
    return (
        f"A trainer rank leaves room: it needs about {_gib(spare.needed)} of {_gib(spare.room)} on an {card.name}. "
        f"{typed(spare.settings)} fits as well, by the estimate of memory, and of the {spare.layers} layers "
        f"{spare.fewest} compute again, not {spare.again}."
    )


def describe_server_memory(memory: ServerMemory, max_model_len: int, card: GpuCard) -> str:
    staging = f", staging buffer {_gib(memory.staging)}" if memory.staging else ""
    return (
        f"A server on an {card.name} ({_gib(card.memory)}): weights {_gib(memory.weights)}{staging}, steps and runtime "
        f"{_gib(memory.overhead)}, KV cache {_gib(memory.kv)} at {memory.kv_bytes_per_token:,} bytes a token: "
        f"{memory.kv_tokens:,} tokens, {memory.sequences(max_model_len):,} sequences of max_model_len={max_model_len:,}."
    )


def describe_calibration(calibration: Calibration, folder: str) -> str:
    engine = calibration.load.engine
    return (
        f"Calibrated on {folder}: {calibration.steps} steps of {_s(calibration.step_s)} (median) and {calibration.turns:,} "
        f"requests; a decode step takes {_s(engine.step_s)} + {_s(engine.sequence_s)} a sequence, a train step "
        f"{_s(calibration.load.train_step_s)} + {_s(calibration.load.train_token_s * 1000)} a thousand tokens of a rank, "
        f"weights {_s(calibration.load.sync_s)}; requests are met within {calibration.error:.0%}."
    )


def describe_assumed(load: Latencies, card: GpuCard) -> str:
    return (
        f"Uncalibrated: times derived from the data sheet of an {card.name} for completions of "
        f"{load.completion_tokens.mean:,.0f} tokens on average (--completion-tokens). They can be wrong by a factor of two; "
        "--calibrate RUN_DIR takes those of a run."
    )


def describe_outcome(outcome: SimulatedRun) -> Iterator[str]:
    steps = len(outcome.steps)
    yield (
        f"Simulated ({steps} steps): a step takes {_s(outcome.step_s)} (median; {_s(outcome.mean_step_s)} in the mean of the "
        f"settled ones); {outcome.tokens_per_s:,.0f} trained and {outcome.sampled_per_s:,.0f} sampled tokens/s."
    )
    yield (
        f"  Trainer: trains {outcome.trainer_training:.0%}, sends weights {outcome.trainer_syncing:.0%}, idle "
        f"{outcome.trainer_waiting:.0%}. Servers: generate {outcome.servers_generating:.0%}, paused "
        f"{outcome.servers_paused:.0%}, idle {outcome.servers_waiting:.0%}; {outcome.sequences:.1f} sequences each, "
        f"{outcome.preemptions} preempted."
    )
    counts = outcome.counts
    groups = max(sum(counts.ages.values()), 1)
    ages = ", ".join(f"{age}: {count / groups:.0%}" for age, count in counts.ages.items())
    lost = sum(number for reason, number in counts.reasons.items() if reason.startswith("cancelled: off_policy"))
    yield f"  Age of trained groups in versions: {ages} (mean {counts.age_mean:.2f}); {lost} cancelled as off-policy."
    if not outcome.ok:
        yield f"  The simulated run failed: {outcome.reason}"


def describe_processor(processor_step_s: float, calibrated_step_s: float | None) -> str:
    """Of hosts whose cores the processes share, this is the steadier figure."""
    known = f" (the calibrated run's own: {_s(calibrated_step_s)})" if calibrated_step_s is not None else ""
    return f"  A step takes {_s(processor_step_s)} of processor time, all processes together{known}."


def describe_splits(divisions: Sequence[Split], chosen: Split | None, gpus: int) -> Iterator[str]:
    yield f"{gpus} GPUs divided between servers and trainer ranks (simulated):"
    heads = f"  {'servers':>7} {'ranks':>6} {'tokens/s':>10} {'mean step':>9}"
    yield f"{heads} {'servers idle':>13} {'trainer idle':>13} {'mean age':>9}"
    for split in divisions:
        if split.outcome is None:
            yield f"  {split.servers:>7} {split.ranks:>6} impossible: {split.problem}"
            continue
        outcome = split.outcome
        mark = "  best" if split is chosen else ""
        yield (
            f"  {split.servers:>7} {split.ranks:>6} {outcome.tokens_per_s:>10,.0f} {_s(outcome.mean_step_s):>9} "
            f"{outcome.servers_waiting:>13.0%} {outcome.trainer_waiting:>13.0%} {outcome.counts.age_mean:>9.2f}{mark}"
        )
    if chosen is not None:
        yield (
            f"Best: cluster.inference_num_workers={chosen.servers} cluster.trainer_num_workers={chosen.ranks}; with more "
            "or longer rollouts, another batch or another max_async_rollout it may be another."
        )


def _billions(parameters: int) -> str:
    return f" ({parameters / 1e9:.3f}B)" if parameters >= 1_000_000 else ""


def _gib(nbytes: float) -> str:
    """`6.17 GiB`; less than a tenth in MiB, so that a small part does not read as none."""
    return f"{nbytes / GIB:.2f} GiB" if nbytes >= GIB / 10 else f"{nbytes * 1024 / GIB:.1f} MiB"


def _s(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1 or seconds == 0:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"
