"""What a worker must know before it may say hello: its environments and their cards (prompt_lengths.py: whether prompts fit);
and an environment's own set-up and tear-down, each within its time.

Every failure here is one sentence that names `environments.<label>` and the file, because the code is the user's. A set-up that
fails is raised, a tear-down that fails is logged.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import inspect
import json
import logging
import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from telescope.config import plugins
from telescope.config.run import RunConfig, as_json, keep_references
from telescope.config.secrets import find_references, secret_values
from telescope.environments.base import Environment, Prompt
from telescope.environments.questions.rows import NoRows
from telescope.environments.validate import (
    describe_not_awaitable,
    find_class_mistake,
    find_prompts_mistake,
    find_ranges_mistake,
)
from telescope.records import EnvironmentCard
from telescope.wire.process import Interrupted

SAMPLE = 256
"""Prompts of a split that the digest reads; a split of no more is read whole."""
PACKAGE = Path(__file__).resolve().parent.parent


class EnvironmentBroken(RuntimeError):
    """An environment that can't be loaded; the message names its entry and its file."""


@dataclass(frozen=True)
class LoadedEnvironment:
    """One entry of `environments`, ready to play."""

    label: str
    environment: Environment
    prompts: dict[str, Sequence[Prompt]]
    card: EnvironmentCard
    secrets: frozenset[str] = frozenset()
    """Values that must not reach the run directory: of all variables that the run's settings refer to, wherever they do."""
    set_up_timeout_s: float = 300.0
    tear_down_timeout_s: float = 10.0
    temperature: float | None = None
    """Its own; None: the run's, and likewise with `max_tokens`."""
    max_tokens: int | None = None
    of_eval: bool = False
    """An eval alone plays it."""

    @property
    def place(self) -> str:
        """Where it stands in the configuration, e.g. `environments.countdown`, `evals.math500`."""
        return f"{'evals' if self.of_eval else 'environments'}.{self.label}"

    @property
    def max_tokens_setting(self) -> str:
        """The setting that limits its answers."""
        return "rollout.max_tokens" if self.max_tokens is None else f"{self.place}.max_tokens"


def load_environments(config: RunConfig) -> dict[str, LoadedEnvironment]:
    """All environments of the run by label. Raises `EnvironmentBroken`."""
    return {label: _load(config, label) for label in config.played}


def find_obstacle(config: RunConfig, label: str) -> str:
    """Why a worker could not load the entry, as far as its environment can tell quickly (`Environment.check_data`); else ""."""
    try:
        with _broken_by_name(config, label):
            config.environment(label).check_data()
    except EnvironmentBroken as error:
        return str(error)
    return ""


def _load(config: RunConfig, label: str) -> LoadedEnvironment:
    entry = config.played[label]
    with _broken_by_name(config, label) as kind:
        environment = config.environment(label)
        _refuse(find_ranges_mistake(environment.metrics_ranges))
        prompts = {split: _load_prompts(environment, split) for split in environment.splits}
        if not prompts.get("train"):
            raise ValueError("it has no prompts in its train split")
        _refuse(find_class_mistake(kind))
        secrets = secret_values(os.environ, as_json(config))
        card = make_card(label, environment, prompts, entry.kwargs)
        return LoadedEnvironment(
            label,
            environment,
            prompts,
            card,
            secrets,
            entry.set_up_timeout_s,
            entry.tear_down_timeout_s,
            entry.temperature,
            entry.max_tokens,
            label not in config.environments,
        )


