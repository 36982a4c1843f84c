"""What vLLM says, as our records and sentences: a request's output, a failed start, an error, and each step of its engine (that
it samples, since final outputs say nothing for as long as an answer takes; and how full it is).

Refuses what can't be trained on. torch is not imported, and vLLM only by the logger of steps.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from telescope.inference.engine import Generated, LoadReport, RequestRefused
from telescope.inference.vllm.engine_health import how_it_ended
from telescope.inference.vllm.token_versions import VersionSpans
from telescope.records import FinishReason


def generated(
    output: Any, logprobs: np.ndarray, routed: np.ndarray | None, spans: VersionSpans, version: int, total_s: float
) -> Generated:
    """The answer to a request, of a finished output, its tokens' log-probs, and the routing of prompt and answer where it is
    kept. `version`: served now. Raises `RequestRefused`."""
    completion = output.outputs[0]
    ids = np.asarray(completion.token_ids, dtype=np.int32)
    versions = spans.of(len(ids))
    if len(logprobs) != len(ids) or not np.isfinite(logprobs).all():
        raise RequestRefused(
            f"the engine gave {len(logprobs)} log-probs, finite or not, for {len(ids)} tokens under weights version "
            f"{version}; a missing one can't be trained on (are the weights finite?)"
        )
    queued_s = _queued_s(output.metrics)
    reasons: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
    if completion.finish_reason not in reasons:
        raise RequestRefused(f"the engine ended the request with {completion.finish_reason!r}")
    return Generated(
        ids=ids,
        logprobs=logprobs,
        versions=versions,
        finish_reason=reasons[completion.finish_reason],
        cached_tokens=output.num_cached_tokens or 0,
        queued_s=queued_s,
        generated_s=max(0.0, total_s - queued_s),
        routed=routed,
    )


def _queued_s(metrics: Any) -> float:
    """Seconds between arrival in the engine and the first step of the request; 0 where it was never scheduled."""
    if metrics is None or not metrics.scheduled_ts:
        return 0.0
    return max(0.0, float(metrics.scheduled_ts - metrics.queued_ts))


OWN_WORDS = "; its own words are further up in this log"
"""Of an engine whose process has said why it ended, and nobody else."""


def start_failure(words: str) -> str:
    """A sentence for what vLLM says of a failed start, e.g. `… Failed core proc(s): {'EngineCore': -9}`: its
    processes' names and exit codes, or `{}` where they had not ended yet."""
    ends = [(name, int(code)) for name, code in re.findall(r"'([^']+)': (-?\d+)", words)]
    if ends:
        how = ", ".join(f"{name} {how_it_ended(code)}" for name, code in ends)
        return f"the engine's process ended during its start ({how}){OWN_WORDS}"
    if "root cause above" in words:
        return f"the engine's process could not start{OWN_WORDS}"
    return f"the engine did not start: {words.strip().splitlines()[0] if words.strip() else 'vLLM does not say why'}"


def said(error: BaseException) -> str:
    """One line; pydantic puts the reason on the lines after its first."""
    return " ".join(str(error).split())[:400] or type(error).__name__


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def step_teller(stepped: Callable[[LoadReport, bool], None]) -> Any:
    """A stat logger for AsyncLLM that calls `stepped` on the event loop after each engine step, with whether a request got
    tokens in it.

    Both kinds of numbers come with that call in vLLM 0.25 to 0.32: the scheduler's as they are, preemptions by step.
    """
    from vllm.v1.metrics.loggers import StatLoggerBase

    class StepTeller(StatLoggerBase):  # type: ignore[misc, unused-ignore]
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            self._load = LoadReport()

        def record(self, scheduler_stats: Any, iteration_stats: Any, *others: Any, **more: Any) -> None:
            preempted = 0 if iteration_stats is None else iteration_stats.num_preempted_reqs
            if scheduler_stats is not None:
                self._load = LoadReport(
                    kv_used=min(1.0, max(0.0, float(scheduler_stats.kv_cache_usage))),
                    running=scheduler_stats.num_running_reqs,
                    waiting=scheduler_stats.num_waiting_reqs,
                    preemptions=self._load.preemptions + preempted,
                )
            stepped(self._load, iteration_stats is not None)  # None for a step without outputs

        def log_engine_initialized(self) -> None: ...

    return StepTeller
