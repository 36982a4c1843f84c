"""Every decision of a run. `Core.handle(event, now)` takes what has happened and answers with what is to be done.

    WorkerJoined ─▶ draw, admit ─▶ DispatchRollout ─▶ TurnStarted ─▶ PlaceRequest ─▶ TurnDone … RolloutDone
                                                                       batched ◀─ kept ◀─ complete ◀─┘
    P groups, trainer idle ─▶ TrainOnBatch ─▶ StepDone ─▶ UpdateWeights ─▶ UpdateDone ─▶ commit, free slots, retire

Deterministic: the same settings and the same (event, now) pairs give the same commands, on any machine. It holds ids and
scalars; it refuses clocks, sockets, files and arrays. docs/flow.md tells the story; the law of staleness is rule 5 of
docs/architecture.md.
"""

from __future__ import annotations

from telescope.flow import commands as do
from telescope.flow import events as seen
from telescope.flow.batches import BatchBuilder, GroupBatch
from telescope.flow.checkpoint_schedule import CheckpointSchedule
from telescope.flow.counts import Counts, RunTally
from telescope.flow.early_stop import EarlyStop
from telescope.flow.eval_servers import EvalServers
from telescope.flow.evals import EVAL_IDS, EvalGroup, Evals
from telescope.flow.group_lifecycle import GroupLifecycle, GroupStates
from telescope.flow.groups import GroupState, RolloutAttempt, RolloutGroup
from telescope.flow.lanes import Lanes
from telescope.flow.limits import FailureLimits, Membership
from telescope.flow.placement import Placement, TokenRequests
from telescope.flow.prompt_sampler import DataPosition, PromptPrefetch, PromptSampler, sample_seed
from telescope.flow.settings import FlowSettings
from telescope.flow.snapshot import Snapshot, compare_digests, compare_sizes, find_refusal, restore_groups, save_groups
from telescope.flow.staleness import Slots
from telescope.flow.weight_versions import WeightVersions
from telescope.records import RolloutOrder

TRIED_AGAIN = "infrastructure"
"""The one kind of failure that another try may not have."""
_PLAY = frozenset({seen.TurnStarted, seen.TurnDone, seen.GenerationOver, seen.RolloutDone})
"""Nearly all events of a run. Unless a group moves or an eval ends by one of them, there is nothing to take and nothing to
admit after it."""


