"""Hears from vLLM each time that its engine has stepped: that it samples (final outputs alone say nothing for as long as an
answer takes), and how full it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from telescope.inference.engine import Load


def step_teller(stepped: Callable[[Load, bool], None]) -> Any:
    """A stat logger for AsyncLLM that calls `stepped` on the event loop after each engine step, with whether a request got
    tokens in it.

    Both kinds of numbers come with that call in vLLM 0.25 to 0.32: the scheduler's as they are, preemptions by step.
    """
    from vllm.v1.metrics.loggers import StatLoggerBase

    class StepTeller(StatLoggerBase):  # type: ignore[misc, unused-ignore]
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            self._load = Load()

        def record(self, scheduler_stats: Any, iteration_stats: Any, *others: Any, **more: Any) -> None:
            preempted = 0 if iteration_stats is None else iteration_stats.num_preempted_reqs
            if scheduler_stats is not None:
                self._load = Load(
                    kv_used=min(1.0, max(0.0, float(scheduler_stats.kv_cache_usage))),
                    running=scheduler_stats.num_running_reqs,
                    waiting=scheduler_stats.num_waiting_reqs,
                    preemptions=self._load.preemptions + preempted,
                )
            stepped(self._load, iteration_stats is not None)  # None for a step without outputs

        def log_engine_initialized(self) -> None: ...

    return StepTeller
