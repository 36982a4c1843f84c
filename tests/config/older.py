"""A run's config.json as a version wrote it that lacked some of today's settings."""

from __future__ import annotations

import json
from typing import Any

from telescope.config.run import FORMAT, RunConfig, _hash_of, as_json


def as_an_earlier_version_wrote(config: RunConfig, *lacking: str) -> str:
    """Without the settings `lacking`, e.g. `trainer.max_broken_steps`, which is always one of them."""
    settings = as_json(config)
    for place in ("trainer.max_broken_steps", *lacking):
        *path, last = place.split(".")
        section: Any = settings
        for name in path:
            section = section[name]
        del section[last]
    return json.dumps({"format": FORMAT, "config_hash": _hash_of(settings), **settings})
