"""A run without processes: a clock that jumps, and stand-ins for workers, servers and the trainer around a real core."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from random import Random
from typing import Any

import msgspec

from telescope.flow import commands as do
from telescope.flow import events as seen
from telescope.flow.core import Core
from telescope.flow.replay import encode_line, encode_opening
from telescope.flow.settings import FlowSettings
from telescope.flow.snapshot import Snapshot
from telescope.records import EnvironmentCard, FinishReason, RolloutOrder
from tests.flow.rules import Rules

Reward = Callable[[RolloutOrder], float]


def mixed(order: RolloutOrder) -> float:
    """Depends on the sample's seed alone."""
    return float(order.seed % 3)


def equal(order: RolloutOrder) -> float:
    return 1.0


def sometimes_equal(order: RolloutOrder) -> float:
    """One group in three has equal rewards."""
    return 1.0 if order.prompt.index % 3 == 0 else float(order.sample % 2)


@dataclass(frozen=True)
class Manners:
    """How the stand-ins behave. Times in seconds are means of exponential draws."""

    workers: int = 2
    capacity: int = 64
    servers: int = 2
    server_capacity: int = 1000
    """Requests a server takes at once."""
    prompts: int = 50
    eval_prompts: int = 3
    most_turns: int = 2
    generate_s: float = 1.0
    straggler_share: float = 0.0
    """Requests that take `straggler_factor` times longer."""
    straggler_factor: float = 50.0
    score_s: float = 0.2
    step_s: float = 3.0
    update_s: float = 0.5
    cancel_s: float = 0.1
    wire_s: float = 0.01
    failure_share: float = 0.0
    """Attempts that end in RolloutFailed."""
    timeout_share: float = 0.0
    """Requests whose rollout fails while a server still holds them: the worker gives up waiting."""
    abort_s: float = 0.3
    """Until a server has answered a request that it was told to abort."""
    worker_life_s: float = 0.0
    """Mean life; 0: for ever. A worker comes back after `absence_s`."""
    server_life_s: float = 0.0
    fenced_share: float = 0.0
    """Servers that do not take an update and are killed while it is on its way; they come back likewise."""
    absence_s: float = 2.0
    repeat_share: float = 0.0
    """Events delivered a second time, some time later."""
    mute_share: float = 0.0
    """Attempts a worker never answers by itself (cancels it does answer)."""
    deaf: bool = False
    """A mute attempt's cancel is not answered either."""
    closes_share: float = 0.0
    """Rollouts that say when their generation is over, on the way to their reward."""
    kv_tokens: int = 0
    """Tokens that a server's cache holds; 0: it reports nothing. One request more than it holds is thrown out, and counted."""
    engine_room: int = 1000
    """Requests that a server's engine works on at once; the others wait in it."""
    load_every_s: float = 0.25
    load_lost_share: float = 0.0
    """Reports of load that are lost."""
    save_s: float = 1.0
    save_failure_share: float = 0.0
    tick_s: float = 5.0
    reward: Reward = mixed


@dataclass
class Play:
    order: RolloutOrder
    worker: str
    life: int
    turns: int
    turn: int = 0
    over: bool = False
    """The answer is on its way, or never comes."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint: what the core was, and how many commands had come by then."""

    step: int
    blob: bytes
    commands: int

    @property
    def snapshot(self) -> Snapshot:
        return msgspec.msgpack.decode(self.blob, type=Snapshot)


