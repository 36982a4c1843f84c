"""What a rank of this backend holds, from its settings: for planning, and for a rank at its start, so that both say the same.

Owns which setting becomes which number of `maths.memory`. Refuses torch and cards.
"""

from __future__ import annotations

from telescope.backends.fsdp import FSDP
from telescope.config.parts import LoraSettings, ModelSettings, TrainerSettings
from telescope.maths.memory import Adapters, ModelShape, TrainerMemory, trainer_memory

BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
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
    rows = seq_len or trainer.seq_len
    return trainer_memory(
        shape,
        ranks=ranks // settings.replicas,
        row_tokens=rows // settings.ranks_a_shard,
        chunk=trainer.entropy_chunk_size,
        weight_bytes=BYTES[model.dtype],
        compute_bytes=BYTES[settings.mixed_precision_dtype or model.dtype],
        checkpointing=settings.gradient_checkpointing,
        reshard=settings.reshard_after_forward,
        optimizer=settings.optimizer,
        offload=settings.offload,
        reference=reference,
        handed_bytes=handed_bytes,
        compiled=settings.compile,
        joined=settings.attention in ("auto", "cudnn") and LONG <= longest < rows,
        adapters=None if model.lora is None else adapters(model.lora),
    )


def adapters(lora: LoraSettings) -> Adapters:
    return Adapters(rank=lora.rank, modules=lora.target_modules)
