"""When an eval is due, which prompts it plays, and when it is done. Ids and scalars; its rollouts are placed and tried again
like any other.

    commit of version v ─▶ due? ─▶ BeginEval, its groups wait for lanes ─▶ each sample scored or given up ─▶ EndEval

An eval plays the first prompts of its environment's eval split, the same ones each time, with the same seeds: what differs
between two of its scores is the policy. One that is due between the first step and the last is dedicated where servers can be
held for it (eval_servers.py): it is of one version. Else it is pinned to none: servers are updated under it, and each answer
says which version sampled it. Its groups are no training's: they hold no slot, enter no batch and no tally, and never grow
stale.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from telescope.flow import commands as do
from telescope.flow.eval_servers import EvalServers
from telescope.flow.groups import GroupState, RolloutAttempt, RolloutGroup, RolloutStatus
from telescope.flow.lanes import Lanes
from telescope.flow.limits import EVAL_SPLIT
from telescope.flow.prompt_sampler import keyed_hash
from telescope.flow.settings import EvalRules, FlowSettings
from telescope.records import PromptRef, RolloutOrder

EVAL_IDS = 1 << 52
"""Rollouts and groups of evals are numbered from here on, those of training below."""


class SavedRound(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An eval under way, for a checkpoint: what is decided of it stays so, the rest is played anew under the same ids."""

    rules: EvalRules
    step: int
    first_id: int
    """Of its rollouts, which are numbered prompt by prompt."""
    prompts: int
    digest: str
    """Of its environment's card: settings and prompts."""
    scored: tuple[int, ...]
    failed: tuple[int, ...]
    """Given up."""


