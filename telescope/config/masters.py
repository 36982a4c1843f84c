"""Which precision the weights in training may have, in sentences. Adapters are float32 in any model, so all this is of full
training."""

from __future__ import annotations

from telescope.config.run import RunConfig

STILL = 512
"""A number of bfloat16, which has 8 bits, stays what it is where less than its 512th part is added."""


def refusal(config: RunConfig) -> str | None:
    """Why `model.dtype` can't be; None where it can."""
    if config.model.dtype != "float16" or config.model.lora is not None:
        return None
    return (
        "model.dtype=float16 would keep the weights in training, their gradients and the optimiser's moments in float16, in "
        "which squares of small gradients are 0 and AdamW's steps far too large: set model.dtype=float32; "
        "backend.mixed_precision_dtype=float16 computes in half precision"
    )


def warning(config: RunConfig) -> str | None:
    """What `model.dtype` costs; None where it costs nothing."""
    rate = config.trainer.learning_rate
    if config.model.dtype != "bfloat16" or config.model.lora is not None or not rate:
        return None
    return (
        f"model.dtype=bfloat16 keeps the weights in training in 8 bits: at trainer.learning_rate={rate:g} a step of AdamW's "
        f"leaves those above {STILL * rate:.2g} as they are; set model.dtype=float32 "
        "(backend.mixed_precision_dtype=bfloat16 computes in half precision)"
    )
