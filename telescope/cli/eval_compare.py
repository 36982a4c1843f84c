"""`telescope eval compare A B`: two results of one eval, prompt by prompt.

A result is `RUN_DIR` (its latest step that was evaluated), `RUN_DIR@STEP`, or a folder that `telescope eval` has written.
How each was played stands in its row: the settings of a run may have changed since. Prompts are the same where their texts
are; under two chat templates, where place and answer are. Reads run directories, and changes nothing in them.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from telescope.cli.arguments import from_zero
from telescope.config.evals import Eval, list_setup
from telescope.config.run import RunConfig
from telescope.maths.paired import PairedDifference, compare_paired, exact_sign_test
from telescope.maths.summaries import mean
from telescope.runlog import opening
from telescope.runlog.eval_rows import find_standalone
from telescope.runlog.files import DamagedFile
from telescope.runlog.layout import RunDirectory
from telescope.runlog.reader import rows

OK, FAILED, USAGE = 0, 1, 2
AT = re.compile(r"(.+)@(\d+)")
TEXT = "text"
SHOWN = 60
"""Characters of a prompt."""


class NotComparable(ValueError):
    """The text says why."""


@dataclass(frozen=True)
class PromptScore:
    """One prompt of an eval: the rewards of its samples, failed ones with the lowest there is, and how many passed."""

    index: int
    text: str
    answers: tuple[str, ...]
    rewards: tuple[float, ...]
    passed: int

    @property
    def reward(self) -> float:
        return mean(self.rewards)


@dataclass(frozen=True)
class EvalResult:
    """One complete eval of one model."""

    name: str
    where: str
    config: RunConfig
    row: Mapping[str, Any]
    prompts: tuple[PromptScore, ...]

    @property
    def has_setup(self) -> bool:
        """Rows of earlier versions do not say how they were played."""
        return bool(self.row.get("setup"))

    @property
    def setup(self) -> Mapping[str, Any]:
        if self.has_setup:
            found: Mapping[str, Any] = self.row["setup"]
            return found
        config = self.config
        one = next(one for one in config.active_evals if one.name == self.name)
        return list_setup(one, config.played[one.label], config.rollout, config.inference, config.model)


def compare(arguments: Sequence[str]) -> int:
    """0; 1 where two results can't be compared, 2 on wrong usage."""
    asked = _parser().parse_args(list(arguments))
    try:
        first, second = (_find(given, asked.eval, asked.own) for given in (asked.first, asked.second))
        names = [name for name in first if name in second] if asked.eval is None else [asked.eval]
        if not names:
            raise NotComparable(
                f"{asked.first} has {_list(first)}, and {asked.second} {_list(second)}: they have no eval in common"
            )
        for side, given in ((first, asked.first), (second, asked.second)):
            if missing := [name for name in names if name not in side]:
                raise NotComparable(f"{given} has no complete eval {missing[0]}; it has {_list(side)}")
        found = [_compare(first[name](), second[name](), asked.other_sampling) for name in names]
    except (NotComparable, opening.NotARun, DamagedFile) as error:
        sys.stderr.write(f"telescope eval compare: {error}\n")
        return FAILED
    if asked.json:
        sys.stdout.writelines(json.dumps(one) + "\n" for one in found)
    else:
        sys.stdout.write("\n\n".join("\n".join(_describe(one, int(asked.changed))) for one in found) + "\n")
    return OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="telescope eval compare", description=__doc__, allow_abbrev=False)
    parser.add_argument("first", metavar="A", help="RUN_DIR, RUN_DIR@STEP, or a folder that telescope eval has written")
    parser.add_argument("second", metavar="B", help="likewise; differences are B − A")
    parser.add_argument("--eval", metavar="NAME", help="this one alone (default: all that both have)")
    parser.add_argument(
        "--changed", type=from_zero, default=10, metavar="N", help="show so many prompts that changed (default: 10)"
    )
    parser.add_argument("--own", action="store_true", help="of a run directory its own evals alone, and none of telescope eval")
    parser.add_argument("--other-sampling", action="store_true", help="compare though the two were played differently")
    parser.add_argument("--json", action="store_true", help="print a JSON object an eval, with each prompt in it")
    return parser