class SavedEvals(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    next_id: int = EVAL_IDS
    rounds: tuple[SavedRound, ...] = ()


class EvalGroup(RolloutGroup):
    """The samples of one prompt of one eval."""

    of_eval = True
    __slots__ = ("round",)

    def __init__(self, of: EvalRound, prompt: PromptRef, first_id: int) -> None:
        super().__init__(first_id, prompt, returned=False, group_size=of.rules.num_samples, first_rollout=first_id)
        self.round = of


class EvalRound:
    """One eval that has begun: `step` is the version it was due at."""

    def __init__(self, rules: EvalRules, step: int, prompts: int, digest: str, first_id: int) -> None:
        self.rules = rules
        self.step = step
        self.prompts = prompts
        self.digest = digest
        self.first_id = first_id
        self.groups = [
            EvalGroup(self, PromptRef(rules.environment, EVAL_SPLIT, index), first_id + index * rules.num_samples)
            for index in range(prompts)
        ]
        self.undecided = prompts * rules.num_samples
        self.failed = 0

    def dedicate(self, on: bool) -> None:
        """It plays on servers held for it, or no longer."""
        for group in self.groups:
            group.dedicated = on

    def save(self) -> SavedRound:
        decided: dict[RolloutStatus, list[int]] = {RolloutStatus.DONE: [], RolloutStatus.FAILED: []}
        for group in self.groups:
            for rollout in group.rollouts:
                if rollout.status in decided:
                    decided[rollout.status].append(rollout.rollout_id)
        return SavedRound(
            rules=self.rules,
            step=self.step,
            first_id=self.first_id,
            prompts=self.prompts,
            digest=self.digest,
            scored=tuple(decided[RolloutStatus.DONE]),
            failed=tuple(decided[RolloutStatus.FAILED]),
        )


class Evals:
    """The evals of a run. `say` takes commands."""

    def __init__(self, settings: FlowSettings, lanes: Lanes, servers: EvalServers, say: do.Say) -> None:
        self._settings = settings
        self._lanes = lanes
        self._servers = servers
        self._say = say
        self._rounds: list[EvalRound] = []
        self._standing_by: list[EvalRound] = []
        """Of these, the ones that wait for servers to be held."""
        self._dedicated: list[EvalRound] = []
        """Those played on the servers that are held now, ended ones included."""
        self.ended = False
        """One has, since the core last looked."""
        self.changed: list[str] = []
        """Names of those that could not go on, as they would be played otherwise than they were begun."""
        self.last_step = settings.number_of_steps
        """Of the run, as far as is known: evals that are due then are its final ones."""
        self._next_id = EVAL_IDS
        self._waiting: tuple[SavedRound, ...] = ()
        """Of the checkpoint that the run goes on from, until the prompts are known."""

    @property
    def under_way(self) -> bool:
        return bool(self._rounds or self._waiting)

    @property
    def holds_training(self) -> bool:
        """Whether the trainer gets no batch before an eval has ended: one that is of the weights before the first step, which
        would be gone, and any one where servers sleep while the trainer trains."""
        return bool(self._rounds) and any(one.step == 0 or self._settings.evals_hold_training for one in self._rounds)

    @property
    def samples_left(self) -> int:
        return sum(one.undecided for one in self._rounds)

    # ---- begun and ended

    def begin_due(
        self, version: int, sizes: Mapping[str, int], digests: Mapping[str, str], known: frozenset[str] = frozenset()
    ) -> None:
        """At the commit of `version`, 0 before the first step. `sizes`: prompts in the eval split of each environment;
        `digests`: of their cards; `known`: names of those that have begun. An eval whose last round still plays is left out,
        so that slow ones don't pile up; the last of a run never is."""
        last = version == self.last_step
        for rules in self._settings.evals:
            if rules.name in known or not rules.is_due(version, last=last):
                continue
            if not last and any(one.rules.name == rules.name for one in self._rounds):
                self._say(do.EndEval(rules.name, version, "left out", 0, 0))
                self._say(
                    do.WarnUser(
                        f"the eval {rules.name} of step {version} is left out: the one before it still plays; raise "
                        f"evals.{rules.name}.every, or lower its num_prompts or num_samples"
                    )
                )
                continue
            size = sizes.get(rules.environment, 0)
            prompts = min(rules.num_prompts or size, size)
            digest = digests.get(rules.environment, "")
            self._begin(EvalRound(rules, version, prompts, digest, self._next_id))
            self._next_id += prompts * rules.num_samples

    def _begin(self, of: EvalRound) -> None:
        self._rounds.append(of)
        self._say(do.BeginEval(of.rules.name, of.step, of.prompts, of.rules.num_samples, of.first_id))
        self._line_up(of)

    def _line_up(self, of: EvalRound) -> None:
        if self._settings.eval_servers and 0 < of.step < self.last_step:
            self._standing_by.append(of)
        else:
            self._queue(of)

    def _queue(self, of: EvalRound) -> None:
        for group in of.groups:
            for rollout in group.rollouts:
                if rollout.status is RolloutStatus.WAITING:
                    self._lanes.queue(rollout)

    def end_all(self) -> None:
        """The run ends: what still plays is cut off."""
        for one in self._rounds:
            self._say(do.EndEval(one.rules.name, one.step, "cut off", one.failed, one.undecided))
        for saved in self._waiting:
            unfinished = saved.prompts * saved.rules.num_samples - len(saved.scored) - len(saved.failed)
            self._say(do.EndEval(saved.rules.name, saved.step, "cut off", len(saved.failed), unfinished))
        self._rounds, self._waiting = [], ()

    # ---- servers held for them

    def start_standing_by(self, version: int, *, updating: bool) -> None:
        """Those that wait begin, together: once servers of `version` can be held, which is not while others are held or come
        back from it, nor during an update; on all servers where none can be held, and where training is over."""
        if not self._standing_by:
            return
        begun, held = self._standing_by, False
        if version < self.last_step:
            if updating or self._servers.busy:
                return
            held = self._servers.hold(version, tuple((one.rules.name, one.step) for one in begun))
        self._standing_by = []
        for one in begun:
            one.dedicate(held)
            self._queue(one)
        self._dedicated = begun if held else self._dedicated

    def lose_server(self, server: str, version: int) -> None:
        """Before its requests are placed elsewhere: on another that is held, or on any where none is left."""
        servers, held = self._servers, self._servers.held
        servers.lose(server)
        if not held or (servers.held and servers.leave_training_one(server)):
            return
        self._say(
            do.WarnUser(
                f"{server} is lost, and evals go on beside training on all servers that are left: their answers may be of "
                "several versions"
            )
        )
        self._end_dedicated(version)

    def release_servers(self, version: int) -> None:
        """Where all that were played on them have ended. `version`: served by the others."""
        if self._dedicated and not any(one.undecided for one in self._dedicated):
            self._end_dedicated(version)

    def _end_dedicated(self, version: int) -> None:
        ended, self._dedicated = self._dedicated, []
        for one in ended:
            one.dedicate(False)
        self._lanes.share_dedicated()
        if self._servers.held:
            self._servers.release(version)

    # ---- one sample

    def make_order(self, rollout: RolloutAttempt, group: EvalGroup) -> RolloutOrder:
        sample = rollout.rollout_id - group.group_id
        seed = eval_seed(self._settings.seed, group.round.rules.name, group.prompt.index, sample)
        name = group.round.rules.name
        return RolloutOrder(rollout.rollout_id, group.group_id, sample, rollout.attempt, group.prompt, seed, name)

    def settle(self, rollout: RolloutAttempt, group: EvalGroup, status: RolloutStatus) -> None:
        """The sample has its score, or is given up. What was scored is written down, and nobody asks for it again."""
        rollout.status, of = status, group.round
        if status is RolloutStatus.DONE:
            self._say(do.ForgetRollouts((rollout.rollout_id,)))
        else:
            group.failed += 1
            of.failed += 1
        of.undecided -= 1
        group.undecided -= 1
        if not group.undecided:
            group.state = GroupState.COMPLETE
            self._lanes.leave_lane(group)
        if not of.undecided:
            self._complete(of)

    def _complete(self, of: EvalRound) -> None:
        self._rounds.remove(of)
        for ended in of.groups:
            ended.close()
        self._say(do.EndEval(of.rules.name, of.step, "complete", of.failed, 0))
        self.ended = True

    # ---- a checkpoint

    def save(self) -> SavedEvals:
        return SavedEvals(next_id=self._next_id, rounds=(*self._waiting, *(one.save() for one in self._rounds)))

    def restore(self, saved: SavedEvals) -> None:
        self._next_id, self._waiting = saved.next_id, saved.rounds

    def go_on(self, sizes: Mapping[str, int], digests: Mapping[str, str]) -> None:
        """With the evals of the checkpoint, once the prompts are known. One whose settings or prompts are others by now is cut
        off: its parts would not be of one eval."""
        waiting, self._waiting = self._waiting, ()
        for saved in waiting:
            if not self._is_same(saved, sizes, digests):
                unfinished = saved.prompts * saved.rules.num_samples - len(saved.scored) - len(saved.failed)
                self._say(do.EndEval(saved.rules.name, saved.step, "changed", len(saved.failed), unfinished))
                self.changed.append(saved.rules.name)
                self._say(
                    do.WarnUser(
                        f"the eval {saved.rules.name} of step {saved.step} was under way at the checkpoint and has other "
                        "settings or prompts by now: it is cut off"
                    )
                )
                continue
            self._resume(EvalRound(saved.rules, saved.step, saved.prompts, saved.digest, saved.first_id), saved)

    def _is_same(self, saved: SavedRound, sizes: Mapping[str, int], digests: Mapping[str, str]) -> bool:
        """Whether what is left of it would be played as what was scored."""
        environment = saved.rules.environment
        size = sizes.get(environment, 0)
        return (
            any(saved.rules.plays_as(rules) for rules in self._settings.evals)
            and saved.digest == digests.get(environment, "")
            and saved.prompts == min(saved.rules.num_prompts or size, size)
        )

    def _resume(self, of: EvalRound, saved: SavedRound) -> None:
        self._rounds.append(of)
        decided = dict.fromkeys(saved.scored, RolloutStatus.DONE) | dict.fromkeys(saved.failed, RolloutStatus.FAILED)
        for group in of.groups:
            for rollout in group.rollouts:
                rollout.status = decided.get(rollout.rollout_id, RolloutStatus.WAITING)
            group.failed = sum(rollout.status is RolloutStatus.FAILED for rollout in group.rollouts)
            group.undecided = sum(rollout.status is RolloutStatus.WAITING for rollout in group.rollouts)
            group.state = GroupState.PENDING if group.undecided else GroupState.COMPLETE
        of.failed, of.undecided = len(saved.failed), of.undecided - len(decided)
        if of.undecided:
            self._line_up(of)
        else:  # its last sample was scored, and its own row lost
            self._complete(of)


def eval_seed(run_seed: int, name: str, index: int, sample: int) -> int:
    """Sampling seed of one answer, in [0, 2^48): the same each time the eval is played."""
    return keyed_hash(f"eval/{name}", run_seed, index, sample) >> 16
