"""Settings of evals: what all share (`eval`), what one has of its own (`evals.<name>`), and what follows from both.

An eval is on where `evals` names it, and with `eval.every` alone each environment that is trained on is one. Pure data, with
the sentences about what makes no sense; environments are looked at elsewhere (conflicts.py, run.py).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from telescope.config.sections import EnvironmentEntry, InferenceSettings, ModelSettings, RolloutSettings
from telescope.settings import Settings

SHARED = (
    *("every", "num_samples", "num_prompts", "pass_at_k", "pass_above", "temperature", "top_p", "max_tokens"),
    *("baseline", "final"),
)
"""Settings of `eval` that `evals.<name>` may have of its own."""


FROM_SERVERS = 3
"""A run of so many inference servers holds one for its evals where `num_servers` is auto."""
LOWEST_TEMPERATURE = 0.01
"""Of those that vLLM keeps apart from each other, and from 0."""


class EvalSettings(Settings):
    every: int | None = Field(default=None, ge=1, le=1_000_000_000)
    """Steps between two evals, after each of which the latest weights are evaluated. Without `evals`, null means none, and a
    number evaluates each environment that is trained on; of an eval in `evals`, null plays it before and after training."""
    num_samples: int = Field(default=1, ge=1, le=100_000)
    """Answers to each prompt (n)."""
    num_prompts: int | None = Field(default=None, ge=1, le=1_000_000_000)
    """Prompts: the first so many of the environment's eval split, the same ones each time; null: all of them."""
    pass_at_k: tuple[int, ...] = (1,)
    """The k of pass@k and pass^k, none above num_samples."""
    pass_above: float = Field(default=0.5, allow_inf_nan=False)
    """An answer passes with a reward of the environment above this."""
    temperature: float | None = Field(default=None, ge=0, le=2)
    """Answers are sampled at it; 0: the likeliest token each time; null: as in training."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Sample from the likeliest tokens with this share of the probability; null: as in training."""
    max_tokens: int | None = Field(default=None, ge=1, le=100_000_000)
    """Sampled tokens of one turn, at most; null: as in training."""
    baseline: bool = True
    """Evaluate before the first step too."""
    final: bool = True
    """Evaluate after the last step too."""
    num_servers: Literal["auto"] | Annotated[int, Field(ge=0, le=1_000_000)] = "auto"
    """Servers that take nothing of training and keep their weights while evals between the first step and the last are played
    on them; 0: evals play beside training on all servers; auto: 1 where there are three servers or more, else 0."""
    stop_after: int | None = Field(default=None, ge=1, le=1_000_000_000)
    """End the run, saved and with its final evals, after so many evals in a row without a gain: of checkpoint.keep_best where
    that is set, else in the reward of the first eval; null: train all steps."""


class EvalEntry(Settings):
    """One eval. What is null is as `eval` has it."""

    environment: str | None = Field(default=None, min_length=1)
    """What it plays: the name of an entry of `environments`, else an environment of its own; null: the eval's name."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Settings of an environment of its own; none for an entry of `environments`, which has them there."""
    every: int | None = Field(default=None, ge=1, le=1_000_000_000)
    """Steps between two of it."""
    num_samples: int | None = Field(default=None, ge=1, le=100_000)
    """Answers to each prompt (n)."""
    num_prompts: int | None = Field(default=None, ge=1, le=1_000_000_000)
    """Prompts: the first so many of the eval split."""
    pass_at_k: tuple[int, ...] | None = None
    """The k of pass@k and pass^k."""
    pass_above: float | None = Field(default=None, allow_inf_nan=False)
    """An answer passes with a reward above this."""
    temperature: float | None = Field(default=None, ge=0, le=2)
    """Answers are sampled at it; 0: the likeliest token each time."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Sample from the likeliest tokens with this share of the probability."""
    max_tokens: int | None = Field(default=None, ge=1, le=100_000_000)
    """Sampled tokens of one turn, at most."""
    baseline: bool | None = None
    """Evaluate before the first step too."""
    final: bool | None = None
    """Evaluate after the last step too."""


