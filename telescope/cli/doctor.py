"""`python -m telescope doctor logprobs|weights [overrides]`: do trainer and server agree?

logprobs, on the probabilities of the same tokens: starts the configured engine, lets it answer prompts of the configured
environments, ends it, builds the configured backend and asks it for the log-probs of the same tokens at the same temperature.
One after the other, so that one GPU is enough; `--temperature 1 --temperature 0.7` asks one engine at both. weights, on the
weights after an update: see doctor_weights.py.
Exit codes: 0 they agree, 1 they don't or something failed, 2 usage.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from telescope.cli.arguments import from_one
from telescope.cli.command_line import parse_all

if TYPE_CHECKING:
    from telescope.backends.base import TrainShard
    from telescope.config.run import RunConfig
    from telescope.config.sections import EnvironmentEntry
    from telescope.inference.engine import Engine, Generated

log = logging.getLogger(__name__)

AGREE, DISAGREE, USAGE = 0, 1, 2
SAMPLES = 32


@dataclass(frozen=True)
class LogprobParity:
    """Trainer minus server over all sampled tokens, in nats."""

    tokens: int
    mean: float
    largest: float
    ratio: float
    """Mean importance ratio exp(trainer - server); 1 where both agree."""
    limit: float

    @property
    def agree(self) -> bool:
        return self.mean <= self.limit

    def report(self, config: RunConfig) -> str:
        verdict = "agree" if self.agree else "DISAGREE: training would be off-policy from the first step"
        return (
            f"log-probs of {self.tokens} tokens of {config.model.name} at temperature {_name_temperatures(config)}\n"
            f"  mean |trainer - server|  {self.mean:.2e} (at most {self.limit:g})\n"
            f"  max  |trainer - server|  {self.largest:.2e}\n"
            f"  mean importance ratio    {self.ratio:.6f}\n"
            f"  trainer and server {verdict}\n"
        )


def main(arguments: Sequence[str]) -> int:
    """One command line; gives the exit code."""
    parser = argparse.ArgumentParser(prog="telescope doctor", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("check", choices=["logprobs", "weights"])
    parser.add_argument("--samples", type=from_one, default=SAMPLES, help="answers to compare (default %(default)s)")
    parser.add_argument("-cd", "--config-dir", help="a folder of your own presets and plug-ins")
    parser.add_argument(
        *("-t", "--temperature"),
        type=float,
        action="append",
        default=[],
        help="instead of the run's and of any environment's; logprobs takes several",
    )
    parser.add_argument("overrides", nargs="*", help="as for telescope.run, e.g. model=qwen3-0.6b rollout.temperature=0.7")
    asked = parse_all(parser, arguments)
    from telescope.compose.load import UsageError, load_points, places_for
    from telescope.config.words import ConfigError

    at = [[*asked.overrides, f"rollout.temperature={each:g}"] for each in asked.temperature] or [asked.overrides]
    configs: list[RunConfig] = []
    for overrides in at:
        try:
            (point,) = load_points(overrides, places_for(asked.config_dir), os.environ)
        except UsageError as error:
            sys.stderr.write(f"telescope doctor: {error}\n")
            return USAGE
        if point.config is None:
            sys.stderr.write(f"{ConfigError(point.problems)}\n")
            return DISAGREE
        configs.append(_at_one_temperature(point.config) if asked.temperature else point.config)
    return examine(asked.check, configs, asked.samples)


def _at_one_temperature(config: RunConfig) -> RunConfig:
    """Without temperatures of environments."""
    entries = {label: entry.model_copy(update={"temperature": None}) for label, entry in config.environments.items()}
    return config.model_copy(update={"environments": entries})


def _name_temperatures(config: RunConfig) -> str:
    own = {label: entry.temperature for label, entry in config.environments.items() if entry.temperature is not None}
    return ", ".join([f"{config.rollout.temperature:g}", *(f"{label} at {each:g}" for label, each in own.items())])


def examine(check: str, configs: Sequence[RunConfig], samples: int) -> int:
    """`configs` differ in the temperature alone. Gives the exit code."""
    if configs[0].inference.engine == "fake" or configs[0].backend_name == "fake":
        sys.stderr.write("telescope doctor: a fake engine or backend has no model; use inference=vllm and a real backend\n")
        return USAGE
    if check == "weights" and len(configs) > 1:
        sys.stderr.write("telescope doctor: weights are the same at every temperature: give --temperature once or not\n")
        return USAGE
    try:
        return weights(configs[0], samples) if check == "weights" else logprobs(configs, samples)
    except explained() as error:
        log.debug("the cause", exc_info=error)
        sys.stderr.write(f"telescope doctor: {error}\n")
        return DISAGREE


def explained() -> tuple[type[BaseException], ...]:
    """Errors of engine, trainer and plan whose text is all that there is to say. Imports torch."""
    from telescope.backends.common.models import UnfitModel
    from telescope.cli.doctor_weights import PairFailed
    from telescope.inference import main as server
    from telescope.inference.engine import RequestRefused, WeightsRefused
    from telescope.trainer import main as trainer

    ours = (PairFailed, RequestRefused, WeightsRefused, UnfitModel)
    return (*server.KNOWN.errors, *server.KNOWN.gone, *trainer.KNOWN.errors, *ours)


def logprobs(configs: Sequence[RunConfig], samples: int) -> int:
    """Both sides' log-probs of the same tokens, at each temperature. Gives the exit code."""
    found = check_logprobs(configs, samples)
    sys.stdout.write("".join(parity.report(config) for parity, config in zip(found, configs, strict=True)))
    return AGREE if all(parity.agree for parity in found) else DISAGREE


