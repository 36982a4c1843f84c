"""What a rank of this backend holds, from its settings. Owns which setting becomes which number of `maths.parallel_memory`.
Refuses torch and cards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from telescope.backends.megatron.pipeline_order import passes_held
from telescope.backends.megatron.stages import cut_shape
from telescope.config.sections import ModelSettings, TrainerSettings
from telescope.maths.memory import BYTES, ModelShape, TrainerMemory
from telescope.maths.parallel_memory import parallel_memory

if TYPE_CHECKING:
    from telescope.backends.megatron import Megatron


def rank_memory(
    settings: Megatron, shape: ModelShape, model: ModelSettings, trainer: TrainerSettings, *,
    ranks: int, reference: bool = False, handed_bytes: int = 0, seq_len: int | None = None,
) -> TrainerMemory:  # fmt: skip
    """Of one of `ranks`, of the stage that needs most; `seq_len` in place of the trainer's."""
    computing = BYTES[settings.mixed_precision_dtype or model.dtype]
    stages = settings.pipeline_parallel_size

    def of_stage(stage: int) -> TrainerMemory:
        stretches = layout.of(stage)
        return parallel_memory(
            shape,
            tensor=settings.tensor_parallel_size,
            copies=ranks // settings.ranks_a_model,
            sharing=settings.context_parallel_size,
            spread_sequence=settings.spreads_sequence(),
            spread_moments=settings.spreads_optimizer(ranks),
            row_tokens=seq_len or trainer.row_tokens,
            chunk=trainer.entropy_chunk_size,
            weight_bytes=BYTES[model.dtype],
            compute_bytes=computing,
            gradient_bytes=4 if settings.grad_reduce_in_fp32 else computing,
            moment_bytes=[BYTES[dtype] for dtype in settings.moment_dtypes(model.dtype).values()],
            hosted=settings.hosted_share,
            checkpointing=settings.checkpointing,
            reference=reference,
            handed_bytes=handed_bytes if stage == 0 else 0,
            layers=sum(stretch.layers for stretch in stretches),
            begins=stretches[0].begins,
            ends=stretches[-1].ends,
            rows_held=passes_held(stage, stages, len(stretches)) / len(stretches),
        )

    layout = cut_shape(shape, stages, settings.virtual_pipeline_size)
    return max(map(of_stage, range(stages)), key=lambda memory: memory.total)
