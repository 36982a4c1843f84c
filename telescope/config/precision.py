"""How far the log-probs of trainer and server may be apart where both are right. Owns the limits; looks at no device itself."""

from __future__ import annotations

from telescope.config.run import RunConfig

LIMITS_NATS = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.05, "fp8": 0.3}
"""Mean |trainer - server| of sampled tokens. Two right implementations were 5e-7 apart in float32, 0.007 to 0.04 in bfloat16
(0.1 with experts, whose router may choose otherwise), 0.015 in fp8 (0.23 with drawn weights)."""


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
    return max(LIMITS_NATS[served_precision(config, device)], LIMITS_NATS[trained])
