"""What a run came to, in the few lines that a terminal has at its end. Summary in, text out.

Owns the choice: how the reward went comes first, what did not happen is left out. The whole summary is in `summary.json`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from telescope._launch.progress import format_duration
from telescope.flow.group_lifecycle import describe_reason
from telescope.runlog.eval_words import describe_reward

MOST_REASONS = 3
"""Of the causes by which groups were left out, as many are named."""
ROLLOUTS = ("generated", "trained", "discarded", "left over", "failed", "retried")
"""Of a summary's counts, which has those of cancelled groups besides, generated or not."""


def format_closing(summary: Mapping[str, Any], *, failed: bool = False) -> str:
    """A line a fact, its name first; empty for an empty summary. A half-known summary is told as far as it goes. `failed`: the
    terminal has the sentence of the end already."""
    rows = [
        ("reward", _describe_change(summary, "reward")),
        ("exact", _describe_change(summary, "exact")),
        *((f"env {label}", _describe_environment(summary, label)) for label in _mapping(summary, "environments")),
        *((f"eval {name}", _describe_eval(row)) for name, row in _mapping(summary, "evals").items()),
        ("steps", _describe_steps(summary)),
        ("rollouts", _describe_rollouts(summary)),
        ("failed", _list(_mapping(summary, "failures"))),
        ("out of range", _list(_mapping(summary, "rewards_out_of_range"))),
        ("restarts", _list(_mapping(summary, "restarts"))),
        ("tokens", _describe_tokens(summary)),
        ("time", _describe_time(summary)),
        ("end", "" if failed else str(summary.get("exit_reason") or "")),
    ]
    told = [(name, text) for name, text in rows if text]
    width = max((len(name) for name, _ in told), default=0)
    return "\n".join(f"  {name:<{width}}  {text}" for name, text in told)


def _describe_change(summary: Mapping[str, Any], name: str) -> str:
    """`0.365 → 0.831  (means of 1,800 and 1,160 rollouts)`, of the first versions and of the last."""
    key = "reward_policy" if name == "reward" else name
    first, last = summary.get(f"{key}_first"), summary.get(f"{key}_last")
    if first is None and last is None:
        return "–" if name == "reward" and summary.get("steps") else ""
    ends = [_mapping(summary, f"policy_{end}") for end in ("first", "last")]
    counts = [end.get("rollouts") if name == "reward" else _mapping(end, "counts").get(name) for end in ends]
    return _describe_means(first, last, counts)


def _describe_means(first: Any, last: Any, counts: Sequence[Any]) -> str:
    counted = f"  (means of {counts[0]:,} and {counts[1]:,} rollouts)" if all(map(_is_number, counts)) else ""
    return f"{_number(first)} → {_number(last)}{counted}"


def _describe_environment(summary: Mapping[str, Any], label: str) -> str:
    """One of several: `0.310 → 0.702  (means of 904 and 590 rollouts); of the last exact 0.640 (n=590), 34.2 tokens, 1.5 % cut
    off, 21 of 74 groups discarded; 12 of 9,310 attempts failed`."""
    first, last = (_mapping(_mapping(_mapping(summary, f"policy_{end}"), "environments"), label) for end in ("first", "last"))
    attempts = _mapping(_mapping(summary, "environments"), label)
    exact, count = _mapping(last, "metrics").get("exact"), _mapping(last, "counts").get("exact")
    of_last = [
        f"exact {exact:.3f} (n={count})" if _is_number(exact) else "",
        f"{last['completion_tokens']:.1f} tokens" if _is_number(last.get("completion_tokens")) else "",
        f"{last['stop_reason_length_pct']:.1f} % cut off" if _is_number(last.get("stop_reason_length_pct")) else "",
        _describe_share(last.get("discarded"), last.get("groups"), "groups discarded"),
    ]
    parts = [
        _describe_means(first.get("reward"), last.get("reward"), [end.get("rollouts") for end in (first, last)]),
        f"of the last {', '.join(filter(None, of_last))}" if any(of_last) else "",
        _describe_share(attempts.get("failed"), attempts.get("attempts"), "attempts failed"),
    ]
    return "; ".join(filter(None, parts))


