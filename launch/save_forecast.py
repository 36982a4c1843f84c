"""What a save at the end of a run will take, said at its start: bytes, seconds, and whether it fits.

Owns these sentences. Says nothing that is not known: the bytes follow from the model's shape, the seconds from a short try of
the disk. Refuses to decide what is saved (telescope/config/end_saves.py).
"""

from __future__ import annotations

import shutil
from pathlib import Path

from telescope.config.end_saves import EndSaves, SaveBytes, SaveContent, count_save_bytes, format_bytes
from telescope.config.run import RunConfig
from telescope.runlog import checkpoints
from telescope.runlog.disk_speed import measure_write_speed
from telescope.runlog.layout import RunDirectory

WORTH_A_WORD = 100_000_000
"""Bytes: less takes neither time nor room."""
WORDS: dict[SaveContent, str] = {"weights": "the weights", "state": "the training state"}


def describe_end_save(config: RunConfig, run: RunDirectory) -> list[str]:
    """Sentences for whoever starts the run; none where nothing is saved, where little is, and where its size is not known."""
    saves, nbytes = config.end_saves, count_save_bytes(config)
    if not saves.any or nbytes is None:
        return []
    directory = checkpoints.root(run, config.checkpoint.dir)
    try:
        there = next(place for place in (directory, *directory.parents) if place.is_dir())
        free = shutil.disk_usage(there).free
    except OSError:  # whoever writes there says why it can't
        return []
    if max(nbytes.of(saves.done), nbytes.of(saves.stopped)) < min(WORTH_A_WORD, free):
        return []
    speed = measure_write_speed(there, nbytes.of(saves.done))
    return [_describe_size(saves, nbytes, speed), *_warn(config, nbytes, speed, directory, free)]


def _describe_size(saves: EndSaves, nbytes: SaveBytes, speed: float | None) -> str:
    """`At the end the run saves the weights (16.1 GB, about 40 s), at Ctrl-C the training state (48.3 GB, about 120 s).`"""

    def told(content: SaveContent) -> str:
        seconds = nbytes.of(content) / speed if speed else 0.0
        return f"{WORDS[content]} ({format_bytes(nbytes.of(content))}" + (f", about {seconds:.0f} s)" if seconds >= 1 else ")")

    if saves.done == saves.stopped:
        return f"At the end, and at Ctrl-C, the run saves {told(saves.done)}."
    return f"At the end the run saves {told(saves.done)}, at Ctrl-C {told(saves.stopped)}."


def _warn(config: RunConfig, nbytes: SaveBytes, speed: float | None, directory: Path, free: int) -> list[str]:
    saves, limit_s = config.end_saves, config.stop_timeout_s
    room, elsewhere = f"Warning: {directory} has {format_bytes(free)} free", "name another folder with checkpoint.dir=…"
    if (done := nbytes.of(saves.done)) > free:
        taken = format_bytes(done)
        return [f"{room}, and the save at the end takes {taken}: free some, {elsewhere}, or set checkpoint.at_end=none"]
    weights_alone = "at Ctrl-C the weights alone are saved then, from which no run can go on"
    if (stopped := nbytes.of(saves.stopped)) > free:
        return [f"{room}: {weights_alone}. Free some, or {elsewhere}"]
    if speed and stopped / speed > limit_s:
        settings = "checkpoint.stop_timeout_s" + (" and cluster.slurm.stop_before_s" if config.cluster.slurm else "")
        fits = saves.gives_way and nbytes.weights / speed <= limit_s
        then = weights_alone if fits else "nothing may be saved by then"
        return [f"Warning: a stop has {limit_s:g} s for its step and its save: {then}. Raise {settings}"]
    return []
