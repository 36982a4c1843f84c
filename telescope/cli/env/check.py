"""`python -m telescope env check NAME [setting=value …] [run.override=value …]`: what training would see of an environment.

Composes a run as `telescope.run` would, loads its environment and tokenizer as a worker does, plays some prompts through the
worker's own code, and prints openings, tokens and masks, rewards, metrics, failures, times and warnings. A word without a dot
is a setting of the environment (`num_numbers=4`), one with a dot of the run (`rollout.max_tokens=64`), as is the choice of a
preset (`experiment=wordle`, `model=tiny_turns`).

The policy says each prompt's right answer, or what a file holds (--answers: a JSON text, or a list of texts for a dialogue, on
each line), or is a small model in this process (--model tiny). Exit codes: 0 fine, 1 rollouts failed or prompts differ between
processes, 2 usage.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from telescope.cli.arguments import from_one
from telescope.cli.env.check_policies import (
    CheckPolicy,
    GoldenAnswers,
    LocalModel,
    ScriptBroken,
    Scripted,
    load_model,
    read_script,
)
from telescope.cli.env.check_report import Played, Stated, write_report
from telescope.compose.load import UsageError, load_points, places_for
from telescope.compose.options import GROUPS, Places
from telescope.config.models import ModelNotFound, model_folder
from telescope.config.plugins import ENVIRONMENTS, PluginError, load
from telescope.config.plugins import files as find_names
from telescope.config.run import RunConfig
from telescope.config.secrets import SecretMissing
from telescope.config.words import ConfigError
from telescope.environments.chat import Sampled
from telescope.environments.graders.pool import open_graders
from telescope.environments.template import ChatTemplate
from telescope.records import PromptRef, RolloutOrder, Sampling
from telescope.wire.process import leave
from telescope.workers.loading import EnvironmentBroken, LoadedEnvironment, load_environments, set_up, tear_down
from telescope.workers.play import PlayLimits, play
from telescope.workers.prompt_cache import PromptCache
from telescope.workers.prompt_lengths import leave_out_too_long
from telescope.workers.reward_threads import RewardThreads
from telescope.workers.tokenizer import TokenizerError, load_template

OK, NOT_FINE, USAGE = 0, 1, 2
THREADS = 32
"""As a worker has for synchronous reward functions."""
REFUSALS = (ConfigError, EnvironmentBroken, TokenizerError, ModelNotFound, PluginError, SecretMissing, ScriptBroken)


def main(arguments: Sequence[str]) -> int:
    asked = _make_parser().parse_intermixed_args(list(arguments))
    threads = RewardThreads(THREADS)
    code = _print_result(asked, list(arguments), threads)
    if threads.count_hung(0):  # the interpreter's end would wait for them
        leave(code)
    return code


def _print_result(asked: argparse.Namespace, arguments: list[str], threads: RewardThreads) -> int:
    """Print what is found, or why there is nothing; the exit code."""
    try:
        config = _compose(asked)
        if asked.digest:
            sys.stdout.write(load_environments(config)[asked.name].card.digest + "\n")
            return OK
        lines, fine = asyncio.run(_check(config, asked, arguments, threads))
    except UsageError as error:
        sys.stderr.write(f"telescope env check: {error}\n")
        return USAGE
    except (*REFUSALS, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return NOT_FINE
    sys.stdout.write("\n".join(lines) + "\n")
    return OK if fine else NOT_FINE


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="telescope env check",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", help="the environment, e.g. countdown")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="settings of it, or of the run")
    parser.add_argument("-cd", "--config-dir", help="a folder with your own plug-ins and presets")
    answers = parser.add_mutually_exclusive_group()
    answers.add_argument("--answers", type=Path, metavar="FILE", help="what the policy says, as JSON lines")
    answers.add_argument("--model", metavar="NAME", help="let this model answer, in this process (tiny)")
    parser.add_argument("--prompts", type=from_one, default=4, metavar="N", help="how many train prompts, from the first (4)")
    parser.add_argument("--samples", type=from_one, default=2, metavar="N", help="how often each is played (2)")
    parser.add_argument("--no-second-process", action="store_true", help="do not compare the prompts with another process's")
    parser.add_argument("--digest", action="store_true", help=argparse.SUPPRESS)  # what that other process does
    return parser


def _compose(asked: argparse.Namespace) -> RunConfig:
    """The run that would be made. Raises `ConfigError`, `UsageError` or `PluginError`."""
    places = places_for(asked.config_dir)
    kind = load(ENVIRONMENTS, _find_class(asked.name, places), places.plugin_path)  # an unknown name is told first
    overrides = [f"env={asked.name}", *([f"model.name={asked.model}"] if asked.model else ())]
    for override in asked.overrides:
        key, equals, _ = override.partition("=")
        if not equals:
            raise UsageError(f"{override!r} is not key=value")
        is_run = "." in key or "/" in key or (key in GROUPS and key not in kind.model_fields)
        overrides.append(override if is_run else f"environments.{asked.name}.kwargs.{override}")
    (point,) = load_points(overrides, places, os.environ)
    if point.config is None or point.problems:
        raise ConfigError(point.problems)
    return point.config


def _find_class(name: str, places: Places) -> str:
    """The registered name behind the environment of a preset; any other name stands for itself. Raises `ConfigError`."""
    if name in find_names(ENVIRONMENTS, places.plugin_path) or name not in places.presets("env"):
        return name
    (point,) = load_points([f"env={name}"], places, os.environ)
    if point.config is None or name not in point.config.environments:
        raise ConfigError(point.problems)
    return point.config.environments[name].name


async def _check(
    config: RunConfig, asked: argparse.Namespace, arguments: list[str], threads: RewardThreads
) -> tuple[list[str], bool]:
    asyncio.get_running_loop().set_default_executor(threads)
    template = load_template(config.model, model_folder(config.model.name))
    whole = load_environments(config)[asked.name]
    limits = PlayLimits.from_config(config)
    longest = limits.of(whole).max_prompt_tokens
    loaded = leave_out_too_long(whole, template, longest, config.cluster.placement_timeout_s)
    policy = _make_policy(config, asked, template, loaded)
    played = await _play_all(
        loaded, template, limits, policy, min(asked.prompts, loaded.card.split_sizes["train"]), asked.samples
    )
    same = (
        None if asked.no_second_process else _compare_with_second_process(arguments, whole, config.cluster.placement_timeout_s)
    )
    stated = Stated(
        label=asked.name,
        sizes=loaded.card.split_sizes,
        too_long=loaded.card.too_long,
        longest=longest,
        max_tokens_setting=loaded.max_tokens_setting,
        reward_range=config.reward_range(asked.name),
        metrics_ranges=loaded.environment.metrics_ranges,
        same_prompts=same,
        unwritable=sorted(policy.unwritable) if isinstance(policy, Scripted) else (),
        oddities=template.find_oddities(),
        right=policy.find if isinstance(policy, GoldenAnswers) else None,
        answers_of=_describe_policy(asked),
    )
    return write_report(stated, played, template)


def _describe_policy(asked: argparse.Namespace) -> str:
    """Who answers, for what is said of the rewards."""
    if asked.model:
        return f"they are of {asked.model}'s own answers"
    if asked.answers:
        return f"the answers of {asked.answers} were played, not those of a policy"
    return Stated.answers_of


def _make_policy(
    config: RunConfig, asked: argparse.Namespace, template: ChatTemplate, loaded: LoadedEnvironment
) -> Scripted | LocalModel:
    if asked.model:
        return load_model(model_folder(config.model.name), tuple(template.end_texts))
    if asked.answers:
        return Scripted(template, read_script(asked.answers))
    return GoldenAnswers(template, loaded.environment, loaded.prompts)


async def _play_all(
    loaded: LoadedEnvironment, template: ChatTemplate, limits: PlayLimits, policy: CheckPolicy, prompts: int, samples: int
) -> list[Played]:
    """All rollouts side by side, between the environment's own beginning and end; twice where grader processes had to start."""
    openings = PromptCache(template)
    orders = [
        RolloutOrder(
            index * samples + sample, index, sample, 0, PromptRef(loaded.label, "train", index), index * samples + sample
        )
        for index in range(prompts)
        for sample in range(samples)
    ]

    async def play_them() -> list[Played]:
        return list(await asyncio.gather(*(_play_one(order, loaded, openings, limits, policy) for order in orders)))

    async with open_graders() as graders:  # one for all, as in a worker
        await set_up(loaded)
        try:
            played = await play_them()
            return await play_them() if graders.started else played  # where their start was a part of the times
        finally:
            openings.close()
            await tear_down(loaded)


