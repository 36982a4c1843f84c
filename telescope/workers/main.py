"""An environment worker process: `python -m telescope.workers --run-dir DIR --name worker-0`.

Loads the run's environments and tokenizer, says hello, plays rollouts until told to stop. Exit codes: 0 done, 1 error,
2 usage, 130 and 143 interrupted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import Any

from telescope.config.model_facts import read_model_facts
from telescope.config.models import ModelNotFound, model_folder
from telescope.config.plugins import PluginError
from telescope.config.secrets import SecretMissing
from telescope.config.words import ConfigError
from telescope.wire.direct import DirectClient
from telescope.wire.link import Link, LinkLost, WireRefused, WireTimeout
from telescope.wire.process import Interrupted, KnownErrors, ProcessContext, ProcessSignals, freeze_heap, run_process
from telescope.wire.security import BadKeys
from telescope.workers.loading import EnvironmentBroken, load_environments
from telescope.workers.play import PlayLimits
from telescope.workers.prompt_lengths import leave_out_too_long
from telescope.workers.service import WorkerHopeless, WorkerService
from telescope.workers.shared_prompts import count_shared
from telescope.workers.text_chat import ChatCompletions
from telescope.workers.tokenizer import TokenizerError, load_template

log = logging.getLogger(__name__)

KNOWN = KnownErrors(
    errors=(
        *(EnvironmentBroken, TokenizerError, ModelNotFound, WorkerHopeless, ConfigError, PluginError, SecretMissing),
        *(WireRefused, WireTimeout, BadKeys),
    ),
    gone=(LinkLost,),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """The process. Gives its exit code."""
    return run_process(run_worker, prog="python -m telescope.workers", known=KNOWN, arguments=arguments)


def run_worker(context: ProcessContext, signals: ProcessSignals) -> int:
    """Load, say hello, play, say goodbye."""
    config = context.config
    limits = PlayLimits.from_config(config)
    deadline_s = config.cluster.placement_timeout_s / 2
    environments = load_environments(config)
    template = model = remote = None
    if config.inference.remote is not None:
        remote = ChatCompletions(config.inference.remote, limits.timeout_s)
    else:
        folder = model_folder(config.model.name)
        template = load_template(config.model, folder)
        model = read_model_facts(config.model, folder, weights=False)
    if config.trains and template is not None:
        environments |= {
            label: leave_out_too_long(loaded, template, limits.of(loaded).max_prompt_tokens, deadline_s)
            for label, loaded in environments.items()
            if label in config.environments
        }
        environments = count_shared(environments, config.active_evals, list(config.environments))
    hello = context.make_hello(
        "worker",
        capacity=config.cluster.rollouts_per_env_worker,
        environments=tuple(loaded.card for loaded in environments.values()),
        model=model,
    )
    freeze_heap()
    with Link.connect(context.directory, hello, deadline_s=config.cluster.placement_timeout_s) as link:
        direct = None
        if config.wire.direct:
            direct = DirectClient(link, context.directory, lambda: context.make_hello("worker", capacity=0))
        service = WorkerService(link, context.name, environments, template, limits, direct, remote=remote)
        return run_through(_until_stopped(service, signals))


def run_through(life: Coroutine[Any, Any, int]) -> int:
    """`asyncio.run` that outlives a `sys.exit()` in a task of the environment's own: the loop stops for it, the task keeps it
    for the rollout that waits, and the loop goes on."""
    with asyncio.Runner() as runner:
        living = runner.get_loop().create_task(life)
        while True:
            try:
                return runner.get_loop().run_until_complete(living)
            except (SystemExit, KeyboardInterrupt) as error:
                if isinstance(error, Interrupted) or living.done():
                    raise
                log.warning("an environment's own task raised %s; the worker goes on", type(error).__name__)


async def _until_stopped(service: WorkerService, signals: ProcessSignals) -> int:
    """0 after the orchestrator's Stop, 128 + n after a signal n."""
    signalled = signals.watch_on_loop()
    running = asyncio.ensure_future(service.run())
    await asyncio.wait((running, signalled), return_when=asyncio.FIRST_COMPLETED)
    if signalled.done():
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return 128 + signalled.result()
    log.info("stopped: %s", running.result())
    return 0
