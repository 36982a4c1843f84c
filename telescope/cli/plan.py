"""`python -m telescope plan [overrides]`: what a run would be, in numbers. Starts nothing and writes nothing.

Takes the same overrides as `telescope.run`: batches, steps and staleness come from `flow.staleness`, the processes and their
GPUs and threads from the launcher's own plan for this machine or the nodes of a Slurm job, memory from `maths.memory`, and
times from the simulator (`planning.simulator`), with those of a run (`--calibrate RUN_DIR`) or of a card (`--card h100`).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from telescope._launch.process_plan import LaunchPlan, PlanError, describe_shared_gpus, make_plan
from telescope._launch.this_host import inspect_this_host
from telescope.backends.megatron import Megatron
from telescope.cli.command_line import parse_all
from telescope.compose.load import UsageError, load_points, places_for
from telescope.config.automatic import Decision, Surroundings, decide, find_open
from telescope.config.model_shapes import ShapeUnknown, shape_of
from telescope.config.run import RunConfig
from telescope.config.words import ConfigError
from telescope.flow.staleness import explain
from telescope.maths.memory import ModelShape
from telescope.maths.minibatches import cut
from telescope.orchestrator.main import make_flow_settings
from telescope.planning.calibration import Calibration, Uncalibratable, calibrate
from telescope.planning.cards import CARDS, GpuCard
from telescope.planning.forecast import (
    adapt_latencies,
    assume_latencies,
    choose_split,
    find_short_rows,
    forecast,
    pack_step,
    try_splits,
)
from telescope.planning.latencies import Latencies
from telescope.planning.memory import (
    PlanRefused,
    check_memory,
    check_model,
    decide_for,
    divide,
    estimate_rank,
    estimate_server,
    find_spare_memory,
    shares_a_card,
)
from telescope.planning.report import (
    BadHosts,
    describe_assumed,
    describe_calibration,
    describe_model,
    describe_outcome,
    describe_placement,
    describe_processor,
    describe_rows,
    describe_server_memory,
    describe_spare,
    describe_splits,
    describe_trainer_memory,
    plan_nodes,
    read_hosts,
)
from telescope.runlog import opening
from telescope.runlog.layout import RunDirectory

OK, CONFIG_ERROR, USAGE = 0, 1, 2


def main(arguments: Sequence[str]) -> int:
    """Exit code 0; 1 where the run would be refused, 2 for a command line that cannot be read."""
    asked = parse_all(_parser(), arguments)
    try:
        (point,) = load_points(asked.overrides, places_for(asked.config_dir), os.environ)
        if point.config is None or point.problems:
            raise ConfigError(point.problems)
        if asked.placement:
            lines = [*describe_placement(point.config, _plan(point.config, asked)), *point.warnings]
        elif not point.config.trains:
            raise PlanRefused(
                "cluster.trainer_num_workers=0 trains nothing: --placement shows its processes, and no more is planned"
            )
        else:
            settled = _settle(_as_placed(point.config, asked), asked)
            lines = [*describe(settled.config), *filter(None, (settled.sentence,))]
            lines += [*_processes(point.config, point.warnings, asked), *_forecast(settled.config, asked)]
    except (UsageError, BadHosts) as error:
        sys.stderr.write(f"telescope plan: {error}\n")
        return USAGE
    except (ConfigError, PlanError, PlanRefused, Uncalibratable) as error:
        sys.stderr.write(f"{error}\n")
        return CONFIG_ERROR
    sys.stdout.write("\n".join(lines) + "\n")
    return OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="telescope plan", description=__doc__, allow_abbrev=False)
    parser.add_argument("-cd", "--config-dir", help="a folder with your own presets")
    parser.add_argument("--calibrate", metavar="RUN_DIR", help="take times and lengths from this run")
    parser.add_argument("--gpus", type=int, metavar="N", help="divide N GPUs between inference and training; show the splits")
    parser.add_argument("--card", choices=sorted(CARDS), help="the GPU to plan for, whatever this machine has (default: h100)")
    parser.add_argument("--placement", action="store_true", help="show which process goes where, and nothing else")
    parser.add_argument("--hosts", metavar="4x8", help="hosts to plan for, COUNTxGPUS or COUNTxGPUSxCORES, e.g. 1x0x16,4x8")
    parser.add_argument(
        "--completion-tokens",
        type=float,
        metavar="MEAN",
        help="mean length of a completion, cut off at max_tokens, if no run is given",
    )
    parser.add_argument("overrides", nargs="*", help="as for telescope.run, e.g. model=tiny orchestrator.max_async_rollout=1")
    return parser


def _processes(config: RunConfig, warnings: Iterable[str], asked: argparse.Namespace) -> Iterator[str]:
    """What the hosts would start; nothing where a card is planned for that they need not have."""
    if asked.gpus is not None or asked.card is not None:
        yield from warnings
        return
    plan = _plan(config, asked)
    yield from describe_processes(plan)
    yield from (*warnings, *filter(None, (describe_shared_gpus(plan),)))


def _as_placed(config: RunConfig, asked: argparse.Namespace) -> RunConfig:
    """With the transport that follows where hosts put everything on one card, which the memory of both sides depends on."""
    sync = config.weight_sync
    if sync.transport != "auto" or config.model.lora is not None or asked.gpus is not None or (asked.card and not asked.hosts):
        return config
    plan = _plan(config, asked)
    cards = {(process.node, gpu) for process in plan.processes for gpu in process.gpus}
    if plan.device == "cpu" or len(cards) != 1 or not describe_shared_gpus(plan):
        return config
    return config.model_copy(update={"weight_sync": sync.model_copy(update={"transport": "cuda_ipc"})})


def _plan(config: RunConfig, asked: argparse.Namespace) -> LaunchPlan:
    """For the hosts that were named, else for the nodes that Slurm is asked for, else for as many like this one as the run has.

    Raises `PlanError`, `BadHosts`."""
    here = inspect_this_host()
    if asked.hosts is not None:
        return make_plan(config, read_hosts(asked.hosts, here.cpus))
    if config.cluster.slurm is not None:
        return make_plan(config, plan_nodes(config.cluster.slurm))
    return make_plan(config, (here,) * (config.cluster.nodes or 1))


def _settle(config: RunConfig, asked: argparse.Namespace) -> Decision:
    """With `auto` decided for the card that is planned for; where cards are to be divided that waits for the division."""
    card = _card(config, asked)
    if asked.gpus is not None or not find_open(config):
        return Decision(config)
    if card is None:
        return decide(config, Surroundings(device="cpu"))
    return _settle_on(config, card)


def _settle_on(config: RunConfig, card: GpuCard) -> Decision:
    try:
        shape = shape_of(config.model.name)
    except ShapeUnknown:
        shape = None
    return decide_for(config, shape, card)


def _forecast(config: RunConfig, asked: argparse.Namespace) -> Iterator[str]:
    """Memory, and the simulated run: with the times of a run, or with those of a card."""
    if asked.completion_tokens is not None and not 1 <= asked.completion_tokens <= config.rollout.max_tokens:
        raise PlanRefused(
            f"--completion-tokens {asked.completion_tokens:g} must lie between 1 and "
            f"rollout.max_tokens={config.rollout.max_tokens}"
        )
    card = _card(config, asked)
    try:
        shape = shape_of(config.model.name)
    except ShapeUnknown as error:
        shape = None
        yield f"No estimate of memory: {error}"
    if shape is not None:
        check_model(config, shape)
        if asked.gpus is None:
            yield from _memory(config, shape, card)
    calibration = _calibration(asked.calibrate)
    if calibration is None and (card is None or shape is None):
        yield "Not simulated: --calibrate RUN_DIR takes the times of a run, --card h100 those of a data sheet."
        return

    def load_of(divided: RunConfig) -> Latencies:
        if shape is not None and card is not None:
            divided = decide_for(divided, shape, card).config
            check_memory(divided, shape, card)
        if calibration is not None:
            return adapt_latencies(calibration, divided, shape, card)
        assert shape is not None
        assert card is not None  # else returned above
        return assume_latencies(divided, shape, card, asked.completion_tokens)

    if calibration is not None:
        yield describe_calibration(calibration, asked.calibrate)
    if asked.gpus is not None:
        divisions = list(try_splits(config, asked.gpus, load_of))
        chosen = choose_split(divisions)
        if chosen is None:
            raise PlanRefused(f"No division of {asked.gpus} GPUs works. The last one: {divisions[-1].problem}")
        yield from describe_splits(divisions, chosen, asked.gpus)
        config = divide(config, chosen.servers, chosen.ranks)
        if card is not None:
            settled = _settle_on(config, card)
            yield from filter(None, (settled.sentence,))
            config = settled.config
        if shape is not None:
            yield from _memory(config, shape, card)  # of the division that is recommended
    load = load_of(config)
    if calibration is None and card is not None:
        yield describe_assumed(load, card)
    yield describe_rows(config, load, pack_step(config, load.prompt_tokens, load.completion_tokens).rows)
    if shape is not None and card is not None and (short := find_short_rows(config, load, shape, card)) is not None:
        yield short.sentence
    if shape is not None and card is not None and (spare := find_spare_memory(config, shape, card)) is not None:
        yield describe_spare(spare, card)
    outcome = forecast(config, load)
    yield from describe_outcome(outcome)
    if calibration is not None and calibration.host_costs is not None and card is None:
        yield describe_processor(calibration.host_costs.estimate_step_s(outcome.steps), calibration.processor_step_s)


def _memory(config: RunConfig, shape: ModelShape, card: GpuCard | None) -> Iterator[str]:
    yield describe_model(config, shape)
    if shares_a_card(config):
        yield "Server and trainer share a card."
    memory = estimate_rank(config, shape)
    if memory is not None:
        yield describe_trainer_memory(memory, config.cluster.trainer_num_workers)
    if isinstance(config.backend, Megatron):
        waits = ", without the wait of its stages for each other" if config.backend.pipeline_parallel_size > 1 else ""
        waits += ", without the way of its moments over the bus" if config.backend.optimizer_cpu_offload else ""
        yield f"The steps of backend=megatron are taken to be as long as those of backend=fsdp{waits}."
    if card is not None:
        yield describe_server_memory(estimate_server(config, shape, card), config.inference.max_model_len, card)


def _card(config: RunConfig, asked: argparse.Namespace) -> GpuCard | None:
    """The card to plan for; None on a machine, or for a run, without GPUs."""
    if asked.card is not None or asked.gpus is not None:
        return CARDS[asked.card or "h100"]
    return CARDS["h100"] if _plan(config, asked).device == "gpu" else None


def _calibration(folder: str | None) -> Calibration | None:
    if folder is None:
        return None
    run = RunDirectory(Path(folder))
    try:
        config = opening.read(run)
        return calibrate(run, ranks=config.cluster.trainer_num_workers, epochs=config.trainer.epochs_per_batch)
    except (OSError, ValueError) as error:
        raise Uncalibratable(f"--calibrate {folder}: {error}") from error


def describe(config: RunConfig) -> Iterator[str]:
    """The arithmetic of steps, batches, tokens and staleness."""
    rollouts = config.orchestrator.prompts_batch_size_for_trainer * config.rollout.group_size
    ranks, steps = config.cluster.trainer_num_workers, config.number_of_steps
    names = ", ".join(config.environments)
    yield f"{config.model.name} with {config.algorithm_name} on {names}, backend {config.backend_name}."
    minibatches, groups = config.trainer.number_of_minibatches, config.orchestrator.prompts_batch_size_for_trainer
    epochs = config.trainer.epochs_per_batch
    yield from explain(make_flow_settings(config), config.trainer.updates_per_step)
    yield f"{steps} steps train {steps * rollouts:,} rollouts and make weight versions 1 to {steps}."
    if epochs > 1:
        yield f"A step runs {epochs} times over its batch, cut anew each time."
    if config.trainer.updates_per_step > 1:
        sizes = sorted({len(part) for part in cut(range(groups), minibatches)})
        each = " or ".join(map(str, sizes))
        yield f"A step makes {config.trainer.updates_per_step} optimiser updates, each on {each} group{'s' * (sizes[-1] != 1)}."
    tokens = rollouts * config.rollout.max_tokens
    yield f"Turns of max_tokens={config.rollout.max_tokens} make at most {tokens:,} sampled tokens a step of single turns."
    rows = "" if config.trainer.seq_len == "auto" else f" of {config.trainer.row_tokens} tokens"
    yield f"They are trained in packed rows{rows}, on {ranks} rank{'s' * (ranks != 1)}."


def describe_processes(plan: LaunchPlan) -> Iterator[str]:
    for node, host in enumerate(plan.hosts):
        gpus = f"{len(host.gpus)} GPU{'s' * (len(host.gpus) != 1)}" if host.gpus else "no GPU"
        yield f"Processes on {host.name} ({host.cpus} core{'s' * (host.cpus != 1)}, {gpus}; runs on {plan.device}):"
        for process in plan.processes:
            where = (
                f"GPU {', '.join(process.gpus)}" if process.gpus else f"{process.threads} thread{'s' * (process.threads != 1)}"
            )
            if process.node == node:
                yield f"  {process.name:<14}{where}"