def _list(names: Mapping[str, Any]) -> str:
    return ", ".join(names) or "no complete eval"


# ---- finding results


class _Loader:
    """Reads one result when it is asked for."""

    def __init__(self, run: RunDirectory, row: Mapping[str, Any]) -> None:
        self.run, self.row = run, row

    def __call__(self) -> EvalResult:
        name, step = self.row["eval"], self.row["step"]
        config = opening.read(self.run)
        one = next((one for one in config.active_evals if one.name == name), None)
        if one is None:
            raise NotComparable(f"{self.run.path} has rows of the eval {name}, which its configuration no longer has")
        samples = [row for row in rows(self.run, "eval_samples") if (row["eval"], row.get("step")) == (name, step)]
        scored = list({row["rollout_id"]: row for row in samples if row["status"] == "scored"}.values())
        return EvalResult(
            name, f"{self.run.path}, step {step}", config, self.row, _score_prompts(self.row, samples, scored, config, one)
        )


def _score_prompts(
    row: Mapping[str, Any],
    samples: Sequence[Mapping[str, Any]],
    scored: Sequence[Mapping[str, Any]],
    config: RunConfig,
    one: Eval,
) -> tuple[PromptScore, ...]:
    """As the eval's own row counts: a sample that was given up has not passed, and the lowest reward."""
    floor = config.reward_min(one.label)
    lowest = min(0.0 if floor is None else floor, *(each["reward"] for each in scored), 0.0 if floor is None else floor)
    by_index: dict[int, list[Mapping[str, Any]]] = {index: [] for index in range(row["prompts"])}
    for each in scored:
        by_index.setdefault(each["index"], []).append(each)
    found = []
    for index, of_prompt in sorted(by_index.items()):
        rewards = [each["reward"] for each in sorted(of_prompt, key=lambda each: int(each["sample"]))]
        known = next(iter(of_prompt), {})
        found.append(
            PromptScore(
                index,
                known.get("prompt", ""),
                tuple(known.get("golden_answers") or ()),
                (*rewards, *[lowest] * (row["samples"] - len(rewards))),
                sum(reward > row["pass_above"] for reward in rewards),
            )
        )
    return tuple(found)


def _find(given: str, name: str | None, own: bool) -> dict[str, _Loader]:
    """Complete evals by name, or the one that is asked for, of the latest step or the one that is asked for; `own`: those that
    the run has played itself. Raises `NotComparable` and `DamagedFile`."""
    at = AT.fullmatch(given) if not Path(given).exists() else None
    path, wanted = (Path(at[1]), int(at[2])) if at is not None else (Path(given), None)
    if not opening.is_run(path):
        raise NotComparable(
            f"{path} is not a run directory: name one, RUN_DIR@STEP, or a folder that telescope eval has written"
        )
    run = RunDirectory(path.absolute())
    runs = [run] if own else [run, *(standalone.run for standalone in find_standalone(run))]
    found = [_Loader(each, row) for each in runs for row in rows(each, "evals") if row["state"] == "complete"]
    steps = sorted({one.row["step"] for one in found})
    if not steps:
        raise NotComparable(f"{path} has no complete eval")
    step = steps[-1] if wanted is None else wanted
    if step not in steps:
        raise NotComparable(f"{path} has no complete eval of step {step}; there are steps {', '.join(map(str, steps))}")
    chosen: dict[str, _Loader] = {}
    for one in found:
        if one.row["step"] != step:
            continue
        other = chosen.get(one.row["eval"])
        if other is not None and other.run != one.run and name in (None, one.row["eval"]):
            remedy = (
                "--own takes the first, and the folder's name the second" if other.run == run else "name one of these folders"
            )
            raise NotComparable(
                f"{path} has several results of {one.row['eval']} at step {step}, in {other.run.path} and in {one.run.path}: "
                f"{remedy}"
            )
        chosen[one.row["eval"]] = one
    return chosen


