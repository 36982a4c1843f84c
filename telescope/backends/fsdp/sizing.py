"""What a rank of this backend holds, from its settings: for planning, and for a rank at its start, so that both say the same.

Owns which setting becomes which number of `maths.memory` and `maths.short_rows`. Refuses torch and cards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from telescope.backends.base import Job
from telescope.backends.fsdp import FSDP
from telescope.config.sections import LoraSettings, ModelSettings, TrainerSettings
from telescope.maths.flops import TrainingWork
from telescope.maths.memory import BYTES, AdapterShape, ModelShape, TrainerMemory, shape_from, trainer_memory
from telescope.maths.short_rows import MEAN_SHARE, PROMPT_TOKENS, ShortRows, short_rows

LONG = 4096
"""Tokens from which on a sample is a part of its own in `attention=cudnn`, which is what `auto` comes to on an H100 or H200."""


def rank_memory(
    settings: FSDP,
    shape: ModelShape,
    model: ModelSettings,
    trainer: TrainerSettings,
    *,
    ranks: int,
    longest: int,
    reference: bool = False,
    handed_bytes: int = 0,
    seq_len: int | None = None,
) -> TrainerMemory:
    """Of one of `ranks`, for samples of `longest` tokens at most; `seq_len` in place of the trainer's.

    A row that one sample can fill is planned for that sample: with a long one beside others attention's results are there
    twice, another 3 to 4 % where all activations are kept.
    """
    rows = seq_len or trainer.row_tokens
    return trainer_memory(
        shape,
        ranks=ranks // settings.replicas,
        row_tokens=rows // settings.ranks_a_shard,
        chunk=trainer.entropy_chunk_size,
        weight_bytes=BYTES[model.dtype],
        compute_bytes=BYTES[settings.mixed_precision_dtype or model.dtype],
        checkpointing=settings.checkpointing,
        checkpointed_layers=settings.checkpointed_layers,
        reshard=settings.reshard_after_forward,
        optimizer=settings.optimizer,
        offload=settings.offload,
        reference=reference,
        handed_bytes=handed_bytes,
        compiled=settings.compiles,
        pointwise_again=settings.recompute_pointwise,
        joined=settings.attention in ("auto", "cudnn") and LONG <= longest < rows,
        adapters=None if model.lora is None else adapters(model.lora),
    )


def adapters(lora: LoraSettings) -> AdapterShape:
    return AdapterShape(rank=lora.rank, modules=lora.target_modules)


def too_short(
    settings: FSDP,
    shape: ModelShape,
    model: ModelSettings,
    trainer: TrainerSettings,
    *,
    ranks: int,
    length: float,
    tokens: float,
    peak: float,
    fits: Callable[[int], bool],
) -> ShortRows | None:
    """Whether rows leave the cards of `ranks` ranks waiting, for samples of `length` tokens on average and updates of `tokens`,
    all ranks together. `peak`: operations a second of a card; `fits`: rows of so many tokens into its memory."""
    trained, frozen = float(shape.computing_parameters), 0.0
    if model.lora is not None:
        trained, frozen = float(adapters(model.lora).parameters(shape)), trained
    work = TrainingWork.of(
        trained=trained, frozen=frozen, layers=shape.layers, heads=shape.heads, head_dim=shape.head_dim
    )  # fmt: skip
    return short_rows(
        work,
        layers=shape.layers,
        seq_len=trainer.row_tokens,
        ranks_a_row=settings.ranks_a_shard,
        length=length,
        tokens=tokens * settings.ranks_a_shard / ranks,
        peak=peak,
        checkpointing=settings.checkpointing,
        checkpointed_layers=settings.checkpointed_layers,
        fits=lambda row: row % trainer.pad_to_multiple_of == 0 and fits(row),
    )


def remark(settings: FSDP, job: Job, architecture: Mapping[str, Any], peak: float | None, card_bytes: int) -> str | None:
    """What the first rank says at its start of rows that are too short for its card: `architecture` is the model's config.json.

    None on a CPU, for a card without a known peak, for a job without known batches (a step that is run again), for a model
    whose size can't be worked out.
    """
    world, model, trainer = job.world, job.model, job.trainer
    if world.rank or not world.device.startswith("cuda") or peak is None or not job.rollouts:
        return None
    try:
        shape = shape_from(architecture)
    except ValueError:
        return None
    length = min(float(trainer.row_tokens), MEAN_SHARE * job.max_tokens + PROMPT_TOKENS)
    beside = 2 if world.memory_share < 1 and model.lora is None else 0  # the version handed to the server on the card

    def fits(row: int) -> bool:
        rank = rank_memory(
            settings, shape, model, trainer, ranks=world.size, longest=job.max_model_len or job.max_tokens,
            reference=job.algorithm.needs_reference, handed_bytes=beside, seq_len=row,
        )  # fmt: skip
        return rank.needed <= world.memory_share * card_bytes

    found = too_short(
        settings, shape, model, trainer, ranks=world.size, length=length, tokens=job.rollouts * length, peak=peak, fits=fits
    )  # fmt: skip
    return None if found is None else found.sentence
