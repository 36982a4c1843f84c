"""Where settings that are `auto` become values: once for a run, before its processes are started.

Owns the look at the cards and compilers that it depends on, and whose these are: the host that starts the run, the head of
several, in a Slurm job the first of its nodes. Refuses to decide (config/automatic.py does).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from telescope._launch.process_plan import GPU_SHARE, LaunchPlan
from telescope._launch.this_host import find_smallest_card, has_compilers, inspect_this_host
from telescope.config.automatic import Decision, RankCard, Surroundings, decide, find_open, keep_decided
from telescope.config.run import RunConfig, as_yaml, config_hash, dump_run
from telescope.maths.flops import peak_of
from telescope.runlog.identity import read_identity, write_identity
from telescope.runlog.layout import RunDirectory, write_atomically

USUAL_FLOPS, USUAL_BYTES_A_FLOP = 989e12, 4.8e12 / 989e12
"""Of a card: an H200's, of one whose own are not known here. Which settings are fastest hardly depends on them."""
HANDED_BYTES = 2
"""Of a value in the buffer by which a server on the same card takes a version."""


FindCard = Callable[[], tuple[str, int] | None]


def settle(
    config: RunConfig,
    plan: LaunchPlan | None,
    before: Mapping[str, Any] | None = None,
    find_card: FindCard = find_smallest_card,
    nodes: int = 1,
) -> Decision:
    """Every `auto` decided. `plan`: None where `nodes` hosts have yet to meet, of which this is the head; `before`: what the
    config.json of the run that goes on says; `find_card`: `find_smallest_card`, cached where there are many points. A run that
    Slurm will start is left to its job."""
    if before is not None:
        config = keep_decided(config, before)
    if not find_open(config) or config.cluster.slurm is not None:
        return Decision(config)
    return decide(config, _look_around(config, plan, find_card, nodes))


def settle_in_job(run: RunDirectory, config: RunConfig, plan: LaunchPlan) -> Decision:
    """On the first node of a Slurm job: what was submitted with `auto` is written down with its values. Raises OSError."""
    if not find_open(config):
        return Decision(config)
    found = decide(config, _look_around(config, plan, find_smallest_card))
    write_atomically(run.config_json, dump_run(found.config), mode=0o600)
    write_atomically(run.config_yaml, as_yaml(found.config), mode=0o600)
    write_identity(run, msgspec.structs.replace(read_identity(run), config_hash=config_hash(found.config)))
    return found


def _look_around(config: RunConfig, plan: LaunchPlan | None, find_card: FindCard, nodes: int = 1) -> Surroundings:
    if plan is None:  # the others are taken to have as many GPUs as this one
        cluster, gpus = config.cluster, nodes * len(inspect_this_host().gpus)
        on_gpu = cluster.device == "gpu" or (cluster.device == "auto" and gpus > 0)
        enough = gpus >= cluster.inference_num_workers + cluster.trainer_num_workers
        shares = [1.0 if enough else 1 - config.inference.gpu_memory_utilization]
    else:
        on_gpu = plan.device == "gpu"
        ranks = [process for process in plan.processes if process.role == "trainer"]
        shares = [float(process.environment.get(GPU_SHARE, 1)) for process in ranks]
    if not on_gpu:
        return Surroundings(device="cpu")
    known, share = find_card(), min(shares, default=1.0)
    if known is None:
        return Surroundings(device="gpu")
    name, memory = known
    flops = config.trainer.peak_flops or peak_of(name) or USUAL_FLOPS
    card = RankCard(name=name, room=int(memory * share), flops=flops, bandwidth=flops * USUAL_BYTES_A_FLOP)
    handed = HANDED_BYTES if share < 1 else 0
    return Surroundings(device="gpu", card=card, handed_bytes=handed, compiler=has_compilers())
