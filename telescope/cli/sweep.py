"""The results of a sweep: one folder below which each point has its run directory, and one table of how every point ended.

`sweep.json` is written anew after each point, so that a sweep that was killed has told all it knew. A point that fails stops
nothing; every failure stands in the table with its reason. Decides nothing about what the points are.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from textwrap import shorten
from typing import Any

import msgspec

from telescope._launch.own_command import name_own_command
from telescope._launch.progress import format_duration
from telescope.cli.point_output import find_log
from telescope.config.redaction import is_hidden, redact_shapes
from telescope.runlog.files import read_json
from telescope.runlog.layout import RunDirectory, write_atomically
from telescope.runlog.opening import RunLook, look

OBJECTIVE = "reward_policy_last"
"""The number of a run's summary that tells how good a point is, unless `--objective` names another."""
SHOWN_REASON = 1_000
RESULTS = "sweep.json"
LONGEST_NAME = 80
"""Of a point's folder, whose path stands in front of all its files."""
_NAMED = re.compile(r"[\w-]+(?=\s*[=:])")
"""What an override gives values to: `PGPASSWORD` of `cluster.env={PGPASSWORD:…}`, too."""
_UNSAFE = re.compile(r"[^A-Za-z0-9._+-]+")


def name_point(number: int, swept: Sequence[str], otherwise: str) -> str:
    """`003_learning_rate-0.0001_seed-2`: a folder and a job, by the values that were swept; `otherwise`: where none were. Of a
    setting its last word, which says enough to whoever chose it; secrets that were typed in are left out. A path of it can be
    given back as a setting as it is."""
    words = []
    for override in swept:
        name, _, value = redact_shapes(override).lstrip("+").partition("=")
        words.append(name.rpartition(".")[2] + ("" if _sounds_secret(override) else f"-{value}"))
    text = "_".join(_UNSAFE.sub("-", word) for word in words) or otherwise
    return f"{number:03d}_{text}"[:LONGEST_NAME].rstrip("_.")


def _sounds_secret(override: str) -> bool:
    return any(map(is_hidden, _NAMED.findall(override)))


def list_swept(overrides: Sequence[str]) -> str:
    """As they were typed, for the terminal; of one that sounds like a secret its name alone."""
    return " ".join(f"{each.partition('=')[0]}=…" if _sounds_secret(each) else redact_shapes(each) for each in overrides)


def shown(reason: str) -> str:
    """In one line of the table; `sweep.json` has it whole."""
    return shorten(reason, SHOWN_REASON, placeholder=" …")


@dataclass(frozen=True)
class SweepResult:
    """How one point ended. `value` is the objective, None where the run has no such number; `job` is a batch system's."""

    point: int
    overrides: tuple[str, ...]
    run_dir: str
    exit_code: int | None
    reason: str
    value: float | None = None
    first: float | None = None
    job: str = ""
    swept: tuple[str, ...] = ()
    """Of the overrides those in which it differs from the other points."""
    version: int | None = None
    """The newest version of the weights that the default objective covers; 0: before any update."""
    rollouts: int | None = None
    """That the default objective is the mean of."""

    @property
    def failed(self) -> bool:
        """Also where the run itself ended well, and has no number to compare."""
        return self.exit_code is not None and (self.exit_code != 0 or self.value is None)


class SweepRecord(msgspec.Struct, frozen=True):
    """What sweep.json holds."""

    objective: str
    points: tuple[SweepResult, ...]


