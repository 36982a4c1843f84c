"""A run without processes: the real core under a clock that jumps from event to event, with `Latencies` for what takes time.

Owns the stand-ins of workers, servers and trainer, and the sum of what they did (`SimulatedRun`). Decides nothing a run
decides: admission, placement, batches, cancels and versions are the core's, so what holds for a simulated run's ages and order
holds for a real one's. Deterministic: one seed, one answer. docs/planning.md says what is modelled and what is left out.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import pairwise
from math import inf
from statistics import median
from typing import Any

import msgspec

from telescope.flow import commands as do
from telescope.flow import events as seen
from telescope.flow.core import Core
from telescope.flow.counts import Counts
from telescope.flow.prompt_sampler import keyed_hash
from telescope.flow.settings import FlowSettings
from telescope.planning.latencies import Latencies, draw, share_of
from telescope.planning.simulated_server import SimulatedRequest, SimulatedServer
from telescope.records import EnvironmentCard, RolloutOrder


class SimulatedStep(msgspec.Struct, frozen=True):
    """One train step: when it began, when it was through, when its weights were served. Seconds; sums from the start."""

    begun_s: float
    done_s: float
    committed_s: float
    rollouts: int
    tokens: int
    """Prompts and completions of its batch."""
    sampled: float
    """Tokens that all servers have made by `done_s`."""
    generating_s: float
    """Of all servers together, by `done_s`: at least one sequence runs."""
    paused_s: float
    sequence_s: float
    """Running sequences, integrated over time."""
    engine_steps: float
    """Of the servers' engines."""
    scores: int
    """Rollouts scored, those that nothing was trained on included."""


class SimulatedRun(msgspec.Struct, frozen=True, kw_only=True):
    """What a simulated run did. The shares are over its settled part: without the first steps, which fill the pipeline, and
    the last ones, for which nothing is generated any more."""

    ok: bool
    reason: str
    steps: tuple[SimulatedStep, ...]
    step_s: float
    """Median of the seconds between the ends of train steps, as `timing_step_total` counts them."""
    mean_step_s: float
    """Of the settled steps: with their tokens, `tokens_per_s`."""
    tokens_per_s: float
    """Trained tokens, prompts included, a second."""
    sampled_per_s: float
    trainer_training: float
    trainer_syncing: float
    trainer_waiting: float
    """Shares of the trainer's time; they add up to 1."""
    servers_generating: float
    servers_paused: float
    servers_waiting: float
    """Shares of the servers' time; they add up to 1."""
    sequences: float
    """Sequences that run on a server, in the mean over time."""
    preemptions: int
    counts: Counts
    events: int


def sum_up(
    steps: Sequence[SimulatedStep],
    *,
    ok: bool,
    reason: str,
    max_async_rollout: int,
    servers: int,
    preemptions: int,
    counts: Counts,
    events: int,
) -> SimulatedRun:
    """Sum a run up. Raises ValueError where it has no step."""
    if not steps:
        raise ValueError(f"the simulated run ended before its first step: {reason}")
    first, last = find_settled(len(steps), max_async_rollout)
    ends = [0.0, *(step.done_s for step in steps)]
    span = ends[last] - ends[first]
    origin = steps[first - 1] if first else None
    inner = steps[first:last]
    syncs = steps[first - 1 : last - 1] if first else steps[first : last - 1]
    training = sum(step.done_s - step.begun_s for step in inner) / span
    syncing = sum(step.committed_s - step.done_s for step in syncs) / span

    def grown(name: str) -> float:
        total: float = getattr(steps[last - 1], name) - (getattr(origin, name) if origin else 0.0)
        return total

    servers_s = span * servers
    generating, paused = grown("generating_s") / servers_s, grown("paused_s") / servers_s
    return SimulatedRun(
        ok=ok,
        reason=reason,
        steps=tuple(steps),
        step_s=median(b - a for a, b in pairwise(ends)),
        mean_step_s=span / (last - first),
        tokens_per_s=sum(step.tokens for step in inner) / span,
        sampled_per_s=grown("sampled") / span,
        trainer_training=training,
        trainer_syncing=syncing,
        trainer_waiting=max(0.0, 1.0 - training - syncing),  # rounding must not make a negative time
        servers_generating=generating,
        servers_paused=paused,
        servers_waiting=max(0.0, 1.0 - generating - paused),
        sequences=grown("sequence_s") / servers_s,
        preemptions=preemptions,
        counts=counts,
        events=events,
    )