# ---- comparing


def _compare(first: EvalResult, second: EvalResult, other_sampling: bool) -> dict[str, Any]:
    different = _list_differences(first, second)
    if different and not other_sampling:
        raise NotComparable(
            f"{first.name} was played differently ({'; '.join(different)}): --other-sampling compares all the same, and the "
            "difference is then of models and settings together"
        )
    pairs, by = pair_prompts(first.prompts, second.prompts)
    if not pairs:
        raise NotComparable(f"{first.name}: the two results have no prompt in common")
    if by != TEXT and any(first.setup[name] != second.setup[name] for name in ("environment", "kwargs")):
        raise NotComparable(
            f"{first.name} is of two environments ({'; '.join(different)}) whose prompts have no text in common"
        )
    difference = compare_paired([one.reward for one, _ in pairs], [two.reward for _, two in pairs])
    return {
        "eval": first.name,
        "first": first.where,
        "second": second.where,
        "prompts_first": len(first.prompts),
        "prompts_second": len(second.prompts),
        "paired_by": by,
        "played_differently": different,
        "setup_of_present_settings": [one.where for one in (first, second) if not one.has_setup],
        "reward_first": mean([one.reward for one, _ in pairs]),
        "reward_second": mean([two.reward for _, two in pairs]),
        **{f"difference_{name}" if name != "prompts" else name: value for name, value in asdict(difference).items()},
        **_compare_passes(first, second, pairs),
        "changed": [
            {"index": one.index, "first": one.reward, "second": two.reward, "prompt": one.text}
            for one, two in sorted(pairs, key=lambda pair: -abs(pair[1].reward - pair[0].reward))
            if one.rewards != two.rewards
        ],
    }


def _compare_passes(first: EvalResult, second: EvalResult, pairs: Sequence[tuple[PromptScore, PromptScore]]) -> dict[str, Any]:
    """Of one answer a prompt McNemar's test; of several the paired t test over the shares that passed."""
    ones = first.row["samples"] == second.row["samples"] == 1
    shares = [(one.passed / len(one.rewards), two.passed / len(two.rewards)) for one, two in pairs]
    numbers: dict[str, Any] = {
        "pass_first": mean([one for one, _ in shares]),
        "pass_second": mean([two for _, two in shares]),
    }
    if not ones:
        tested: PairedDifference = compare_paired([one for one, _ in shares], [two for _, two in shares])
        return numbers | {"pass_p": tested.p, "pass_test": "paired t"}
    alone = sum(one > two for one, two in shares), sum(two > one for one, two in shares)
    return numbers | {
        "passed_by_first_alone": alone[0],
        "passed_by_second_alone": alone[1],
        "pass_p": exact_sign_test(*alone),
        "pass_test": "exact sign test",
    }


def _list_differences(first: EvalResult, second: EvalResult) -> list[str]:
    """How the two were played differently, e.g. `temperature 1.0 and 0.5`, as far as both are known."""
    one, two = dict(first.setup), dict(second.setup)
    one["num_samples"], two["num_samples"] = first.row["samples"], second.row["samples"]
    one["pass_above"], two["pass_above"] = first.row["pass_above"], second.row["pass_above"]
    return [f"{name} {one[name]} and {two[name]}" for name in one if name in two and one[name] != two[name]]


