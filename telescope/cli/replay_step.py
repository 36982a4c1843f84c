"""One recorded train step, run again alone: its loss, its metrics, and which of its inputs are not finite numbers.

Reads what a run kept (`kept/step_…`), puts the ranks' shards together, builds the run's own backend in this process and trains
the step once. Writes nothing. Under torchrun (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) each process takes its share;
torchrun itself listens there, and says so by TORCHELASTIC_USE_AGENT_STORE.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from telescope.backends.base import BackendSettings, Job, StepResult, TrainShard, World
from telescope.backends.common import shards
from telescope.config.run import RunConfig
from telescope.maths import dealing, routing
from telescope.records import TrainItem
from telescope.runlog import checkpoints, kept_steps, opening
from telescope.runlog.attempts import attempt_that_trained
from telescope.runlog.layout import RunDirectory
from telescope.trainer.main import job as job_of


class CannotReplay(ValueError):
    """The step can't be run again; the sentence says why."""


def replay_step(run: RunDirectory, step: int, *, weights: str | None, device: str | None) -> tuple[bool, str]:
    """Whether all of it is finite, and a report (empty on all ranks but the first). `weights`: a folder with a checkpoint, or
    with a model in the format of Hugging Face; None: the run's own checkpoint of the step before, or else the model that it
    began with.

    Raises `kept_steps.NothingKept`, `CannotReplay`, `CheckpointUnreadable`, `NotARun`, `DamagedFile`,
    and what building the backend raises.
    """
    parts, run = kept_steps.read(run, step), kept_steps.find(run, step)
    config = opening.read(run)
    whole = together(parts)
    broken = list(broken_inputs(whole))
    first = parts[0].header
    doubt = ""
    if weights is None:
        weights, doubt = _checkpoint(run, config, step - 1)
    said = [*_opening(run, first, whole, weights or f"{config.model.name}, as the run began"), *filter(None, [doubt])]
    if any("log-prob" in line for line in broken):
        return False, "\n".join([*said, *broken, "A loss without them can't be computed, so nothing was run."])
    world = _world(device, config)
    own = share(whole, world, config.trainer.row_tokens)
    backend = _fit_here(config.backend, world, first.ranks).build(_job(config, world, weights, first.loss_scale))
    try:
        result = backend.train_step(own)
    finally:
        backend.close()
    finite = not broken and all(map(math.isfinite, result.metrics.values()))
    return finite, "" if world.rank else "\n".join([*said, *broken, *_outcome(result)])


def _fit_here(settings: BackendSettings, world: World, ranks: int) -> BackendSettings:
    """For processes of their own. What was chosen for the run's GPUs and so many `ranks` is not for a CPU, nor for fewer."""
    here: dict[str, bool | None] = {}
    if not world.device.startswith("cuda"):
        here["compile"] = False
    if world.size < ranks:
        here |= {"gradient_checkpointing": True, "checkpointed_layers": None}
    known = type(settings).model_fields
    return settings.alone().model_copy(update={name: value for name, value in here.items() if name in known})


def together(parts: Sequence[kept_steps.KeptShard]) -> TrainShard:
    """The shards of all ranks as one, minibatch by minibatch. Ranks that trained the same trajectories count once."""
    different: dict[tuple[int, ...], kept_steps.KeptShard] = {}
    for part in parts:
        different.setdefault(_rollouts(part), part)
    first = parts[0].header
    items: list[TrainItem] = []
    pieces: list[tuple[np.ndarray, ...]] = [_nothing()]
    routed: list[np.ndarray | None] = []
    for minibatch in range(len(first.denominators)):
        for part in different.values():
            ends = np.cumsum([item.length for item in part.header.items])
            for item, end in zip(part.header.items, ends, strict=True):
                if item.minibatch == minibatch:
                    here = slice(end - item.length, end)
                    items.append(item)
                    pieces.append((part.ids[here], part.mask[here], part.logprobs[here], part.versions[here]))
                    routed.append(None if part.routed is None else part.routed[here])
    ids, mask, logprobs, versions = (np.concatenate(column) for column in zip(*pieces, strict=True))
    of_experts = routing.joined(routed, [item.length for item in items])
    return TrainShard(first.step, tuple(items), ids, mask, logprobs, versions, first.denominators, of_experts)


def _rollouts(part: kept_steps.KeptShard) -> tuple[int, ...]:
    """A rollout goes to one rank, or to all that share rows. (Items compare by their advantages too: none that is not a
    number is equal to itself.)"""
    return tuple(item.rollout_id for item in part.header.items)


def _nothing() -> tuple[np.ndarray, ...]:
    return tuple(np.zeros(0, kind) for kind in (np.int32, np.uint8, np.float32, np.int32))