@contextlib.contextmanager
def _broken_by_name(config: RunConfig, label: str) -> Iterator[type[Environment]]:
    """The entry's class; whatever the user's code raises within comes out as `EnvironmentBroken`."""
    entry = config.played[label]
    entry_name = f"environments.{label}" if label in config.environments else f"evals.{label}"
    place = f"{entry_name} (environment '{entry.name}')"
    try:
        kind = plugins.load(plugins.ENVIRONMENTS, entry.name, config.plugin_path)
    except plugins.PluginError as error:  # a whole sentence with the file in it
        raise EnvironmentBroken(f"{entry_name}: {error}") from error
    place = f"{place} in {inspect.getfile(kind)}"
    try:
        yield kind
    except NoRows as error:  # a whole sentence about the user's data, which no file of code would explain
        raise EnvironmentBroken(f"{entry_name}: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        setting = ".".join(map(str, first["loc"]))
        raise EnvironmentBroken(f"{place} refuses its settings: {setting or 'kwargs'}: {first['msg']}") from error
    except (Exception, SystemExit) as error:
        raise EnvironmentBroken(f"{place} can't be loaded: {describe(error)}") from error


def _load_prompts(environment: Environment, split: str) -> Sequence[Prompt]:
    prompts = environment.prompts(split)
    _refuse(find_prompts_mistake(type(environment), split, prompts))
    return prompts


def _refuse(mistake: str) -> None:
    if mistake:
        raise TypeError(mistake)


def make_card(
    label: str, environment: Environment, prompts: dict[str, Sequence[Prompt]], kwargs: Mapping[str, Any] = {}
) -> EnvironmentCard:
    """Sizes, and a digest over settings and prompts: all of them up to `SAMPLE`, else `SAMPLE` spread over the split. Settings
    that are references in `kwargs` count as these: the digest must not follow from a variable's value."""
    hashed = hashlib.sha256()
    # By their JSON, so that secrets are hashed as the stars they are shown as.
    settings = (
        keep_references(environment, kwargs, os.environ) if find_references(kwargs) else environment.model_dump(mode="json")
    )
    _feed(hashed, [type(environment).__name__, settings])
    for split, sequence in prompts.items():
        _feed(hashed, [split, len(sequence)])
        for prompt in sample_prompts(sequence):
            if not isinstance(prompt, Prompt):
                raise TypeError(f"prompts({split!r}) holds {prompt!r:.60}, which is not a Prompt (telescope.environments.base)")
            _feed(hashed, [[dict(turn) for turn in prompt.turns], prompt.answer, dict(prompt.facts)])
    sizes = {split: len(sequence) for split, sequence in prompts.items()}
    return EnvironmentCard(label, sizes, hashed.hexdigest()[:16])


def sample_prompts(prompts: Sequence[Prompt]) -> Iterator[Prompt]:
    """All prompts of a small split; of a larger one `SAMPLE` at equal distances, the first and the last among them."""
    size = len(prompts)
    if size <= SAMPLE:
        yield from (prompts[index] for index in range(size))
    else:
        yield from (prompts[at * (size - 1) // (SAMPLE - 1)] for at in range(SAMPLE))


def describe(error: BaseException) -> str:
    """`KeyError: 'target' (my_task.py line 41)`: what was raised and the last line of a user's file that it came through."""
    text = _read_text(error).strip().splitlines()
    words = f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
    line = find_users_line(error)
    return f"{words} ({line})" if line else words


def find_users_line(error: BaseException | None) -> str:
    """`my_task.py line 41`: the last line of a user's file that it, or what caused it, came through, else of a file of ours;
    else empty."""
    frames: list[traceback.FrameSummary] = []
    while error is not None:
        frames += traceback.extract_tb(error.__traceback__)
        error = error.__cause__
    own = [frame for frame in frames if _is_users(Path(frame.filename))]
    own = [frame for frame in own if not Path(frame.filename).is_relative_to(PACKAGE)] or own
    return f"{own[-1].filename} line {own[-1].lineno}" if own else ""


def _read_text(error: BaseException) -> str:
    try:
        if isinstance(error, ValidationError):  # its text begins with no more than a count
            first = error.errors()[0]
            private = "keep what it makes in a private field (docs/environments.md)"
            remedy = f": {private}" if first["type"] == "frozen_instance" else ""
            return f"{error.title}.{'.'.join(map(str, first['loc']))}: {first['msg']}{remedy}"
        return str(error)
    except Interrupted:
        raise
    except BaseException:  # noqa: BLE001 a user's own `__str__` may raise anything, in the one place that must not fail
        return ""


def _is_users(path: Path) -> bool:
    """Whether a file may hold an environment: one of ours, or neither Telescope's own nor a library's."""
    if path.is_relative_to(PACKAGE):
        return path.is_relative_to(PACKAGE / "environments")
    return "site-packages" not in path.parts and not path.is_relative_to(Path(inspect.__file__).parent) and path.is_file()


def _feed(hashed: Any, value: Any) -> None:
    # Objects that JSON has no form for count by their type: their text may hold an address that differs everywhere.
    text = json.dumps(value, sort_keys=True, default=lambda other: f"<{type(other).__qualname__}>", separators=(",", ":"))
    hashed.update(text.encode())
    hashed.update(b"\x00")


log = logging.getLogger(__name__)


async def set_up(loaded: LoadedEnvironment) -> None:
    """Raises `EnvironmentBroken`, also after `set_up_timeout_s`."""
    place, limit_s = loaded.place, loaded.set_up_timeout_s
    try:
        async with asyncio.timeout(limit_s) as limit:
            await _call_hook(f"{type(loaded.environment).__name__}.set_up", loaded.environment.set_up)
    except (Exception, SystemExit) as error:
        if limit.expired():
            raise EnvironmentBroken(
                f"{place}: its set_up was not done within {place}.set_up_timeout_s={limit_s:g}; it waited in "
                f"{find_users_line(error.__cause__) or 'code of a library'}: see what for, or give it longer"
            ) from error
        raise EnvironmentBroken(f"{place}: its set_up failed: {describe(error)}") from error


async def tear_down(loaded: LoadedEnvironment) -> None:
    """Waits at most `tear_down_timeout_s`."""
    place, limit_s = loaded.place, loaded.tear_down_timeout_s
    try:
        async with asyncio.timeout(limit_s) as limit:
            await _call_hook(f"{type(loaded.environment).__name__}.tear_down", loaded.environment.tear_down)
    except (Exception, SystemExit) as error:  # noqa: BLE001 user code at the process's end: the others have theirs too
        why = f"not done within {place}.tear_down_timeout_s={limit_s:g}" if limit.expired() else describe(error)
        log.warning("%s: its tear_down failed: %s", place, why)


async def _call_hook(name: str, hook: Callable[[], Any]) -> None:
    waiting = hook()
    if not inspect.isawaitable(waiting):
        raise TypeError(describe_not_awaitable(name, waiting))
    await waiting
