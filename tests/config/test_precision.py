"""How far apart log-probs may be by the coarser of two precisions."""

from __future__ import annotations

import pytest

from telescope.algorithms.grpo import GRPO
from telescope.backends.fsdp import FSDP
from telescope.backends.megatron import Megatron
from telescope.config.precision import parity_limit
from telescope.config.run import RunConfig
from telescope.config.sections import EnvironmentEntry, InferenceSettings, ModelSettings


def config(**changes: object) -> RunConfig:
    entries = {"reverse_letters": EnvironmentEntry(name="reverse_letters")}
    settings = {"model": ModelSettings(name="tiny_reverse"), "backend": FSDP(mixed_precision_dtype=None)} | changes
    return RunConfig(environments=entries, algorithm=GRPO(), **settings)


@pytest.mark.parametrize(
    ("changes", "device", "nats"),
    [
        ({}, "cpu", 1e-3),
        ({}, "gpu", 0.1),
        ({"inference": InferenceSettings(dtype="float32")}, "gpu", 1e-3),
        ({"backend": FSDP(mixed_precision_dtype="bfloat16")}, "cpu", 0.1),
        ({"inference": InferenceSettings(quantization="fp8")}, "gpu", 0.3),
        ({"backend": Megatron(fp8=True)}, "gpu", 0.3),
        ({"backend": Megatron()}, "gpu", 0.1),
    ],
)
def test_the_limit_is_that_of_the_coarser_precision(changes: dict[str, object], device: str, nats: float):
    assert parity_limit(config(**changes), device) == nats