async def _play_one(
    order: RolloutOrder, loaded: LoadedEnvironment, openings: PromptCache, limits: PlayLimits, policy: CheckPolicy
) -> Played:
    policy_s = 0.0

    async def ask(order: RolloutOrder, turn: int, ids: np.ndarray, sampling: Sampling) -> Sampled:
        nonlocal policy_s
        begun = time.monotonic()
        try:
            return await policy.answer(order, turn, ids, sampling)
        finally:
            policy_s += time.monotonic() - begun

    begun = time.monotonic()
    body, arrays = await play(order, loaded, openings, limits, ask)
    return Played(order, body, arrays, time.monotonic() - begun, policy_s)


def _compare_with_second_process(arguments: list[str], here: LoadedEnvironment, limit_s: float) -> bool:
    """Whether another process, in which `hash` gives other numbers, has the same prompts. Raises `EnvironmentBroken`."""
    # The digest reads 256 prompts of a long split; that is what workers compare too.
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    command = [sys.executable, "-m", "telescope", "env", "check", *arguments, "--digest"]
    try:
        said = subprocess.run(
            command, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise EnvironmentBroken(f"environments.{here.label}: a second process did not load it in {limit_s:g} s") from error
    if said.returncode != OK:
        raise EnvironmentBroken(f"environments.{here.label}: a second process can't load it: {said.stderr.strip()[-2000:]}")
    return said.stdout.split()[-1] == here.card.digest
