"""Recomputes a run's headline from its rows alone, and says whether what was told of it is the same.

    python scripts/recompute_rewards.py RUN_DIR_OR_SWEEP_DIR ...

Of a run that is summary.json and `telescope runs list`, of a sweep the objective of each of its points as well.

Shares no code with what wrote the summary: a group belongs to the version in its first row of state `queued`, its scores are
the `scored` rows of `rollouts`, and a version counts once each of its groups has a row that ends it. Exits 1 where a number
differs.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from telescope.runlog.layout import RunDirectory
from telescope.runlog.reader import rows

ENDS = ("complete", "cancelled", "failed")
AT_EACH_END = 5
CLOSE = 1e-12
LIST_S = 120.0


def recompute(run: RunDirectory) -> dict[str, float | None]:
    """`reward_policy_first`, `reward_policy_last` and how many rollouts each is the mean of."""
    begun: dict[int, int] = {}
    over: dict[int, str] = {}
    cut_off: set[int] = set()
    for row in rows(run, "groups"):
        group = row["group_id"]
        if row["state"] == "queued":
            if group in begun:  # it played at a checkpoint that the run went on from
                cut_off.add(begun[group])
            begun[group] = row["version"]
        if row["state"] in ENDS:
            over.setdefault(group, row["reason"])
    latest = {row["rollout_id"]: row for row in rows(run, "rollouts") if row["status"] == "scored"}
    rewards: dict[int, list[Fraction]] = defaultdict(list)
    for row in latest.values():
        rewards[begun[row["group_id"]]].append(Fraction(row["reward"]))
    cut_off |= {version for group, version in begun.items() if over.get(group, "the run ended") == "the run ended"}
    whole = sorted(version for version in rewards if version not in cut_off) or sorted(rewards)[:1]
    each = min(AT_EACH_END, len(whole) // 2)
    first, last = ([one for version in some for one in rewards[version]] for some in (whole[:each], whole[-max(each, 1) :]))
    return {
        "reward_policy_first": float(sum(first) / len(first)) if first else None,
        "reward_policy_last": float(sum(last) / len(last)) if last else None,
        "rollouts_first": len(first),
        "rollouts_last": len(last),
    }


def find_differences(run: RunDirectory) -> list[str]:
    """A sentence for each number of the summary that the rows contradict."""
    summary = json.loads(run.summary_json.read_text(encoding="utf-8"))
    told = {
        "reward_policy_first": summary["reward_policy_first"],
        "reward_policy_last": summary["reward_policy_last"],
        "rollouts_first": summary["policy_first"].get("rollouts", 0),
        "rollouts_last": summary["policy_last"].get("rollouts", 0),
    }
    found = recompute(run)
    return [
        f"{run.path}: {name} is {told[name]} in summary.json and {found[name]} by the rows"
        for name in told
        if (told[name] is None) != (found[name] is None) or abs((told[name] or 0) - (found[name] or 0)) > CLOSE
    ]


def find_other_values(folder: Path, rewards: dict[Path, float | None]) -> Iterator[str]:
    """A sentence for each number of `runs list` and of the folder's sweep.json that is not the run's of `rewards`."""
    listed = subprocess.run(
        [sys.executable, "-m", "telescope", "runs", "list", "--json", str(folder)],
        check=True, capture_output=True, text=True, timeout=LIST_S, cwd=ROOT,
    ).stdout  # fmt: skip
    told = [("`runs list`", Path(row["run_dir"]), row["reward"]) for row in map(json.loads, listed.splitlines())]
    if (folder / "sweep.json").is_file():
        points = json.loads((folder / "sweep.json").read_text(encoding="utf-8"))["points"]
        told += [("sweep.json", Path(point["run_dir"]), point["value"]) for point in points]
    for where, path, value in told:
        found = rewards[path.resolve()]
        if (value is None) != (found is None) or abs((value or 0) - (found or 0)) > CLOSE:
            yield f"{path}: the reward is {value} in {where} and {found} by the rows"


def main() -> int:
    failed = False
    for folder in (Path(name).resolve() for name in sys.argv[1:]):
        runs = [folder] if (folder / "run.json").is_file() else sorted(file.parent for file in folder.glob("*/run.json"))
        found = {path: recompute(RunDirectory(path)) for path in runs}
        differences = [sentence for path in runs for sentence in find_differences(RunDirectory(path))]
        differences += find_other_values(folder, {path: one["reward_policy_last"] for path, one in found.items()})
        failed = failed or bool(differences) or not runs
        print("\n".join(differences or [f"{path}: the same, {one}" for path, one in found.items()]))
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
