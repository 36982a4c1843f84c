"""A trainer rank's process: `python -m telescope.trainer --run-dir DIR --name trainer-0`.

Reads once, from the launcher's environment variables, which rank of how many it is. Builds the backend (all ranks together),
says hello when it can train, serves orders until told to stop. Exit codes: 0 done, 1 error, 2 usage, 130 and 143 interrupted.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from telescope.backends.base import Backend, CheckpointUnfit, Job, RankLost, SaveSettings, World
from telescope.config.model_facts import read_model_facts
from telescope.config.models import ModelNotFound, model_folder
from telescope.config.plugins import PluginError
from telescope.config.run import RunConfig, config_hash
from telescope.config.secrets import SecretMissing
from telescope.config.sections import ClusterSettings
from telescope.config.words import ConfigError
from telescope.runlog.checkpoints import CheckpointUnreadable, Resume, read_resume, trainer_part
from telescope.runlog.writer import RunLog
from telescope.trainer.compiled_graphs import keep_graphs
from telescope.trainer.gpu_share import CudaCard, GpuShare, NoRoomBeside
from telescope.trainer.kept_batches import Keeper, last_word
from telescope.trainer.service import OutOfOrder, SenderStuck, TrainerService
from telescope.trainer.timeline import Timeline
from telescope.weights.base import NoRoomForWeights, Publisher, TrainerEnd, TransportRefused
from telescope.weights.transport_choice import choose, read_placement, wire_dtype
from telescope.wire import discovery
from telescope.wire.link import Link, LinkLost, WireRefused, WireTimeout
from telescope.wire.messages import RowsLost
from telescope.wire.process import KnownErrors, ProcessContext, ProcessSignals, freeze_heap, run_process
from telescope.wire.security import BadKeys


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
    meeting = Path(file) if (file := environ.get("TELESCOPE_MEETING_FILE")) else None
    return World(rank=rank, size=size, device=_device(environ, cluster, rank), memory_share=share, meeting_file=meeting)


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


log = logging.getLogger(__name__)

KNOWN = KnownErrors(
    errors=(
        *(OutOfOrder, Misplaced, NoRoomBeside, NoRoomForWeights),
        *(TransportRefused, ModelNotFound, ConfigError, PluginError, SecretMissing),
        *(CheckpointUnfit, CheckpointUnreadable),
        *(WireRefused, WireTimeout, BadKeys),
    ),
    gone=(LinkLost, RankLost, SenderStuck),
)
HUB_S = 5.0
"""The hub's address was there when the link found it; a shared file system may still take a moment."""
CREDITS = 2
"""Orders that may lie here at once: the next one waits while a step runs."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The process. Gives its exit code."""
    return run_process(live, prog="python -m telescope.trainer", known=KNOWN, arguments=arguments)


def live(place: ProcessContext, signals: ProcessSignals) -> int:
    """0 after the orchestrator's Stop. The hello comes after the build, so that it means: ready to train."""
    config = place.config
    world = placement(os.environ, config.cluster)
    link: Link | None = None

    def progress(doing: str) -> None:
        if link is not None:
            link.progress(doing)

    resume = read_resume(place.directory)
    if config.backend.compiles:
        keep_graphs(os.environ)
    backend = config.backend.build(job(config, world, progress, resume))
    name = config.model.name  # its facts are those of what was loaded, all of which is there now
    model = None if config.backend_name == "fake" else read_model_facts(config.model, model_folder(name), weights=True)
    freeze_heap()
    length = backend.attention_length
    hello = place.make_hello("trainer", capacity=CREDITS, rank=world.rank, model=model, attention_length=length)
    with Link.connect(place.directory, hello, deadline_s=config.cluster.placement_timeout_s) as connected:
        link = connected
        with (
            contextlib.closing(publisher(place, backend, world)) as weights,
            contextlib.closing(timeline(place, world, 0 if resume is None else resume.step, connected.send)) as lines,
            last_word(keeps := keeper(place, world)),
            signals.hold(),
        ):
            service = TrainerService(
                connected,
                backend,
                weights,
                signals.check,
                config.weight_sync.update_timeout_s,
                0 if resume is None else resume.step,
                keeper=keeps,
                room=room(config, world, weights),
                timeline=lines,
            )
            log.info("stopped: %s", service.run())
        backend.close()  # not after an error: it would wait for ranks that are gone
    return 0


