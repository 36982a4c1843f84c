"""The table of several runs: `python -m benchmarks.peers.table FILES`.

Medians of the steps after the first two, ours by each peer's, and below what is not equal. Files of one system, mode and
variant are turns of the same line, and their steps are taken together. Runs of other work, or on other cards, are refused.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.peers.result import (
    FEWEST_STEPS,
    WARM_STEPS,
    PeerFigures,
    PeerResult,
    UnusableResult,
    read_result,
    summarise,
)

COLUMNS = (
    "run", "tokens/s", "step, s", "steps", "trainer idle", "sampler idle", "requests in flight", "step / longest part",
    "masters",
)  # fmt: skip
GOALS = {("0.6B", 2): 4.3, ("4B", 2): 3.3, ("0.6B", 1): 3.5}
"""Times TRL's tokens a second that we aim at, by shape and number of cards."""
OVERLAPPING = ("two_cards", "one_card")
"""Our layouts that generate while they train."""
OVERLAP_GOAL = 1.03
"""Of an asynchronous step by the longer of generation and training, at most."""


def check_equal(results: Sequence[PeerResult]) -> None:
    """Raises `UnusableResult` with every difference in work and cards."""
    first = results[0]
    differ = []
    for other in results[1:]:
        ours, theirs = asdict(first.workload) | {"cards": first.cards}, asdict(other.workload) | {"cards": other.cards}
        differ += [
            f"{name} is {ours[name]} of {first.label} and {theirs[name]} of {other.label}"
            for name in ours
            if ours[name] != theirs[name]
        ]
    if differ:
        raise UnusableResult("these runs cannot stand in one table: " + "; ".join(dict.fromkeys(differ)))


def gather(results: Sequence[PeerResult], at_least: int) -> dict[str, tuple[PeerResult, PeerFigures]]:
    """Lines by their label, with the figures of all their turns. Raises `UnusableResult` where a line has too few steps."""
    turns: dict[str, list[PeerResult]] = {}
    for result in results:
        turns.setdefault(result.label, []).append(result)
    lines = {}
    for label, same in turns.items():
        figures = summarise([step for result in same for step in result.counted], same[0].workload.rollouts)
        if figures.steps < at_least:
            raise UnusableResult(
                f"{label} has {figures.steps} steps after the first {WARM_STEPS}, and {at_least} are wanted: give more --steps "
                "(--at-least takes fewer, for a dry run)"
            )
        lines[label] = same[0], figures
    return lines


def ratios(lines: dict[str, tuple[PeerResult, PeerFigures]]) -> dict[tuple[str, str], float]:
    """Tokens a second of each of our lines by each peer's."""
    rates = {label: (result.system, figures.tokens_per_s) for label, (result, figures) in lines.items()}
    return {
        (ours, peer): rate / other
        for ours, (system, rate) in rates.items()
        if system == "telescope"
        for peer, (kind, other) in rates.items()
        if kind != "telescope"
    }


def page(results: Sequence[PeerResult], at_least: int = FEWEST_STEPS) -> Iterator[str]:
    """Lines of Markdown."""
    check_equal(results)
    lines, work, cards = gather(results, at_least), results[0].workload, results[0].cards
    yield (
        f"{work.shape}, {', '.join(cards) or 'CPU'}; {work.rollouts} rollouts a step in groups of {work.group_size}, "
        f"{work.prompt_tokens} + {work.answer_tokens} tokens, {work.compute_dtype}"
    )
    yield ""
    yield f"| {' | '.join(COLUMNS)} |"
    yield "|---" * len(COLUMNS) + "|"
    for label, (result, figures) in lines.items():
        cells = (
            label, f"{figures.tokens_per_s:,.0f}", f"{figures.seconds:.2f}", str(figures.steps), _share(figures.trainer_idle),
            _share(figures.sampler_idle), _number(figures.in_flight, 0), _number(figures.over_longest, 2), result.masters,
        )  # fmt: skip
        yield f"| {' | '.join(cells)} |"
    yield ""
    yield from _compare(lines, GOALS.get((work.shape, len(cards))))
    yield "Not equal, and not to be made so:"
    yield from (f"- {sentence}" for sentence in dict.fromkeys(_handicaps(lines)))


def _compare(lines: dict[str, tuple[PeerResult, PeerFigures]], goal: float | None) -> Iterator[str]:
    aim = f" (goal: {goal})" if goal else ""
    found = ratios(lines)
    yield from (f"- {ours} / {peer}: {ratio:.2f}{aim}" for (ours, peer), ratio in found.items())
    overlaps = {label: figures.over_longest for label, (result, figures) in lines.items() if result.mode in OVERLAPPING}
    yield from (
        f"- step / longest part of {label}: {overlap:.3f} (goal: at most {OVERLAP_GOAL})"
        for label, overlap in overlaps.items()
        if overlap is not None
    )
    if found or overlaps:
        yield ""


def _handicaps(lines: dict[str, tuple[PeerResult, PeerFigures]]) -> Iterator[str]:
    """Those that each run names, then those that are seen only beside each other."""
    for result, _ in lines.values():
        yield from result.handicaps
    whole = lines[next(iter(lines))][0].workload.answer_tokens
    for label, (result, figures) in lines.items():
        if figures.answer_tokens < whole:
            yield f"Answers of {label} have {figures.answer_tokens:.1f} tokens on average, of {whole} that they may have."
        versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
        yield f"{label} ran with {versions or 'versions that it does not tell'}."
    masters = {label: result.masters for label, (result, _) in lines.items()}
    if len(set(masters.values())) > 1:
        yield "Weights that are updated: " + ", ".join(f"{kind} in {label}" for label, kind in masters.items()) + "."


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--at-least", type=int, default=FEWEST_STEPS, help="counted steps that a line must have")
    given = parser.parse_args()
    try:
        print("\n".join(page([read_result(file) for file in given.files], given.at_least)))
    except UnusableResult as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