@dataclass(frozen=True)
class Eval:
    """One eval of a run, with nothing left to look up. `label`: of the environment that workers load for it."""

    name: str
    label: str
    every: int | None
    num_samples: int
    num_prompts: int | None
    pass_at_k: tuple[int, ...]
    pass_above: float
    temperature: float | None
    top_p: float | None
    max_tokens: int | None
    baseline: bool
    final: bool

    def is_due_at_the_end(self, number_of_steps: int) -> bool:
        """Whether it plays after the last of so many steps."""
        return self.final or (self.every is not None and number_of_steps % self.every == 0)

    def count_before(self, number_of_steps: int) -> int:
        """How often it is due before the last of so many steps."""
        return self.baseline + (0 if self.every is None else (number_of_steps - 1) // self.every)

    def is_due_between(self, number_of_steps: int) -> bool:
        """Whether it plays while such a run trains: neither before the first step alone nor after the last."""
        return self.every is not None and self.every < number_of_steps

    def is_due(self, number_of_steps: int) -> bool:
        """Whether it is ever due in a run of so many steps."""
        return self.baseline or self.final or (self.every is not None and self.every <= number_of_steps)


def is_of_its_own(name: str, entry: EvalEntry, environments: Mapping[str, EnvironmentEntry]) -> bool:
    """Whether the eval plays an environment that is not trained on."""
    return bool(entry.kwargs) or (entry.environment or name) not in environments


def make_evals(
    shared: EvalSettings, entries: Mapping[str, EvalEntry], environments: Mapping[str, EnvironmentEntry]
) -> tuple[Eval, ...]:
    """The evals of a run, in the order in which they play."""
    if not entries and shared.every is not None:
        entries = {label: EvalEntry() for label in environments}
    made = []
    for name, entry in entries.items():
        chosen = {field: getattr(shared if getattr(entry, field) is None else entry, field) for field in SHARED}
        own = is_of_its_own(name, entry, environments)
        made.append(Eval(name, name if own else entry.environment or name, **chosen))
    return tuple(made)


def find_server_mistakes(
    shared: EvalSettings, evals: tuple[Eval, ...], *, servers: int, number_of_steps: int, sleeps: bool
) -> Iterator[tuple[tuple[str, ...], str]]:
    """The same of `eval.num_servers`. `sleeps`: servers sleep while the trainer trains."""
    asked = shared.num_servers
    if asked == "auto" or asked == 0:
        return
    if asked >= servers:
        yield (
            ("eval.num_servers", "cluster.inference_num_workers"),
            f"eval.num_servers={asked} leaves training none of the run's {servers} inference server{'s' * (servers != 1)}: "
            f"set eval.num_servers={servers - 1 if servers > 1 else 0}, or raise cluster.inference_num_workers",
        )
    if sleeps:
        yield (
            ("eval.num_servers", "inference.sleep_while_training"),
            f"eval.num_servers={asked} is not possible with inference.sleep_while_training, where all servers sleep while the "
            "trainer trains: set eval.num_servers=0",
        )
    if not any(one.is_due_between(number_of_steps) for one in evals):
        yield (
            ("eval.num_servers",),
            f"eval.num_servers={asked} does nothing: no eval is due between the first step and the last of {number_of_steps}, "
            "and the others play on all servers; set eval.every, or leave it out",
        )


def digest_sampling(one: Eval, entry: EnvironmentEntry, rollout: RolloutSettings, max_model_len: int) -> str:
    """16 hexadecimal digits over `list_sampling`."""
    return _digest(list_sampling(one, entry, rollout, max_model_len))


def list_sampling(one: Eval, entry: EnvironmentEntry, rollout: RolloutSettings, max_model_len: int) -> dict[str, Any]:
    """All that an eval's answers are sampled with, wherever it is set. `entry`: of the environment that it plays."""
    support = rollout.support
    return {
        "temperature": _first(one.temperature, entry.temperature, rollout.temperature),
        "max_tokens": _first(one.max_tokens, entry.max_tokens, rollout.max_tokens),
        "top_p": _first(one.top_p, support.top_p),
        "top_k": support.top_k,
        "min_p": support.min_p,
        "stop": rollout.stop,
        "max_model_len": max_model_len,
    }


def list_setup(
    one: Eval, entry: EnvironmentEntry, rollout: RolloutSettings, inference: InferenceSettings, model: ModelSettings
) -> dict[str, Any]:
    """What an eval's row says of how it was played: two results are of one kind where these are equal. Plain JSON; of what may
    be long, 16 hexadecimal digits. `entry`: of the environment that it plays. The run's seed is not in it: it is noise of the
    answers, as two runs to be compared have. Of a server of somebody else's, what it does not tell is left out."""
    setup = list_sampling(one, entry, rollout, inference.max_model_len)
    setup = {"environment": entry.name, "kwargs": _digest(entry.kwargs), **setup, "stop": list(rollout.stop)}
    if inference.remote is not None:
        del setup["max_model_len"]
        return setup
    template = None if model.chat_template is None else _digest(model.chat_template)
    return {**setup, "dtype": inference.dtype, "chat_template": template, "enable_thinking": model.enable_thinking}


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=8).hexdigest()


