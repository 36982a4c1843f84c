"""Shipped experiments play and trains two steps with the tiny model on the CPU, and say what it can learn from them.

The preset is composed as a user composes it, its environment loaded as a worker loads it, its rollouts played and recorded as a
worker does it, and the FSDP trainer trains. Only the server is another: transformers' model draws the tokens. Data sets are
local copies of made-up questions. Both steps are as a run without `discard_group_zero_advantage` has them: with the preset's
algorithm's own advantages of the rewards that there were. A tiny model scores 0 nearly everywhere, and then these are 0: such a
step must have no gradient, and must leave every weight as it was; any other step must move them. The optimiser is plain SGD, as
a momentum left by another experiment would move weights by itself. That the tokens of every experiment can be trained is shown
beside its steps: the same tokens with advantages of 1 and -1 in turn, which no run would give them, have a gradient.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from telescope.algorithms.grpo import GRPO
from telescope.backends.base import Backend, Job, TrainShard, World
from telescope.backends.fsdp import FSDP
from telescope.config.models import model_source
from telescope.config.run import RunConfig
from telescope.config.sections import ModelSettings, TrainerSettings
from telescope.environments.chat import Sampled
from telescope.environments.graders.pool import open_graders
from telescope.environments.tasks.tau.data import find_folder
from telescope.environments.template import ChatTemplate
from telescope.records import PromptRef, RolloutOrder, Sampling, Trajectory
from telescope.wire.messages import RolloutResult
from telescope.workers.loading import LoadedEnvironment, load_environments
from telescope.workers.play import PlayLimits, play
from telescope.workers.prompt_cache import PromptCache
from telescope.workers.prompt_lengths import leave_out_too_long
from tests.config.conftest import compose_one, sentences
from tests.environments.datasets_at_home import write_all
from tests.learning.loop import shard

EXPERIMENTS = (
    *("gsm8k", "hendrycks_math", "dapo_math", "deepscaler", "math500", "aime_2024", "aime_2025", "gpqa_diamond"),
    *(
        "hendrycks_math_python",
        "hendrycks_math_evals",
        "reasoning_gym",
        "wordle",
        "countdown",
        "reverse_letters",
        "code_generation",
        "i3_code",
        "guess_letter",
        "letter_agent",
        "look_up",
        "smollm2_countdown",
        "qwen_countdown",
        "textarena",
        "tau_retail",
    ),
)
SLOW = ("tau_retail",)  # a large database to read; the fast lane has a whole run of it (tests/run/test_tool_runs.py)
ELSEWHERE = ("fake", "textworld", "verifiers")
"""No task; a package in a Python environment of its own (tests/run)."""
STEPS, PROMPTS, GROUP_SIZE, MAX_TOKENS = 2, 2, 2, 4


class TinyServer:
    def __init__(self) -> None:
        source = model_source("tiny")
        self.tokenizer = AutoTokenizer.from_pretrained(source)
        self.model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
        self.version = 0

    async def ask(self, order: RolloutOrder, turn: int, ids: np.ndarray, sampling: Sampling) -> Sampled:
        return self._draw(ids, sampling)

    @torch.inference_mode()
    def _draw(self, ids: np.ndarray, sampling: Sampling) -> Sampled:
        random = torch.Generator().manual_seed(sampling.seed)
        fed, cache, tokens, logprobs = torch.from_numpy(ids.astype(np.int64))[None], None, [], []
        while len(tokens) < sampling.max_tokens and self.tokenizer.eos_token_id not in tokens:
            out = self.model(input_ids=fed, past_key_values=cache, use_cache=True)
            distribution = (out.logits[0, -1] / sampling.temperature).log_softmax(-1)
            fed, cache = distribution.exp().multinomial(1, generator=random)[None], out.past_key_values
            tokens.append(int(fed))
            logprobs.append(float(distribution[tokens[-1]]))
        reason = "stop" if tokens[-1] == self.tokenizer.eos_token_id else "length"
        versions = np.full(len(tokens), self.version, np.int32)
        return Sampled(np.array(tokens, np.int32), np.array(logprobs, np.float32), versions, reason)


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_all(tmp_path_factory.mktemp("copies"))


@pytest.fixture(scope="module")
def server() -> TinyServer:
    return TinyServer()


@pytest.fixture(scope="module")
def backend() -> Iterator[Backend]:
    """One for all experiments: they differ in nothing that it is built from."""
    job = Job(
        algorithm=GRPO(),
        model=ModelSettings(name="tiny"),
        trainer=TrainerSettings(learning_rate=1e-4, seq_len=8192),
        number_of_steps=(STEPS + 1) * len(EXPERIMENTS),
        temperature=1.0,
        max_tokens=MAX_TOKENS,
        seed=0,
        world=World(rank=0, size=1, device="cpu"),
    )
    built = FSDP(optimizer="sgd", mixed_precision_dtype=None, gradient_checkpointing=False).build(job)
    yield built
    built.close()


def short_tau(folder: Path) -> list[str]:
    """Settings of `tau` with its package's own tasks and database, under a policy and a tool prompt short enough for `tiny`."""
    shutil.copytree(find_folder("retail", ""), folder / "retail")
    (folder / "retail" / "policy.txt").write_text("Serve the customer.")
    settings = {"data": str(folder), "tool_prompt": "none", "max_turns": 3}
    return [f"+environments.tau.kwargs.{name}={value}" for name, value in settings.items()]


