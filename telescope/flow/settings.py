"""What the core is told about a run. Small and serialisable: it is the first line of the journal.

Owns the numbers that decide scheduling, each by the name that it has in the configuration (`orchestrator.…`, `rollout.…`);
refuses to know the rest of it. What is computed from settings (deadlines, weights of environments) has a name of its own.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from telescope.flow.curriculum import PassRateRules

TakeOrder = Literal["completion", "admission"]
LONGEST_BACKOFF_S = 60.0
JOURNAL_NAMES = {
    "prompts_batch_size_for_trainer": "groups_per_batch",
    "max_async_rollout": "max_async",
    "discard_group_zero_advantage": "discard_zero_advantage",
    "enable_individual_sample_lanes": "individual_lanes",
    "free_lane_after_generation": "free_lane",
    "max_concurrent_prompts_per_server": "prompts_per_server",
    "adaptive_concurrency": "adaptive",
    "prompt_prefetch_buffer_size": "prefetch",
    "checkpoint_stop_timeout_s": "stop_deadline_s",
}
"""Names that journals and checkpoints have given them from the first on, and keep: so that any version reads any of these."""


class EvalRules(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One eval, as far as it decides scheduling. Raises ValueError with a whole sentence."""

    name: str
    environment: str
    """Label of the environment whose eval split it plays."""
    every: int = 0
    """It is due at each version that this divides; 0: at the first and the last alone."""
    num_samples: int = 1
    """Of each prompt."""
    num_prompts: int = 0
    """The first so many of the split; 0: all of them."""
    baseline: bool = True
    """Before the first step too."""
    final: bool = True
    """After the last step too, whether or not `every` divides it."""
    sampling: str = ""
    """Digest of how its answers are sampled."""

    def __post_init__(self) -> None:
        for name, least in (("every", 0), ("num_samples", 1), ("num_prompts", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"evals.{self.name}.{name}={getattr(self, name)} must be at least {least}")

    def is_due(self, version: int, *, last: bool) -> bool:
        if version == 0:
            return self.baseline
        return (last and self.final) or (self.every > 0 and version % self.every == 0)

    def plays_as(self, other: EvalRules) -> bool:
        """Whether both play the same samples in the same way, whenever that is, if the environment is the same."""
        names = ("name", "environment", "num_samples", "num_prompts", "sampling")
        return all(getattr(self, name) == getattr(other, name) for name in names)


class FlowSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename=JOURNAL_NAMES):
    """Settings of one core. Raises ValueError with a whole sentence where a value makes no sense."""

    number_of_steps: int
    """Training batches of the run; step s produces weight version s."""
    trains: bool = True
    """False: nobody trains. The servers begin with the weights of `number_of_steps` (0: those of a model that was not trained
    here), all evals are played once, and the run ends."""
    prompts_batch_size_for_trainer: int = 16
    """P."""
    group_size: int = 8
    """G, samples of one prompt."""
    max_async_rollout: int = 2
    """M, steps that generation may run ahead of training; 0 = synchronous."""
    take_order: TakeOrder = "completion"
    max_off_policy_steps: int = 8
    """D: at a commit, an incomplete group whose first dispatch is this many versions old is retired."""
    discard_group_zero_advantage: bool = True
    """Drop groups of two or more samples whose rewards are all equal."""
    min_group_size: int = 2
    """Scored survivors below which a group fails."""
    max_attempts: int = 3
    """Tries of one rollout that fails for infrastructure reasons."""
    retry_backoff_s: float = 0.0
    """Pause before the second try; doubled before each further one, up to `LONGEST_BACKOFF_S`."""
    enable_individual_sample_lanes: bool = True
    """A concurrency slot is a sample; false: a group."""
    free_lane_after_generation: bool = False
    """A sample's lane is free once its last generation is over, before its reward; needs individual lanes."""
    max_concurrent_prompts_per_server: int = 32
    """Group lanes of one server, or that many times `group_size` sample lanes."""
    kv_soft: float = 0.85
    """Share of a server's KV cache in use from which groups avoid it, and (adaptive) no new rollout starts for it."""
    kv_hard: float = 0.95
    """Share from which (adaptive) its lanes shrink."""
    adaptive_concurrency: bool = False
    """Lanes follow what the servers' engines report; false: their number is fixed."""
    environments: tuple[tuple[str, float], ...]
    """(label, weight) of each environment; labels are the names on the workers' environment cards."""
    split: str = "train"
    """The split prompts are drawn from."""
    curricula: dict[str, PassRateRules] = {}
    """By label, of the environments that have one."""
    prompt_prefetch_buffer_size: int = 0
    """Prompts that workers are told of before they are sent out; 0: none (`enable_prompt_prefetch` is off)."""
    seed: int = 0
    rollout_deadline_s: float = 660.0
    """A rollout its worker has not answered for this long is cancelled and tried again: the worker's own time limit plus a
    margin, so that it fires only where the worker's has failed."""
    cancel_deadline_s: float = 60.0
    """A worker that leaves a cancel unanswered for this long ends the run."""
    absence_deadline_s: float = 900.0
    """Without any worker, any server or the trainer for this long, the run ends."""
    weights_while_training: bool = True
    """A server that joins late can be given the last version while the trainer is at its next step; false: the trainer itself
    has to send, and does so between steps."""
    failed_batches_limit: int = 2
    """This many batches' worth of one environment's groups failing in a row, none complete between, ends the run."""
    discarded_batches_limit: int = 50
    """This many batches' worth of groups discarded for equal rewards in a row, none kept between, ends the run."""
    checkpoint_every: int = 0
    """A checkpoint each so many steps; 0: only as `checkpoint_at_end` says."""
    checkpoint_at_end: bool | None = None
    """One at the last step, and before a stop that leaves time for it; None: where `checkpoint_every` is more than 0."""
    checkpoint_with: str = ""
    """An eval: with checkpoints on, one is made at each step that it is due at, too."""
    checkpoint_stop_timeout_s: float = 120.0
    """A run that is told to stop waits no longer than this for its step and its checkpoint."""

    evals: tuple[EvalRules, ...] = ()
    """In the order in which they play where several are due."""
    stop_after: int = 0
    """The run ends after so many evals in a row (`EvalScored`) without a gain; 0: it trains all its steps."""
    stop_measure: str = ""
    """What is to gain, in words."""
    stop_lower: bool = False
    """A gain is a lower score."""
    eval_servers: int = 0
    """Servers held for the evals between the first step and the last, as far as training keeps one; 0: they play on all."""
    evals_hold_training: bool = False
    """The trainer gets no batch while an eval plays: servers that sleep while it trains would lose what they generate."""

    @property
    def saves_end(self) -> bool:
        """Whether a checkpoint is made at the last step, and before a stop."""
        return self.checkpoint_every > 0 if self.checkpoint_at_end is None else self.checkpoint_at_end

    @property
    def saves(self) -> bool:
        """Whether any checkpoint is made."""
        return self.checkpoint_every > 0 or self.saves_end

    def __post_init__(self) -> None:
        for name in ("number_of_steps", "prompts_batch_size_for_trainer", "group_size", "max_off_policy_steps",
                     "min_group_size", "max_attempts", "max_concurrent_prompts_per_server", "failed_batches_limit",
                     "discarded_batches_limit"):  # fmt: skip
            if getattr(self, name) < (1 if self.trains or name != "number_of_steps" else 0):
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("rollout_deadline_s", "cancel_deadline_s", "absence_deadline_s", "checkpoint_stop_timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0")
        if not 0 <= self.retry_backoff_s < float("inf"):
            raise ValueError(f"retry_backoff_s={self.retry_backoff_s} must be 0 (at once) or more")
        if self.checkpoint_with and self.checkpoint_with not in [rules.name for rules in self.evals]:
            raise ValueError(f"checkpoint_with={self.checkpoint_with} names no eval: there are {[e.name for e in self.evals]}")
        if self.checkpoint_every < 0:
            raise ValueError(f"checkpoint_every={self.checkpoint_every} must be 0 (off) or more")
        if self.stop_after < 0:
            raise ValueError(f"stop_after={self.stop_after} must be 0 (off) or more")
        if self.eval_servers < 0:
            raise ValueError(f"eval_servers={self.eval_servers} must be 0 (evals play on all servers) or more")
        if self.eval_servers and self.evals_hold_training:
            raise ValueError(
                f"eval_servers={self.eval_servers} are held so that training goes on beside evals, and evals_hold_training "
                "stops it: set eval_servers=0"
            )
        if self.prompt_prefetch_buffer_size < 0:
            raise ValueError(f"prompt_prefetch_buffer_size={self.prompt_prefetch_buffer_size} must be 0 (off) or more")
        if self.max_async_rollout < 0:
            raise ValueError(f"max_async_rollout={self.max_async_rollout} must be 0 (synchronous) or more")
        if self.group_size > 1 and self.min_group_size > self.group_size:
            raise ValueError(
                f"min_group_size={self.min_group_size} is above group_size={self.group_size}: every group would fail; lower it"
            )
        lanes = "enable_individual_sample_lanes"
        for name, needs in (("free_lane_after_generation", "a group's lane is free when all its samples are through"),
                            ("adaptive_concurrency", "it counts the requests on a server, not groups")):  # fmt: skip
            if getattr(self, name) and not getattr(self, lanes):
                raise ValueError(f"{name} needs {lanes}: {needs}; switch {name} off, or {lanes} on")
        if not 0 < self.kv_soft <= self.kv_hard <= 1:
            raise ValueError(f"kv_soft={self.kv_soft} and kv_hard={self.kv_hard} must be in order: 0 < soft <= hard <= 1")
        if not self.trains and (self.environments or not self.evals or self.saves):
            raise ValueError("a run that does not train plays evals alone: it draws no prompts and saves no checkpoints")
        if self.trains and not self.environments:
            raise ValueError("environments is empty: name at least one environment to draw prompts from")
        labels = [label for label, _ in self.environments]
        if len(set(labels)) != len(labels):
            raise ValueError(f"environments {labels} name one label twice; give each entry its own")
        strangers = sorted(set(self.curricula) - set(labels))
        if strangers:
            raise ValueError(f"curricula names {strangers[0]}, and the environments are {labels}")
        names = [rules.name for rules in self.evals]
        if len(set(names)) != len(names):
            raise ValueError(f"evals {names} name one twice; give each its own name")
        for label, weight in self.environments:
            if not 0 < weight < float("inf"):
                raise ValueError(f"environments.{label}.weight={weight} must be a finite number above 0")

    @property
    def slots(self) -> int:
        """B = (M + 1)·P: groups that may be alive at once."""
        return (self.max_async_rollout + 1) * self.prompts_batch_size_for_trainer

    @property
    def survivors_needed(self) -> int:
        """Scored samples without which a group is failed. A group of one needs its one; others never fewer than two, since
        one sample compares with nothing."""
        return 1 if self.group_size == 1 else max(2, self.min_group_size)

    @property
    def excused_limit(self) -> int:
        """Tries of a sample that weight updates and lost servers may cut short without their counting as failures. No update
        cuts a group short more often than D times; beyond that, and as many losses as it has tries, something else is wrong."""
        return self.max_off_policy_steps + self.max_attempts

    @property
    def lanes_per_server(self) -> int:
        return self.max_concurrent_prompts_per_server * (self.group_size if self.enable_individual_sample_lanes else 1)