def weights(config: RunConfig, samples: int) -> int:
    """A trained version's way to a server's parameters. Gives the exit code."""
    from telescope.cli.doctor_weights import check_weights

    if config.model.lora is not None:
        sys.stderr.write("telescope doctor: with model.lora only adapters travel; use `doctor weights` without it\n")
        return USAGE

    async def shard(engine: Engine, pair: RunConfig) -> TrainShard:
        prompts = prompts_of(pair, max(samples, 2 * pair.cluster.trainer_num_workers))
        return as_shard(prompts, await sampled(engine, prompts, pair), _temperatures(pair, len(prompts)))

    found = check_weights(config, shard)
    sys.stdout.write(found.report())
    return AGREE if found.agree else DISAGREE


def check_logprobs(configs: Sequence[RunConfig], samples: int) -> list[LogprobParity]:
    """Sample, then score the same tokens, at the temperature of each: one engine answers for all. Raises what engine and
    backend raise."""
    from telescope._launch.this_host import inspect_this_host

    config = configs[0]
    gpus = inspect_this_host().gpus
    if gpus and config.cluster.device != "cpu" and not os.environ.get("CUDA_VISIBLE_DEVICES"):
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[0]
    from telescope.config.precision import parity_limit
    from telescope.inference.main import build_engine, device_of

    device = device_of(config, os.environ)
    engine = build_engine(config, secrets.token_hex(8), device)  # sets vLLM's environment: before anything imports torch
    prompts = prompts_of(config, samples)
    answers = asyncio.run(answer(engine, prompts, configs))
    shards = [as_shard(prompts, got, _temperatures(each, len(prompts))) for got, each in zip(answers, configs, strict=True)]
    scorer = "cuda:0" if device == "gpu" else "cpu"
    return [
        compare(shard, score(shard, each, scorer), parity_limit(each, device))
        for shard, each in zip(shards, configs, strict=True)
    ]


