"""What of a core is kept in a checkpoint, as plain data: enough to go on from, and nothing that belongs to processes.

Taken while no batch is in training, so that it and the trainer's weights are one version. Groups that are complete are kept
with their rewards; those that were begun are kept by name, and start anew under the same ids, prompts and seeds. Owns the
shape of the data and the comparison with the settings that go on; core.py fills and reads it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from telescope.flow.counts import RunTallyState
from telescope.flow.early_stop import EarlyStop, SavedEarlyStop
from telescope.flow.evals import SavedEvals
from telescope.flow.groups import GroupState, RolloutGroup, RolloutStatus
from telescope.flow.limits import FailureLimitsState, name_place
from telescope.flow.prompt_sampler import DataPosition
from telescope.flow.settings import FlowSettings
from telescope.records import PromptRef


class SavedSample(msgspec.Struct, frozen=True, array_like=True):
    """A rollout that has its reward."""

    rollout_id: int
    reward: float
    tokens: int


class SavedGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    group_id: int
    prompt: PromptRef
    returned: bool
    v_start: int = -1
    """-1: it was not complete, and starts anew."""
    survivors: tuple[SavedSample, ...] = ()

    @property
    def survivor_ids(self) -> tuple[int, ...]:
        return tuple(sample.rollout_id for sample in self.survivors)


class Snapshot(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename={"limits": "patience"}):
    """A core between two steps. `limits` has the name that it has had in journals and checkpoints from the first on."""

    settings: FlowSettings
    """It was taken under; `find_refusal` compares them."""
    step: int
    """Steps trained, which is the version served."""
    split_sizes: dict[str, int]
    """Prompts of each environment."""
    digests: dict[str, str]
    position: DataPosition
    playing: tuple[SavedGroup, ...]
    """Alive and not complete."""
    kept: tuple[SavedGroup, ...]
    """Complete, and waiting for a place in a batch."""
    forming: tuple[SavedGroup, ...]
    """In the forming batch, in order of their entry."""
    baseline: tuple[SavedGroup, ...]
    """Discarded ones that count in the statistics of the forming batch, once it is full."""
    discarded: tuple[SavedGroup, ...]
    """Discarded ones that count in those of the next batch that fills up."""
    tally: RunTallyState
    limits: FailureLimitsState
    evals: SavedEvals = SavedEvals()
    early_stop: SavedEarlyStop = SavedEarlyStop()

    @property
    def complete(self) -> tuple[SavedGroup, ...]:
        """All groups whose rollouts may still be asked for."""
        return (*self.kept, *self.forming, *self.baseline, *self.discarded)

    @property
    def rollout_ids(self) -> frozenset[int]:
        """What the rollout store must hold."""
        return frozenset(rollout_id for group in self.complete for rollout_id in group.survivor_ids)


DECIDES = (
    "prompts_batch_size_for_trainer", "group_size", "max_async_rollout", "take_order", "max_off_policy_steps", "seed", "split",
    "curricula",
)  # fmt: skip
"""Settings by which waiting groups were made: under other ones they would be too many, too old, or somebody else's."""


def find_refusal(snapshot: Snapshot, settings: FlowSettings) -> str:
    """Why a run with these settings cannot go on from the snapshot; empty if it can."""
    old = snapshot.settings
    for name in DECIDES:
        if getattr(old, name) != getattr(settings, name):
            return (
                f"the checkpoint of step {snapshot.step} was made with {name}={getattr(old, name)}, and this run has "
                f"{getattr(settings, name)}: set it back, or begin a new run from exported weights"
            )
    labels, others = ([label for label, _ in one.environments] for one in (old, settings))
    if labels != others:
        return (
            f"the checkpoint of step {snapshot.step} was made with environments {', '.join(labels)}, and this run has "
            f"{', '.join(others)}: name the same ones, in the same order"
        )
    early = EarlyStop(settings)
    early.restore(snapshot.early_stop)
    unplayed = snapshot.evals.rounds and early.last_step == snapshot.step
    if early.last_step <= snapshot.step < settings.number_of_steps and not unplayed:
        return f"{early.sentence}: set eval.stop_after=null to train on, or to more"
    if settings.trains and settings.number_of_steps <= snapshot.step and not unplayed:
        return (
            f"number_of_steps={settings.number_of_steps} is reached: the checkpoint is of step {snapshot.step}; raise "
            "number_of_steps to train on"
        )
    return ""


def compare_sizes(snapshot: Snapshot, sizes: Mapping[str, int]) -> str:
    """Why the workers' prompts are not those of the snapshot; empty where they can be."""
    for label, size in snapshot.split_sizes.items():
        if sizes.get(label) != size:
            return (
                f"environments.{label} has {sizes.get(label)} prompts and had {size} at the checkpoint of step "
                f"{snapshot.step}: the position in the data would be another one; give it the same data and settings"
            )
    return ""


def compare_digests(snapshot: Snapshot, digests: Mapping[str, str]) -> str:
    """Which environments are not those of the snapshot, though they have as many prompts; empty where all are."""
    trained = [label for label, _ in snapshot.settings.environments]
    changed = [name_place(label, trained) for label, digest in digests.items() if snapshot.digests.get(label, digest) != digest]
    return f"{', '.join(changed)}: prompts or settings are not those of the checkpoint" if changed else ""


def save_groups(groups: Iterable[RolloutGroup]) -> tuple[SavedGroup, ...]:
    return tuple(map(_save, groups))


def _save(group: RolloutGroup) -> SavedGroup:
    if group.playing:
        return SavedGroup(group.group_id, group.prompt, group.returned)
    survivors = tuple(SavedSample(rollout.rollout_id, rollout.reward, rollout.tokens) for rollout in group.survivors)
    return SavedGroup(group.group_id, group.prompt, group.returned, group.v_start, survivors)


def restore_groups(saved: Iterable[SavedGroup], state: GroupState, group_size: int) -> list[RolloutGroup]:
    """The groups as they were. A rollout of a complete group that has no reward was given up."""
    groups = []
    for one in saved:
        group = RolloutGroup(one.group_id, one.prompt, one.returned, group_size)
        if state is not GroupState.PENDING:
            group.state, group.v_start, group.undecided = state, one.v_start, 0
            scored = {sample.rollout_id: sample for sample in one.survivors}
            for rollout in group.rollouts:
                known = scored.get(rollout.rollout_id)
                rollout.status = RolloutStatus.FAILED if known is None else RolloutStatus.DONE
                if known is not None:
                    rollout.reward, rollout.tokens = known.reward, known.tokens
            group.failed = group_size - len(scored)
        groups.append(group)
    return groups