@dataclass
class World:
    settings: FlowSettings
    manners: Manners = field(default_factory=Manners)
    seed: int = 0
    core_class: type[Core] = Core
    journal: bool = False
    check: bool = True
    resumed: Snapshot | None = None
    """What the run goes on from."""

    def __post_init__(self) -> None:
        again = self.resumed
        self.core = self.core_class(self.settings) if again is None else self.core_class.restore(self.settings, again)
        self.rules = Rules(self.settings, again)
        self.said: list[Any] = []
        """Every command, in order."""
        self.checkpoints: list[Saved] = []
        """Those that are complete."""
        self.random = Random(self.seed)
        self.now = 0.0
        self.events = 0
        self.lines: list[bytes] = [encode_opening(self.settings, again)] if self.journal else []
        self.stop: do.EndRun | None = None
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._plays: dict[tuple[int, int], Play] = {}
        self._requests: dict[str, Play] = {}
        self._placed: dict[str, str] = {}
        self._worker_lives: dict[str, int] = {}
        self._server_lives: dict[str, int] = {}
        self._absent: set[str] = set()
        """Servers that are down and come again."""
        self._held: dict[str, dict[str, int]] = {}
        """Tokens of each request that a server has."""
        self._thrown_out: dict[str, int] = {}
        self._reported: dict[str, seen.ServerLoad] = {}
        self._served: dict[str, int] = {}
        self._on_its_way: dict[str, list[seen.TurnDone]] = {}

    # ---- the clock

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        heappush(self._agenda, (self.now + seconds, next(self._numbers), action))

    def some(self, mean_s: float) -> float:
        return self.random.expovariate(1 / mean_s) if mean_s > 0 else 0.0

    def run(self, most_events: int = 200_000, killed_after: float = float("inf")) -> World:
        """Play until Stop, or so many events. Fails if the run has not ended after `most_events`."""
        self._open()
        while self.stop is None and self._agenda:
            if self.events >= killed_after:
                return self
            self.now, _, action = heappop(self._agenda)
            action()
            assert self.events < most_events, f"no end after {self.events} events: {self.core.counts()}"
        assert self.stop is not None, f"everyone waits for someone: {self.core.counts()}"
        return self

    def _open(self) -> None:
        for number in range(self.manners.workers):
            self._worker_up(f"worker-{number}")
        for number in range(self.manners.servers):
            self._server_up(f"server-{number}", 0)
        self.after(self.some(self.manners.wire_s), lambda: self.tell(seen.TrainerReady(1)))
        self._tick()

    def _tick(self) -> None:
        self.tell(seen.Tick())
        self.after(self.manners.tick_s, self._tick)

    def tell(self, event: Any) -> None:
        """The core handles the event now; its commands are carried out."""
        if self.stop is not None:
            return
        self.events += 1
        commands = self.core.handle(event, self.now)
        if self.journal:
            self.lines.append(encode_line(self.now, event, commands))
        if self.check:
            self.rules.saw(event, commands)
        for command in commands:
            self.said.append(command)
            self._perform(command)
        if self.random.random() < self.manners.repeat_share and isinstance(event, REPEATABLE):
            self.after(self.some(self.manners.generate_s), lambda: self.tell(event))

    def _perform(self, command: Any) -> None:
        match command:
            case do.DispatchRollout():
                self._run(command)
            case do.CancelAttempt():
                self._cancel(command)
            case do.PlaceRequest():
                self._place(command)
            case do.RefuseRequest():
                play = self._requests.pop(command.request_id, None)
                if play is not None:
                    self._answer(play, seen.RolloutFailed(play.order.rollout_id, play.order.attempt, command.cause))
            case do.TrainOnBatch():
                self.after(self.some(self.manners.step_s), lambda: self.tell(seen.StepDone(command.step)))
            case do.UpdateWeights():
                self._update(command)
            case do.TakeCheckpoint(step=step):
                saved = Saved(step, msgspec.msgpack.encode(self.core.saved), len(self.said))
                self.after(self.some(self.manners.save_s), lambda: self._saved(saved))
            case do.EndRun():
                self.stop = command

    def _saved(self, saved: Saved) -> None:
        if self.random.random() < self.manners.save_failure_share:
            self.tell(seen.CheckpointFailed(saved.step, "the disk is full"))
            return
        self.checkpoints.append(saved)
        self.tell(seen.CheckpointDone(saved.step))

    # ---- workers

    def cards(self) -> tuple[EnvironmentCard, ...]:
        """Of what is trained on, and of what evals alone play."""
        sizes = {self.settings.split: self.manners.prompts, "eval": self.manners.eval_prompts}
        labels = [label for label, _ in self.settings.environments] + [rules.environment for rules in self.settings.evals]
        return tuple(EnvironmentCard(label, sizes, "d") for label in dict.fromkeys(labels))

    def _worker_up(self, name: str) -> None:
        life = self._worker_lives[name] = self._worker_lives.get(name, 0) + 1
        self.after(self.some(self.manners.wire_s), lambda: self._worker_joined(name, life))
        if self.manners.worker_life_s:
            self.after(10 * self.manners.wire_s + self.some(self.manners.worker_life_s), lambda: self._worker_down(name, life))

    def _worker_joined(self, name: str, life: int) -> None:
        if self._worker_lives[name] == life:  # as with servers
            self.tell(seen.WorkerJoined(name, self.manners.capacity, self.cards()))

    def _worker_down(self, name: str, life: int) -> None:
        self._worker_lives[name] = life + 1
        self.tell(seen.WorkerLost(name, "killed"))
        self.after(self.some(self.manners.absence_s), lambda: self._worker_up(name))

    def _run(self, command: do.DispatchRollout) -> None:
        order = command.order
        play = Play(order, command.worker, self._worker_lives[command.worker], self.random.randint(1, self.manners.most_turns))
        self._plays[order.rollout_id, order.attempt] = play
        chance = self.random.random()
        if chance < self.manners.failure_share:
            failed = seen.RolloutFailed(order.rollout_id, order.attempt, "the sandbox is down")
            self.after(self.some(self.manners.score_s), lambda: self._answer(play, failed))
        elif chance < self.manners.failure_share + self.manners.mute_share:
            play.over = self.manners.deaf
        else:
            self.after(self.some(self.manners.wire_s), lambda: self._ask(play))

    def _ask(self, play: Play) -> None:
        if play.over or self._worker_lives[play.worker] != play.life:
            return
        order = play.order
        request_id = f"{order.rollout_id}.{order.attempt}.{play.turn}"
        self._requests[request_id] = play
        self.tell(seen.TurnStarted(request_id, order.rollout_id, order.attempt, play.turn, 20 + 10 * play.turn))

    def _answer(self, play: Play, event: Any) -> None:
        """The worker's last word on an order, unless it has spoken or is dead."""
        if not play.over:
            play.over = True
            self.after(self.some(self.manners.wire_s), lambda: self._heard(play, event))

    def _heard(self, play: Play, event: Any) -> None:
        if self._worker_lives[play.worker] == play.life:
            self.tell(event)

    def _cancel(self, command: do.CancelAttempt) -> None:
        play = self._plays[command.rollout_id, command.attempt]
        for request_id in [request_id for request_id, other in self._requests.items() if other is play]:
            self._abort(request_id)
        gone = seen.RolloutFailed(command.rollout_id, command.attempt, "cancelled")
        self.after(self.some(self.manners.cancel_s), lambda: self._answer(play, gone))

    # ---- servers

    def _server_up(self, name: str, version: int) -> None:
        self._absent.discard(name)
        life = self._server_lives[name] = self._server_lives.get(name, 0) + 1
        self.after(self.some(self.manners.wire_s), lambda: self._server_joined(name, version, life))
        self._held[name], self._thrown_out[name] = {}, 0
        if self.manners.kv_tokens:
            self._report(name, life)
        if self.manners.server_life_s:
            self.after(10 * self.manners.wire_s + self.some(self.manners.server_life_s), lambda: self._server_down(name, life))

    def _server_joined(self, name: str, version: int, life: int) -> None:
        """Unless it is down again already: the hub never tells of a join after the loss of the same process, nor of its answers
        after a second join."""
        if self._server_lives[name] == life:
            self.tell(seen.ServerJoined(name, version, self.manners.server_capacity))

    def _server_down(self, name: str, life: int) -> None:
        if self._server_lives[name] != life or name in self._absent:
            return  # a fence meant an earlier life, or one that had ended already
        self._absent.add(name)
        for done in self._on_its_way.pop(name, []):
            self.tell(done)  # what it has said is heard before its end is
        self._server_lives[name] = life + 1
        self.tell(seen.ServerLost(name, "killed"))
        self.after(self.some(self.manners.absence_s), lambda: self._server_up(name, 0))

    def _report(self, name: str, life: int) -> None:
        """A server's engine says how full it is, if that has changed."""
        if self._server_lives[name] != life:
            return
        held = self._held[name]
        used = sum(held.values()) / self.manners.kv_tokens
        running = min(len(held), self.manners.engine_room)
        self._thrown_out[name] += used > 1
        load = seen.ServerLoad(name, min(1.0, used), running, len(held) - running, self._thrown_out[name])
        if load != self._reported.get(name) and self.random.random() >= self.manners.load_lost_share:
            self._reported[name] = load
            self.after(self.some(self.manners.wire_s), lambda: self.tell(load))
        self.after(self.manners.load_every_s, lambda: self._report(name, life))

    def _place(self, command: do.PlaceRequest) -> None:
        self._held[command.server][command.request_id] = self.random.randint(10, 60) if self.manners.kv_tokens else 0
        play = self._requests[command.request_id]
        self._placed[command.request_id] = command.server
        slow = self.manners.straggler_factor if self.random.random() < self.manners.straggler_share else 1.0
        life = self._server_lives[command.server]
        seconds = self.some(self.manners.generate_s) * slow
        self.after(seconds, lambda: self._generated(play, command.request_id, command.server, life, int(1 + 10 * seconds)))
        if self.manners.timeout_share and self.random.random() < self.manners.timeout_share:
            self.after(self.some(self.manners.score_s), lambda: self._give_up(play, command.request_id))

    def _give_up(self, play: Play, request_id: str) -> None:
        if self._requests.get(request_id) is play:
            order = play.order
            self._answer(play, seen.RolloutFailed(order.rollout_id, order.attempt, "rollout.timeout_s ran out"))
            self._abort(request_id)

    def _abort(self, request_id: str) -> None:
        """The server stops the request soon, if it has it, and answers."""
        server = self._placed.get(request_id)
        if server is not None:
            play, life = self._requests[request_id], self._server_lives[server]
            self.after(self.some(self.manners.abort_s), lambda: self._generated(play, request_id, server, life, 1, "abort"))

    def _generated(
        self, play: Play, request_id: str, server: str, life: int, tokens: int, reason: FinishReason = "stop"
    ) -> None:
        if self._server_lives[server] != life or request_id not in self._held[server]:
            return  # it was lost with the server's last life, or is answered
        del self._held[server][request_id]
        if self._requests.pop(request_id, None) is None:
            return
        order = play.order
        # the relay tells the core and the worker at once; which of them speaks first is chance
        done = seen.TurnDone(request_id, order.rollout_id, tokens, reason)
        self._on_its_way.setdefault(server, []).append(done)
        self.after(self.some(self.manners.wire_s), lambda: self._said(server, done))
        if reason == "abort":
            return
        play.turn += 1
        if play.turn < play.turns:
            self.after(self.some(self.manners.wire_s), lambda: self._ask(play))
        else:
            if self.manners.closes_share and self.random.random() < self.manners.closes_share:
                over = seen.GenerationOver(order.rollout_id, order.attempt)
                self.after(self.some(self.manners.wire_s), lambda: self._heard(play, over))
            result = seen.RolloutDone(order.rollout_id, order.attempt, self.manners.reward(order), 20, tokens)
            self.after(self.some(self.manners.score_s), lambda: self._answer(play, result))

    def _said(self, server: str, done: seen.TurnDone) -> None:
        if done in self._on_its_way.get(server, ()):
            self._on_its_way[server].remove(done)
            self.tell(done)

    def _update(self, command: do.UpdateWeights) -> None:
        """Some servers do not follow and are fenced: their loss is told before the update's end."""
        seconds = self.some(self.manners.update_s)
        for name, life in self._server_lives.items():
            if self.manners.fenced_share and self.random.random() < self.manners.fenced_share:
                self.after(self.random.random() * seconds, functools.partial(self._server_down, name, life))
        self.after(seconds, lambda: self._updated(command.version, dict(self._server_lives)))

    def _updated(self, version: int, lives: dict[str, int]) -> None:
        self._served.update(dict.fromkeys(lives, version))
        self.tell(seen.UpdateDone(version))


REPEATABLE = (
    seen.GenerationOver, seen.ServerLoad,
    seen.TurnStarted, seen.TurnDone, seen.RolloutDone, seen.RolloutFailed, seen.StepDone, seen.UpdateDone, seen.TrainerReady,
)  # fmt: skip


def settings(**changes: Any) -> FlowSettings:
    """Small defaults for tests."""
    return FlowSettings(
        **{
            "number_of_steps": 6, "prompts_batch_size_for_trainer": 4, "group_size": 3, "max_async_rollout": 1,
            "max_off_policy_steps": 2, "environments": (("countdown", 1.0),), "rollout_deadline_s": 400.0, **changes,
        }
    )  # fmt: skip