def prompts_of(config: RunConfig, samples: int) -> list[np.ndarray]:
    """Opening prompts [T] int32 of the train splits, the environments in turn, as a worker would send them."""
    from telescope.config.models import model_folder
    from telescope.workers.tokenizer import load_template

    template = load_template(config.model, model_folder(config.model.name))
    splits = [config.environment(name).prompts("train") for name in config.environments]
    chosen = (splits[index % len(splits)][index // len(splits)] for index in range(samples))
    return [template.opening(prompt.turns).ids for prompt in chosen]


async def answer(engine: Engine, prompts: Sequence[np.ndarray], configs: Sequence[RunConfig]) -> list[list[Generated]]:
    """As each of `configs` samples, by an engine that lives for this alone."""
    try:
        await engine.start()
        return [await sampled(engine, prompts, config) for config in configs]
    finally:
        await engine.close()


async def sampled(engine: Engine, prompts: Sequence[np.ndarray], config: RunConfig) -> list[Generated]:
    from telescope.records import Sampling

    temperatures = _temperatures(config, len(prompts))

    def sampling(index: int) -> Sampling:
        rollout, kept = config.rollout, config.rollout.support
        most = min(_entry_of(config, index).max_tokens or rollout.max_tokens, rollout.max_tokens)
        seed = config.seed + index
        return Sampling(temperatures[index], most, seed, kept.top_k, kept.top_p, kept.min_p, rollout.stop)

    asked = (engine.generate(f"doctor-{i}", prompt, sampling(i), 0) for i, prompt in enumerate(prompts))
    return list(await asyncio.gather(*asked))


def _entry_of(config: RunConfig, index: int) -> EnvironmentEntry:
    """That of a prompt of `prompts_of`."""
    entries = list(config.environments.values())
    return entries[index % len(entries)]


def _temperatures(config: RunConfig, prompts: int) -> list[float]:
    own = (_entry_of(config, index).temperature for index in range(prompts))
    return [config.rollout.temperature if each is None else each for each in own]


def as_shard(prompts: Sequence[np.ndarray], answers: Sequence[Generated], temperatures: Sequence[float]) -> TrainShard:
    """Prompts and answers as a step's trajectories; advantages are 0, for nothing is trained."""
    from telescope.backends.base import TrainShard
    from telescope.records import Denominators, TrainItem

    pairs = list(zip(prompts, answers, strict=True))
    items = tuple(
        TrainItem(
            *(i, i, i),
            length=len(prompt) + len(got.ids),
            advantage=0.0,
            sequence_tokens=len(got.ids),
            temperature=temperatures[i],
        )
        for i, (prompt, got) in enumerate(pairs)
    )
    mask = np.concatenate([np.repeat([0, 1], [len(prompt), len(got.ids)]) for prompt, got in pairs]).astype(np.uint8)
    return TrainShard(
        step=1,
        items=items,
        ids=np.concatenate([part for prompt, got in pairs for part in (prompt, got.ids)]).astype(np.int32),
        mask=mask,
        logprobs=_spread(mask, np.nan, [got.logprobs for got in answers], np.float32),
        versions=_spread(mask, -1, [got.versions for got in answers], np.int32),
        denominators=(Denominators(int(mask.sum()), len(items), len(items)),),
    )


def score(shard: TrainShard, config: RunConfig, device: str) -> np.ndarray:
    """[T] float32: the trainer's log-probs of the shard's sampled tokens."""
    from telescope.backends.base import World
    from telescope.trainer.main import job

    backend = config.backend.alone().build(job(config, World(rank=0, size=1, device=device), lambda doing: None))
    try:
        return backend.logprobs(shard)
    finally:
        backend.close()


def compare(shard: TrainShard, trainer: np.ndarray, limit: float) -> LogprobParity:
    sampled = shard.mask.astype(bool)
    difference = (trainer - shard.logprobs)[sampled].astype(np.float64)
    if not np.isfinite(difference).all():
        return LogprobParity(int(sampled.sum()), float("inf"), float("inf"), float("nan"), limit)
    apart = np.abs(difference)
    return LogprobParity(int(sampled.sum()), float(apart.mean()), float(apart.max()), float(np.exp(difference).mean()), limit)


def _spread(mask: np.ndarray, fill: float, values: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    spread: np.ndarray = np.full(len(mask), fill, dtype)
    spread[mask.astype(bool)] = np.concatenate(values)
    return spread
