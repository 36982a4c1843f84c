"""Every decision of a run. `Core.handle(event, now)` takes what has happened and answers with what is to be done.

    WorkerJoined ─▶ draw, admit ─▶ Run ─▶ TurnStarted ─▶ Place ─▶ TurnDone … RolloutDone ─▶ complete ─▶ kept ─▶ batched
    commit, free slots, cancel stale ◀─ UpdateDone ◀─ Update ◀─ StepDone ◀─ Train ◀─ P groups batched, trainer idle

Deterministic: the same settings and the same (event, now) pairs give the same commands, on any machine. It holds ids and
scalars; it refuses clocks, sockets, files and arrays. docs/flow.md tells the story; the law of staleness is rule 5 of
docs/architecture.md.
"""

from __future__ import annotations

from telescope.flow import commands as do
from telescope.flow import events as seen
from telescope.flow.ahead import Ahead
from telescope.flow.batches import Batch
from telescope.flow.counts import Counts
from telescope.flow.draws import DataPosition, Draws, sample_seed
from telescope.flow.fates import Fates
from telescope.flow.groups import Fate, Group, State
from telescope.flow.presence import Presence
from telescope.flow.resuming import Parts, draw_on, put_back, take
from telescope.flow.saving import Saving
from telescope.flow.settings import FlowSettings
from telescope.flow.snapshot import Snapshot, digests_warning, refusal, sizes_refusal
from telescope.flow.updates import Updates
from telescope.records import RolloutOrder

GRADER = "grader"
_PLAY = frozenset({seen.TurnStarted, seen.TurnDone, seen.GenerationOver, seen.RolloutDone})
"""Nearly all events of a run. Unless a group moves by one of them, there is nothing to take and nothing to admit after it."""