def share(whole: TrainShard, world: World, seq_len: int) -> TrainShard:
    """What one rank trains of the step: trajectories of each minibatch by cost. All of it, where it is alone."""
    if world.size == 1:
        return whole
    own: list[int] = []
    for minibatch in range(len(whole.denominators)):
        members = [index for index, item in enumerate(whole.items) if item.minibatch == minibatch]
        lengths = [[whole.items[index].length] for index in members]
        own += [members[place] for place in dealing.deal(lengths, world.size, seq_len=seq_len)[world.rank]]
    ends = np.cumsum([item.length for item in whole.items])
    kept_places = [np.arange(ends[index] - whole.items[index].length, ends[index]) for index in own]
    places = np.concatenate([np.zeros(0, np.int64), *kept_places])
    return TrainShard(
        whole.step,
        tuple(whole.items[index] for index in own),
        whole.ids[places],
        whole.mask[places],
        whole.logprobs[places],
        whole.versions[places],
        whole.denominators,
        None if whole.routed is None else whole.routed[places],
    )


def broken_inputs(shard: TrainShard) -> Iterator[str]:
    """What came in that is not a finite number, in a sentence a trajectory."""
    for item, trajectory in zip(shard.items, shards.trajectories(shard), strict=True):
        places = np.flatnonzero(trajectory.mask.astype(bool) & ~np.isfinite(trajectory.logprobs))
        if len(places):
            value = trajectory.logprobs[places[0]]
            yield (
                f"{_name(item)}: the sampling log-prob of {len(places)} trained tokens is not a finite number, first {value} "
                f"at token {places[0]}"
            )
        advantages = np.array([item.advantage, *(advantage for _, advantage in item.turns or ())])
        for advantage in advantages[~np.isfinite(advantages)][:1]:
            yield f"{_name(item)}: its advantage is {advantage}"


def _world(device: str | None, config: RunConfig) -> World:
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if device is None:
        device = "cpu" if config.cluster.device == "cpu" or not _has_gpu() else "cuda"
    if device.startswith("cuda") and not _has_gpu():
        raise CannotReplay(f"--device {device}: PyTorch finds no GPU here; leave it out, or give --device cpu")
    if device == "cuda":
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    return World(rank=rank, size=size, device=device, met=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True")


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _checkpoint(run: RunDirectory, config: RunConfig, step: int) -> tuple[str | None, str]:
    """The run's own of this step, if there is one, and a doubt about it. Where attempts have trained the step more than once it
    is the one that `run`'s attempt went on from, though another may have its place by now."""
    there = checkpoints.all_of(checkpoints.root(run.whole, config.checkpoint.dir), step)
    if not there and step > 0:
        return None, (
            f"These weights are not those that step {step + 1} began with: no checkpoint of step {step} is there. Loss and "
            "norm are other than the run's; give the weights with --weights, or save them (checkpoint.every)."
        )
    attempt = attempt_that_trained(run, step) if there else None
    if attempt is None:
        return next(map(str, there), None), ""
    makers = [checkpoints.read(folder).attempt for folder in there]
    if attempt in makers:
        return str(there[makers.index(attempt)]), ""
    return str(there[0]), (
        f"These weights are not those that step {step + 1} began with: attempt {makers[0]} trained step {step} too, and the "
        f"checkpoint of attempt {attempt}, which this step followed, is gone."
    )


def _job(config: RunConfig, world: World, weights: str | None, loss_scale: float | None) -> Job:
    if weights is not None:
        folder = Path(weights).expanduser()
        if (folder / checkpoints.COMPLETE).is_file():
            made = job_of(config, world, lambda doing: None)
            return replace(made, recorded_loss_scale=loss_scale, rollouts=0, resume=checkpoints.trainer_part(folder))
        if not (folder / "config.json").is_file():
            raise CannotReplay(
                f"--weights {weights} is not a folder with a model in it, as it has no config.json, and no checkpoint, as it "
                f"has no {checkpoints.COMPLETE}"
            )
        config = config.model_copy(update={"model": config.model.model_copy(update={"name": str(folder)})})
    return replace(job_of(config, world, lambda doing: None), recorded_loss_scale=loss_scale, rollouts=0)


def _opening(run: RunDirectory, header: kept_steps.Header, whole: TrainShard, weights: str) -> list[str]:
    return [
        f"step {header.step} of {run.path}, trained on version {header.version} by {header.ranks} "
        f"rank{'s' * (header.ranks != 1)}; kept because {header.why}",
        f"{len(whole.items)} trajectories, {len(whole.ids):,} tokens, {int(whole.mask.sum()):,} of them trained, "
        f"{len(whole.denominators)} update{'s' * (len(whole.denominators) != 1)}; weights here: {weights}",
    ]


def _outcome(result: StepResult) -> Iterator[str]:
    metrics = result.metrics
    trained = "loss" in metrics
    yield f"loss {metrics['loss']:.6g}, gradient norm {metrics['grad_norm']:.6g}" if trained else "nothing was left to train"
    if wrong := int(metrics.get("updates_not_finite", 0)):
        yield f"{wrong} of {metrics['updates']:.0f} updates had a gradient that is not finite, and moved no weight"
    for name, value in sorted(metrics.items()):
        yield f"  {name} {value:.6g}"


def _name(item: TrainItem) -> str:
    return f"rollout {item.rollout_id} of group {item.group_id} ({item.length} tokens)"