def _describe_share(part: Any, whole: Any, what: str) -> str:
    return f"{part:,} of {whole:,} {what}" if _is_number(part) and _is_number(whole) else ""


def _describe_eval(row: Any) -> str:
    """`0.084 → 0.391 ± 0.018 after step 60 (512 prompts x 1)`."""
    if not isinstance(row, Mapping):
        return ""
    first = _mapping(row, "first")
    before = f"{_number(first.get('reward'))} → " if first.get("step") != row.get("step") else ""
    failed = f", {row['failed']} failed" if row.get("failed") else ""
    played = f"{row.get('prompts')} prompts x {row.get('samples')}{failed}"
    return f"{before}{describe_reward(row)} after step {row.get('step')} ({played})"


def _describe_steps(summary: Mapping[str, Any]) -> str:
    steps, skipped = summary.get("steps"), summary.get("updates_skipped")
    return "" if steps is None else f"{steps}" + (f", {skipped} of their updates skipped" if skipped else "")


def _describe_rollouts(summary: Mapping[str, Any]) -> str:
    """Counts that are not 0, and why groups were left out. Those of generated ones add up: what is left over was in groups that
    were not complete, or that no step had taken yet."""
    known = dict(_mapping(summary, "rollouts"))
    generated, *ended = (known.get(name, 0) for name in ("generated", "trained", "discarded"))
    if all(map(_is_number, (generated, *ended))):
        known["left over"] = max(0, generated - sum(ended))
    counts = _list({name: known[name] for name in ROLLOUTS if name in known})
    counted = ((reason, count) for reason, count in _mapping(summary, "reasons").items() if _is_number(count))
    reasons = sorted(counted, key=lambda reason: -reason[1])
    named = ", ".join(f"{count:,} {describe_reason(reason)}" for reason, count in reasons[:MOST_REASONS])
    more = f" and {len(reasons) - MOST_REASONS} more causes" if len(reasons) > MOST_REASONS else ""
    return f"{counts}; of groups {named}{more}" if counts and named else counts


def _describe_tokens(summary: Mapping[str, Any]) -> str:
    tokens, seconds = _mapping(summary, "tokens"), _mapping(summary, "seconds").get("training")
    sampled, trained = tokens.get("completion"), tokens.get("trained")
    if not sampled:
        return ""
    rate = f" ({sampled / seconds:,.0f}/s while training)" if _is_number(seconds) and seconds > 0 else ""
    return f"{sampled:,} sampled{rate}, {trained or 0:,} trained"


def _describe_time(summary: Mapping[str, Any]) -> str:
    """Of this attempt from its orchestrator's start on, which the start of processes precedes, and of all attempts what the
    trainer worked and waited."""
    wall, seconds = summary.get("wall_s"), _mapping(summary, "seconds")
    if not _is_number(wall):
        return ""
    parts = [
        f"{what} {format_duration(seconds[name])}"
        for name, what in (("timing_step_active", "the trainer computed"), ("timing_waiting_for_data", "waited for data"))
        if _is_number(seconds.get(name))
    ]
    again = bool(summary.get("resumed_after_step"))
    alone = f" in attempt {summary.get('attempt')} alone" if again else ""
    whose = "in all attempts " if again else ""
    return f"{format_duration(wall)}{alone}" + (f" ({whose}{', '.join(parts)})" if parts else "")


def _mapping(summary: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = summary.get(name)
    return found if isinstance(found, Mapping) else {}


def _list(counts: Mapping[str, Any]) -> str:
    """`960 trained, 2 failed`: numbers that are not 0, and what is not a number as it is."""
    return ", ".join(f"{value:,} {name}" if _is_number(value) else f"{name} {value}" for name, value in counts.items() if value)


def _number(value: Any) -> str:
    return f"{value:.3f}" if _is_number(value) else "–"


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
