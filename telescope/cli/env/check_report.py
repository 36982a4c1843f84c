"""What a check has seen, in lines: the opening, a dialogue token by token, rewards, metrics, failures, warnings. No playing."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from telescope.environments.template import ChatTemplate
from telescope.maths.rounding import is_rounding
from telescope.records import PromptRef, RolloutOrder
from telescope.wire.messages import RolloutError, RolloutResult

SHOWN_CHARACTERS = 600
SHOWN_IDS = 12


@dataclass(frozen=True)
class Played:
    """One rollout. `policy_s` is the share of `seconds` in which the policy answered."""

    order: RolloutOrder
    body: RolloutResult | RolloutError
    arrays: tuple[np.ndarray, ...]
    seconds: float
    policy_s: float


@dataclass(frozen=True)
class Stated:
    """What the environment says of itself, and what was found before playing."""

    label: str
    sizes: Mapping[str, int]
    too_long: int
    longest: int
    """Tokens that a prompt may have."""
    reward_range: tuple[float, float] | None
    metrics_ranges: Mapping[str, tuple[float, float]]
    same_prompts: bool | None
    """Whether another process makes the same prompts; None: not compared."""
    unwritable: Sequence[str] = field(default=())
    oddities: Sequence[str] = field(default=())
    """Of the chat template."""
    right: Callable[[PromptRef], str] | None = None
    """The right answers, where these were said."""
    max_tokens_setting: str = "rollout.max_tokens"
    """What limits its answers."""
    answers_of: str = "the right answers were played, not those of a policy"
    """Who has answered."""


def write_report(stated: Stated, played: Sequence[Played], template: ChatTemplate) -> tuple[list[str], bool]:
    """The lines, and whether all is well enough to train: no failures, the same prompts everywhere."""
    done = [each for each in played if isinstance(each.body, RolloutResult)]
    lines = [*_describe_prompts(stated), ""]
    if done:
        lines += [
            *_describe_dialogue(done[0], template),
            "",
            *_list_rollouts(done),
            "",
            *_list_metrics(done, stated),
            "",
            *_describe_times(done),
            "",
        ]
    failures = list(_list_failures(played))
    lines += failures
    warnings = list(_list_warnings(stated, done))
    lines += [f"warning: {each}" for each in warnings]
    fine = not failures and stated.same_prompts is not False
    lines.append(f"{len(done)} of {len(played)} rollouts scored, {len(warnings)} warning{'s' * (len(warnings) != 1)}")
    return lines, fine


def _describe_prompts(stated: Stated) -> Iterator[str]:
    sizes = ", ".join(f"{size:,} {split}" for split, size in stated.sizes.items())
    yield f"environments.{stated.label}: {sizes} prompts; the longest may have {stated.longest:,} tokens"
    if stated.same_prompts is not None:
        yield f"prompts in another process: {'the same' if stated.same_prompts else 'OTHERS'}"
    if stated.reward_range is not None:
        yield "stated rewards: {:g} to {:g}".format(*stated.reward_range)


def _describe_dialogue(each: Played, template: ChatTemplate) -> Iterator[str]:
    """The first rollout as training gets it: runs of prompt (untrained) and of sampled tokens."""
    body, (ids, mask, *_) = each.body, each.arrays
    assert isinstance(body, RolloutResult)
    yield f"rollout {body.rollout_id}, prompt {each.order.prompt.index}, as training gets it:"
    start = 0
    for branch, length in enumerate(body.branch_lengths):
        if len(body.branch_lengths) > 1:
            yield f"  branch {branch}"
        changes = np.flatnonzero(np.diff(mask[start : start + length])) + 1
        for run in np.split(np.arange(start, start + length), changes):
            kind = "sampled" if mask[run[0]] else "prompt "
            tokens = ids[run]
            shown = " ".join(map(str, tokens[:SHOWN_IDS])) + (" …" if len(tokens) > SHOWN_IDS else "")
            yield f"  {kind} {len(run):>5} tokens  {_shorten(repr(template.decode(tokens.tolist())))}"
            yield f"                       {shown}"
        start += length


def _list_rollouts(done: Sequence[Played]) -> Iterator[str]:
    yield "rollout  prompt   reward  turns  sampled  end     tags, answer"
    for each in done:
        body = each.body
        assert isinstance(body, RolloutResult)
        golden = " | ".join(body.golden_answers)
        right = [f"(right: {_shorten(golden, 30)})"] if golden else []
        said = " ".join([*(f"[{tag}]" for tag in body.tags), _shorten(repr(body.completion_text), 60), *right])
        yield (
            f"{body.rollout_id:>7} {each.order.prompt.index:>7} {body.reward:>8.4g} {body.turns:>6} {body.completion_tokens:>8}"
            f"  {body.finish_reason:<7} {said}"
        )


def _list_metrics(done: Sequence[Played], stated: Stated) -> Iterator[str]:
    rows = {"reward": _collect_rewards(done), **_collect_metrics(done)}
    width = max(22, *map(len, rows))
    yield f"{'metric':<{width}}     mean       min       max   stated"
    for name, values in rows.items():
        ends = stated.reward_range if name == "reward" else stated.metrics_ranges.get(name)
        said = "–" if ends is None else "{:g} to {:g}".format(*ends)
        yield f"{name:<{width}} {np.mean(values):>8.4g}  {min(values):>8.4g}  {max(values):>8.4g}   {said}"


def _describe_times(done: Sequence[Played]) -> Iterator[str]:
    own = sorted(each.seconds - each.policy_s for each in done)
    yield (
        f"the environment's own time: median {own[len(own) // 2] * 1000:.1f} ms a rollout, longest {own[-1] * 1000:.1f} ms; "
        f"the policy's: median {sorted(each.policy_s for each in done)[len(done) // 2] * 1000:.1f} ms"
    )


def _list_failures(played: Sequence[Played]) -> Iterator[str]:
    """One line a cause, the commonest first."""
    failed = [each.body for each in played if isinstance(each.body, RolloutError)]
    for (kind, cause), count in Counter((body.kind, body.cause) for body in failed).most_common():
        yield f"failure of the {kind}, {count} times: {cause}"


def _list_warnings(stated: Stated, done: Sequence[Played]) -> Iterator[str]:
    if stated.too_long:
        yield (
            f"{stated.too_long:,} train prompts have more than {stated.longest:,} tokens and are left out: raise "
            f"inference.max_model_len or lower {stated.max_tokens_setting}"
        )
    if stated.same_prompts is False:
        yield (
            "another process makes other prompts: draw with environments/hashed_random.py, not with random, hash() or the clock"
        )
    for text in list(stated.unwritable)[:3]:
        yield f"the tokenizer can't write the answer {_shorten(repr(text), 60)}: name the model to be trained (model.name=)"
    yield from stated.oddities
    yield from _find_wrong_answers(stated, done)
    yield from _find_reward_warnings(stated, done)
    yield from _find_metric_warnings(stated, done)
    cut = sum(each.body.finish_reason == "length" for each in done if isinstance(each.body, RolloutResult))
    if cut:
        yield f"{cut} of {len(done)} last answers were cut off at {stated.max_tokens_setting}"


def _find_wrong_answers(stated: Stated, done: Sequence[Played]) -> Iterator[str]:
    """Right answers that do not earn the whole reward."""
    if stated.right is None or stated.reward_range is None:
        return
    scored = [(each.order.prompt, each.body.reward) for each in done if isinstance(each.body, RolloutResult)]
    whole = stated.reward_range[1]
    wrong = {prompt.index: reward for prompt, reward in scored if not is_rounding(reward, whole) and stated.right(prompt)}
    if wrong:
        index, reward = next(iter(wrong.items()))
        yield (
            f"the right answers of {len(wrong)} prompts do not earn the {whole:g} that is stated, e.g. prompt "
            f"{index} earns {reward:g}: is that the form in which the reward wants them (`right_answer` says it)?"
        )


def _find_reward_warnings(stated: Stated, done: Sequence[Played]) -> Iterator[str]:
    rewards = _collect_rewards(done)
    if len(rewards) > 1 and is_rounding(min(rewards), max(rewards)):
        yield f"all {len(rewards)} rewards are {rewards[0]:g}: nothing can be learnt from that ({stated.answers_of})"
    if stated.reward_range is not None:
        outside = [reward for reward in rewards if not _is_within(reward, stated.reward_range)]
        if outside:
            yield f"{len(outside)} rewards lie outside what is stated, e.g. {outside[0]:g}"


def _is_within(value: float, ends: tuple[float, float]) -> bool:
    """But for rounding: 0.1 + 0.2 + 0.7 is within 0 to 1."""
    low, high = ends
    return low <= value <= high or any(np.isfinite(end) and is_rounding(*sorted((end, value))) for end in ends)


def _find_metric_warnings(stated: Stated, done: Sequence[Played]) -> Iterator[str]:
    for name, values in _collect_metrics(done).items():
        ends = stated.metrics_ranges.get(name)
        outside = [] if ends is None else [value for value in values if not _is_within(value, ends)]
        if outside:
            yield f"metric {name} lies outside what is stated, e.g. {outside[0]:g}"
        if len(values) < len(done):
            yield f"metric {name} is there in {len(values)} of {len(done)} rollouts: its mean is over those alone"
    for name in sorted(set(stated.metrics_ranges) - set(_collect_metrics(done)) if done else ()):
        yield f"metric {name} has a stated range and never came"


def _collect_rewards(done: Sequence[Played]) -> list[float]:
    return [each.body.reward for each in done if isinstance(each.body, RolloutResult)]


def _collect_metrics(done: Sequence[Played]) -> dict[str, list[float]]:
    values: dict[str, list[float]] = defaultdict(list)
    for each in done:
        if isinstance(each.body, RolloutResult):
            for name, value in each.body.metrics.items():
                values[name].append(value)
    return dict(values)


def _shorten(text: str, most: int = SHOWN_CHARACTERS) -> str:
    return text if len(text) <= most else f"{text[:most]}…"