def find_settled(steps: int, max_async_rollout: int) -> tuple[int, int]:
    """Steps `first:last` between the filling and the emptying of the pipeline; all of them where few remain."""
    first, last = max_async_rollout + 1, steps - max_async_rollout - 1
    return (first, last) if last - first >= 2 else (0, steps)


PROMPTS = 1_000_000
TICK_S = 10.0
REPORT_S = 1.0


class SimulatedCluster(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Who is there, and the settings that act outside the core."""

    servers: int
    ranks: int
    server_capacity: int
    """Requests that one server takes at once."""
    workers: int = 1
    worker_capacity: int = 1024
    """Rollouts that one environment worker plays at once."""
    max_tokens: int = 1_000_000
    """Sampled tokens of one turn, at most."""
    prefix_caching: bool = True
    reset_prefix_cache: bool = True
    """At each weight update."""
    abort_at_update: bool = False
    """Running generations are aborted and tried again; false: they go on."""
    recompute_at_update: bool = False
    """Keys and values of running generations are computed anew."""


class _SimulatedPrompt:
    """What the rollouts of a group share."""

    __slots__ = ("equal", "scored_tokens", "tokens")

    def __init__(self, tokens: int, equal: bool) -> None:
        self.tokens = tokens
        self.equal = equal  # its group's rewards all are
        self.scored_tokens = 0  # of the rollouts scored so far, prompts included


class _SimulatedRollout:
    """A rollout with a worker."""

    __slots__ = (
        "cached_at", "completion", "order", "over", "prompt", "request_id", "sequence", "server", "tokens", "turn", "turns",
        "worker",
    )  # fmt: skip

    def __init__(self, order: RolloutOrder, worker: str, prompt: _SimulatedPrompt, turns: int) -> None:
        self.order = order
        self.worker = worker
        self.prompt = prompt
        self.turns = turns
        self.turn = 0
        self.tokens = 0  # of its present turn's completion
        self.completion = 0  # of all its turns before
        self.request_id = ""
        self.sequence: SimulatedRequest | None = None  # on a server
        self.server: SimulatedServer | None = None
        self.cached_at = 0  # the server's resets when it came there
        self.over = False


Watch = Callable[[float, seen.AnyEvent, Sequence[do.AnyCommand]], None]
"""Sees each event with its time and what the core answered, as the journal of a real run does."""


def simulate(
    settings: FlowSettings, cluster: SimulatedCluster, latencies: Latencies, watch: Watch | None = None
) -> SimulatedRun:
    """Play the run's training to its end; evals beside it are left out. Raises ValueError where it can't end.

    Without the collector of cycles: none are left of a rollout, and it would look through millions of living objects again and
    again to find that out.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return _Simulation(msgspec.structs.replace(settings, evals=()), cluster, latencies, watch).run()
    finally:
        if collects:
            gc.enable()


class _Simulation:
    def __init__(
        self, settings: FlowSettings, cluster: SimulatedCluster, latencies: Latencies, watch: Watch | None = None
    ) -> None:
        self._settings, self._cluster, self._load = settings, cluster, latencies
        self._core = Core(settings)
        self._handle = self._core.handle if watch is None else self._watch_with(watch)
        self._now = 0.0
        self._agenda: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._entries = self._events = self._scores = 0
        self._pending: deque[seen.AnyEvent] = deque()
        self._say = self._pending.append
        self._servers = {
            f"server-{number}": SimulatedServer(latencies.engine, share_prefixes=cluster.prefix_caching)
            for number in range(cluster.servers)
        }
        self._plays: dict[
            int, _SimulatedRollout
        ] = {}  # of each rollout the attempt that plays: the next is ordered after its end
        self._requests: dict[str, _SimulatedRollout] = {}  # asked, not placed yet
        self._prompts: dict[int, _SimulatedPrompt] = {}  # by group
        self._busy_until: dict[str, float] = {}  # workers
        self._steps: list[SimulatedStep] = []
        self._begun: tuple[float, int, int] = (0.0, 0, 0)
        self._stop: do.EndRun | None = None
        self._perform: dict[type, Callable[[Any], None]] = {
            do.DispatchRollout: self._run,
            do.PlaceRequest: self._place,
            do.RefuseRequest: self._refuse,
            do.CancelAttempt: self._cancel,
            do.TrainOnBatch: self._train,
            do.UpdateWeights: self._update,
            do.TakeCheckpoint: self._checkpoint,
            do.ForgetRollouts: self._forget,
            do.EndRun: self._end_run,
        }

    def run(self) -> SimulatedRun:
        self._open()
        self._drain()
        agenda = self._agenda
        while self._stop is None:
            if not agenda:
                raise ValueError(f"the simulated run stands still at {self._now:.1f} s: {self._core.counts()}")
            self._now, _, action, subject = heappop(agenda)
            action(subject)
            if self._pending:
                self._drain()
        return self._sum_up(self._stop)

    def _sum_up(self, stop: do.EndRun) -> SimulatedRun:
        return sum_up(
            self._steps,
            ok=stop.ok,
            reason=stop.reason,
            max_async_rollout=self._settings.max_async_rollout,
            servers=self._cluster.servers,
            preemptions=sum(server.preemptions for server in self._servers.values()),
            counts=self._core.counts(),
            events=self._events,
        )

    # ---- the clock and the core

    def _after(self, seconds: float, action: Callable[[Any], None], subject: Any) -> None:
        self._entries += 1
        heappush(self._agenda, (self._now + seconds, self._entries, action, subject))

    def _do_after(self, seconds: float, action: Callable[[Any], None], subject: Any) -> None:
        if seconds > 0:  # as `_after` does; this one is called several times a rollout
            self._entries += 1
            heappush(self._agenda, (self._now + seconds, self._entries, action, subject))
        else:
            action(subject)

    def _drain(self) -> None:
        pending, handle, perform = self._pending, self._handle, self._perform
        while pending:
            self._events += 1
            for command in handle(pending.popleft(), self._now):
                action = perform.get(type(command))
                if action is not None:
                    action(command)

    def _watch_with(self, watch: Watch) -> Callable[[seen.AnyEvent, float], list[do.AnyCommand]]:
        def handle(event: seen.AnyEvent, now: float) -> list[do.AnyCommand]:
            ordered = self._core.handle(event, now)
            watch(now, event, ordered)
            return ordered

        return handle

    def _open(self) -> None:
        cluster, settings = self._cluster, self._settings
        self._say(seen.TrainerReady(cluster.ranks))
        for name in self._servers:
            self._say(seen.ServerJoined(name, 0, cluster.server_capacity))
        cards = tuple(EnvironmentCard(label, {settings.split: PROMPTS}, "") for label, _ in settings.environments)
        for number in range(cluster.workers):
            self._say(seen.WorkerJoined(f"worker-{number}", cluster.worker_capacity, cards))
        self._after(TICK_S, self._tick, None)
        if settings.adaptive_concurrency:
            self._after(REPORT_S, self._report, None)

    def _tick(self, _: None) -> None:
        self._say(seen.Tick())
        self._after(TICK_S, self._tick, None)

    def _report(self, _: None) -> None:
        """What each server's engine says of itself, for lanes that follow it."""
        for name, server in self._servers.items():
            server.advance(self._now)
            running, waiting = len(server.running), len(server.waiting)
            self._say(seen.ServerLoad(name, server.kv_used, running, waiting, server.preemptions))
        self._after(REPORT_S, self._report, None)

    # ---- workers

    def _run(self, command: do.DispatchRollout) -> None:
        order, latencies = command.order, self._load
        turns = int(draw(latencies.turns, order.seed, 1))
        play = _SimulatedRollout(order, command.worker, self._prompt_of(order.group_id), turns if turns > 1 else 1)
        self._plays[order.rollout_id] = play
        wait = draw(latencies.dispatch_s, order.seed, 2)
        if latencies.start_s:
            wait += self._wait_for_worker(command.worker, latencies.start_s)
        self._do_after(wait, self._ask, play)

    def _wait_for_worker(self, worker: str, seconds: float) -> float:
        """Seconds until the worker, which does one thing after another, has done this too."""
        until = self._busy_until[worker] = max(self._busy_until.get(worker, 0.0), self._now) + seconds
        return until - self._now

    def _prompt_of(self, group_id: int) -> _SimulatedPrompt:
        known = self._prompts.get(group_id)
        if known is None:
            latencies, seed = self._load, keyed_hash("simulated group", self._settings.seed, group_id) >> 16
            tokens = max(1, round(draw(latencies.prompt_tokens, seed, 0)))
            known = self._prompts[group_id] = _SimulatedPrompt(tokens, share_of(seed, 1) < latencies.equal_share)
        return known

    def _ask(self, play: _SimulatedRollout) -> None:
        if play.over:
            return
        order, turn = play.order, play.turn
        request_id = play.request_id = f"{order.rollout_id}.{order.attempt}.{turn}"
        self._requests[request_id] = play
        self._say(seen.TurnStarted(request_id, order.rollout_id, order.attempt, turn, play.prompt.tokens + play.completion))

    def _take_answer(self, play: _SimulatedRollout) -> None:
        """The worker has the tokens of a turn."""
        if play.over:
            return
        order, latencies = play.order, self._load
        play.turn += 1
        if play.turn < play.turns:
            self._do_after(draw(latencies.environment_s, order.seed, 16 * play.turn + 3), self._ask, play)
        else:
            if self._settings.free_lane_after_generation:
                self._say(seen.GenerationOver(order.rollout_id, order.attempt))
            wait = draw(latencies.reward_s, order.seed, 4)
            if latencies.score_s:
                wait += self._wait_for_worker(play.worker, latencies.score_s)
            self._do_after(wait, self._score, play)

    def _score(self, play: _SimulatedRollout) -> None:
        if play.over:
            return
        self._end(play)
        self._scores += 1
        order, prompt, completion = play.order, play.prompt, play.completion
        prompt.scored_tokens += prompt.tokens + completion
        reward = 0.0 if prompt.equal else float(order.sample % 2)
        self._say(seen.RolloutDone(order.rollout_id, order.attempt, reward, prompt.tokens, completion))

    def _fail(self, play: _SimulatedRollout, cause: str) -> None:
        if not play.over:
            self._end(play)
            self._say(seen.RolloutFailed(play.order.rollout_id, play.order.attempt, cause))

    def _end(self, play: _SimulatedRollout) -> None:
        play.over = True
        del self._plays[play.order.rollout_id]

    def _refuse(self, command: do.RefuseRequest) -> None:
        play = self._requests.pop(command.request_id, None)
        if play is not None:
            self._fail(play, command.cause)

    def _cancel(self, command: do.CancelAttempt) -> None:
        play = self._plays.get(command.rollout_id)
        if play is None or play.order.attempt != command.attempt:
            return
        server = play.server
        if play.sequence is not None and server is not None:
            server.advance(self._now)
            self._abort(server, play.sequence)
            self._schedule(server)
        self._fail(play, "cancelled")

    # ---- servers

    def _place(self, command: do.PlaceRequest) -> None:
        play = self._requests.pop(command.request_id)
        order, latencies, cluster, shared = play.order, self._load, self._cluster, play.prompt.tokens
        tokens, most = round(draw(latencies.completion_tokens, order.seed, 16 * play.turn)), cluster.max_tokens
        tokens = play.tokens = most if tokens > most else tokens if tokens > 1 else 1
        server = self._servers[command.server]
        # its own earlier turns are cached where it stays on its server and no update has come between
        stays = play.server is server and play.cached_at == server.resets and cluster.prefix_caching
        prompt = shared + play.completion
        sequence = play.sequence = SimulatedRequest(play, order.group_id, shared, prompt, tokens, prompt if stays else 0)
        play.server, play.cached_at = server, server.resets
        server.advance(self._now)
        server.add(sequence)
        at = server.next_at
        if at < server.scheduled_at:
            self._appoint(server, at)

    def _schedule(self, server: SimulatedServer) -> None:
        """See to it that somebody looks at the server when its next sequence ends, or earlier."""
        at = server.next_at
        if at < server.scheduled_at:
            self._appoint(server, at)

    def _appoint(self, server: SimulatedServer, at: float) -> None:
        server.scheduled_at = at
        self._entries += 1
        heappush(self._agenda, (at, self._entries, self._look, server))

    def _look(self, server: SimulatedServer) -> None:
        if self._now != server.scheduled_at:
            return  # an earlier look has been appointed since
        server.scheduled_at = inf
        server.advance(self._now)
        request_s = self._load.request_s
        for sequence in server.ended():
            sequence.key.sequence = None
            self._do_after(request_s, self._return_tokens, sequence.key)
        at = server.next_at
        if at < server.scheduled_at:
            self._appoint(server, at)

    def _return_tokens(self, play: _SimulatedRollout) -> None:
        """The relay tells the core and the worker at once."""
        play.completion += play.tokens
        self._say(seen.TurnDone(play.request_id, play.order.rollout_id, play.tokens, "stop"))
        self._take_answer(play)

    def _abort(self, server: SimulatedServer, sequence: SimulatedRequest) -> None:
        play: _SimulatedRollout = sequence.key
        server.remove(sequence)
        play.sequence = None
        made = max(0, sequence.completion - round(sequence.left))
        self._say(seen.TurnDone(play.request_id, play.order.rollout_id, made, "abort"))

    # ---- the trainer

    def _train(self, command: do.TrainOnBatch) -> None:
        latencies = self._load
        tokens = sum(self._prompts[group_id].scored_tokens for group_id in command.group_ids)
        self._begun = (self._now, sum(map(len, command.rollout_ids)), tokens)
        self._slow(latencies.shared_share)
        self._after(
            latencies.train_step_s + latencies.train_token_s * tokens / self._cluster.ranks, self._finish_training, command.step
        )

    def _finish_training(self, step: int) -> None:
        begun_s, rollouts, tokens = self._begun
        servers = self._servers.values()
        for server in servers:
            server.advance(self._now)
        self._slow(0.0)
        self._steps.append(
            SimulatedStep(
                begun_s=begun_s,
                done_s=self._now,
                committed_s=self._now,
                rollouts=rollouts,
                tokens=tokens,
                sampled=sum(server.tokens for server in servers),
                generating_s=sum(server.generating_s for server in servers),
                paused_s=sum(server.paused_s for server in servers),
                sequence_s=sum(server.sequence_s for server in servers),
                engine_steps=sum(server.steps for server in servers),
                scores=self._scores,
            )
        )
        self._say(seen.StepDone(step))

    def _slow(self, share: float) -> None:
        if self._load.shared_share:
            for server in self._servers.values():
                server.advance(self._now)
                server.slow(share)
                self._schedule(server)

    def _update(self, command: do.UpdateWeights) -> None:
        self._after(self._load.sync_s - self._load.pause_s, self._pause, command.version)

    def _pause(self, version: int) -> None:
        for server in self._servers.values():
            server.advance(self._now)
            if self._cluster.abort_at_update:
                for sequence in server.everyone():
                    self._abort(server, sequence)
                    self._fail(sequence.key, "aborted by a weight update")
            server.pause(
                self._load.pause_s,
                forget_prefixes=self._cluster.reset_prefix_cache,
                recompute=self._cluster.recompute_at_update,
            )
            self._schedule(server)
        self._after(self._load.pause_s, self._commit, version)

    def _commit(self, version: int) -> None:
        self._steps[-1] = msgspec.structs.replace(self._steps[-1], committed_s=self._now)
        self._say(seen.UpdateDone(version))

    def _checkpoint(self, command: do.TakeCheckpoint) -> None:
        """Written beside the work, which costs the run no time that is worth simulating."""
        self._say(seen.CheckpointDone(command.step))

    def _forget(self, command: do.ForgetRollouts) -> None:
        for group_id in {rollout_id // self._settings.group_size for rollout_id in command.rollout_ids}:
            self._prompts.pop(group_id, None)

    def _end_run(self, command: do.EndRun) -> None:
        self._stop = command
        self._pending.clear()
