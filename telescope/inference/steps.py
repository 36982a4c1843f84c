"""Hears from vLLM each time that its engine has sampled: final outputs alone say nothing for as long as an answer takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def step_teller(stepped: Callable[[], None]) -> Any:
    """A stat logger for AsyncLLM that calls `stepped` on the event loop after each engine step that gave a request tokens."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class StepTeller(StatLoggerBase):  # type: ignore[misc, unused-ignore]
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None: ...

        def record(self, scheduler_stats: Any, iteration_stats: Any, *others: Any, **more: Any) -> None:
            if iteration_stats is not None:  # None for a step without outputs
                stepped()

        def log_engine_initialized(self) -> None: ...

    return StepTeller
