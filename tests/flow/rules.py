"""What every run must keep to, checked from outside: only events and commands are seen, nothing of the core's insides.

The bounds are written out here once more, on purpose: a checker that asks the checked code for its limits finds nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from telescope.flow import commands as do
from telescope.flow import events as seen
from telescope.flow.settings import FlowSettings
from telescope.flow.snapshot import Snapshot
from telescope.records import PromptRef

PLAYING = ("pending", "queued", "generating", "env", "scoring")
NEXT = {
    **{state: {*PLAYING[i + 1 :], "complete", "cancelled", "failed"} for i, state in enumerate(PLAYING)},
    "complete": {"kept", "discarded"},
    "kept": {"batched", "cancelled"},
    "batched": {"trained", "cancelled"},
    **{state: set() for state in ("trained", "discarded", "cancelled", "failed")},
}
FINAL = ("trained", "discarded", "cancelled", "failed")


FIRST_EVAL = 2**52
"""Ids of evals' rollouts and groups begin here."""


class Broken(AssertionError):
    """A rule was broken; the sentence says which."""


def keep(rule: bool, sentence: str) -> None:
    if not rule:
        raise Broken(sentence)


def most_versions_old(settings: FlowSettings) -> int:
    """Rule 5: M in admission order; M + D − 1 in completion order, D = 0 (and no extra wait) where M = 0."""
    if settings.max_async_rollout == 0:
        return 0
    return settings.max_async_rollout + (settings.max_off_policy_steps - 1 if settings.take_order == "completion" else 0)


@dataclass
class Order:
    worker: str
    cancelled: bool = False
    over: bool = False
    """It asks for no more tokens."""
    dedicated: bool = False
    """Of an eval that has servers of its own."""


@dataclass
class Known:
    """One group, as far as it shows."""

    state: str = "pending"
    v_start: int = -1
    prompt: PromptRef | None = None
    server: str | None = None
    seeds: dict[int, int] = field(default_factory=dict)
    attempts: dict[int, int] = field(default_factory=dict)
    rewards: dict[int, float] = field(default_factory=dict)
    trained: bool = False
    baseline: bool = False
    holds_slot: bool = True
    restored: bool = False


@dataclass
class Eval:
    """One eval under way."""

    samples: int
    ids: range
    """Of its rollouts."""
    scored: set[int] = field(default_factory=set)


