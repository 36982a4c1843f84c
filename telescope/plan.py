"""`python -m telescope.plan [overrides]`: what a run would be, in numbers. Starts nothing and writes nothing.

Takes the same overrides as `telescope.run`: batches, steps and staleness come from `flow.bounds`, the processes and their
GPUs and threads from the launcher's own plan for this machine.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence

from telescope._launch.local import this_host
from telescope._launch.plan import Host, Plan, PlanError, make_plan, shared_gpus
from telescope.compose.load import UsageError, load_points, places_for
from telescope.config.run import RunConfig
from telescope.config.words import ConfigError
from telescope.flow.bounds import explain
from telescope.maths.batching import cut
from telescope.orchestrator.main import flow_settings

OK, CONFIG_ERROR, USAGE = 0, 1, 2


def main(arguments: Sequence[str]) -> int:
    """Exit code 0; 1 where the run would be refused, 2 for a command line that cannot be read."""
    parser = argparse.ArgumentParser(prog="telescope.plan", description=__doc__, allow_abbrev=False)
    parser.add_argument("-cd", "--config-dir", help="a folder with your own presets")
    parser.add_argument("overrides", nargs="*", help="as for telescope.run, e.g. model=tiny orchestrator.max_async_rollout=1")
    asked = parser.parse_intermixed_args(list(arguments))
    try:
        (point,) = load_points(asked.overrides, places_for(asked.config_dir), os.environ)
        if point.config is None or point.problems:
            raise ConfigError(point.problems)
        host = this_host()
        plan = make_plan(point.config, (host,))
        warnings = (*point.warnings, *filter(None, (shared_gpus(plan),)))
        lines = [*describe(point.config), *describe_processes(plan, host), *warnings]
    except UsageError as error:
        sys.stderr.write(f"telescope.plan: {error}\n")
        return USAGE
    except (ConfigError, PlanError) as error:
        sys.stderr.write(f"{error}\n")
        return CONFIG_ERROR
    sys.stdout.write("\n".join(lines) + "\n")
    return OK


def describe(config: RunConfig) -> Iterator[str]:
    """The arithmetic of steps, batches, tokens and staleness."""
    rollouts = config.orchestrator.prompts_batch_size_for_trainer * config.rollout.group_size
    ranks, steps = config.cluster.trainer_num_workers, config.number_of_steps
    names = ", ".join(config.environments)
    yield f"{config.model.name} with {config.algorithm_name} on {names}, backend {config.backend_name}."
    minibatches, groups = config.trainer.number_of_minibatches, config.orchestrator.prompts_batch_size_for_trainer
    epochs = config.trainer.epochs_per_batch
    yield from explain(flow_settings(config), config.trainer.updates_per_step)
    yield f"{steps} steps train {steps * rollouts:,} rollouts and make weight versions 1 to {steps}."
    if epochs > 1:
        yield f"A step runs {epochs} times over its batch, cut anew each time."
    if config.trainer.updates_per_step > 1:
        sizes = sorted({len(part) for part in cut(range(groups), minibatches)})
        each = " or ".join(map(str, sizes))
        yield f"A step makes {config.trainer.updates_per_step} optimiser updates, each on {each} group{'s' * (sizes[-1] != 1)}."
    tokens = rollouts * config.rollout.max_tokens
    yield f"Turns of max_tokens={config.rollout.max_tokens} make at most {tokens:,} sampled tokens a step of single turns."
    yield f"They are trained in packed rows of {config.trainer.seq_len} tokens, on {ranks} rank{'s' * (ranks != 1)}."


def describe_processes(plan: Plan, host: Host) -> Iterator[str]:
    gpus = f"{len(host.gpus)} GPU{'s' * (len(host.gpus) != 1)}" if host.gpus else "no GPU"
    yield f"Processes on {host.name} ({host.cpus} core{'s' * (host.cpus != 1)}, {gpus}; runs on {plan.device}):"
    for process in plan.processes:
        where = f"GPU {', '.join(process.gpus)}" if process.gpus else f"{process.threads} thread{'s' * (process.threads != 1)}"
        yield f"  {process.name:<14}{where}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
