"""Judges a resolved container: a RunConfig, or every mistake in it at once, in sentences.

Wrong settings are set aside one round after another, so that a typo does not hide an impossible combination elsewhere.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from telescope.config.checks import conflicts
from telescope.config.explain import Mistake, explain, value_at
from telescope.config.run import RunConfig
from telescope.config.words import Problem

_ROUNDS = 8


def judge(container: Mapping[str, Any]) -> tuple[RunConfig | None, list[Problem]]:
    """The configuration, or None and all its problems. `container` holds plain JSON values."""
    rest = copy.deepcopy(dict(container))
    mistakes: list[Mistake] = []
    for _ in range(_ROUNDS):
        try:
            config = RunConfig.model_validate_json(json.dumps(rest), strict=True)
        except ValidationError as error:
            found = explain(error, rest)
            said = {mistake.path for mistake in mistakes}  # what was set aside is missing now, and that is no second mistake
            mistakes += [mistake for mistake in found if not (mistake.kind == "missing" and mistake.path in said)]
            if not _set_aside(rest, found):
                return None, _problems(mistakes)
        else:
            wrong = {mistake.path for mistake in mistakes}
            impossible = [Problem(c.paths[0], c.sentence) for c in conflicts(config) if not wrong.intersection(c.paths)]
            problems = [*_problems(mistakes), *impossible]
            return (None if problems else config), problems
    return None, _problems(mistakes)


def _problems(mistakes: Sequence[Mistake]) -> list[Problem]:
    return list(dict.fromkeys(Problem(mistake.path, mistake.sentence) for mistake in mistakes))


def _set_aside(rest: dict[str, Any], mistakes: Sequence[Mistake]) -> bool:
    """Remove what is wrong, so that the class default stands there; False where that is not possible."""
    progress = False
    for mistake in mistakes:
        if mistake.kind in ("missing", "plugin"):
            return False
        parent = value_at(rest, mistake.place[:-1])
        if not isinstance(parent, dict) or mistake.place[-1] not in parent:
            continue
        wrong = parent.pop(str(mistake.place[-1]))
        if isinstance(wrong, dict) and "name" in wrong:
            parent[str(mistake.place[-1])] = {"name": wrong["name"]}
        progress = True
    return progress
