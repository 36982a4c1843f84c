"""What travels between the parts of a run: ids, scalars and token arrays. No behaviour beyond simple derived facts.

Floor 0: msgspec structs and numpy arrays only. Every other package may import this one; it imports none of them.
"""

from __future__ import annotations

from typing import Literal, dataclass_transform

import msgspec
import numpy as np

Role = Literal["worker", "server", "trainer"]
FinishReason = Literal["stop", "length", "abort"]
FailureKind = Literal["infrastructure", "grader", "prompt"]
"""Whose failure ended a rollout without a score; what the policy does wrong is a score."""


@dataclass_transform(frozen_default=True)  # else a type checker takes the subclasses for mutable
class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all records: immutable, and closed to fields it does not know."""


class PromptRef(Record):
    """One prompt by name: the `index`-th of an environment's split, e.g. `PromptRef("countdown", "train", 41)`."""

    environment: str
    split: str
    index: int


class EnvironmentCard(Record):
    """What an environment worker reports of one environment, so that the core can draw prompts without loading it."""

    name: str
    split_sizes: dict[str, int]
    digest: str
    """Hash over the environment's settings and prompts: two workers that disagree would train on different data."""
    too_long: int = 0
    """Train prompts that left no room for an answer; they are not among `split_sizes`, and are never drawn."""
    in_training: int | msgspec.UnsetType = msgspec.UNSET
    """Prompts of its eval split that an eval plays and that are trained on too, as far as was looked; unset for none."""


class ModelFacts(Record):
    """What a process has read in the model's folder: one that reads other facts would train or sample another model."""

    name: str
    """model.name"""
    folder: str
    facts: dict[str, str]
    """By the name of the fact, e.g. `{"end tokens": "151645, 151643"}` (config/model_facts.py)."""


class Sampling(Record):
    """How tokens are drawn. Log-probs are those of the distribution after `temperature`, `min_p`, `top_k` and `top_p`
    (processed)."""

    temperature: float
    max_tokens: int
    seed: int
    top_k: int = 0
    """0: every token may be drawn."""
    top_p: float = 1.0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    """Texts behind which the answer ends; they belong to it."""


class RolloutOrder(Record, omit_defaults=True):
    """One sample to be played. A retry keeps `rollout_id`, `group_id`, `sample` and `seed`; `attempt` counts up from 0."""

    rollout_id: int
    group_id: int
    sample: int
    attempt: int
    prompt: PromptRef
    seed: int
    eval: str = ""
    """Name of the eval it is a sample of; empty: it is training's."""


class Denominators(Record):
    """Counts over one whole optimiser update (one minibatch: all its ranks and micro-batches); docs/architecture.md, rule 2."""

    tokens: int
    """Trained tokens: sum of the masks."""
    sequences: int
    """Rollouts, those without a trained token included."""
    groups: int


class Trajectory(msgspec.Struct, frozen=True):
    """One packed-able token sequence: a rollout, or one branch of it. All arrays have length T."""

    ids: np.ndarray  # [T] int32, exactly as the server saw and sampled them
    mask: np.ndarray  # [T] uint8, 1 where the policy sampled the token
    logprobs: np.ndarray  # [T] float32, log-prob of the token under the sampling policy; NaN where mask is 0
    versions: np.ndarray  # [T] int32, weight version that sampled the token; -1 where mask is 0
    routed: np.ndarray | None = None  # [T, L, K] uint8 or int16, experts of each token (maths/routing.py); None: not recorded

    def __post_init__(self) -> None:
        lengths = {len(array) for array in self.arrays}
        if len(lengths) != 1:
            raise ValueError(f"arrays of a trajectory differ in length: {sorted(lengths)}")

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """Four, or five where its routing was recorded."""
        return (self.ids, self.mask, self.logprobs, self.versions, *(() if self.routed is None else (self.routed,)))

    @property
    def trained_tokens(self) -> int:
        return int(self.mask.sum())

    def first(self, tokens: int) -> Trajectory:
        """Its beginning, as views: the prompt, and what was sampled first."""
        return Trajectory(*(array[:tokens] for array in self.arrays))


class TrainItem(Record):
    """One trajectory of a train step. `sequence` is the rollout it belongs to: its branches share it."""

    rollout_id: int
    group_id: int
    sequence: int
    """Index of the rollout within the step, counted over all ranks."""
    length: int
    advantage: float
    sequence_tokens: int
    """Trained tokens of the whole rollout, over all its branches (n_i)."""
    temperature: float
    """At which its tokens were sampled; the trainer's log-probs are of the distribution at the same one."""
    minibatch: int = 0
    """Which of the step's updates trains it, from 0."""
    turns: tuple[tuple[int, float], ...] | msgspec.UnsetType = msgspec.UNSET
    """(sampled tokens, advantage) of each answer in the trajectory, in order; `advantage` is then the mean over the rollout's
    trained tokens. Unset: every token has `advantage`."""

    @property
    def token_advantages(self) -> float | np.ndarray:
        """Of its sampled tokens in order: one number for all, or [sampled tokens] float64."""
        if isinstance(self.turns, msgspec.UnsetType):
            return self.advantage
        counts, advantages = [tokens for tokens, _ in self.turns], [advantage for _, advantage in self.turns]
        return np.repeat(np.array(advantages, np.float64), np.array(counts, np.int64))


class TensorSpec(Record):
    """Where one tensor lies in a weight segment. `dtype` is torch's name without the prefix, e.g. `float32`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class WeightGroup(Record):
    """Who takes part in one broadcast group of a collective transport: the sender first, then one entry a server's worker.

    E.g. `WeightGroup(2, ("trainer-0", "server-0/0", "server-0/1"))`. Members of one epoch never
    change, and epochs go up for the life of a run: after a failure, and for other members, a new one begins.
    """

    epoch: int
    members: tuple[str, ...]


class WeightManifest(Record):
    """One published version of the weights: how to fetch it and how to know that it arrived whole."""

    version: int
    transport: str
    location: str
    """A path, a handle, or for a collective transport where its members meet: `tcp://host:port/word`."""
    tensors: tuple[TensorSpec, ...]
    nbytes: int
    checksum: str
    """Hash of the version's bytes, all or a sample of them as its kind says; empty for a collective transport, whose sender
    knows it only when all is sent."""
    bucket_bytes: int = 0
    """Where the layout is cut on its way (`telescope.weights.buckets`); 0: every tensor for itself."""
    compare_all: bool = False
    """Whether both sides compare every tensor of the version; else a sample. In host memory and files it is always all."""

    @property
    def collective(self) -> bool:
        """Whether the bytes come by a broadcast of a `WeightGroup`; else they are in place once the manifest is there."""
        return not self.checksum
