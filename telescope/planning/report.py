"""The sentences of `python -m telescope plan`: memory, simulated times, splits, and which process would be where. Numbers and
plans come in, lines go out; hosts to plan for are read from `--hosts` or from the settings of a Slurm job. Starts nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from telescope._launch.process_plan import Host, LaunchPlan, ProcessPlan
from telescope._launch.slurm.allocation import list_nominal_nodes
from telescope._launch.slurm.allocation import make_hosts as slurm_hosts
from telescope.config.run import RunConfig
from telescope.config.sections import DEFAULT_PORT
from telescope.config.slurm import SlurmSettings
from telescope.maths.memory import ModelShape, ServerMemory, TrainerMemory
from telescope.planning.calibration import Calibration
from telescope.planning.cards import GIB, GpuCard
from telescope.planning.forecast import Split
from telescope.planning.latencies import Latencies
from telescope.planning.memory import SpareMemory, write_settings
from telescope.planning.simulator import SimulatedRun


def describe_rows(config: RunConfig, latencies: Latencies, rows: int) -> str:
    """How a batch of expected lengths is cut up."""
    updates, seq_len = config.trainer.number_of_minibatches * config.trainer.epochs_per_batch, config.trainer.row_tokens
    rollouts = config.orchestrator.prompts_batch_size_for_trainer * config.rollout.group_size
    tokens = (
        latencies.prompt_tokens.mean
        + latencies.turns.mean * latencies.completion_tokens.clipped(config.rollout.max_tokens).mean
    )
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
        "what comes for its step": memory.visiting,
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
    return (
        f"A trainer rank of {ranks} needs about {_gib(memory.needed)}: tensors of {_gib(memory.total)} at their peak, the "
        f"runtime, and what the allocator can't use. Tensors, not all at once: {said}.{host}"
    )


def describe_spare(spare: SpareMemory, card: GpuCard) -> str:
    """Where memory would do instead of time."""
    return (
        f"A trainer rank leaves room: it needs about {_gib(spare.needed)} of {_gib(spare.room)} on an {card.name}. "
        f"{write_settings(spare.settings)} fits as well, by the estimate of memory, and of the {spare.layers} layers "
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
    latencies, engine = calibration.latencies, calibration.latencies.engine
    return (
        f"Calibrated on {folder}: {calibration.steps} steps of {_s(calibration.step_s)} (median) and {calibration.turns:,} "
        f"requests; a decode step takes {_s(engine.step_s)} + {_s(engine.sequence_s)} a sequence, a train step "
        f"{_s(latencies.train_step_s)} + {_s(latencies.train_token_s * 1000)} a thousand tokens of a rank, "
        f"weights {_s(latencies.sync_s)}; requests are met within {calibration.error:.0%}."
    )


def describe_assumed(latencies: Latencies, card: GpuCard) -> str:
    return (
        f"Uncalibrated: times derived from the data sheet of an {card.name} for completions of "
        f"{latencies.completion_tokens.mean:,.0f} tokens on average (--completion-tokens). They can be wrong by a factor of "
        "two; --calibrate RUN_DIR takes those of a run."
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


_KIND = re.compile(r"^(?:(\d+)x)?(\d+)(?:x(\d+))?$")
MOST_HOSTS = 10_000


class BadHosts(ValueError):
    """What --hosts says can't be read."""


def read_hosts(text: str, cpus: int) -> tuple[Host, ...]:
    """Hosts to plan for: `4x8` is four of 8 GPUs, `1x0x16,4x8x64` one of 16 cores without and four of 64 cores with 8 GPUs.

    `cpus`: cores of a host where none are given. Raises `BadHosts`.
    """
    hosts: list[Host] = []
    for part in text.split(","):
        found = _KIND.match(part.strip())
        if found is None or not 0 < int(found[1] or 1) + len(hosts) <= MOST_HOSTS:
            raise BadHosts(f"--hosts {text} is not a list of hosts: COUNTxGPUS or COUNTxGPUSxCORES, e.g. 4x8 or 1x0x16,4x8x64")
        gpus = tuple(str(gpu) for gpu in range(int(found[2])))
        for _ in range(int(found[1] or 1)):
            hosts.append(Host(f"host-{len(hosts)}", int(found[3] or cpus), gpus, f"host-{len(hosts)}", ""))
    return tuple(hosts)


def plan_nodes(settings: SlurmSettings) -> tuple[Host, ...]:
    """Those of a Slurm job as it asks for them. Several have addresses that only Slurm will know."""
    nodes = list_nominal_nodes(settings)
    return slurm_hosts(nodes, {node.name: (node.name, "") for node in nodes} if len(nodes) > 1 else {})


def describe_placement(config: RunConfig, plan: LaunchPlan) -> Iterator[str]:
    """Host by host: processes with their GPUs and threads, then ports and interfaces."""
    hosts = plan.hosts
    cluster = config.cluster
    yield (
        f"{len(hosts)} host{'s' * (len(hosts) != 1)}, on {plan.device}; servers {cluster.inference_placement}, trainer ranks "
        f"{cluster.trainer_placement}:"
    )
    for node, host in enumerate(hosts):
        processes = [process for process in plan.processes if process.node == node]
        yield f"node-{node}: {_describe_host(host)}"
        yield from (f"  {process.name:<14}{_describe_share(process)}" for process in processes)
        taken = {gpu for process in processes for gpu in process.gpus}
        if free := [gpu for gpu in host.gpus if gpu not in taken]:
            yield f"  {'free':<14}GPU {', '.join(free)}"
    yield from _describe_sockets(config, plan)


def _describe_host(host: Host) -> str:
    gpus = f"{len(host.gpus)} GPU{'s' * (len(host.gpus) != 1)}" if host.gpus else "no GPU"
    at = f", {host.address}{f' ({host.interface})' if host.interface else ''}" if host.address != host.name else ""
    side = "" if host.kept_for == "both" else f", for {'servers' if host.kept_for == 'inference' else 'trainer ranks'} alone"
    return f"{host.name}{at}, {host.cpus} core{'s' * (host.cpus != 1)}, {gpus}{side}"


def _describe_share(process: ProcessPlan) -> str:
    threads = f"{process.threads} thread{'s' * (process.threads != 1)}"
    return f"GPU {', '.join(process.gpus)}, {threads}" if process.gpus else threads


def _describe_sockets(config: RunConfig, plan: LaunchPlan) -> Iterator[str]:
    where = "loopback" if len(plan.hosts) == 1 else "each host's own address"
    direct = " and servers for workers" if config.wire.direct else ""
    yield f"Sockets bind to {where}, on free ports: the hub{direct} (CURVE); trainer ranks and weights (not encrypted)."
    if not config.inference.http or config.inference.engine != "vllm":
        return
    base = config.inference.base_port
    wish = {0: "any free port", DEFAULT_PORT: f"ports from {base} on, the next free ones where those are taken"}
    port = wish.get(base, f"port {base} + the server's number")
    host = config.inference.host or "loopback"
    made = "; requests need the key in http.key of the run directory" if config.inference.makes_http_key else ""
    yield f"HTTP of servers: {host}, {port}{'; requests need the API key' if config.inference.api_key else made}."