class Sweep:
    """`folder` is the sweep's own; `objective` a dotted path into summary.json, e.g. `seconds.training`."""

    def __init__(self, folder: Path, objective: str = OBJECTIVE) -> None:
        self.folder, self.objective = folder, objective
        self.results: list[SweepResult] = []
        self._kept: SweepResult | None = None

    @classmethod
    def load(cls, folder: Path) -> Sweep:
        """The one whose results lie in the folder. Raises FileNotFoundError and `DamagedFile`."""
        record = read_json(folder / RESULTS, SweepRecord)
        sweep = cls(folder, record.objective)
        sweep.results = list(record.points)
        return sweep

    def collect(self) -> None:
        """See how the points have ended that a batch system has got; what stands in sweep.json stays as it is."""
        self.results = [self._collect(one) if one.exit_code is None else one for one in self.results]

    def _collect(self, result: SweepResult) -> SweepResult:
        found = look(RunDirectory(Path(result.run_dir)))
        last = found.last_of_job
        if found.exit.ended is None or (last is not None and last.requeued):
            return result
        return self._judge(result, found, found.exit.ended)

    @property
    def name(self) -> str:
        """What W&B groups the points' runs by."""
        return self.folder.name

    def ended(self, overrides: Sequence[str], run_dir: Path, exit_code: int, swept: Sequence[str] = ()) -> SweepResult:
        """Take down how the next point ended, from what its run directory says."""
        result = SweepResult(len(self.results), tuple(overrides), str(run_dir), exit_code, "", swept=tuple(swept))
        result = self._judge(result, look(RunDirectory(run_dir)), exit_code)
        self._take(result)
        return result

    def _judge(self, result: SweepResult, found: RunLook, exit_code: int) -> SweepResult:
        """With what the run directory says of its end."""
        value, first = (_number(found.summary, name) for name in (self.objective, "reward_policy_first"))
        reason = found.reason or "it left no summary"
        if exit_code == 0 and value is None:
            why = "no group was scored" if self.objective == OBJECTIVE else "--objective names a number of summary.json"
            reason = f"it has no {self.objective}: {why}"
        last = found.summary.get("policy_last") if self.objective == OBJECTIVE else None
        versions = last.get("versions") if isinstance(last, Mapping) else None
        version = int(versions[-1]) if isinstance(versions, list) and versions else None
        counted = _number(found.summary, "policy_last.rollouts") if self.objective == OBJECTIVE else None
        rollouts = None if counted is None else int(counted)
        return replace(result, exit_code=exit_code, reason=reason, value=value, first=first, version=version, rollouts=rollouts)

    def submitted(self, overrides: Sequence[str], run_dir: Path, job: str, swept: Sequence[str] = ()) -> None:
        """Take down a point that a batch system has got (`job`; empty where its batch file was written alone); how it ends
        stands in its own run directory."""
        reason = "submitted" if job else "written, not submitted"
        number = len(self.results)
        self._take(SweepResult(number, tuple(overrides), str(run_dir), None, reason, job=job, swept=tuple(swept)))

    def refused(self, overrides: Sequence[str], run_dir: Path, exit_code: int, reason: str, swept: Sequence[str] = ()) -> None:
        """Take down a point that a batch system has not got."""
        number = len(self.results)
        self._take(SweepResult(number, tuple(overrides), str(run_dir), exit_code, reason, swept=tuple(swept)))

    def describe(self, result: SweepResult, seconds: float) -> str:
        """A point that has ended, in one line: `algorithm=rloo seed=1  reward 0.377 → 0.832 (n=1,568) in 4:01`; of another
        objective its name and value, of a failure the exit code and the reason."""
        swept = list_swept(result.swept or result.overrides)
        took = f"in {format_duration(seconds)}"
        if result.failed or result.value is None:
            return f"{swept}  exit code {result.exit_code} {took}: {shown(result.reason)}{self._name_log(result)}"
        if self.objective != OBJECTIVE:
            return f"{swept}  {self.objective} {_shown(result.value)} {took}"
        first = "" if result.first is None else f"{result.first:.3f} → "
        return f"{swept}  reward {first}{result.value:.3f} (n={_format_count(result.rollouts)}) {took}"

    @staticmethod
    def _name_log(result: SweepResult) -> str:
        log = find_log(Path(result.run_dir))
        return f" ({log} has what it said)" if log.is_file() else ""

    @property
    def knows_best(self) -> bool:
        """A reward is better the higher it is; of another objective nobody has said which way."""
        return self.objective == OBJECTIVE

    def keep_best(self, result: SweepResult) -> None:
        """Of the points given here that have ended well, delete the weights of all but the best."""
        if result.failed or result.value is None:
            return
        best = self._kept
        if best is None or best.value is None or result.value > best.value:
            worse, self._kept = best, result
        else:
            worse = result
        if worse is not None:
            shutil.rmtree(RunDirectory(Path(worse.run_dir)).checkpoints, ignore_errors=True)

    def table(self) -> str:
        """Every point in a line, with what was swept; then the failures with their reasons, whose weights are kept, and where
        the results lie. The default objective has the number of rollouts that it is the mean of."""
        counted = self.objective == OBJECTIVE
        lines = [f"{'point':>5}  {'exit':>4}  {self.objective:>18}  {'rollouts  ' if counted else ''}swept"]
        lines += [
            f"{result.point:>5}  {_shown(result.exit_code):>4}  {_shown(result.value):>18}  "
            f"{f'{_format_count(result.rollouts):>8}  ' if counted else ''}"
            f"{list_swept(result.swept or result.overrides)}"
            for result in self.results
        ]
        untrained = sum(result.version == 0 for result in self.results)
        if untrained:
            lines.append(
                f"The reward of {untrained} of {len(self.results)} points is that of version 0, before any update: they have "
                "too few steps to be compared"
            )
        failures = [result for result in self.results if result.failed]
        if failures:
            lines.append(f"{len(failures)} of {len(self.results)} points failed:")
            lines += [f"  {result.point}: {shown(result.reason)} ({result.run_dir})" for result in failures]
        if self._kept is not None:
            lines.append(
                f"{self._describe_kept(self._kept)} (checkpoint.at_end=weights keeps all): "
                f"{name_own_command()} export latest --run-dir {shlex.quote(self._kept.run_dir)} --to my-model"
            )
        return "\n".join([*lines, f"Results: {self.file}"])

    def _describe_kept(self, kept: SweepResult) -> str:
        """Points whose rewards are the same as they are shown are equal: none of them is the best."""
        equal = [one.point for one in self.results if not one.failed and _shown(one.value) == _shown(kept.value)]
        if len(equal) == 1:
            return f"The weights of the best point, {kept.point}, are kept"
        points = ", ".join(map(str, equal))
        return f"{len(equal)} points are equal at {_shown(kept.value)}: {points}. The weights of point {kept.point} are kept"

    @property
    def file(self) -> Path:
        return self.folder / RESULTS

    def _take(self, result: SweepResult) -> None:
        self.results.append(result)
        record = {"objective": self.objective, "points": [asdict(result) for result in self.results]}
        try:
            write_atomically(self.file, json.dumps(record, indent=2) + "\n", mode=0o600)
        except OSError as error:  # the points go on, or are queued already; the table at the end has them all
            sys.stderr.write(f"{self.file} can't be written: {error.strerror or error}\n")


def _number(summary: Mapping[str, Any], path: str) -> float | None:
    found: Any = summary
    for name in path.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return float(found) if isinstance(found, int | float) and math.isfinite(found) else None


def _format_count(rollouts: int | None) -> str:
    return "-" if rollouts is None else f"{rollouts:,}"


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
