"""What is written down of evals: rows of samples and of whole evals, lines for the terminal, the summary's part, W&B.

Reads the clock, decides nothing; the numbers are eval_scores.py's.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from telescope.flow import commands
from telescope.orchestrator.best_checkpoint import BestCheckpoint
from telescope.orchestrator.eval_scores import EvalProgress, EvalScoring, EvalTally, describe, name_metrics
from telescope.orchestrator.rollout_store import Rollout
from telescope.orchestrator.saved_state import SavedEvalScores
from telescope.runlog.wandb_mirror import WandbMirror
from telescope.runlog.writer import RunLog

log = logging.getLogger(__name__)

SUMMARIZED = (
    *("prompts", "samples", "scored", "failed", "truncated", "reward", "reward_error", "reward_low", "reward_high"),
    *("pass_at", "pass_all", "metrics", "version_first", "version_last"),
)
"""Of an eval's row, what its run's summary has."""
LINES = 8
"""Of evals that have ended, as many stand in the status."""


class EvalRecorder:
    """`measures`: how each eval is scored, by its name. `best`: which checkpoint is kept by them. `warn` takes a sentence."""

    def __init__(
        self,
        run_log: RunLog,
        mirror: WandbMirror | None,
        measures: Mapping[str, EvalScoring],
        best: BestCheckpoint | None = None,
        warn: Callable[[str], None] = log.warning,
    ) -> None:
        self._log, self._mirror = run_log, mirror
        self._measures = measures
        self._tally = EvalTally(measures)
        self._best, self._warn = best, warn
        self._latest: dict[str, dict[str, Any]] = {}
        """The complete row of each eval's latest step, by name."""
        self._first: dict[str, dict[str, Any]] = {}
        """That of its first step."""
        self._starts: dict[tuple[str, int], float] = {}
        self._ended = 0
        self._held: tuple[str, ...] = ()
        """Servers that are held for them."""
        self._lines: deque[str] = deque(maxlen=LINES)

    @property
    def described(self) -> str:
        """What evals are under way, and on which servers where some are held; empty for none."""
        held = f" on {', '.join(self._held)}" if self._held else ""
        return self._tally.described + held

    @property
    def status(self) -> dict[str, Any]:
        """How many have ended, a line of each of the last ones, and the latest reward of each; empty in a run without evals."""
        if not self._measures:
            return {}
        rewards = {name: {"step": row["step"], "reward": row["reward"]} for name, row in self._latest.items()}
        return {"evals": self._ended, "latest_evals": list(self._lines), "eval_rewards": rewards, **self.best_checkpoint}

    @property
    def summary(self) -> dict[str, dict[str, Any]]:
        """By name: the latest complete round, and the reward of the first one beside it."""
        return {name: self._summarize(name, row) for name, row in self._latest.items()}

    def _summarize(self, name: str, row: Mapping[str, Any]) -> dict[str, Any]:
        first = self._first[name]
        numbers = {field: row.get(field) for field in SUMMARIZED}
        return {"step": row["step"], **numbers, "first": {"step": first["step"], "reward": first["reward"]}}

    def save(self) -> SavedEvalScores:
        return SavedEvalScores(self._tally.save(), tuple(self._latest.values()), tuple(self._first.values()))

    def restore(self, saved: SavedEvalScores) -> None:
        self._tally.restore(saved.under_way)
        self._latest = {row["eval"]: row for row in saved.latest}
        self._first = {row["eval"]: row for row in saved.first}

    @property
    def best_checkpoint(self) -> dict[str, dict[str, Any]]:
        """The best one by the eval that decides; empty without one."""
        best = self._best.described if self._best is not None else None
        return {} if best is None else {"best_checkpoint": best}

    def note_checkpoint(self, step: int) -> None:
        """It is complete."""
        if self._best is not None:
            self._best.note_checkpoint(step)

    def protect_steps(self, completing: int) -> frozenset[int]:
        """Whose checkpoints are not to be deleted, now that the one of `completing` will be complete."""
        return self._best.protect(completing, self._tally.under_way) if self._best is not None else frozenset()

    def begin(self, command: commands.BeginEval) -> None:
        self._tally.begin(EvalProgress(command.eval, command.step, command.prompts, command.samples, command.first_rollout))
        self._starts[command.eval, command.step] = time.monotonic()
        log.info("eval %s of step %d: %d prompts x %d", command.eval, command.step, command.prompts, command.samples)

    def hold(self, command: commands.HoldServers) -> None:
        self._held = command.servers
        played = " and ".join(f"{name} of step {step}" for name, step in command.evals)
        log.info("%s held at version %d for the eval %s", ", ".join(command.servers), command.version, played)

    def release(self, servers: Sequence[str]) -> None:
        self._held = ()
        log.info("%s held no more", ", ".join(servers))

    def write_scored(self, rollout: Rollout, row: Mapping[str, Any], safe: Callable[[], None]) -> None:
        """A sample has its score; `row`: as one of training has it."""
        if rollout.taken:
            self._tally.add(rollout)
        written = {name: value for name, value in row.items() if name != "length_penalty"}
        written |= {**self._place(rollout), "status": "scored" if rollout.taken else "ignored"}
        self._log.append("eval_samples", written, safe)

    def write_failed(self, rollout: Rollout, row: Mapping[str, Any]) -> None:
        self._log.append("eval_samples", {**row, **self._place(rollout)})

    def _place(self, rollout: Rollout) -> dict[str, Any]:
        """Which eval it is a sample of; the step is not known once that has ended."""
        progress = self._tally.find(rollout.order.rollout_id)
        return {"eval": rollout.order.eval, "step": None if progress is None else progress.step}

    def end(self, command: commands.EndEval, latest_step: int) -> dict[str, Any]:
        """Write its row, which is given, and, where it is complete, tell its numbers. `latest_step`: the one reported last."""
        row = self._tally.end(command.eval, command.step, command.state, command.failed, command.unfinished)
        began = self._starts.pop((command.eval, command.step), None)
        if began is not None:
            row["seconds"] = time.monotonic() - began
        self._log.append("evals", row)
        if self._best is not None and (sentence := self._best.note_eval(row)):
            self._warn(sentence)
        said = describe(row)
        log.info("%s", said)
        self._ended += 1
        self._lines.append(said)
        if row["state"] != "complete":
            return row
        name, step = command.eval, command.step
        if name not in self._latest or step >= self._latest[name]["step"]:  # else one of a later step has ended before it
            self._latest[name] = row
        if name not in self._first or step < self._first[name]["step"]:
            self._first[name] = row
        if self._mirror is not None:
            self._mirror.log_eval(latest_step, command.eval, command.step, name_metrics(row))
        return row