def pair_prompts(
    first: Sequence[PromptScore], second: Sequence[PromptScore]
) -> tuple[list[tuple[PromptScore, PromptScore]], str]:
    """The prompts that both have, and by what they are the same: `text`, or, where no text is in common because chat templates
    differ, `place and answer`. A text that stands several times is paired in order. A prompt of which no sample was scored has
    no text: it is paired by its place, where the others stand at the same ones. Where they moved, the prompts that are left are
    paired with those without a text, if there are as many: all of these have the lowest reward, whichever is whose."""
    places: dict[str, list[PromptScore]] = {}
    for two in second:
        places.setdefault(two.text, []).append(two)
    pairs, by = [(one, places[one.text].pop(0)) for one in first if one.text and places.get(one.text)], TEXT
    at = {two.index: two for two in second}
    if not pairs:
        known = [one for one in first if one.index in at and one.answers]
        pairs, by = [(one, at[one.index]) for one in known if one.answers == at[one.index].answers], "place and answer"
    if any(one.index != two.index for one, two in pairs):
        return sorted([*pairs, *_pair_left(first, second, pairs)], key=lambda pair: pair[0].index), by
    unscored = [one for one in first if one.index in at and not (one.text and at[one.index].text)]
    return sorted([*pairs, *((one, at[one.index]) for one in unscored)], key=lambda pair: pair[0].index), by


def _pair_left(
    first: Sequence[PromptScore], second: Sequence[PromptScore], pairs: Sequence[tuple[PromptScore, PromptScore]]
) -> list[tuple[PromptScore, PromptScore]]:
    """Prompts with a text on one side alone, with those without one on the other; none where the numbers do not fit."""
    paired, found = {one.index for one, _ in pairs}, {two.index for _, two in pairs}
    ones = sorted((one for one in first if one.index not in paired), key=lambda one: not one.text)
    twos = sorted((two for two in second if two.index not in found), key=lambda two: bool(two.text))
    fit = len(ones) == len(twos) and sum(bool(one.text) for one in ones) <= sum(not two.text for two in twos)
    return list(zip(ones, twos, strict=True)) if fit else []


# ---- telling


def _describe(found: Mapping[str, Any], changed: int) -> Iterator[str]:
    yield f"{found['eval']}"
    yield f"  A {found['reward_first']:.3f}  {found['first']}"
    yield f"  B {found['reward_second']:.3f}  {found['second']}"
    total = max(found["prompts_first"], found["prompts_second"])
    some = f" of {total}" if found["prompts"] < total else ""
    matched = " by place and answer, as their texts differ" if found["paired_by"] != TEXT else ""
    yield f"  {found['prompts']}{some} prompts are in both{matched}"
    if found["played_differently"]:
        yield f"  played differently: {'; '.join(found['played_differently'])}"
    for where in found["setup_of_present_settings"]:
        yield f"  {where} does not say how it was played: its run's present settings stand for it"
    if found["difference_low"] is None:
        same = found["difference_error"] == 0 and found["difference_mean"] != 0
        spread = ", the same of each prompt: without a spread there is no p" if same else ""
        yield f"  reward B − A {found['difference_mean']:+.4f}{spread}"
    else:
        yield (
            f"  reward B − A {found['difference_mean']:+.4f} ± {found['difference_error']:.4f}, 95 % "
            f"{found['difference_low']:+.4f} … {found['difference_high']:+.4f}, paired t p = {found['difference_p']:.3g}"
        )
    alone = (
        f", {found['passed_by_first_alone']} prompts by A alone, {found['passed_by_second_alone']} by B alone"
        if "passed_by_first_alone" in found
        else ""
    )
    p = "–" if found["pass_p"] is None else f"{found['pass_p']:.3g}"
    yield f"  pass {found['pass_first']:.3f} and {found['pass_second']:.3f}{alone}, {found['pass_test']} p = {p}"
    yield f"  {len(found['changed'])} prompts changed"
    for one in found["changed"][:changed]:
        text = " ".join(one["prompt"].split())
        yield f"    {one['index']:>6}  {one['first']:.3f} → {one['second']:.3f}  {text[-SHOWN:]}"
