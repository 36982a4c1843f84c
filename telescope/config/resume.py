"""Which settings a run may go on with: those of its checkpoints, but for what changes neither model nor data.

Pure: two resolved configurations as plain JSON, and sentences.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from telescope.maths.learning_rate import learning_rate_factor

FIXED = {
    "model.name": "the weights are this model's",
    "model.lora": "the weights are those that were trained before",
    "algorithm.name": "the optimiser's state is of another loss",
    "backend.name": "its files are another backend's",
    "backend.optimizer": "the checkpoint has its moments",
    "seed": "prompts and samples are drawn with it",
    "rollout.group_size": "rollouts are numbered by it",
    "orchestrator.prompts_batch_size_for_trainer": "the batch that forms was begun with it",
    "orchestrator.max_async_rollout": "groups that wait were admitted by it",
    "orchestrator.take_order": "groups that wait were admitted by it",
    "orchestrator.max_off_policy_steps": "groups that wait were admitted by it",
}
"""By path, and why."""
SAME_FILES = {"fsdp", "megatron"}
"""Backends whose checkpoints have the same names and shapes: each reads the other's."""


def find_obstacles_to_resume(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Why a run with the settings `new` can't go on where one with `old` was; empty if it can."""
    alike = {_at(old, "backend.name"), _at(new, "backend.name")} == SAME_FILES
    fixed = {path: why for path, why in FIXED.items() if not (alike and path == "backend.name")}
    found = [
        f"{path}={_said(here)} was {_said(was)} when the run began: {why}; set it back, or begin a new run"
        for path, why in fixed.items()
        if (was := _stepped(old, path)) != (here := _stepped(new, path))
    ]
    found = [*_trains(old, new), *found, *_replays(old, new), *_rounded(old, new)]
    return [*found, *_environments(old.get("environments", {}), new.get("environments", {}))]


def _stepped(config: Mapping[str, Any], path: str) -> Any:
    """A setting; backend=megatron has no choice of optimizers, and steps with AdamW."""
    return "adamw" if path == "backend.optimizer" and _at(config, "backend.name") == "megatron" else _at(config, path)


def _trains(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    """A run of evals that took over the directory of one that trains would put its rows aside, and be what is resumed next."""
    was, here = _at(old, "cluster.trainer_num_workers"), _at(new, "cluster.trainer_num_workers")
    if None not in (was, here) and (was > 0) != (here > 0):
        yield (
            f"cluster.trainer_num_workers={here} was {was} when the run began: a run that trains and one that plays evals "
            "alone have a directory each; name another"
        )


SCHEDULE = ("learning_rate", "lr_scheduler", "warmup_steps", "min_lr_ratio")


def _rounded(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    """Weights and moments are read into tensors of model.dtype, and float32 alone holds each number of the others."""
    was, here = _at(old, "model.dtype"), _at(new, "model.dtype")
    if None not in (was, here) and here not in (was, "float32"):
        yield (
            f"model.dtype={here} was {was} when the run began: the checkpoint's weights and moments would be rounded to it; "
            "set it back, or begin a new run"
        )


def _replays(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    """Without it nothing needs a record, so to switch it off is allowed."""
    if _at(new, "trainer.router_replay") and not _at(old, "trainer.router_replay"):
        yield (
            "trainer.router_replay=true was false when the run began: of groups that wait no server recorded the experts; set "
            "it back, or begin a new run"
        )


def remark_on_resume(old: Mapping[str, Any], new: Mapping[str, Any], step: int) -> list[str]:
    """What of a run that goes on after `step` is otherwise than one may think, though it is allowed; empty mostly."""
    return [*_schedule(old, new, step), *_widened(old, new), *_coarser_moments(old, new)]


def _widened(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    was, here = _at(old, "model.dtype"), _at(new, "model.dtype")
    if was is not None and was != here == "float32":
        yield (
            f"model.dtype=float32 was {was}: the checkpoint's weights and moments keep their values, are held in float32 from "
            "now on, and take twice the memory"
        )


def _coarser_moments(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    """A step of the new run would round them all the same; the other way they keep their values."""
    for name in ("exp_avg_dtype", "exp_avg_sq_dtype"):
        was, here = (_at(config, f"backend.{name}") or "float32" for config in (old, new))
        if was == "float32" != here:
            yield f"backend.{name}={here} was {was} when the run began: the checkpoint's moments are rounded to it"


def _schedule(old: Mapping[str, Any], new: Mapping[str, Any], step: int) -> list[str]:
    total, before = new.get("number_of_steps"), old.get("number_of_steps")
    facts = [tuple(_at(config, f"trainer.{name}") for name in SCHEDULE) for config in (old, new)]
    if total is None or before is None or total == before or facts[0] != facts[1] or None in facts[0]:
        return []
    rate, schedule, warmup, least = facts[1]
    was, here = (
        rate * learning_rate_factor(step + 1, schedule=schedule, number_of_steps=steps, warmup_steps=warmup, min_ratio=least)
        for steps in (before, total)
    )
    if was == here:
        return []
    return [
        f"number_of_steps={total} was {before}, and trainer.lr_scheduler={schedule} is spread over all of them: step "
        f"{step + 1} runs at a rate of {here:.3g}, and would have had {was:.3g}"
    ]


def _environments(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    if list(old) != list(new):
        yield (
            f"environments are {', '.join(new)} and were {', '.join(old)}: the place in the data is counted by them; name the "
            "same ones in the same order"
        )
        return
    for label, entry in new.items():
        for name, why in (("name", "its prompts are others"), ("curriculum", "its pools are others")):
            if entry.get(name) != old[label].get(name):
                yield (
                    f"environments.{label}.{name}={_said(entry.get(name))} was {_said(old[label].get(name))}: {why}; set it "
                    "back, or begin a new run"
                )


def _at(config: Mapping[str, Any], path: str) -> Any:
    value: Any = config
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _said(value: Any) -> str:
    return "null" if value is None else str(value)
