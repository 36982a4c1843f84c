"""Where settings that are `auto` become values: once for a run, before its processes are started.

Owns the look at the cards and compilers that it depends on, and whose these are: the host that starts the run, the head of
several, in a Slurm job the first of its nodes. Refuses to decide (config/automatic.py does).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from telescope._launch.process_plan import GPU_SHARE, LaunchPlan
from telescope._launch.this_host import SmallestCard, find_smallest_card, has_compilers, inspect_this_host
from telescope.config.automatic import (
    OLDEST_COMPILED,
    Decision,
    RankCard,
    Surroundings,
    decide,
    find_misfit,
    find_open,
    keep_decided,
)
from telescope.config.run import RunConfig, as_yaml, config_hash, dump_run
from telescope.maths.flops import peak_of
from telescope.maths.memory import BYTES
from telescope.runlog.identity import read_identity, write_identity
from telescope.runlog.layout import RunDirectory, write_atomically

USUAL_FLOPS, USUAL_BYTES_A_FLOP = 989e12, 4.8e12 / 989e12
"""Of a card: an H200's, of one whose own are not known here. Which settings are fastest hardly depends on them."""
HALF_BYTES = 2
"""Of a value of a server on a card, unless inference.dtype says otherwise."""


FindCard = Callable[[], SmallestCard | None]


def settle(
    config: RunConfig,
    plan: LaunchPlan | None,
    before: Mapping[str, Any] | None = None,
    find_card: FindCard = find_smallest_card,
    nodes: int = 1,
) -> Decision:
    """Every `auto` decided. `plan`: None where `nodes` hosts have yet to meet, of which this is the head; `before`: what the
    config.json of the run that goes on has to keep, which may be nothing; None: the run is new. `find_card`:
    `find_smallest_card`, cached where there are many points. A run that Slurm will start is left to its job."""
    if before is not None:
        config = keep_decided(config, before)
    if config.cluster.slurm is not None or (before is None and not find_open(config)):
        return Decision(config)
    where = _look_around(config, plan, find_card, nodes)
    found = decide(config, where)
    return found if before is None else _warn_of_misfit(found, where)


def settle_in_job(run: RunDirectory, config: RunConfig, plan: LaunchPlan, *, goes_on: bool = False) -> Decision:
    """On the first node of a Slurm job: what was submitted with `auto` is written down with its values. `goes_on`: an attempt
    before has begun the run. Raises OSError, and `DamagedFile` of run.json."""
    if not find_open(config):
        found = Decision(config)
        return _warn_of_misfit(found, _look_around(config, plan, find_smallest_card)) if goes_on else found
    found = decide(config, _look_around(config, plan, find_smallest_card))
    write_atomically(run.config_json, dump_run(found.config), mode=0o600)
    write_atomically(run.config_yaml, as_yaml(found.config), mode=0o600)
    write_identity(run, msgspec.structs.replace(read_identity(run), config_hash=config_hash(found.config)))
    return found


def _warn_of_misfit(found: Decision, where: Surroundings) -> Decision:
    """Of servers that sleep in its steps a rank has the memory too: nothing is said of these."""
    if found.config.inference.sleep_while_training != "off":
        return found
    return msgspec.structs.replace(found, misfit=find_misfit(found.config, where))


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
    flops = config.trainer.peak_flops or peak_of(known.name) or USUAL_FLOPS
    card = RankCard(name=known.name, room=int(known.memory * share), flops=flops, bandwidth=flops * USUAL_BYTES_A_FLOP)
    handed = BYTES.get(config.inference.dtype, HALF_BYTES) if share < 1 else 0
    old = known.capability is not None and known.capability < OLDEST_COMPILED
    return Surroundings(device="gpu", card=card, handed_bytes=handed, compiler=has_compilers(), old_cards=old)