def room(config: RunConfig, world: World, weights: Publisher) -> GpuShare | None:
    """What this rank may take of the GPU that it shares; None where it has none, or one of its own. Raises `NoRoomBeside`."""
    if world.memory_share == 1:
        return None
    in_turns = config.inference.sleep_while_training != "off"
    found = GpuShare(CudaCard(world.device), world.memory_share, weights.card_bytes, in_turns)
    found.settle()
    return found


def keeper(place: ProcessContext, world: World) -> Keeper:
    """What keeps the batches of steps that go wrong."""
    trainer = place.config.trainer
    return Keeper(
        place.directory,
        config_hash(place.config),
        world.rank,
        world.size,
        latest=trainer.keep_batches,
        every=trainer.keep_batches_every,
    )


def timeline(place: ProcessContext, world: World, step: int, tell: Callable[[RowsLost], object]) -> Timeline:
    """What stores this rank's spans and memory, as far as the settings want them."""
    settings = place.config.logging
    wanted = settings.track_gpu_events or settings.torch_memory_sample_interval_seconds > 0
    return Timeline(
        RunLog(place.directory, place.name, seals_at_end=False, redactor=place.redactor) if wanted else None,
        process=place.name,
        device=world.device,
        spans=settings.track_gpu_events,
        sample_s=settings.torch_memory_sample_interval_seconds,
        drain_s=settings.torch_memory_drain_interval_seconds,
        step=step,
        tell=tell,
    )


def publisher(place: ProcessContext, backend: Backend, world: World) -> Publisher:
    """This rank's end of the transport that the settings name. Raises `TransportRefused`, `NoRoomForWeights`."""
    config = place.config
    placement = replace(read_placement(place.directory.plan_json), on_gpu=world.device.startswith("cuda"))
    transport = choose(config, placement)
    end = TrainerEnd(
        place.identity.run_id,
        place.directory.path,
        world.device,
        config.weight_sync,
        wire_dtype(config.weight_sync, world.device, config.inference.dtype),
        world.rank,
    )
    if transport.collective:
        from telescope.weights.broadcast.rendezvous import facing

        end = replace(end, address=facing(discovery.find_hub(place.directory, place.identity.attempt, HUB_S).endpoint))
    log.info("weights travel by %s as %s", transport.name, end.dtype or "they are held")
    return transport.publisher(backend, end)


def job(config: RunConfig, world: World, progress: Callable[[str], None], resume: Resume | None = None) -> Job:
    """What a backend is told of the run."""
    return Job(
        algorithm=config.algorithm,
        model=config.model,
        trainer=config.trainer,
        number_of_steps=config.number_of_steps,
        temperature=config.rollout.temperature,
        support=config.rollout.support,
        max_tokens=config.rollout.max_tokens,
        max_model_len=config.inference.max_model_len,
        seed=config.seed,
        world=world,
        progress=progress,
        rollouts=config.orchestrator.prompts_batch_size_for_trainer
        * config.rollout.group_size
        // config.trainer.number_of_minibatches,
        resume=None if resume is None else trainer_part(Path(resume.folder)),
        saving=SaveSettings(
            training_state=config.checkpoint.save_training_state,
            background=config.checkpoint.async_save and config.checkpoint.every > 0,  # at the end nothing trains on
            timeout_s=config.checkpoint.timeout_s,
            expected=config.checkpoint.every > 0,
        ),
    )