def composed(experiment: str, copies: dict[str, Path]) -> RunConfig:
    environment = experiment.removesuffix("_python").removesuffix("_evals")
    copy = copies.get(environment)
    data = [] if copy is None else [f"+environments.{environment}.kwargs.data_dir={copy}"]
    held_out = [f"+environments.{experiment}.kwargs.held_out=2"] if experiment in ("dapo_math", "deepscaler", "i3_code") else []
    more = short_tau(copies["gsm8k"].parent / "tau") if experiment == "tau_retail" else []
    more += [f"+evals.math500.kwargs.data_dir={copies['math500']}"] if experiment == "hendrycks_math_evals" else []
    point = compose_one(f"experiment={experiment}", "model=tiny", f"number_of_steps={STEPS}", *data, *held_out, *more)
    assert point.config is not None, sentences(point)
    return point.config


def advantages_of(config: RunConfig, rewards: list[float]) -> np.ndarray:
    groups = np.repeat(np.arange(PROMPTS), GROUP_SIZE)
    return config.algorithm.advantages(np.array(rewards), groups, group_size=GROUP_SIZE)


@dataclass
class Batch:
    """One step's rollouts: a trajectory a branch, `belongs` to one of the rewards."""

    trajectories: list[Trajectory] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    belongs: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)

    def shard(self, step: int, advantages: np.ndarray) -> TrainShard:
        """With one advantage a reward."""
        rows = list(range(len(self.belongs)))
        return shard(step, rows, self.trajectories, np.array(self.groups), advantages[self.belongs])


async def played(step: int, loaded: LoadedEnvironment, openings: PromptCache, limits: PlayLimits, server: TinyServer) -> Batch:
    batch = Batch()
    for group in range(PROMPTS):
        for sample in range(GROUP_SIZE):
            reference = PromptRef(loaded.label, "train", (step - 1) * PROMPTS + group)
            order = RolloutOrder(group * GROUP_SIZE + sample, group, sample, 0, reference, seed=7 * group + sample)
            done, arrays = await play(order, loaded, openings, limits, server.ask)
            assert isinstance(done, RolloutResult), done
            ends = np.cumsum(done.branch_lengths)
            for branch in zip(*(np.split(array, ends[:-1]) for array in arrays), strict=True):
                batch.trajectories.append(Trajectory(*branch))
                batch.groups.append(group)
                batch.belongs.append(len(batch.rewards))
            batch.rewards.append(done.reward)
    return batch


def fingerprint(backend: Backend) -> str:
    """Of every weight, to the bit."""
    hashed = hashlib.sha256()
    for name, tensor in backend.weights():
        hashed.update(name.encode())
        hashed.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return hashed.hexdigest()


def train_honestly(backend: Backend, config: RunConfig, step: int, batch: Batch) -> None:
    """A step with the advantages that the rewards give: its gradient is 0 where they are, and then no weight moves."""
    advantages, before = advantages_of(config, batch.rewards), fingerprint(backend)
    alike = not advantages.any()
    assert alike == all(len({*part}) == 1 for part in np.split(np.array(batch.rewards), PROMPTS))
    result = backend.train_step(batch.shard(step, advantages))
    assert all(np.isfinite(value) for value in result.metrics.values())
    assert (result.metrics["grad_norm"] == 0) is alike
    assert (fingerprint(backend) == before) is alike


def test_no_shipped_experiment_is_forgotten() -> None:
    shipped = Path(__file__).resolve().parents[2] / "conf" / "experiment"
    assert {file.stem for file in shipped.glob("*.yaml")} == {*EXPERIMENTS, *ELSEWHERE}


@pytest.mark.parametrize(
    "experiment", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in EXPERIMENTS]
)
async def test_a_shipped_experiment_trains_two_steps(
    experiment: str, copies: dict[str, Path], server: TinyServer, backend: Backend
) -> None:
    config = composed(experiment, copies)
    template = ChatTemplate(server.tokenizer, [server.tokenizer.eos_token_id])
    limits = PlayLimits(config.rollout.temperature, MAX_TOKENS, 4096, timeout_s=100)
    (label,) = config.environments
    loaded = load_environments(config)[label]
    low, high = config.reward_range(label) or (0.0, 1.0)
    loaded = leave_out_too_long(loaded, template, limits.max_prompt_tokens, 60)
    openings = PromptCache(template)
    before = EXPERIMENTS.index(experiment) * (STEPS + 1)
    async with open_graders(1), AsyncExitStack() as stack:
        await loaded.environment.set_up()
        stack.push_async_callback(loaded.environment.tear_down)
        for step in range(1, STEPS + 1):
            batch = await played(step, loaded, openings, limits, server)
            assert all(low <= reward <= high for reward in batch.rewards)
            train_honestly(backend, config, before + step, batch)
    openings.close()
    made_up = np.where(np.arange(len(batch.rewards)) % 2, 1.0, -1.0)
    assert backend.train_step(batch.shard(before + STEPS + 1, made_up)).metrics["grad_norm"] > 0
