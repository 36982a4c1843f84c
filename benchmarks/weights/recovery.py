"""What a killed server costs: a real run whose server-0 gets SIGKILL in mid-generation, and again in mid-update.

    python -m benchmarks.weights.recovery                                         # fake engine and backend, on any machine
    python -m benchmarks.weights.recovery --run-dir DIR model=… inference=vllm …  # any run: the arguments are its own
    python -m benchmarks.weights.recovery --stop -- --config-dir benchmarks env=letters …   # with options of telescope.run

Prints one JSON object, read off the run's journal: seconds until the orchestrator knew, until every request of the dead server
was placed again, until the server was back and until it served the current version; samples lost; tokens kept.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from telescope.flow import commands as do
from telescope.flow import events as seen
from telescope.flow.replay import JournalLine, decode_line
from telescope.runlog.layout import RunDirectory

VICTIM = "server-0"
WHEN = ("generation", "update")
FAKE = (
    "experiment=fake",
    "cluster.device=cpu",
    "cluster.inference_num_workers=2",
    "number_of_steps=60",
    "backend.step_s=0.2",
    "inference.fake_token_s=0.05",
    "inference.fake_weights_s=0.3",
)
LOOK_S = 0.01
STEPS_AFTER = 3
"""Steps to be trained after a death before the next thing is done."""
LIMIT_S = 1800.0


class NotReached(RuntimeError):
    """What was waited for did not come; what came before is told."""


@dataclass
class Run:
    """The run under test."""

    directory: RunDirectory
    process: subprocess.Popen[bytes]
    deadline: float

    def status(self) -> tuple[dict[str, Any], float]:
        """The status, and the wall clock at the zero of the journal's times; empty and 0 before the first."""
        try:
            written = self.directory.status_json.stat().st_mtime
            status = json.loads(self.directory.status_json.read_bytes())
        except (OSError, ValueError):
            return {}, 0.0
        return status, written - status["elapsed_s"]

    def until(self, condition: Callable[[dict[str, Any]], bool], what: str) -> None:
        """Raises `NotReached`."""
        while not condition(self.status()[0]):
            if self.process.poll() is not None:
                raise NotReached(f"the run ended before it was {what}")
            if time.monotonic() > self.deadline:
                raise NotReached(f"it was not {what} in time (--limit)")
            time.sleep(LOOK_S)

    def kill(self, pid: int) -> float:
        """SIGKILL to the server's process; gives the journal's time."""
        os.kill(pid, signal.SIGKILL)
        killed = time.time()
        return killed - self.status()[1]

    def pid(self) -> int:
        """The server's: looked for beforehand, since a moment to kill is short."""
        for process in psutil.Process(self.process.pid).children(recursive=True):
            try:
                line = process.cmdline()
            except psutil.Error:  # it has ended
                continue
            if line[1:3] == ["-m", "telescope.inference"] and VICTIM in line:
                return int(process.pid)
        sys.exit(f"no process {VICTIM}")


@dataclass
class Death:
    """One kill as the journal tells it; times in seconds after the kill."""

    at: float
    known_s: float = 0.0
    requests: set[str] = field(default_factory=set)
    """Placed on the server and not answered when it was given up."""
    placed_s: dict[str, float] = field(default_factory=dict)
    back_s: float = 0.0
    current_s: float = 0.0
    travelling: int = 0
    """The version that was on its way to the servers; 0: none."""
    arrived_s: float = 0.0
    """When the servers that were left had it."""


def deaths(lines: list[JournalLine], kills: list[float]) -> list[Death]:
    """Follow servers, placements and versions through the journal."""
    found = [Death(at) for at in kills]
    at_server: dict[str, str] = {}
    served: dict[str, int] = {}
    travelling: tuple[str, ...] = ()
    version, ordered, open_deaths = 0, 0, list(found)
    for line in lines:
        for one in open_deaths:
            if one.at > line.now:
                one.travelling = ordered if ordered > version else 0
        death = next((one for one in open_deaths if one.at <= line.now and not one.current_s), None)
        match line.event:
            case seen.TurnDone(request_id=request_id):
                at_server.pop(request_id, None)
            case seen.ServerJoined(server=server, version=served_version):
                served[server] = served_version
                if server == VICTIM and death is not None:
                    death.back_s = line.now - death.at
            case seen.ServerLost(server=server):
                served.pop(server, None)
                travelling = tuple(name for name in travelling if name != server)
                if server == VICTIM and death is not None:
                    death.known_s = line.now - death.at
                    death.requests = {request for request, where in at_server.items() if where == server}
            case seen.UpdateDone(version=done):
                served |= dict.fromkeys(travelling, done)
                version = max(version, done)
                if death is not None and death.travelling == done:
                    death.arrived_s = line.now - death.at
        for command in line.commands:
            if isinstance(command, do.UpdateWeights):
                travelling, ordered = tuple(served), command.version
            if isinstance(command, do.PlaceRequest):
                at_server[command.request_id] = command.server
                if death is not None and command.request_id in death.requests:
                    death.placed_s.setdefault(command.request_id, line.now - death.at)
        if death is not None and death.back_s and served.get(VICTIM) == version:
            death.current_s = line.now - death.at
    return found


