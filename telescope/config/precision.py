"""Which precisions a run may train and serve with, and how far two right implementations' log-probs may be apart.

Looks at no device itself.
"""

from __future__ import annotations

from collections.abc import Iterator

from telescope.config.run import RunConfig

LIMITS_NATS = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.05, "fp8": 0.3}
"""Mean |trainer - server| of sampled tokens. Two right implementations were 5e-7 apart in float32, 0.007 to 0.04 in bfloat16
(0.1 with experts, whose router may choose otherwise), 0.015 in fp8 (0.23 with drawn weights)."""
BFLOAT16_KEEPS = 512
"""A number of bfloat16, which has 8 bits, stays what it is where less than its 512th part is added."""
BFLOAT16_FORGETS = 256
"""And one from which less than its 256th part is taken may stay so: what is left is nearer to it than to the next one below."""


def served_precision(config: RunConfig, device: str) -> str:
    """`auto` is bfloat16 on a GPU (`device` gpu) and the master weights' precision on a CPU."""
    if config.inference.quantization is not None:
        return config.inference.quantization
    if config.inference.dtype != "auto":
        return config.inference.dtype
    return "bfloat16" if device == "gpu" else config.model.dtype


def unserved(config: RunConfig, device: str) -> str:
    """Why no server on `device` (gpu or cpu) has the precision that is asked for; "" where it has."""
    quantization = config.inference.quantization
    if quantization is None or device == "gpu" or config.inference.engine != "vllm":
        return ""
    return f"inference.quantization={quantization} needs a GPU, and this run is on CPUs: leave it out"


def parity_limit(config: RunConfig, device: str) -> float:
    """In nats, by the coarser of what is served and what is computed with in training."""
    trained = getattr(config.backend, "mixed_precision_dtype", None) or config.model.dtype
    if getattr(config.backend, "fp8", False):
        trained = "fp8"
    return max(LIMITS_NATS[served_precision(config, device)], LIMITS_NATS[trained])


def refuse_training_dtype(config: RunConfig) -> str | None:
    """Why `model.dtype` can't be; None where it can."""
    if config.model.dtype != "float16" or config.model.lora is not None:
        return None
    return (
        "model.dtype=float16 would keep the weights in training, their gradients and the optimiser's moments in float16, in "
        "which squares of small gradients are 0 and AdamW's steps far too large: set model.dtype=float32; "
        "backend.mixed_precision_dtype=float16 computes in half precision"
    )


def warn_of_training_dtype(config: RunConfig) -> str | None:
    """What `model.dtype` costs; None where it costs nothing."""
    rate = config.trainer.learning_rate
    if config.model.dtype != "bfloat16" or config.model.lora is not None or not rate:
        return None
    return (
        f"model.dtype=bfloat16 keeps the weights in training in 8 bits: at trainer.learning_rate={rate:g} a step of AdamW's "
        f"leaves those above {BFLOAT16_KEEPS * rate:.2g} as they are; set model.dtype=float32 "
        "(backend.mixed_precision_dtype=bfloat16 computes in half precision)"
    )


def refuse_moments(config: RunConfig) -> Iterator[tuple[tuple[str, ...], str]]:
    """Why moments can't be kept in the precision that is set: settings, and a sentence with the remedy."""
    if not getattr(config.backend, "use_precision_aware_optimizer", False):
        return
    if config.model.dtype != "float32":
        yield (
            ("backend.use_precision_aware_optimizer", "model.dtype"),
            "backend.use_precision_aware_optimizer=true rounds moments after steps in float32, and with "
            f"model.dtype={config.model.dtype} steps and moments are in that precision: set model.dtype=float32, or "
            "use_precision_aware_optimizer=false",
        )
    for name, beta in zip(("exp_avg_dtype", "exp_avg_sq_dtype"), config.trainer.betas, strict=True):
        if getattr(config.backend, name) == "bfloat16" and (1 - beta) * BFLOAT16_FORGETS < 1:
            yield (
                (f"backend.{name}", "trainer.betas"),
                f"backend.{name}=bfloat16 keeps 8 bits of a moment, and trainer.betas={list(config.trainer.betas)} takes off "
                f"its {1 / (1 - beta):.0f}th part at a step: rounding gives that back, so that the moment never shrinks; set "
                f"trainer.betas=[0.9, 0.95], say, or backend.{name}=float32",
            )
