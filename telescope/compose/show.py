"""What `--cfg` and `--info` print of a configuration: ours as it is resolved, and what Hydra says of itself."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
from collections.abc import Sequence
from typing import Any

from hydra._internal.hydra import Hydra
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from telescope.compose.load import Point, UsageError, composing
from telescope.compose.options import Places
from telescope.config.run import as_json, as_yaml
from telescope.config.words import did_you_mean, typed

TOPICS = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
"""What `--info` tells of."""


def show_configurations(points: Sequence[Point], places: Places, kind: str, package: str | None, resolved: bool) -> None:
    """Print each point's configuration (`kind` job), Hydra's (hydra) or both (all), or the part of it at `package`.

    Raises `UsageError` where there is no such part.
    """
    for point in points:
        if len(points) > 1:
            sys.stdout.write(f"# {' '.join(point.overrides)}\n")
        if kind == "job":
            sys.stdout.write(_part(point, package, resolved))
        else:
            with composing(places):
                try:
                    with contextlib.redirect_stderr(io.StringIO()):
                        _hydra().show_cfg("run", list(point.given), cfg_type=kind, package=package)
                except SystemExit as error:  # so Hydra says it, in words of its own
                    raise UsageError(f"--package={package}: there is no such part with --cfg {kind}") from error
        if len(points) > 1:
            sys.stdout.write("---\n")


def show_info(point: Point, places: Places, topic: str) -> None:
    """Print how the point is composed, as Hydra tells it: by a log of its own, which is taken off again."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    try:
        with composing(places):
            _hydra().show_info(topic, "run", list(point.given))
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers


def _hydra() -> Hydra:
    hydra = GlobalHydra.instance().hydra
    assert hydra is not None  # `composing` has made it
    return hydra


def _part(point: Point, package: str | None, resolved: bool) -> str:
    config = point.config if resolved else None
    if package in (None, "_global_"):
        return str(OmegaConf.to_yaml(point.composed)) if config is None else as_yaml(config)
    part: Any = OmegaConf.to_container(point.composed) if config is None else as_json(config)
    for name in str(package).split("."):
        if not isinstance(part, dict) or name not in part:
            known = map(str, part) if isinstance(part, dict) else ()
            raise UsageError(f"--package={package}: there is no such part of the configuration.{did_you_mean(name, known)}")
        part = part[name]
    text = OmegaConf.to_yaml(part) if isinstance(part, dict | list) else f"{typed(part)}\n"
    return f"# @package {package}\n{text}"