def samples(lines: list[JournalLine], requests: set[str]) -> tuple[int, int, int, int]:
    """Of the requests' rollouts: how many there are, how many failed for good, how many were still under way when the run was
    over (or stopped), and the tokens of their earlier turns."""
    rollout_of: dict[str, int] = {}
    tokens: dict[str, int] = {}
    scored: set[int] = set()
    failed: set[int] = set()
    for line in lines:
        match line.event:
            case seen.TurnStarted():
                rollout_of[line.event.request_id] = line.event.rollout_id
            case seen.TurnDone():
                tokens[line.event.request_id] = line.event.completion_tokens
            case seen.RolloutDone():
                scored.add(line.event.rollout_id)
            case seen.RolloutFailed():
                failed.add(line.event.rollout_id)
    rollouts = {rollout_of[request] for request in requests}
    earlier = [
        tokens.get(request, 0) for request, rollout in rollout_of.items() if rollout in rollouts and request not in requests
    ]
    left = rollouts - scored
    return len(rollouts), len(left & failed), len(left - failed), sum(earlier)


def report(lines: list[JournalLine], death: Death, when: str) -> dict[str, Any]:
    placed = sorted(death.placed_s.values())
    count, lost, waiting, kept = samples(lines, death.requests)
    return {
        "killed": when,
        "known_s": round(death.known_s, 3),
        "requests_in_flight": len(death.requests),
        "requeued_s_median": round(statistics.median(placed), 3) if placed else None,
        "requeued_s_last": round(placed[-1], 3) if placed else None,
        "samples_in_flight": count,
        "samples_lost": lost,
        "samples_under_way_at_the_end": waiting,
        "tokens_of_earlier_turns_kept": kept,
        "tokens_of_the_open_turn_salvaged": 0,
        "version_under_way": death.travelling or None,
        "version_committed_s": round(death.arrived_s, 3) or None,
        "back_s": round(death.back_s, 3),
        "serves_the_current_version_s": round(death.current_s, 3),
    }


def restarted(times: int, status: dict[str, Any]) -> bool:
    return int(status.get("restarts", {}).get(VICTIM, 0)) >= times


def trained(step: int, status: dict[str, Any]) -> bool:
    return (status.get("step") or 0) >= step or status.get("state") in ("done", "failed")


def kill_all(run: Run, whens: list[str], kills: list[float]) -> None:
    """One kill after another, each with the server back and steps trained behind it; the journal's times go into `kills`."""
    for number, when in enumerate(whens, start=1):
        run.until(lambda status: (status.get("step") or 0) >= 2 and status["in_flight"] > 0, "generating at step 2")
        pid = run.pid()
        if when == "update":
            run.until(lambda status: (status.get("step") or 0) >= 2 and "prepared" in status["doing"], "in mid-update")
        kills.append(run.kill(pid))
        run.until(partial(restarted, number), "whole again")
        step = (run.status()[0].get("step") or 0) + STEPS_AFTER
        run.until(partial(trained, step), f"{STEPS_AFTER} steps further")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run-dir", type=Path, default=None)
    parser.add_argument("overrides", nargs="*", help="of the run; none: a fake one")
    parser.add_argument("--stop", action="store_true", help="stop the run once the server serves again, before its last step")
    parser.add_argument(
        "--limit", type=float, default=LIMIT_S, help="seconds; then the run is stopped, and what was seen is told"
    )
    parser.add_argument("--kills", nargs="+", choices=WHEN, default=list(WHEN))
    given = parser.parse_args()
    folder = given.run_dir or Path(tempfile.mkdtemp(prefix="telescope-recovery-")) / "run"
    settings = (f"run_dir={folder}", "checkpoint.at_end=none", *(given.overrides or FAKE))
    command = [sys.executable, "-m", "telescope.run", *settings]
    started = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    run = Run(RunDirectory(folder), started, time.monotonic() + given.limit)
    kills: list[float] = []
    missed = ""
    try:
        try:
            kill_all(run, given.kills, kills)
        except NotReached as error:
            missed = str(error)
        if given.stop or missed:
            run.process.terminate()
        code = run.process.wait(given.limit)
    finally:
        if run.process.poll() is None:
            run.process.terminate()
    text = run.directory.journal.read_bytes().splitlines()[1:]
    lines = [decode_line(line, number) for number, line in enumerate(text, 2)]
    summary = json.loads(run.directory.summary_json.read_bytes())
    found = deaths(lines, kills)
    result = {
        "exit_code": code,
        "steps": summary["steps"],
        "restarts": summary["restarts"],
        "rollouts_failed": summary["rollouts"]["failed"],
        "deaths": [report(lines, death, f"mid-{when}") for death, when in zip(found, given.kills, strict=False)],
        "missed": missed or None,
        "run_dir": str(folder),
        "command": " ".join(command[1:]),
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