def _first(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)


def make_own_environments(
    entries: Mapping[str, EvalEntry], environments: Mapping[str, EnvironmentEntry]
) -> dict[str, EnvironmentEntry]:
    """The environments that evals alone play, by the eval's name."""
    return {
        name: EnvironmentEntry(name=entry.environment or name, kwargs=entry.kwargs)
        for name, entry in entries.items()
        if is_of_its_own(name, entry, environments)
    }


def find_mistakes(
    shared: EvalSettings,
    entries: Mapping[str, EvalEntry],
    environments: Mapping[str, EnvironmentEntry],
    *,
    number_of_steps: int | None,
    max_model_len: int,
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Settings of evals that do nothing or can't be, each with the paths of the settings in it. `number_of_steps`: None where
    each eval is played once, whatever says when it is due."""
    evals = make_evals(shared, entries, environments)
    if not evals:
        for name in (name for name in SHARED if getattr(shared, name) != EvalSettings.model_fields[name].default):
            yield (f"eval.{name}",), f"eval.{name} does nothing without an eval: set eval.every, or leave it out"
    for name in SHARED:
        given = getattr(shared, name) != EvalSettings.model_fields[name].default
        if given and entries and all(getattr(entry, name) is not None for entry in entries.values()):
            yield (f"eval.{name}",), f"eval.{name} does nothing: each of `evals` sets its own {name}; leave it out"
    for one in evals:
        entry = entries.get(one.name, EvalEntry())

        def place(field: str, name: str = one.name, entry: EvalEntry = entry) -> str:
            return f"eval.{field}" if getattr(entry, field) is None else f"evals.{name}.{field}"

        if one.name in environments and one.name == one.label and is_of_its_own(one.name, entry, environments):
            yield (
                (f"evals.{one.name}.kwargs",),
                f"evals.{one.name}.kwargs make an environment of the eval's own, and environments.{one.name} has that name "
                "already: give the eval another name, with "
                f"environment={entry.environment or environments[one.name].name}, or leave its kwargs out",
            )
        if not one.pass_at_k or min(one.pass_at_k) < 1 or len(set(one.pass_at_k)) < len(one.pass_at_k):
            yield (
                (place("pass_at_k"),),
                f"{place('pass_at_k')}={list(one.pass_at_k)} must be different whole numbers from 1 on, e.g. [1]",
            )
        elif max(one.pass_at_k) > one.num_samples:
            most = max(one.pass_at_k)
            yield (
                (place("pass_at_k"), place("num_samples")),
                f"{place('pass_at_k')}={list(one.pass_at_k)} asks for k={most} of the eval {one.name}, which has "
                f"{place('num_samples')}={one.num_samples} answers to a prompt: raise {place('num_samples')} to {most}, or "
                "leave that k out",
            )
        if one.temperature is not None and 0 < one.temperature < LOWEST_TEMPERATURE:
            yield (
                (place("temperature"),),
                f"{place('temperature')}={one.temperature:g} is below {LOWEST_TEMPERATURE:g}, at which vLLM samples what is "
                "above 0 and below it: set 0, which takes the likeliest token each time, or that",
            )
        if one.temperature == 0 and one.num_samples > 1:
            yield (
                (place("temperature"), place("num_samples")),
                f"{place('temperature')}={one.temperature:g} takes the likeliest token each time, so the "
                f"{place('num_samples')}={one.num_samples} answers to a prompt of the eval {one.name} are one: set "
                f"{place('num_samples')}=1, or a temperature above 0",
            )
        if number_of_steps is not None and not one.is_due(number_of_steps):
            when = f"{place('every')} is null" if one.every is None else f"{place('every')}={one.every}"
            yield (
                (place("every"), place("baseline"), place("final"), "number_of_steps"),
                f"the eval {one.name} never plays: {when}, {place('baseline')} and {place('final')} are false, and the run has "
                f"{number_of_steps} steps; set {place('every')}, or leave the eval out",
            )
        if one.max_tokens is not None and one.max_tokens >= max_model_len:
            yield (
                (place("max_tokens"), "inference.max_model_len"),
                f"{place('max_tokens')}={one.max_tokens} must be below inference.max_model_len={max_model_len}, which holds "
                f"the prompt too: lower {place('max_tokens')}, or raise inference.max_model_len",
            )