class Core:
    """One run's decisions. After the first `EndRun` it answers every event with nothing."""

    def __init__(self, settings: FlowSettings) -> None:
        self.settings = settings
        self.ended = False
        self.saved: Snapshot | None = None
        """The core at the latest `TakeCheckpoint`, or where this one went on from."""
        self._resumed: Snapshot | None = None
        self._opened = True
        self._now = 0.0
        self._out: list[do.AnyCommand] = []  # of the event at hand
        self._ending: do.EndRun | None = None
        self._tally = RunTally()
        self._membership = Membership(settings)
        self._limits = FailureLimits(settings)
        self._sampler: PromptSampler | None = None
        self._prefetch: PromptPrefetch | None = None
        self._slots = Slots(settings)
        self._batches = BatchBuilder(settings)
        self._lanes = Lanes(settings)
        self._placement = Placement(settings)
        self._early_stop = EarlyStop(settings)
        self._eval_servers = EvalServers(settings, self._placement, self._out.append)
        self._evals = Evals(settings, self._lanes, self._eval_servers, self._out.append)
        self._versions = WeightVersions(while_training=settings.weights_while_training)
        if not settings.trains:
            self._versions.restore(settings.number_of_steps)
        self._checkpoints = CheckpointSchedule(settings)
        self._states = GroupStates(self._tally, self._out.append)
        self._requests = TokenRequests(self._lanes, self._placement, self._out.append, self._states.reach)
        self._groups = GroupLifecycle(
            settings,
            states=self._states,
            slots=self._slots,
            batches=self._batches,
            lanes=self._lanes,
            requests=self._requests,
            evals=self._evals,
            limits=self._limits,
            tally=self._tally,
            say=self._out.append,
            stop=self._fail_run,
        )

    @classmethod
    def restore(cls, settings: FlowSettings, snapshot: Snapshot) -> Core:
        """A core that goes on from a snapshot. It trains, admits and sends nothing before the servers serve the snapshot's
        version. Raises ValueError with a sentence where the settings can't go on from it."""
        if complaint := find_refusal(snapshot, settings):
            raise ValueError(complaint)
        core = cls(settings)
        core._go_on_from(snapshot)
        return core

    def handle(self, event: seen.AnyEvent, now: float) -> list[do.AnyCommand]:
        """What is to be done now that `event` has happened at `now` (seconds since the run's start, never going back)."""
        if self.ended:
            return []
        self._now = now
        self._out.clear()
        self._absorb(event)
        if self._evals.ended and self._eval_servers.held:
            self._evals.release_servers(self.version)
            self._share_servers()
        if self._ending is None and self._checkpoints.waits:
            self._save_or_leave()
        if self._ending is None:
            self._advance(type(event) not in _PLAY)
        if self._ending is not None:
            self._groups.end_run()
            self._out.append(self._ending)
            self.ended = True
        return self._out.copy()

    @property
    def version(self) -> int:
        """The weight version committed last."""
        return self._versions.version

    @property
    def lost_checkpoint(self) -> int:
        """After a `EndRun` that is ok: the last step, where its checkpoint could not be written; else 0."""
        return self._checkpoints.lost

    @property
    def leaving(self) -> do.EndRun | None:
        """How the run ends, once what it waits for is there: its step, its checkpoint, its last evals. None: it goes on."""
        return self._checkpoints.leaving

    @property
    def give_up_at(self) -> float:
        """On the clock of `handle`: when a run that is told to stop ends, saved or not; infinite where none is."""
        return self._checkpoints.give_up_at

    @property
    def last_step(self) -> int:
        """Of the run, as far as is known: with `eval.stop_after` it may become an earlier one."""
        return self._early_stop.last_step

    @property
    def data_position(self) -> DataPosition | None:
        """The state of drawing; None before the first worker has reported the environments' sizes."""
        return self._sampler.position if self._sampler else None

    def counts(self) -> Counts:
        placement = self._placement
        return self._tally.counts(
            version=self.version,
            groups_alive=len(self._slots.alive),
            rollouts_waiting=self._lanes.waiting,
            rollouts_running=len(self._lanes.in_flight),
            rollouts_scoring=self._lanes.scoring,
            lanes=placement.lanes,
            requests_waiting=len(placement.waiting),
            requests_placed=len(placement.requests) - len(placement.waiting),
            eval_samples_left=self._evals.samples_left if self.settings.evals else None,
        )

    # ---- what has happened

    def _absorb(self, event: seen.AnyEvent) -> None:
        match event:
            case seen.TurnStarted():
                self._requests.start(event)
            case seen.TurnDone():
                self._requests.finish(event, self._versions.travelling is not None, self._versions.version)
            case seen.RolloutDone():
                self._take_result(event)
            case seen.GenerationOver():
                self._end_generation(event)
            case seen.ServerLoad():
                self._placement.hear(event, self._now)
            case seen.RolloutFailed():
                self._take_failure(event)
            case seen.Tick():
                self._check_deadlines()
            case seen.StepDone(step=step):
                if self._versions.finish_step(step):
                    self._send_weights()
            case seen.UpdateDone(version=version):
                self._finish_update(version)
            case seen.UpdateFailed(version=version, cause=cause):
                self._fail_run(f"weights of version {version} did not reach the servers: {cause}")
            case seen.WorkerJoined():
                self._add_worker(event)
            case seen.WorkerLost(worker=worker, cause=cause):
                self._lose_worker(worker, cause)
            case seen.ServerJoined():
                self._add_server(event)
            case seen.ServerLost(server=server, cause=cause):
                self._lose_server(server, cause)
            case seen.TrainerReady():
                self._versions.ready = True
                self._send_weights()
            case seen.CheckpointDone(step=step):
                self._checkpoints.finish(step)
            case seen.CheckpointFailed(step=step, cause=cause):
                self._checkpoints.finish(step, cause)
            case seen.EvalScored():
                self._early_stop.note(event, self._versions.step)
                self._evals.last_step = self._early_stop.last_step
            case seen.StopRequested(reason=reason, ok=ok, save=save):
                if save and self._checkpoints.saves_end and not ok:
                    self._leave_early(do.EndRun(reason, ok))
                else:
                    self._stop(do.EndRun(reason, ok))

    def _add_worker(self, event: seen.WorkerJoined) -> None:
        complaint = self._membership.check(event)
        if complaint:
            self._fail_run(complaint)
            return
        self._lose_worker(event.worker, "it was started again")
        self._lanes.join(event.worker, event.capacity)
        if self._sampler is None:
            self._open_the_data()

    def _open_the_data(self) -> None:
        settings, members, resumed = self.settings, self._membership, self._resumed
        sampler = PromptSampler(settings.seed, settings.environments, settings.split, members.split_sizes, settings.curricula)
        if resumed is not None:
            if complaint := compare_sizes(resumed, members.split_sizes):
                self._fail_run(complaint)
                return
            if warning := compare_digests(resumed, members.digests):
                self._out.append(do.WarnUser(warning))
            sampler.restore(resumed.position)
            for group in resumed.playing:
                sampler.resume(group.prompt)
        self._sampler = self._groups.sampler = sampler
        if resumed is None:
            self._evals.begin_due(self.version, members.eval_sizes, members.digests)
        else:
            self._evals.go_on(members.eval_sizes, members.digests)
            if not settings.trains:
                known = frozenset(rules.name for rules in resumed.settings.evals)
                self._evals.begin_due(self.version, members.eval_sizes, members.digests, known)
            if self._opened:
                self._share_servers()
        if self.version == self._early_stop.last_step:
            self._leave(self._make_end())
        ahead = settings.prompt_prefetch_buffer_size
        self._prefetch = PromptPrefetch(sampler, ahead) if ahead else None

    def _lose_worker(self, worker: str, cause: str) -> None:
        if worker not in self._lanes.workers:
            return
        for rollout in self._lanes.lose(worker):
            self._groups.end_attempt(rollout, counts=False, why=f"{worker} was lost")
            if not rollout.cancelled:
                self._groups.fail_attempt(rollout, f"{worker} was lost: {cause}", self._now)

    def _add_server(self, event: seen.ServerJoined) -> None:
        self._lose_server(event.server, "it was started again")
        self._placement.join(event.server, event.version, event.capacity)
        self._send_weights()
        self._requests.place_waiting()

    def _lose_server(self, server: str, cause: str) -> None:
        if server not in self._placement.servers:
            return
        self._versions.forget_server(server)
        apart = self._eval_servers.busy
        if apart:
            self._evals.lose_server(server, self.version)
        self._requests.lose_server(server, f"{server} was lost: {cause}")
        if apart:
            self._share_servers()

    def _end_generation(self, event: seen.GenerationOver) -> None:
        rollout = self._lanes.in_flight.get((event.rollout_id, event.attempt))
        if rollout is not None and self.settings.free_lane_after_generation and not rollout.group.dedicated:
            self._lanes.end_generation(rollout)

    def _take_result(self, event: seen.RolloutDone) -> None:
        rollout = self._lanes.in_flight.get((event.rollout_id, event.attempt))
        if rollout is None or rollout.cancelled:
            self._tally.ignored += event.rollout_id < EVAL_IDS
            self._out.append(do.IgnoreResult(event.rollout_id, event.attempt))
            if rollout is not None:
                self._lanes.end(rollout)
                self._groups.end_attempt(rollout, counts=False)
            return
        self._lanes.end(rollout)
        self._groups.end_attempt(rollout, counts=True)
        self._groups.finish(rollout, event)

    def _take_failure(self, event: seen.RolloutFailed) -> None:
        rollout = self._lanes.in_flight.get((event.rollout_id, event.attempt))
        if rollout is None:
            return
        self._lanes.end(rollout)
        self._groups.end_attempt(rollout, counts=False)
        if not rollout.cancelled:
            if not rollout.group.of_eval:
                self._tally.count_failure(event.kind)
            self._groups.fail_attempt(rollout, event.cause, self._now, again=event.kind == TRIED_AGAIN)

    def _finish_update(self, version: int) -> None:
        versions = self._versions
        if not versions.finish_update(version):
            return
        for server in versions.reached:
            self._placement.serve(server, version)
        batch = versions.commit(version)
        self._opened = True
        self._eval_servers.take_back(self.version)
        if batch is not None:
            self._commit(batch)
        self._share_servers()

    def _share_servers(self) -> None:
        """Which are held for evals, and which take part in an update, may have changed."""
        self._evals.start_standing_by(self.version, updating=self._versions.travelling is not None)
        self._send_weights()
        self._requests.place_waiting()

    def _check_deadlines(self) -> None:
        now, settings = self._now, self.settings
        for rollout in self._lanes.take_overdue(now):
            if rollout.cancelled:
                continue  # with its group a moment ago
            cause = f"no answer from {rollout.worker} within {settings.rollout_deadline_s:g} s"
            self._groups.cancel(rollout, cause, now)
            self._groups.fail_attempt(rollout, cause, now)
        for rollout in self._lanes.take_unreminded(now):
            self._out.append(do.CancelAttempt(rollout.worker, rollout.rollout_id, rollout.attempt, "asked again"))
        for rollout in self._lanes.take_unanswered(now):
            self._fail_run(
                f"{rollout.worker} did not answer the cancel of rollout {rollout.rollout_id} within "
                f"{settings.cancel_deadline_s:g} s: it hangs, or a server that generates for it does; see their logs"
            )
        complaint = self._membership.find_absent(
            now,
            workers=len(self._lanes.workers),
            servers=len(self._placement.servers),
            trainer=self._versions.ready or not settings.trains,
        )
        if complaint:
            self._fail_run(complaint)
        if late := self._checkpoints.end_if_late(now, self.version):
            self._stop(late)

    # ---- batches and versions

    def _commit(self, batch: GroupBatch) -> None:
        """The version trained on the batch is served: its slots are free, and what has become too old is retired."""
        self._groups.finish_batch(batch, self.version)
        self._evals.begin_due(self.version, self._membership.eval_sizes, self._membership.digests)
        if self.version == self._early_stop.last_step:
            if self._early_stop.sentence:
                self._groups.retire_all(self._now)
            self._leave(self._make_end())
        else:
            self._groups.retire_stale(self.version, self._now)
        if sentence := self._checkpoints.note_commit(self.version):
            self._out.append(do.WarnUser(sentence))

    def _make_end(self) -> do.EndRun:
        if not self.settings.trains and (changed := self._evals.changed):
            return do.EndRun(
                f"the eval {changed[0]} has other settings or prompts than when it began, and its parts would not be of one: "
                "remove the run directory to play it anew",
                ok=False,
            )
        if not self.settings.trains:
            return do.EndRun("all evals are played", ok=True)
        return do.EndRun(self._early_stop.sentence or f"all {self.version} steps are trained", ok=True)

    def _send_weights(self) -> None:
        held = self._eval_servers.held
        servers = {name: server.version for name, server in self._placement.servers.items() if name not in held}
        version = self._versions.start_update(servers)
        if version is not None:
            self._out.append(do.UpdateWeights(version, held))

    # ---- the end, and checkpoints that it may wait for

    def _stop(self, stop: do.EndRun) -> None:
        """End the run after this event; the first reason counts."""
        if self._ending is None:
            self._ending = stop

    def _fail_run(self, reason: str) -> None:
        self._stop(do.EndRun(reason, ok=False))

    def _leave(self, stop: do.EndRun) -> None:
        """End the run when the step under way is trained and, where checkpoints are on, saved; one that has trained all plays
        its evals to their end."""
        if self._checkpoints.on or (stop.ok and self._evals.under_way):
            self._checkpoints.leave(stop, version=self.version, training=self._versions.batch is not None, now=self._now)
        else:
            self._stop(stop)

    def _leave_early(self, stop: do.EndRun) -> None:
        if self._plays_last_evals:
            self._checkpoints.leave_early(stop)
        self._leave(stop)

    @property
    def _plays_last_evals(self) -> bool:
        """Whether all is trained, and the run's end waits for evals."""
        leaving = self._checkpoints.leaving
        return leaving is not None and leaving.ok and self._evals.under_way

    def _save_or_leave(self) -> None:
        checkpoints, training = self._checkpoints, self._versions.batch is not None
        if checkpoints.owed and checkpoints.under_way is None and not training:
            checkpoints.begin(self.version)
            self.saved = self.snapshot()
            self._out.append(do.TakeCheckpoint(self.version))
        if self._plays_last_evals:
            return
        if stop := checkpoints.end_if_done(version=self.version, training=training):
            self._stop(stop)

    def snapshot(self) -> Snapshot:
        """This core, to go on from, without what belongs to processes. Raises ValueError while a batch is in training, and
        before a worker has come."""
        if self._versions.batch is not None or self._sampler is None:
            raise ValueError("a core can be saved between two steps, once it knows its prompts")
        batches, members = self._batches, self._membership
        playing = [group for group in self._slots.alive.values() if group.playing]
        trained = [rollout for rollout in self._lanes.in_flight.values() if not rollout.group.of_eval]
        under_way = sum(rollout.tokens for rollout in trained if rollout.group.playing)
        return Snapshot(
            settings=self.settings,
            step=self.version,
            split_sizes=members.split_sizes,
            digests=members.digests,
            position=self._sampler.position,
            playing=save_groups(playing),
            kept=save_groups(batches.waiting),
            forming=save_groups(batches.forming.groups),
            baseline=save_groups(batches.forming.baseline),
            discarded=save_groups(batches.discards),
            tally=self._tally.save(playing, under_way),
            limits=self._limits.state,
            evals=self._evals.save(),
            early_stop=self._early_stop.state,
        )

    def _go_on_from(self, snapshot: Snapshot) -> None:
        """Into the parts of a core that has seen no event. Groups that were begun wait for a lane, as when they were admitted;
        where drawing was is put back when a worker has come."""
        settings, size = self.settings, self.settings.group_size
        forming = GroupBatch()
        forming.groups = restore_groups(snapshot.forming, GroupState.BATCHED, size)
        forming.baseline = restore_groups(snapshot.baseline, GroupState.DISCARDED, size)
        playing = restore_groups(snapshot.playing, GroupState.PENDING, size)
        line = _in_order(playing + restore_groups(snapshot.kept, GroupState.KEPT, size))
        self._batches.restore(line, forming, restore_groups(snapshot.discarded, GroupState.DISCARDED, size))
        self._slots.restore(snapshot.step * settings.prompts_batch_size_for_trainer, _in_order(line + forming.groups))
        self._versions.restore(snapshot.step)
        self._tally.restore(snapshot.tally)
        self._limits.restore(snapshot.limits)
        self._evals.restore(snapshot.evals)
        self._early_stop.restore(snapshot.early_stop)
        self._evals.last_step = self._early_stop.last_step
        for group in _in_order(playing):
            for rollout in group.rollouts:
                self._lanes.queue(rollout)
        self._checkpoints = CheckpointSchedule(settings, snapshot.step)
        self._resumed = self.saved = snapshot
        self._opened = not settings.trains  # else the servers have yet to get the weights

    # ---- what follows from any event: take, train, admit, dispatch

    def _advance(self, more_than_play: bool) -> None:
        """What there was to take and to admit was taken and admitted after the event before, so that there can only be more
        where a group has moved, or where the event was about more than a rollout's play."""
        if not self._opened:
            return  # the servers have yet to get the weights that it goes on from
        if self._checkpoints.leaving is not None:  # it ends when its step is saved and its last evals have ended
            if self._plays_last_evals:
                self._dispatch()
            return
        if more_than_play or self._states.moved or self._evals.ended:
            self._evals.ended = False  # the trainer may have waited for it
            self._take()
            self._admit()
        if self._lanes.waiting:
            self._dispatch()
        self._states.moved = False
        if self._prefetch is not None and (prompts := self._prefetch.take_hints()):
            self._out.append(do.AnnouncePrompts(prompts))

    def _take(self) -> None:
        batches, versions = self._batches, self._versions
        while True:
            while (group := batches.enter()) is not None:
                self._states.move(group, GroupState.BATCHED, f"step {versions.step + (versions.batch is not None)}")
            if self._checkpoints.owed or self._evals.holds_training or not (batches.is_full and versions.idle):
                return
            self._train(batches.close())

    def _train(self, batch: GroupBatch) -> None:
        self._out.append(
            do.TrainOnBatch(
                step=self._versions.train(batch),
                group_ids=tuple(group.group_id for group in batch.groups),
                rollout_ids=tuple(group.survivor_ids for group in batch.groups),
                baseline_group_ids=tuple(group.group_id for group in batch.baseline),
                baseline_rollout_ids=tuple(group.survivor_ids for group in batch.baseline),
            )
        )

    def _admit(self) -> None:
        if self._sampler is None:
            return
        while self._slots.has_room:
            drawn = self._sampler.draw()
            if self._prefetch is not None:
                self._prefetch.note_admitted(drawn.group_id, drawn.prompt)
            self._groups.admit(drawn)

    def _dispatch(self) -> None:
        lanes, dedicated = self._placement.lanes, 0
        if self._placement.apart:
            lanes, dedicated = self._placement.split_lanes()
        version, first = self._versions.version, self._evals.holds_training
        self._lanes.wake(self._now)
        while (rollout := self._lanes.dispatch(lanes, version, self._now, first, dedicated)) is not None:
            group = rollout.group
            if group.v_start < 0:
                group.v_start = self._eval_servers.version if group.dedicated else version
                self._states.reach(group, GroupState.QUEUED)
                if self._prefetch is not None and not group.of_eval:
                    self._prefetch.note_sent(group.group_id)
            order = self._evals.make_order(rollout, group) if isinstance(group, EvalGroup) else self._make_order(rollout)
            self._out.append(do.DispatchRollout(rollout.worker, order))

    def _make_order(self, rollout: RolloutAttempt) -> RolloutOrder:
        group, settings = rollout.group, self.settings
        sample = rollout.rollout_id % settings.group_size
        seed = sample_seed(settings.seed, group.group_id, sample)
        return RolloutOrder(rollout.rollout_id, group.group_id, sample, rollout.attempt, group.prompt, seed)


def _in_order(groups: list[RolloutGroup]) -> list[RolloutGroup]:
    return sorted(groups, key=lambda group: group.group_id)