class Core(Fates):
    """One run's decisions. After the first `Stop` it answers every event with nothing."""

    def __init__(self, settings: FlowSettings) -> None:
        super().__init__(settings)
        self.ended = False
        self._updates = Updates(while_training=settings.weights_while_training)
        self._presence = Presence(settings)
        self._saving = Saving(settings)
        self.saved: Snapshot | None = None
        """The core at the latest `Checkpoint`, or where this one went on from."""
        self._resumed: Snapshot | None = None
        self._opened = True
        self._ahead: Ahead | None = None

    @classmethod
    def restore(cls, settings: FlowSettings, snapshot: Snapshot) -> Core:
        """A core that goes on from a snapshot. It trains, admits and sends nothing before the servers serve the snapshot's
        version. Raises ValueError with a sentence where the settings can't go on from it."""
        if complaint := refusal(snapshot, settings):
            raise ValueError(complaint)
        core = cls(settings)
        core._go_on_from(snapshot)
        return core

    def handle(self, event: seen.AnyEvent, now: float) -> list[do.AnyCommand]:
        """What is to be done now that `event` has happened at `now` (seconds since the run's start, never going back)."""
        if self.ended:
            return []
        self._now = now
        self._out = []
        self._absorb(event)
        if self._ending is None and self._saving.waits:
            self._save_or_leave()
        if self._ending is None:
            self._advance(type(event) not in _PLAY)
        if self._ending is not None:
            self._end_run(self._ending)
            self.ended = True
        return self._out

    @property
    def version(self) -> int:
        """The weight version committed last."""
        return self._updates.version

    @property
    def lost_checkpoint(self) -> int:
        """After a `Stop` that is ok: the last step, where its checkpoint could not be written; else 0."""
        return self._saving.lost

    @property
    def data_position(self) -> DataPosition | None:
        """The state of drawing; None before the first worker has reported the environments' sizes."""
        return self._draws.position if self._draws else None

    def counts(self) -> Counts:
        placement = self._placement
        return self._tally.counts(
            version=self.version,
            groups_alive=len(self._slots.alive),
            rollouts_waiting=self._lanes.waiting,
            rollouts_running=len(self._lanes.flights),
            rollouts_scoring=self._lanes.scoring,
            lanes=placement.lanes,
            requests_waiting=len(placement.waiting),
            requests_placed=len(placement.requests) - len(placement.waiting),
        )

    # ---- what has happened

    def _absorb(self, event: seen.AnyEvent) -> None:
        match event:
            case seen.TurnStarted():
                self._turns.started(event)
            case seen.TurnDone():
                self._turns.done(event, self._updates.travelling is not None, self._updates.version)
            case seen.RolloutDone():
                self._rollout_done(event)
            case seen.GenerationOver():
                self._generation_over(event)
            case seen.ServerLoad():
                self._placement.hear(event, self._now)
            case seen.RolloutFailed():
                self._rollout_failed(event)
            case seen.Tick():
                self._tick()
            case seen.StepDone(step=step):
                if self._updates.trained(step):
                    self._send_weights()
            case seen.UpdateDone(version=version):
                self._update_done(version)
            case seen.UpdateFailed(version=version, cause=cause):
                self._stop(f"weights of version {version} did not reach the servers: {cause}", ok=False)
            case seen.WorkerJoined():
                self._worker_joined(event)
            case seen.WorkerLost(worker=worker, cause=cause):
                self._worker_lost(worker, cause)
            case seen.ServerJoined():
                self._server_joined(event)
            case seen.ServerLost(server=server, cause=cause):
                self._server_lost(server, cause)
            case seen.TrainerReady():
                self._updates.ready = True
                self._send_weights()
            case seen.CheckpointDone(step=step):
                self._saving.ended(step)
            case seen.CheckpointFailed(step=step, cause=cause):
                self._saving.ended(step, cause)
            case seen.StopRequested(reason=reason, ok=ok, save=save):
                if save and self._saving.on and not ok:
                    self._leave(do.StopRun(reason, ok))
                else:
                    self._stop(reason, ok)

    def _worker_joined(self, event: seen.WorkerJoined) -> None:
        complaint = self._presence.complaint(event)
        if complaint:
            self._stop(complaint, ok=False)
            return
        self._worker_lost(event.worker, "it was started again")
        self._lanes.join(event.worker, event.capacity)
        if self._draws is None:
            self._open_the_data()

    def _open_the_data(self) -> None:
        settings, presence, resumed = self.settings, self._presence, self._resumed
        draws = Draws(settings.seed, settings.environments, settings.split, presence.split_sizes, settings.curricula)
        if resumed is not None:
            if complaint := sizes_refusal(resumed, presence.split_sizes):
                self._stop(complaint, ok=False)
                return
            if warning := digests_warning(resumed, presence.digests):
                self._out.append(do.WarnUser(warning))
            draw_on(draws, resumed)
        self._draws = draws
        self._ahead = Ahead(draws, settings.prefetch) if settings.prefetch else None

    def _worker_lost(self, worker: str, cause: str) -> None:
        if worker not in self._lanes.workers:
            return
        for flight in self._lanes.lose(worker):
            self._flight_ended(flight, counted=False, why=f"{worker} was lost")
            if not flight.stopping:
                self._attempt_failed(flight, f"{worker} was lost: {cause}")

    def _server_joined(self, event: seen.ServerJoined) -> None:
        self._server_lost(event.server, "it was started again")
        self._placement.join(event.server, event.version, event.capacity)
        self._send_weights()
        self._turns.place_waiting()

    def _server_lost(self, server: str, cause: str) -> None:
        if server not in self._placement.servers:
            return
        self._updates.forget(server)
        self._turns.server_lost(server, f"{server} was lost: {cause}")

    def _generation_over(self, event: seen.GenerationOver) -> None:
        flight = self._lanes.flights.get((event.rollout_id, event.attempt))
        if flight is not None and self.settings.free_lane:
            self._lanes.generation_over(flight)

    def _rollout_done(self, event: seen.RolloutDone) -> None:
        flight = self._lanes.flights.get((event.rollout_id, event.attempt))
        if flight is None or flight.stopping:
            self._tally.ignored += 1
            self._out.append(do.IgnoreResult(event.rollout_id, event.attempt))
            if flight is not None:
                self._lanes.end(flight)
                self._flight_ended(flight, counted=False)
            return
        self._lanes.end(flight)
        self._flight_ended(flight, counted=True)
        group, sample = flight.group, flight.sample
        sample.fate, sample.reward, sample.tokens = Fate.DONE, event.reward, event.completion_tokens
        self._tally.generated += 1
        self._reach(group, State.SCORING)
        self._decided(group)

    def _rollout_failed(self, event: seen.RolloutFailed) -> None:
        flight = self._lanes.flights.get((event.rollout_id, event.attempt))
        if flight is None:
            return
        self._lanes.end(flight)
        self._flight_ended(flight, counted=False)
        if not flight.stopping:
            self._tally.failed_attempt(event.kind)
            self._attempt_failed(flight, event.cause, again=event.kind != GRADER)

    def _update_done(self, version: int) -> None:
        updates = self._updates
        if not updates.arrived(version):
            return
        for server in updates.reached:
            self._placement.serve(server, version)
        batch = updates.commit(version)
        self._opened = True
        if batch is not None:
            self._commit(batch)
        self._send_weights()
        self._turns.place_waiting()

    def _tick(self) -> None:
        for flight in self._lanes.overdue(self._now):
            if flight.stopping:
                continue  # cancelled with its group a moment ago
            cause = f"no answer from {flight.worker} within {self.settings.rollout_deadline_s:g} s"
            self._cancel(flight, cause)
            self._attempt_failed(flight, cause)
        for flight in self._lanes.to_remind(self._now):
            self._out.append(do.CancelAttempt(flight.worker, flight.sample.rollout_id, flight.attempt, "asked again"))
        for flight in self._lanes.unanswered(self._now):
            self._stop(
                f"{flight.worker} did not answer the cancel of rollout {flight.sample.rollout_id} within "
                f"{self.settings.cancel_deadline_s:g} s: it hangs, or a server that generates for it does; see their logs",
                ok=False,
            )
        complaint = self._presence.absent(
            self._now, workers=len(self._lanes.workers), servers=len(self._placement.servers), trainer=self._updates.ready
        )
        if complaint:
            self._stop(complaint, ok=False)
        if late := self._saving.overdue(self._now, self.version):
            self._ending = self._ending or late

    # ---- batches and versions

    def _commit(self, batch: Batch) -> None:
        """The version trained on the batch is served: its slots are free, and what has become too old is retired."""
        forgotten: list[int] = []
        for group in batch.groups:
            self._move(group, State.TRAINED, f"step {self.version}")
            self._tally.group_trained(group, age=self.version - 1 - group.v_start)
            self._slots.release(group, trained=True)
        for group in (*batch.groups, *batch.baseline):
            forgotten.extend(group.survivor_ids)
        self._out.append(do.ForgetRollouts(tuple(forgotten)))
        if self.version == self.settings.number_of_steps:
            self._leave(do.StopRun(f"all {self.version} steps are trained", ok=True))
        else:
            self._retire_stale(self.version)
        if sentence := self._saving.committed(self.version):
            self._out.append(do.WarnUser(sentence))

    def _send_weights(self) -> None:
        version = self._updates.set_out({name: server.version for name, server in self._placement.servers.items()})
        if version is not None:
            self._out.append(do.UpdateWeights(version))

    # ---- checkpoints, and ends that wait for one

    def _save_or_leave(self) -> None:
        saving, training = self._saving, self._updates.batch is not None
        if saving.owed and saving.under_way is None and not training:
            saving.begin(self.version)
            self.saved = self.snapshot()
            self._out.append(do.TakeCheckpoint(self.version))
        if stop := saving.gone(version=self.version, training=training):
            self._ending = stop

    def _leave(self, stop: do.StopRun) -> None:
        """End the run when the step under way is trained and, where checkpoints are on, saved."""
        if self._saving.on:
            self._saving.leave(stop, version=self.version, training=self._updates.batch is not None, now=self._now)
        else:
            self._stop(stop.reason, stop.ok)

    def snapshot(self) -> Snapshot:
        """This core, to go on from. Raises ValueError while a batch is in training, and before a worker has come."""
        if self._updates.batch is not None or self._draws is None:
            raise ValueError("a core can be saved between two steps, once it knows its prompts")
        return take(self._parts, self._draws, self.version)

    @property
    def _parts(self) -> Parts:
        return Parts(
            self.settings, self._slots, self._batches, self._lanes, self._updates, self._presence, self._tally, self._patience
        )

    def _go_on_from(self, snapshot: Snapshot) -> None:
        put_back(self._parts, snapshot)
        self._saving = Saving(self.settings, snapshot.step)
        self._resumed = self.saved = snapshot
        self._opened = False

    # ---- what follows from any event: take, train, admit, dispatch

    def _advance(self, more_than_play: bool) -> None:
        """What there was to take and to admit was taken and admitted after the event before, so that there can only be more
        where a group has moved, or where the event was about more than a rollout's play."""
        if self._saving.leaving is not None or not self._opened:
            return  # it ends when its step is saved; or the servers have yet to get the weights that it goes on from
        if more_than_play or self._groups_moved:
            self._take()
            self._admit()
        if self._lanes.waiting:
            self._dispatch()
        self._groups_moved = False
        if self._ahead is not None and (prompts := self._ahead.hints()):
            self._out.append(do.AnnouncePrompts(prompts))

    def _take(self) -> None:
        batches, updates = self._batches, self._updates
        while True:
            while (group := batches.enter()) is not None:
                self._move(group, State.BATCHED, f"step {updates.step + (updates.batch is not None)}")
            if self._saving.owed or not (batches.is_full and updates.idle):
                return
            self._train(batches.close())

    def _train(self, batch: Batch) -> None:
        self._out.append(
            do.TrainBatch(
                step=self._updates.train(batch),
                group_ids=tuple(group.group_id for group in batch.groups),
                rollout_ids=tuple(group.survivor_ids for group in batch.groups),
                baseline_group_ids=tuple(group.group_id for group in batch.baseline),
                baseline_rollout_ids=tuple(group.survivor_ids for group in batch.baseline),
            )
        )

    def _admit(self) -> None:
        if self._draws is None:
            return
        while self._slots.has_room:
            drawn = self._draws.draw()
            if self._ahead is not None:
                self._ahead.admitted(drawn.group_id, drawn.prompt)
            group = Group(drawn.group_id, drawn.prompt, drawn.returned, self.settings.group_size)
            self._slots.hold(group)
            self._batches.admitted(group)
            self._tally.admitted += 1
            self._tally.moved(None, group.state)
            self._out.append(do.RecordGroupState(group.group_id, str(group.state), "", group.v_start))
            for sample in group.samples:
                self._lanes.queue(group, sample)

    def _dispatch(self) -> None:
        settings, lanes, version = self.settings, self._placement.lanes, self._updates.version
        self._lanes.wake(self._now)
        while (flight := self._lanes.dispatch(lanes, version, self._now)) is not None:
            group, sample = flight.group, flight.sample
            if group.v_start < 0:
                group.v_start = version
                self._reach(group, State.QUEUED)
                if self._ahead is not None:
                    self._ahead.sent(group.group_id)
            place = sample.rollout_id % settings.group_size
            seed = sample_seed(settings.seed, group.group_id, place)
            order = RolloutOrder(sample.rollout_id, group.group_id, place, flight.attempt, group.prompt, seed)
            self._out.append(do.DispatchRollout(flight.worker, order))
