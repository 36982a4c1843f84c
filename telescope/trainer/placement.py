"""Where a rank stands among the others, from the launcher's environment variables. Read once, by main."""

from __future__ import annotations

from collections.abc import Mapping

from telescope.backends.base import World
from telescope.config.parts import ClusterSettings


class Misplaced(ValueError):
    """The environment variables and the configuration disagree."""


def placement(environ: Mapping[str, str], cluster: ClusterSettings) -> World:
    """RANK, WORLD_SIZE, LOCAL_RANK and CUDA_VISIBLE_DEVICES, e.g. `World(rank=1, size=2, device="cuda:0")`.

    The launcher shows each rank its own GPU, and none where the run is on CPUs. Raises `Misplaced`.
    """
    size = _number(environ, "WORLD_SIZE", default=1)
    rank = _number(environ, "RANK", default=0 if size == 1 else None)
    if size != cluster.trainer_num_workers or not 0 <= rank < size:
        raise Misplaced(
            f"this is rank {rank} of {size} by RANK and WORLD_SIZE, but cluster.trainer_num_workers="
            f"{cluster.trainer_num_workers}: let the launcher start the ranks, or set the variables to agree"
        )
    share = float(environ.get("TELESCOPE_GPU_SHARE", "1"))
    return World(rank=rank, size=size, device=_device(environ, cluster, rank), memory_share=share)


def _device(environ: Mapping[str, str], cluster: ClusterSettings, rank: int) -> str:
    visible = [gpu for gpu in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu.strip()]
    if cluster.device == "cpu" or (cluster.device == "auto" and not visible):
        return "cpu"
    if not visible:
        raise Misplaced("cluster.device=gpu, but CUDA_VISIBLE_DEVICES shows this trainer rank no GPU")
    return f"cuda:{_number(environ, 'LOCAL_RANK', default=rank) % len(visible)}"


def _number(environ: Mapping[str, str], name: str, default: int | None) -> int:
    value = environ.get(name)
    if value is None and default is not None:
        return default
    if value is None or not value.isdigit():
        raise Misplaced(f"the environment variable {name} is {value!r} and must be a count: the launcher sets it")
    return int(value)