class Rules:
    """Fed each event with the commands it gave; raises `Broken` at the first broken rule."""

    def __init__(self, settings: FlowSettings, resumed: Snapshot | None = None) -> None:
        self.settings = settings
        self.saving: int | None = None
        self.next_group = 0
        self.begun_at = 0
        self.opened = resumed is None
        """Servers serve what the run goes on from."""
        self.version = 0
        self.workers: dict[str, int] = {}
        self.servers: dict[str, int] = {}
        self.orders: dict[tuple[int, int], Order] = {}
        self.requests: dict[str, tuple[tuple[int, int], str | None]] = {}
        self.room: dict[str, int] = {}
        self.outstanding: dict[str, set[str]] = {}
        """Requests that a server has and has not answered, whatever has become of their rollouts."""
        self.outstanding_most = 0
        self.loads: dict[str, seen.ServerLoad] = {}
        """What each server has said last since it had nothing to do."""
        self.moved: set[str] = set()
        """Servers of whom a report gave reason to doubt that they are calm."""
        self.freed = 0
        """Lanes that were free before their rollout was answered."""
        self.loads_heard = 0
        self.moves: list[do.PlaceRequest] = []
        """Placements away from a group's server though that had room."""
        self.most_lanes = 0
        self.fewest_lanes = 10**9
        self.refused: set[str] = set()
        self.groups: dict[int, Known] = {}
        self.forgotten: set[int] = set()
        self.evals: dict[tuple[str, int], Eval] = {}
        self.evals_ended: dict[tuple[str, int], do.EndEval] = {}
        self.evals_begun: dict[tuple[str, int], int] = {}
        """Id of the first rollout of each."""
        self.eval_of: dict[int, tuple[str, int]] = {}
        """By the id of a rollout."""
        self.evals_running_most = 0
        self.restored_evals: set[tuple[str, int]] = set()
        self.held: dict[str, int] = {}
        """Version of each server that is held for evals."""
        self.returning: set[str] = set()
        """Servers that were, and have yet to be brought up."""
        self.dedicated: set[tuple[str, int]] = set()
        """Evals played on held servers."""
        self.holds: list[do.HoldServers] = []
        self.updates_beside = 0
        """Updates while servers were held."""
        self.trained_beside = 0
        """Rollouts of training that began meanwhile."""
        self.group_id_of_eval: dict[int, int] = {}
        self.in_training: tuple[int, ...] = ()
        self.training: int | None = None
        self.trained_step = 0
        self.travelling: tuple[int, tuple[str, ...]] | None = None
        self.steps: list[do.TrainOnBatch] = []
        self.ages: list[int] = []
        self.stop: do.EndRun | None = None
        self.last = settings.number_of_steps
        """The run's last step, by `stop_after` an earlier one."""
        self.best_score: float | None = None
        self.without_gain = 0
        self.alive_most = 0
        self.warnings: list[str] = []
        if resumed is not None:
            self._go_on_from(resumed)

    def _go_on_from(self, resumed: Snapshot) -> None:
        self.version = self.trained_step = self.begun_at = resumed.step
        self.next_group = resumed.position.next_group
        settings, early = self.settings, resumed.early_stop
        if settings.stop_after and (early.measure, early.lower) == (settings.stop_measure, settings.stop_lower):
            self.best_score, self.without_gain = early.best, early.without_gain
            if early.without_gain >= settings.stop_after:
                self.last = early.last_step or self.last
        for saved in resumed.evals.rounds:
            key = (saved.rules.name, saved.step)
            self.restored_evals.add(key)
            samples = saved.prompts * saved.rules.num_samples
            self.evals[key] = Eval(samples, range(saved.first_id, saved.first_id + samples), set(saved.scored))
        states = {"pending": resumed.playing, "kept": resumed.kept, "batched": resumed.forming,
                  "discarded": (*resumed.baseline, *resumed.discarded)}  # fmt: skip
        for state, groups in states.items():
            for group in groups:
                rewards = {sample.rollout_id: sample.reward for sample in group.survivors}
                self.groups[group.group_id] = Known(
                    state, group.v_start, group.prompt, rewards=rewards, holds_slot=state != "discarded", restored=True
                )

    def saw(self, event: seen.AnyEvent, commands: list[do.AnyCommand]) -> None:
        if self.stop is not None:
            keep(not commands, f"after Stop came {commands}")
            return
        counted = self._learn(event)
        if isinstance(event, seen.RolloutDone):
            ignored = do.IgnoreResult(event.rollout_id, event.attempt) in commands
            keep(ignored != counted, f"{event} counts: {counted}, but ignored: {ignored}")
        for place, command in enumerate(commands):
            self._check(command, event)
            keep(self.stop is None or place == len(commands) - 1, f"commands follow Stop: {commands}")
        if isinstance(event, seen.TurnStarted) and self.stop is None:
            self._never_frozen(event)

    # ---- events

    def _learn(self, event: seen.AnyEvent) -> bool:
        """Whether a RolloutDone counts."""
        match event:
            case seen.WorkerJoined():
                self._drop_worker(event.worker)
                self.workers[event.worker] = event.capacity
            case seen.WorkerLost():
                self._drop_worker(event.worker)
            case seen.ServerJoined():
                self._drop_server(event.server)
                self.servers[event.server] = event.version
                self.room[event.server] = event.capacity
                self.outstanding[event.server] = set()
                self._calm(event.server)
            case seen.ServerLost():
                self._drop_server(event.server)
            case seen.TurnStarted():
                self.requests.setdefault(event.request_id, ((event.rollout_id, event.attempt), None))
            case seen.TurnDone():
                for server, held in self.outstanding.items():
                    held.discard(event.request_id)
                    if not held:
                        self._calm(server)
            case seen.GenerationOver():
                order = self.orders.get((event.rollout_id, event.attempt))
                if order is not None and not order.over:
                    order.over = True
                    self.freed += self.settings.free_lane_after_generation
            case seen.ServerLoad(server=server):
                self.loads_heard += 1
                if self.outstanding.get(server):
                    before = self.loads.get(server)
                    grew = event.preemptions > (before.preemptions if before else 0)
                    self.loads[server] = event
                    if event.kv_used >= self.settings.kv_soft or grew or event.waiting > event.running:
                        self.moved.add(server)
            case seen.RolloutDone():
                order = self.orders.pop((event.rollout_id, event.attempt), None)
                if order is None or order.cancelled:
                    return False
                if event.rollout_id >= FIRST_EVAL:
                    self.evals[self.eval_of[event.rollout_id]].scored.add(event.rollout_id)
                else:
                    self.group_of(event.rollout_id).rewards[event.rollout_id] = event.reward
                return True
            case seen.RolloutFailed():
                self.orders.pop((event.rollout_id, event.attempt), None)
            case seen.StepDone():
                if event.step == self.training:
                    self.trained_step = event.step
            case seen.UpdateDone():
                self._committed(event.version)
            case seen.EvalScored():
                self._note_score(event.score)
            case seen.CheckpointDone() | seen.CheckpointFailed():
                self.saving = None if event.step == self.saving else self.saving
        return False

    def _note_score(self, score: float) -> None:
        settings, best = self.settings, self.best_score
        if not settings.stop_after or self.last < settings.number_of_steps:
            return
        if best is None or (score < best if settings.stop_lower else score > best):
            self.best_score, self.without_gain = score, 0
            return
        self.without_gain += 1
        if self.without_gain >= settings.stop_after:
            self.last = min(self.version + 1, self.last)

    def _calm(self, server: str) -> None:
        self.loads.pop(server, None)
        self.moved.discard(server)

    def _never_frozen(self, event: seen.TurnStarted) -> None:
        """A rollout that has begun is never kept from its next turn while a server could answer it."""
        key, server = self.requests[event.request_id]
        order = self.orders.get(key)
        if server is None and event.request_id not in self.refused and order is not None and not order.cancelled:
            v_start = self.group_of(event.rollout_id).v_start
            able = [name for name in self.servers if self._could_take(name, v_start, event.rollout_id)]
            keep(not able, f"{event} waits though {able} could answer it")

    def _could_take(self, server: str, v_start: int, rollout_id: int) -> bool:
        serves = self._serves(server, rollout_id)
        return serves and self.servers.get(server, -1) >= v_start and len(self.outstanding[server]) < self.room[server]

    def _serves(self, server: str, rollout_id: int) -> bool:
        if self._is_dedicated(rollout_id):
            return server in self.held
        return server not in self.held and server not in self.returning

    def _is_dedicated(self, rollout_id: int) -> bool:
        return rollout_id >= FIRST_EVAL and self.eval_of[rollout_id] in self.dedicated

    def _share(self) -> None:
        """No eval has servers of its own any more."""
        self.dedicated.clear()
        for order in self.orders.values():
            order.dedicated = False

    def _drop_worker(self, worker: str) -> None:
        self.workers.pop(worker, None)
        self.orders = {key: order for key, order in self.orders.items() if order.worker != worker}

    def _drop_server(self, server: str) -> None:
        """What it had is to be placed again, or refused."""
        for request_id in self.outstanding.get(server, ()):
            self.requests[request_id] = (self.requests[request_id][0], None)
        self.servers.pop(server, None)
        self.outstanding.pop(server, None)
        self.returning.discard(server)
        if self.held.pop(server, None) is not None and not self.held:
            self._share()
        if self.travelling:
            self.travelling = (self.travelling[0], tuple(name for name in self.travelling[1] if name != server))
        for group in self.groups.values():  # one of its name that comes later knows none of their prefixes
            if group.server == server:
                group.server = None

    def _committed(self, version: int) -> None:
        if self.travelling is None or self.travelling[0] != version:
            return
        for server in self.travelling[1]:
            self.servers[server] = version
        self.travelling = None
        self.opened = True
        if version == self.version + 1:
            self.version = version
            self.training = None
            for group_id in self.in_training:
                self.groups[group_id].holds_slot = False
            self.in_training = ()
        self.returning = {name for name in self.returning if self.servers[name] < self.version}

    # ---- commands

    def group_of(self, rollout_id: int) -> Known:
        if rollout_id >= FIRST_EVAL:
            return self.groups[self.group_id_of_eval[rollout_id]]
        return self.groups[rollout_id // self.settings.group_size]

    @property
    def alive(self) -> int:
        return sum(group.holds_slot for number, group in self.groups.items() if number < FIRST_EVAL)

    def _check(self, command: do.AnyCommand, event: seen.AnyEvent) -> None:
        match command:
            case do.DispatchRollout():
                self._run(command)
            case do.CancelAttempt():
                order = self.orders.get((command.rollout_id, command.attempt))
                reminder = isinstance(event, seen.Tick)
                running = order is not None and (reminder or not order.cancelled)
                keep(running, f"{command} is about an order that is not running")
                assert order is not None
                keep(order.worker == command.worker, f"{command} goes to the wrong worker")
                order.cancelled = True
            case do.PlaceRequest():
                self._place(command)
            case do.RefuseRequest():
                keep(command.request_id in self.requests, f"{command} answers an unknown request")
                held = any(command.request_id in requests for requests in self.outstanding.values())
                keep(not held, f"{command}: a server has it, and will answer")
                self.refused.add(command.request_id)
            case do.RecordGroupState():
                self._group_state(command)
            case do.TrainOnBatch():
                self._train(command)
            case do.ForgetRollouts():
                keep(not self.forgotten & set(command.rollout_ids), f"{command} forgets a rollout twice")
                for rollout_id in (number for number in command.rollout_ids if number < FIRST_EVAL):
                    state = self.group_of(rollout_id).state
                    keep(state in FINAL, f"rollout {rollout_id} is forgotten while its group is {state}")
                self.forgotten |= set(command.rollout_ids)
            case do.IgnoreResult():
                keep(isinstance(event, seen.RolloutDone), f"{command} answers {event}")
            case do.BeginEval(eval=name, step=step, prompts=prompts, samples=samples, first_rollout=first):
                keep((name, step) not in self.evals and (name, step) not in self.evals_ended, f"{command} comes twice")
                keep(step == self.version, f"{command} at version {self.version}")
                self.evals[name, step] = Eval(prompts * samples, range(first, first + prompts * samples))
                self.evals_begun[name, step] = first
            case do.EndEval():
                self._end_eval(command)
            case do.UpdateWeights():
                keep(self.travelling is None, f"{command} while version {self.travelling} is on its way")
                keep(command.version == self.trained_step, f"{command}, but the trainer holds version {self.trained_step}")
                busy = self.training is not None and self.training != self.trained_step
                keep(
                    self.settings.weights_while_training or not busy, f"{command} while the trainer is at step {self.training}"
                )
                keep(set(command.held) == set(self.held), f"{command} while {set(self.held)} are held")
                self.updates_beside += bool(self.held)
                self.travelling = (command.version, tuple(name for name in self.servers if name not in self.held))
            case do.HoldServers():
                self._hold(command)
            case do.ReleaseServers(servers=servers):
                keep(set(servers) == set(self.held) != set(), f"{command}: held are {set(self.held)}")
                alone = all(name in self.held for name in self.servers)
                keep(alone or not self.dedicated & set(self.evals), f"{command}: {self.dedicated & set(self.evals)} still play")
                self.returning |= {name for name in servers if self.servers[name] < self.version}
                self.held.clear()
                self._share()
            case do.TakeCheckpoint():
                keep(self.saving is None, f"{command} while that of step {self.saving} is written")
                keep(self.training is None and command.step == self.version > 0, f"{command} at version {self.version}")
                self.saving = command.step
            case do.WarnUser():
                self.warnings.append(command.sentence)
            case do.EndRun():
                self._stop(command)

    def _hold(self, command: do.HoldServers) -> None:
        keep(not self.held and not self.returning, f"{command} while others are held or come back")
        keep(0 < len(command.servers) <= self.settings.eval_servers, f"{command}: too many, or none")
        keep(set(command.servers) < set(self.servers), f"{command} leaves training none of {list(self.servers)}")
        keep(self.travelling is None, f"{command} during an update")
        versions = {self.servers[name] for name in command.servers}
        keep(versions == {command.version} == {self.version}, f"{command}: they serve {versions} at version {self.version}")
        for key in command.evals:
            keep(key in self.evals and 0 < key[1] < self.settings.number_of_steps, f"{command}: {key} is none to hold one for")
        self.held = dict.fromkeys(command.servers, command.version)
        self.dedicated = set(command.evals)
        self.holds.append(command)

    def _run(self, command: do.DispatchRollout) -> None:
        order, settings = command.order, self.settings
        key = (order.rollout_id, order.attempt)
        if order.eval:
            self._run_of_eval(command)
            return
        keep(order.rollout_id < FIRST_EVAL, f"{command} has an eval's id")
        group = self.groups[order.group_id]
        keep(self.opened, f"{command} before any server serves version {self.version}")
        keep(order.rollout_id == order.group_id * settings.group_size + order.sample, f"{order} has the wrong id")
        keep(group.state in PLAYING, f"{command} is about a group that is {group.state}")
        keep(order.rollout_id not in group.rewards, f"{command}: it has its reward")
        keep(order.attempt == group.attempts.get(order.rollout_id, -1) + 1, f"{command} skips or repeats an attempt")
        keep(group.prompt in (None, order.prompt), f"{command}: the group's prompt was {group.prompt}")
        keep(group.seeds.setdefault(order.rollout_id, order.seed) == order.seed, f"{command}: another seed")
        opens = not group.attempts
        keep(not opens or group.v_start == self.version, f"{command}: v_start is {group.v_start}")
        held = sum(other.worker == command.worker for other in self.orders.values())
        keep(held < self.workers.get(command.worker, 0), f"{command}: the worker holds {held} orders")
        group.prompt, group.attempts[order.rollout_id] = order.prompt, order.attempt
        self.orders[key] = Order(command.worker)
        self.trained_beside += bool(self.held)
        self._lanes(command, opens)

    def _run_of_eval(self, command: do.DispatchRollout) -> None:
        order = command.order
        rules = next(rules for rules in self.settings.evals if rules.name == order.eval)
        keep(self.opened, f"{command} before any server serves version {self.version}")
        keep(order.prompt.split == "eval" and order.prompt.environment == rules.environment, f"{command}: another prompt")
        keep(min(order.rollout_id, order.group_id) >= FIRST_EVAL, f"{command} has an id of training")
        known = [key for key, one in self.evals.items() if key[0] == order.eval and order.rollout_id in one.ids]
        keep(len(known) == 1, f"{command}: no such eval is under way")
        key = known[0]
        self.eval_of[order.rollout_id] = key
        self.group_id_of_eval[order.rollout_id] = order.group_id
        dedicated = key in self.dedicated
        version = next(iter(self.held.values())) if dedicated else self.version
        group = self.groups.setdefault(order.group_id, Known(v_start=version, holds_slot=False))
        opens = not group.attempts
        keep(group.prompt in (None, order.prompt), f"{command}: the group's prompt was {group.prompt}")
        keep(order.rollout_id not in self.evals[key].scored, f"{command}: it has its score")
        keep(order.attempt == group.attempts.get(order.rollout_id, -1) + 1, f"{command} skips or repeats an attempt")
        held = sum(other.worker == command.worker for other in self.orders.values())
        keep(held < self.workers.get(command.worker, 0), f"{command}: the worker holds {held} orders")
        group.prompt, group.attempts[order.rollout_id] = order.prompt, order.attempt
        self.orders[order.rollout_id, order.attempt] = Order(command.worker, dedicated=dedicated)
        self._lanes(command, opens)
        self.evals_running_most = max(self.evals_running_most, sum(number >= FIRST_EVAL for number, _ in self.orders))

    def _end_eval(self, command: do.EndEval) -> None:
        key = (command.eval, command.step)
        keep(key not in self.evals_ended, f"{command} comes twice")
        self.evals_ended[key] = command
        if command.state == "left out":
            keep(key not in self.evals, f"{command}: it had begun")
            return
        known = self.evals.pop(key, None)
        if known is None or key in self.restored_evals:
            return  # a checkpoint's; its first part is another attempt's
        scored = len(known.scored)
        whole = scored + command.failed + command.unfinished
        keep(whole == known.samples, f"{command}: {scored} scored of {known.samples}")
        keep(command.state == "cut off" or command.unfinished == 0, f"{command} is not complete")

    def _lanes(self, command: do.DispatchRollout, opens: bool) -> None:
        """A lost server takes its lanes with it: what runs goes on, and so does a group that holds its lane. What has servers
        of its own has their lanes, and the rest has the others."""
        settings = self.settings
        dedicated = self.orders[command.order.rollout_id, command.order.attempt].dedicated
        servers = self.held if dedicated else [name for name in self.servers if self._serves(name, 0)]
        orders = {key: order for key, order in self.orders.items() if order.dedicated == dedicated}
        if settings.enable_individual_sample_lanes:
            early = settings.free_lane_after_generation and not dedicated
            used = sum(not (early and order.over) for order in orders.values())
            lanes = sum(map(self._lanes_of, servers))
            self.most_lanes, self.fewest_lanes = max(self.most_lanes, lanes), min(self.fewest_lanes, lanes)
        else:
            held = {self.group_id_of_eval.get(rollout_id, rollout_id // settings.group_size) for rollout_id, _ in orders}
            held |= {
                number
                for number, group in self.groups.items()
                if group.v_start >= 0 and group.state in PLAYING and number < FIRST_EVAL and not dedicated
            }
            used, lanes = len(held), len(servers) * settings.max_concurrent_prompts_per_server
        keeps_its_lane = not settings.enable_individual_sample_lanes and not opens and lanes > 0
        keep(used <= lanes or keeps_its_lane, f"{command}: {used} of {lanes} lanes are used")

    def _lanes_of(self, server: str) -> int:
        """At most: the core may have cut it further down."""
        settings, load, held = self.settings, self.loads.get(server), len(self.outstanding[server])
        most = settings.max_concurrent_prompts_per_server * settings.group_size
        pressed = settings.adaptive_concurrency and load is not None and load.kv_used >= settings.kv_soft
        return min(most, held) if pressed else most

    def _place(self, command: do.PlaceRequest) -> None:
        keep(command.request_id in self.requests, f"{command} places an unknown request")
        key, server = self.requests[command.request_id]
        keep(server is None and command.request_id not in self.refused, f"{command} answers a request twice")
        order = self.orders.get(key)
        keep(order is not None and not order.cancelled, f"{command}: its rollout does not run")
        keep(command.server in self.servers, f"{command}: no such server")
        group = self.group_of(key[0])
        v_start = group.v_start
        keep(self._serves(command.server, key[0]), f"{command}: {command.server} is not there for it: held are {self.held}")
        stays = group.server is not None and self._could_take(group.server, v_start, key[0])
        if group.server != command.server and group.server is not None and stays:
            keep(group.server in self.moved, f"{command}: its group is at {group.server}, which has room and is calm")
            self.moves.append(command)
        group.server = command.server
        keep(self.servers[command.server] >= v_start, f"{command}: the server is older than v_start={v_start}")
        self.requests[command.request_id] = (key, command.server)
        held, room = self.outstanding[command.server], self.room[command.server]
        keep(len(held) < room, f"{command}: {command.server} takes {room} requests at once and has {len(held)}")
        held.add(command.request_id)
        self.outstanding_most = max(self.outstanding_most, len(held))

    def _group_state(self, command: do.RecordGroupState) -> None:
        if command.state == "pending":
            keep(command.group_id == self.next_group, f"{command}: indices must count up")
            keep(self.opened, f"{command} before any server serves version {self.version}")
            self.next_group += 1
            self.groups[command.group_id] = Known()
            done = self.version * self.settings.prompts_batch_size_for_trainer
            keep(self.alive <= self.settings.slots, f"{self.alive} groups are alive in {self.settings.slots} slots")
            needed = self.settings.number_of_steps * self.settings.prompts_batch_size_for_trainer
            keep(done + self.alive <= needed, f"{command}: no step will need it")
            self.alive_most = max(self.alive_most, self.alive)
            return
        group = self.groups[command.group_id]
        keep(command.state in NEXT[group.state], f"{command}: the group was {group.state}")
        if command.state == "queued":
            group.v_start = self.version
        keep(command.version == group.v_start, f"{command}: v_start is {group.v_start}")
        if command.state == "cancelled" and command.reason == "off_policy":
            age = self.version - group.v_start
            keep(group.state in PLAYING, f"{command}: a complete group is never cancelled for age")
            keep(age >= self.settings.max_off_policy_steps, f"{command}: it is only {age} versions old")
        if command.state in ("discarded", "cancelled", "failed"):
            group.holds_slot = False
        group.state = command.state

    def _train(self, command: do.TrainOnBatch) -> None:
        settings = self.settings
        first = [name for name, step in self.evals if step == 0 or settings.evals_hold_training]
        keep(not first, f"{command} while {first} play, which training waits for")
        keep(self.training is None, f"{command} while step {self.training} is in training")
        keep(self.opened, f"{command} before any server serves version {self.version}")
        keep(settings.weights_while_training or self.travelling is None, f"{command} while the trainer sends")
        keep(command.step == self.version + 1, f"{command} after version {self.version}")
        keep(len(command.group_ids) == settings.prompts_batch_size_for_trainer, f"{command} has the wrong number of groups")
        keep(list(command.group_ids) == sorted(command.group_ids), f"{command} is not in order")
        for group_id, rollout_ids in zip(command.group_ids, command.rollout_ids, strict=True):
            group = self.groups[group_id]
            keep(not group.trained, f"group {group_id} is trained twice")
            keep(group.state == "batched", f"group {group_id} is trained while {group.state}")
            group.trained = True
            self._whole(group_id, rollout_ids)
            rewards = [group.rewards[rollout_id] for rollout_id in rollout_ids]
            equal = settings.discard_group_zero_advantage and len(rewards) > 1 and len(set(rewards)) == 1
            keep(not equal, f"group {group_id} has equal rewards")
            age = command.step - 1 - group.v_start
            bound = most_versions_old(settings)
            keep(0 <= age <= bound, f"group {group_id} is {age} versions old at step {command.step}; the bound is {bound}")
            self.ages.append(age)
        for group_id, rollout_ids in zip(command.baseline_group_ids, command.baseline_rollout_ids, strict=True):
            group = self.groups[group_id]
            keep(group.state == "discarded" and not group.baseline, f"group {group_id} is not a fresh discard")
            group.baseline = True
            self._whole(group_id, rollout_ids)
            keep(len({group.rewards[rollout_id] for rollout_id in rollout_ids}) == 1, f"group {group_id} was worth keeping")
        self.training, self.in_training = command.step, command.group_ids
        self.steps.append(command)

    def _whole(self, group_id: int, rollout_ids: tuple[int, ...]) -> None:
        """All that survived, at least the least number, and nothing still open."""
        size, group = self.settings.group_size, self.groups[group_id]
        keep(list(rollout_ids) == sorted(group.rewards), f"group {group_id}: {rollout_ids} are not its survivors")
        least = 1 if size == 1 else max(2, self.settings.min_group_size)
        keep(len(rollout_ids) >= least, f"group {group_id} has {len(rollout_ids)} survivors, of {least} needed")
        keep(not set(rollout_ids) & self.forgotten, f"group {group_id} is asked for after it was forgotten")
        for rollout_id in range(group_id * size, (group_id + 1) * size):
            if rollout_id not in group.rewards and not (group.restored and not group.attempts):
                tries = group.attempts.get(rollout_id, -1) + 1
                keep(tries >= self.settings.max_attempts, f"rollout {rollout_id} was given up after {tries} tries")

    def _stop(self, command: do.EndRun) -> None:
        self.stop = command
        keep(not self.evals, f"evals were lost at the end: {list(self.evals)}")
        left = {
            number: group.state for number, group in self.groups.items() if group.state not in FINAL and number < FIRST_EVAL
        }
        keep(not left, f"groups were lost at the end: {left}")
        if command.ok:
            last, early = self.last, self.last < self.settings.number_of_steps
            keep(self.version == last, f"{command} at version {self.version}, and the last step is {last}")
            keep(("eval.stop_after" in command.reason) == early, f"{command} with the last step {last}")
            steps = last - self.begun_at
            keep(len(self.steps) == steps, f"{len(self.steps)} Train commands")
            cut_off = [key for key, ended in self.evals_ended.items() if ended.state == "cut off"]
            keep(not cut_off, f"{cut_off} were cut off, though all is trained")
            for group in (group for number, group in self.groups.items() if number < FIRST_EVAL):
                keep(group.trained == (group.state == "trained"), f"a trained group ended as {group.state}")
