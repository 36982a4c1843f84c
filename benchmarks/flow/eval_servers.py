"""Training's throughput while an eval is under way and while none is: what servers held for evals cost, and what none does.

    python -m benchmarks.flow.eval_servers

Each line of a journal has its time, so one run gives both figures.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from benchmarks.flow.predict import play
from telescope.flow import commands as do
from telescope.flow import events as seen
from telescope.flow.evals import EVAL_IDS
from telescope.flow.replay import JournalLine, decode_line
from telescope.flow.settings import EvalRules, FlowSettings
from telescope.runlog.journal import journal_lines
from telescope.runlog.reader import rows
from tests.flow.harness import Manners, World


@dataclass
class Phase:
    """Time and what was done in it, over a whole run."""

    seconds: float = 0.0
    rollouts: int = 0
    """Of training, scored."""
    steps: int = 0
    samples: int = 0
    """Of evals, scored."""

    def describe(self) -> str:
        per_s = self.rollouts / self.seconds if self.seconds else 0.0
        done = f"{self.steps:3d} steps  {self.rollouts:5d} rollouts, {per_s:5.2f}/s"
        return f"{self.seconds:7.1f} s  {done}  {self.samples} samples of evals"


def measure(lines: list[JournalLine]) -> tuple[Phase, Phase]:
    """Without an eval and with one, from the first step's end to the last's: baseline and final are left out."""
    phases = Phase(), Phase()
    under_way, before, inside = 0, 0.0, False
    last = max((line.now for line in lines if isinstance(line.event, seen.StepDone)), default=0.0)
    for line in lines:
        phase = phases[under_way > 0]
        if inside and line.now <= last:
            phase.seconds += line.now - before
            match line.event:
                case seen.RolloutDone(rollout_id=rollout_id) if rollout_id < EVAL_IDS:
                    phase.rollouts += 1
                case seen.RolloutDone():
                    phase.samples += 1
                case seen.StepDone():
                    phase.steps += 1
        before = line.now
        inside = inside or isinstance(line.event, seen.StepDone)
        for command in line.commands:
            under_way += isinstance(command, do.BeginEval)
            under_way -= isinstance(command, do.EndEval) and command.state != "left out"
    return phases


def play_world(servers: int, held: int, steps: int) -> list[JournalLine]:
    """In the test harness's world, whose clock is turned: the same on any machine. A server has 8 lanes, an answer takes a
    second in the mean, a step of 64 rollouts 0.05 s: servers are what is short."""
    rules = EvalRules(name="own", environment="countdown", every=10, num_samples=1, baseline=False, final=False)
    settings = FlowSettings(
        number_of_steps=steps,
        prompts_batch_size_for_trainer=16,
        group_size=4,
        max_async_rollout=2,
        max_concurrent_prompts_per_server=2,
        environments=(("countdown", 1.0),),
        evals=(rules,),
        eval_servers=held,
    )
    manners = Manners(servers=servers, eval_prompts=100, prompts=1000, most_turns=1, step_s=0.05, update_s=0.05)
    world = World(settings, manners, seed=1, journal=True).run()
    return [decode_line(text, number) for number, text in enumerate(world.lines[1:], start=2)]


def play_run(folder: Path, servers: int, held: int, steps: int, token_s: float) -> list[JournalLine]:
    """A run of processes, with the fake engine and the fake trainer."""
    overrides = (
        *("experiment=fake", "cluster.device=cpu", f"cluster.inference_num_workers={servers}", f"number_of_steps={steps}"),
        *("orchestrator.max_concurrent_prompts_per_server=2", "eval.every=8", "eval.num_prompts=40", "eval.baseline=false"),
        *("eval.final=false", f"eval.num_servers={held}", f"inference.fake_token_s={token_s}", "backend.step_s=0.1"),
    )
    run = play(folder, f"{servers}-{held}", overrides)
    for row in rows(run, "evals"):
        print(f"eval of step {row['step']}: {row['state']}, versions {row.get('version_first')} to {row.get('version_last')}")
    return [decode_line(text, number) for number, text in enumerate(journal_lines(run.journal), start=1) if number > 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=int, nargs="+", default=[3, 4, 8])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--runs-below", type=Path, help="play runs of processes in this folder, not in a world of its own")
    parser.add_argument("--token-s", type=float, default=0.1, help="seconds of one token of the fake engine, in such runs")
    asked = parser.parse_args()
    for servers in asked.servers:
        for held in (1, 0):
            print(f"{servers} servers, {held} held")
            if asked.runs_below is None:
                lines = play_world(servers, held, asked.steps)
            else:
                lines = play_run(asked.runs_below, servers, held, asked.steps, asked.token_s)
            without, beside = measure(lines)
            print(f"  without an eval  {without.describe()}")
            print(f"  beside one       {beside.describe()}")


if __name__ == "__main__":
    main()
