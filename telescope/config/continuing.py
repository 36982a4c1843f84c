"""Which settings a run may go on with: those of its checkpoints, but for what changes neither model nor data.

Pure: two resolved configurations as plain JSON, and sentences.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

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


def refusals(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Why a run with the settings `new` can't go on where one with `old` was; empty if it can."""
    found = [
        f"{path}={_said(here)} was {_said(was)} when the run began: {why}; set it back, or begin a new run"
        for path, why in FIXED.items()
        if (was := _at(old, path)) != (here := _at(new, path))
    ]
    return [*found, *_environments(old.get("environments", {}), new.get("environments", {}))]


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
