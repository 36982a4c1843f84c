"""A trainer rank's process: `python -m telescope.trainer --run-dir DIR --name trainer-0`.

Builds the backend (all ranks together), says hello when it can train, serves orders until told to stop. Exit codes: 0 done,
1 error, 2 usage, 130 and 143 interrupted.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence

from telescope.backends.base import Job, RankLost, World
from telescope.config.models import ModelNotFound
from telescope.config.plugins import PluginError
from telescope.config.run import RunConfig
from telescope.config.secrets import SecretMissing
from telescope.config.words import ConfigError
from telescope.trainer.placement import Misplaced, placement
from telescope.trainer.service import OutOfOrder, Service
from telescope.weights.base import NoRoomForWeights
from telescope.weights.shared_memory import SharedMemoryPublisher
from telescope.wire.link import Link, LinkLost, WireRefused, WireTimeout
from telescope.wire.process import Known, Place, Signals, run_process
from telescope.wire.security import BadKeys

log = logging.getLogger(__name__)

KNOWN = Known(
    errors=(
        *(OutOfOrder, Misplaced, NoRoomForWeights, ModelNotFound, ConfigError, PluginError, SecretMissing),
        *(WireRefused, WireTimeout, BadKeys),
    ),
    gone=(LinkLost, RankLost),
)
CREDITS = 2
"""Orders that may lie here at once: the next one waits while a step runs."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The process. Gives its exit code."""
    return run_process(live, prog="python -m telescope.trainer", known=KNOWN, arguments=arguments)


def live(place: Place, signals: Signals) -> int:
    """0 after the orchestrator's Stop. The hello comes after the build, so that it means: ready to train."""
    config = place.config
    world = placement(os.environ, config.cluster)
    link: Link | None = None

    def progress(doing: str) -> None:
        if link is not None:
            link.progress(doing)

    backend = config.backend.build(job(config, world, progress))
    hello = place.hello("trainer", capacity=CREDITS, rank=world.rank)
    with Link.connect(place.directory, hello, deadline_s=config.cluster.placement_timeout_s) as connected:
        link = connected
        with publishing(place.identity.run_id, world) as publisher, signals.held():
            log.info("stopped: %s", Service(connected, backend, publisher, signals.check).run())
        backend.close()  # not after an error: it would wait for ranks that are gone
    return 0


@contextlib.contextmanager
def publishing(run: str, world: World) -> Iterator[SharedMemoryPublisher | None]:
    """Rank 0's publisher, whose segments are gone after the block; no other rank has one."""
    if world.rank != 0:
        yield None
        return
    with contextlib.closing(SharedMemoryPublisher(run)) as publisher:
        yield publisher


def job(config: RunConfig, world: World, progress: Callable[[str], None]) -> Job:
    """What a backend is told of the run."""
    return Job(
        algorithm=config.algorithm,
        model=config.model,
        trainer=config.trainer,
        number_of_steps=config.number_of_steps,
        temperature=config.rollout.temperature,
        support=config.rollout.support,
        max_tokens=config.rollout.max_tokens,
        seed=config.seed,
        world=world,
        progress=progress,
    )
