"""Staleness: how many versions old a group may be when it is trained. Rule 5 of docs/architecture.md; proofs in docs/flow.md.

Two rules keep the bound: only so many groups are alive at once (`Slots`: one is held from admission until retirement or until
the version trained on the group is committed; docs/decisions/0001-slots-until-commit.md says why not less), and an incomplete
group that has become too old is retired (`is_stale`). What follows for a configuration, before anything runs, is `age_bound`.
"""

from __future__ import annotations

from telescope.flow.groups import RolloutGroup
from telescope.flow.settings import FlowSettings


class Slots:
    """The groups alive, oldest first."""

    def __init__(self, settings: FlowSettings) -> None:
        self._limit = settings.slots
        self._needed = settings.number_of_steps * settings.prompts_batch_size_for_trainer
        self._trained = 0
        self.alive: dict[int, RolloutGroup] = {}

    @property
    def has_room(self) -> bool:
        """Whether one more group may be admitted: a slot is free, and the run still needs a group beyond those alive. The
        second keeps the end of a run from generating what no step would train on."""
        alive = len(self.alive)
        return alive < self._limit and self._trained + alive < self._needed

    def restore(self, trained: int, alive: list[RolloutGroup]) -> None:
        """`alive`: in order of their ids."""
        self._trained = trained
        self.alive = {group.group_id: group for group in alive}

    def hold(self, group: RolloutGroup) -> None:
        self.alive[group.group_id] = group

    def release(self, group: RolloutGroup, trained: bool) -> None:
        del self.alive[group.group_id]
        if trained:
            self._trained += 1


def is_stale(group: RolloutGroup, version: int, settings: FlowSettings) -> bool:
    """Whether, at the commit of `version`, the group's first dispatch is D versions old and it is still incomplete. A complete
    group is never stale, however old."""
    return group.playing and group.v_start >= 0 and version - group.v_start >= settings.max_off_policy_steps


def age_bound(settings: FlowSettings) -> int:
    """Most versions a trained group may be old: training batches completed before its own, less its v_start.

    M for `take_order=admission`, M + D − 1 for `completion`, 0 where M = 0; and never more than the run has steps before its
    last. Proof in docs/flow.md.
    """
    if settings.max_async_rollout == 0:
        return 0
    waiting = settings.max_off_policy_steps - 1 if settings.take_order == "completion" else 0
    return min(settings.max_async_rollout + waiting, settings.number_of_steps - 1)


def age_bound_in_updates(settings: FlowSettings, updates_per_step: int = 1) -> int:
    """The same in optimiser updates, minibatches times epochs a step: the last of a step sees its group one update short of a
    version older."""
    return age_bound(settings) * updates_per_step + updates_per_step - 1


def stale_cancel_can_fire(settings: FlowSettings) -> bool:
    """Whether any group can still be incomplete when D versions have passed since its first dispatch.

    With M = 0 a batch waits for every group alive. In admission order at most M batches precede a group's own, so its D-th
    version can only pass where D ≤ M. In completion order a straggler can be overtaken for ever. Nothing fires at the end.
    """
    if settings.max_async_rollout == 0 or settings.max_off_policy_steps > settings.number_of_steps - 1:
        return False
    return settings.take_order == "completion" or settings.max_off_policy_steps <= settings.max_async_rollout


def explain(settings: FlowSettings, updates_per_step: int = 1) -> tuple[str, ...]:
    """Sentences for `plan`, e.g. `A trained group is at most 9 versions old (9 optimiser updates).`"""
    groups, samples = settings.prompts_batch_size_for_trainer, settings.group_size
    age, updates = age_bound(settings), age_bound_in_updates(settings, updates_per_step)
    limit = settings.max_off_policy_steps
    lines = [
        f"A batch is {groups} groups of {samples} samples: {groups * samples} rollouts a step.",
        f"B = (max_async_rollout + 1) x groups = ({settings.max_async_rollout} + 1) x {groups} = {settings.slots} groups may "
        f"be alive at once: {settings.slots * samples} rollouts.",
    ]
    if settings.max_async_rollout == 0:
        lines.append("max_async_rollout=0 is synchronous: every token is sampled by the weights that are trained next.")
    lines.append(
        f"A trained group is at most {age} version{'s' * (age != 1)} old ({updates} optimiser update{'s' * (updates != 1)}), "
        f"in take_order={settings.take_order}."
    )
    if stale_cancel_can_fire(settings):
        lines.append(
            f"A group still incomplete {limit} version{'s' * (limit != 1)} after its first dispatch is cancelled as off-policy."
        )
    else:
        lines.append(f"The off-policy cancel (max_off_policy_steps={limit}) never fires: {_why_never(settings)}.")
    return tuple(lines)


def _why_never(settings: FlowSettings) -> str:
    if settings.max_async_rollout == 0:
        return "each step waits for every group alive"
    if settings.max_off_policy_steps > settings.number_of_steps - 1:
        return f"the run has {settings.number_of_steps} step{'s' * (settings.number_of_steps != 1)}"
    return f"in admission order no group waits for more than max_async_rollout={settings.max_async_rollout} versions"
