"""The page that `telescope show` prints: figures and advice as plain text, two screens long, at any width from 80 columns on.

Commands to type are never cut; all else fits the width. Refuses to judge (advice.py does) and to read (figures.py does).
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from telescope.cli.show.advice import LONG_IDLE, Advice, count_versions, has_fallen, is_higher, is_unclear
from telescope.cli.show.curves import ASCII_BLOCKS, BLOCKS, BUCKETS, EDGE, NumberCurve, draw
from telescope.cli.show.figures import NEWEST, EnvironmentFigures, RunFigures, ShownSample

NARROWEST = 80
MOST_ADVICE = 4
MOST_LINES = 5
"""Of alerts, causes, environments and evals each."""
MOST_CHARACTERS = 4_000
"""Of an alert or a reason, which are wrapped whole: only what no sentence is as long as is cut."""
NAME_WIDTH, NUMBER_WIDTH = 15, 9
BOLD, PLAIN = "\x1b[1m", "\x1b[0m"
ASCII = str.maketrans({"·": "-", "…": "...", "→": "->", "–": "-", "±": "+-", "×": "x", "“": '"', "”": '"'})


class PageStyle:
    """How a stream takes text: its width, whether it has colours, and whether it can write blocks."""

    def __init__(self, width: int = NARROWEST, *, colours: bool = False, encoding: str | None = "utf-8") -> None:
        self.width = max(NARROWEST, width)
        self._colours = colours
        self._blocks = can_encode(BLOCKS + "·…→–±×", encoding)

    def title(self, text: str) -> str:
        return f"{BOLD}{text}{PLAIN}" if self._colours else text

    def curve(self, curve: NumberCurve, width: int) -> str:
        return draw(curve.points, width, BLOCKS if self._blocks else ASCII_BLOCKS)

    def finish(self, line: str) -> str:
        """In characters that the stream has; what models write may have others, which the stream escapes."""
        return line.rstrip() if self._blocks else line.translate(ASCII).rstrip()

    def clip(self, text: str, width: int) -> str:
        """One line, cut in the middle where it is too long: beginning and end say most. Control characters become spaces."""
        text = " ".join("".join(one if one.isprintable() else " " for one in text).split())
        if len(text) <= width:
            return text
        head = max(1, (width - 3) // 2)
        return f"{text[:head]} … {text[len(text) - max(1, width - 3 - head) :]}"

    def wrap(self, text: str, name: str = "") -> list[str]:
        """Behind a name, which stands out to the left."""
        begin = f"  {name:<11}" if name else "  "
        return textwrap.wrap(text, self.width, initial_indent=begin, subsequent_indent=" " * len(begin), break_on_hyphens=False)


def can_encode(text: str, encoding: str | None) -> bool:
    try:
        text.encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def describe(figures: RunFigures, advice: Sequence[Advice], style: PageStyle) -> list[str]:
    """All lines of the page."""
    parts = (
        _describe_run(figures, style),
        _describe_curves(figures, style),
        _describe_evals(figures, style),
        _describe_samples(figures, style),
        _describe_losses(figures, style),
        _describe_times(figures, style),
        _describe_advice(figures, advice, style),
    )
    blocks = [lines for part in parts if (lines := list(part))]
    return [style.finish(line) for block in blocks for line in (*block, "")][:-1]


def _describe_run(figures: RunFigures, style: PageStyle) -> Iterator[str]:
    steps = figures.settings.number_of_steps
    how_far = f"step {figures.step}" + (f" of {steps}" if steps else "")
    yield style.title(style.clip(f"{figures.run_dir} · {figures.state} · {how_far}", style.width))
    if figures.reason:
        yield from style.wrap(style.clip(figures.reason, MOST_CHARACTERS))
    for sentence in figures.damaged[:MOST_LINES]:
        yield from style.wrap(style.clip(sentence.removeprefix(f"{figures.run_dir}/"), 3 * style.width - 60), "damaged")
    if len(figures.damaged) > MOST_LINES:
        yield f"  damaged    {len(figures.damaged) - MOST_LINES} more"
    if figures.cut:
        yield from style.wrap(f"Counts and times are of the newest {NEWEST:,} rows of {', '.join(figures.cut)}.")
    if verdict := describe_reward(figures):
        yield from style.wrap(verdict)


def describe_reward(figures: RunFigures) -> str:
    """What the reward has done, in a sentence."""
    reward = figures.find("reward/policy")
    if reward is None:
        scored = sum(one.scored for one in figures.environments)
        so_far = sum((one.reward or 0.0) * one.scored for one in figures.environments) / max(1, scored)
        told = f"; {scored} rollouts have a mean of {_short(so_far)}" if scored else ""
        return f"No reward of the policy yet, as no version of the weights has been scored to the end{told}."
    moved = f"Reward {_short(reward.first)} → {_short(reward.last)} over {count_versions(reward)} of the weights"
    if reward.error is None:
        return f"{moved}."
    noise = f"{reward.change:+.2g}, noise ±{2 * reward.error:.2g}"
    if is_higher(reward):
        fallen = f", and it has fallen from {_short(reward.best)}" if has_fallen(reward) else ""
        return f"{moved}: higher{fallen} ({noise})."
    if is_unclear(reward):
        return f"{moved}: {'too few' if reward.count < 2 * EDGE else 'too much noise'} to judge ({noise})."
    if reward.change < -2 * reward.error:
        return f"{moved}: lower ({noise})."
    if has_fallen(reward):
        return f"{moved}: it has fallen from {_short(reward.best)} ({noise})."
    return f"{moved}: no change that is more than noise ({noise})."


# ---- curves


def _describe_curves(figures: RunFigures, style: PageStyle) -> Iterator[str]:
    if figures.curves:
        yield style.title(_curve_line("", "", ("first", "last", "min", "max"), style))
        yield from (_describe_curve(curve, style) for curve in figures.curves)


def _describe_curve(curve: NumberCurve, style: PageStyle) -> str:
    numbers = tuple(map(_short, (curve.first, curve.last, curve.low, curve.high)))
    return _curve_line(curve.name, style.curve(curve, _curve_width(style)), numbers, style)


def _curve_width(style: PageStyle) -> int:
    return min(BUCKETS, style.width - NAME_WIDTH - 4 * NUMBER_WIDTH - 3)


def _curve_line(name: str, drawn: str, numbers: Sequence[str], style: PageStyle) -> str:
    told = "".join(f"{number:>{NUMBER_WIDTH}}" for number in numbers)
    return f"  {style.clip(name, NAME_WIDTH - 1):<{NAME_WIDTH}}{drawn:<{_curve_width(style)}}{told}"


def _describe_evals(figures: RunFigures, style: PageStyle) -> Iterator[str]:
    if not figures.evals:
        return
    yield style.title("Evals (reward)")
    for found in figures.evals[:MOST_LINES]:
        yield _describe_curve(found.reward, style)
        prompts = "" if found.prompts is None else f" over {found.prompts} prompt{'s' * (found.prompts != 1)}"
        times = f"once, at step {found.steps[0]}" if len(found.steps) == 1 else (
            f"{len(found.steps)} times, steps {found.steps[0]} to {found.steps[-1]}"
        )  # fmt: skip
        yield f"    {times}; the last: {found.words}{prompts}"
    if len(figures.evals) > MOST_LINES:
        yield f"  {len(figures.evals) - MOST_LINES} more"


# ---- answers


def _describe_samples(figures: RunFigures, style: PageStyle) -> Iterator[str]:
    above = f"{figures.settings.pass_above:g}"
    for name, samples, rule in (
        ("Wrong", figures.wrong, f"reward {above} or less"),
        ("Right", figures.right, f"reward above {above}"),
    ):
        if samples:
            yield style.title(f"{name} ({rule}), of the newest {figures.samples_from} answers: prompt → answer | golden")
            for sample in samples:
                yield from _describe_sample(sample, style, several=len(figures.environments) > 1)
    if figures.samples_from and figures.wrong and not figures.right:
        yield f"  None of the newest {figures.samples_from} answers has a reward above {above} (eval.pass_above)."
    if figures.samples_from and figures.right and not figures.wrong:
        yield f"  All of the newest {figures.samples_from} answers have a reward above {above} (eval.pass_above)."


def _describe_sample(sample: ShownSample, style: PageStyle, *, several: bool) -> Iterator[str]:
    """One line where it fits, else the prompt in one and the answer in another; ends that are not a stop are named."""
    begin = f"  {_short(sample.reward):>6} " + (f"{style.clip(sample.environment, 12)}: " if several else "")
    answer = style.clip(sample.answer, 10_000) or "(empty)"
    golden = ", ".join(style.clip(one, 10_000) for one in sample.golden_answers) or "–"
    cut = "" if sample.finish_reason in ("stop", "") else f" ({'cut off' if sample.finish_reason == 'length' else 'aborted'})"
    whole = f"{begin}{style.clip(sample.prompt, 10_000)} → {answer}{cut} | {golden}"
    if len(whole) <= style.width:
        yield whole
        return
    right = style.clip(golden, style.width // 3)
    room = style.width - 9 - len("→ ") - len(cut) - len(" | ") - len(right)
    yield f"{begin}{style.clip(sample.prompt, style.width - len(begin))}"
    yield f"{'':9}→ {style.clip(answer, room)}{cut} | {right}"


# ---- what was lost, and where time went


def _describe_losses(figures: RunFigures, style: PageStyle) -> Iterator[str]:
    groups = figures.groups
    if groups.begun:
        yield style.title("Discards and alerts")
        shares = f"{groups.discarded / groups.begun:.0%} of the begun, {groups.equal_share:.0%} of the scored"
        equal = f"{groups.discarded} discarded for equal rewards ({shares})"
        if groups.discarded_reward is not None:
            equal += f", with a mean reward of {_short(groups.discarded_reward)}"
            equal += f"; {groups.discarded_all_zero} of them with 0 throughout"
        rest = [f"{groups.too_old} too old" if groups.too_old else "", f"{groups.failed} failed" if groups.failed else ""]
        yield from style.wrap(
            "; ".join([f"groups: {groups.begun} begun, {groups.complete} scored", equal, *filter(None, rest)])
        )
        for reason, count in groups.reasons[:MOST_LINES]:
            yield f"  groups {style.clip(reason, style.width - 20)} × {count}"
    told = sorted(figures.environments, key=lambda one: -one.failed)
    for one in told[:MOST_LINES] if any(one.failed for one in told) or len(told) > 1 else ():
        yield from _describe_environment(one, style)
    for alert in figures.alerts[:MOST_LINES]:
        times = f" (× {alert.count})" if alert.count > 1 else ""
        yield from style.wrap(f"alert{times}: {style.clip(f'{alert.source}: {alert.message}', MOST_CHARACTERS)}")
    if len(figures.alerts) > MOST_LINES:
        yield f"  alert: {len(figures.alerts) - MOST_LINES} more kinds in the stream `alerts`"
    if figures.updates_skipped:
        yield f"  updates left out: {figures.updates_skipped} of {figures.updates}"


def _describe_environment(one: EnvironmentFigures, style: PageStyle) -> Iterator[str]:
    reward = "" if one.reward is None else f", reward {_short(one.reward)}"
    failed = f"{one.failed} of {one.failed + one.scored} attempts failed"
    yield f"  {style.clip(f'{one.label}: {failed}{reward}', style.width - 2)}"
    for cause, count in one.causes[:2]:
        yield f"    {style.clip(cause, style.width - 14)} × {count}"


def _describe_times(figures: RunFigures, style: PageStyle) -> Iterator[str]:
    time = figures.time
    if time is None:
        return
    yield style.title(f"Where the time goes ({_seconds(time.step_s)} a step)")
    stall = f", {time.checkpoint_stall:.0%} saving" if time.checkpoint_stall >= 0.005 else ""
    works, waits = f"{time.trainer_works:.0%} working", f"{time.trainer_waits:.0%} waiting for a batch"
    yield from style.wrap(f"{works}, {waits}{stall}, {time.other:.0%} else", "trainer")
    if time.servers_generate is not None and time.servers_idle is not None:
        each = f"{time.requests_at_once or 0:.3g} requests at once on each of {time.servers}"
        yield from style.wrap(f"{time.servers_generate:.0%} with a request, {time.servers_idle:.0%} idle; {each}", "servers")
    if time.generating_s is not None and time.scoring_s is not None:
        queued = f", {_seconds(time.queued_s)} queued a request" if time.queued_s else ""
        slow = f"; the slowest 5 % take {time.slowest_ratio:.1f} × the median" if time.slowest_ratio else ""
        told = f"{_seconds(time.generating_s)} generating, {_seconds(time.scoring_s)} scoring{queued}{slow}"
        yield from style.wrap(told, "rollouts")
    if time.weight_update_s is not None:
        paused = f"generation paused {time.pause_share or 0:.1%} of the time"
        yield from style.wrap(f"{_seconds(time.weight_update_s)} an update, {paused}", "weights")
    yield f"  {describe_limit(figures)}"


def describe_limit(figures: RunFigures) -> str:
    """Who waits for whom."""
    time = figures.time
    if time is None:
        return ""
    idle = time.servers_idle or 0.0
    if time.trainer_waits > time.trainer_works and time.trainer_waits > 0.2:
        if (time.scoring_s or 0.0) > max(time.generating_s or 0.0, 1e-3):
            return "The trainer waits for the environment."
        if idle >= LONG_IDLE:
            return "Trainer and servers both wait: single slow answers, or processes that lack a core, hold batches up."
        return "The trainer waits for the servers."
    if time.other > max(time.trainer_works, time.trainer_waits):
        return "Most of the time the trainer neither trains nor lacks a batch: weights are on their way, or a save is made."
    if idle > 0.2:
        return "The servers wait for the trainer."
    return "Trainer and servers keep each other busy."


# ---- advice


def _describe_advice(figures: RunFigures, advice: Sequence[Advice], style: PageStyle) -> Iterator[str]:
    yield style.title("What to try next")
    if not advice:
        yield from style.wrap(
            "No rule has anything to say. Read the wrong answers above, and docs/why_not.md."
            if figures.step
            else _describe_no_step(figures)
        )
    for number, one in enumerate(advice[:MOST_ADVICE], start=1):
        yield from style.wrap(f"{number}. {one.found[:1].upper()}{one.found[1:]}. {one.reason}")
        yield f"       {one.command}"
        if one.resume:
            yield from _describe_resume(one.resume, style)
    if len(advice) > MOST_ADVICE:
        yield f"  {len(advice) - MOST_ADVICE} more with --json."


def _describe_resume(sentence: str, style: PageStyle) -> Iterator[str]:
    """A command in it is in a line of its own, and whole."""
    words, colon, command = sentence.partition(": telescope ")
    yield from style.wrap(f"{words}:" if colon else sentence)
    if colon:
        yield f"       telescope {command}"


def _describe_no_step(figures: RunFigures) -> str:
    if figures.groups.begun:
        return "Nothing is trained yet, and no rule has anything to say."
    name, *others = figures.not_ready or ("orchestrator",)
    who = name if not others else f"{name} and {len(others)} more"
    how = "is not ready yet" if figures.state in ("running", "waiting") else "never became ready"
    return f"Nothing was generated: {who} {how}. Read {figures.run_dir}/logs/{name}.log."


def _short(value: float) -> str:
    """In at most 7 characters: 0.417, 12.3, 1.5e-06, 1234."""
    if value == 0:
        return "0"
    if abs(value) >= 99_999.5 or abs(value) < 0.001:
        return f"{value:.1e}"
    return f"{value:.0f}" if abs(value) >= 999.5 else f"{value:.3g}"


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return f"{seconds * 1000:.2g} ms" if seconds < 0.0995 else f"{seconds:.3g} s"
