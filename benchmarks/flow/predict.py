"""Does a calibrated simulation tell the step time of runs it has not seen? `python -m benchmarks.flow.predict FOLDER`.

Starts real runs (the embedded model, vLLM, FSDP; with `--fake` the engine and backend without a model), and tells them from
runs of another configuration that were played before and after them: another max_async_rollout, another batch, other groups,
few lanes, another seed. What is told and compared is a step's processor seconds, all processes together; the wall clock is
shown beside it. What a step costs changes with what else the machine does, so each run is told by the calibration before it
and the one after it, and by their mean; how far the calibrations themselves lie apart is shown too. Runs in FOLDER already are
not started again. On an idle machine of two cores it takes seven minutes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median

from telescope.config.model_shapes import shape_of
from telescope.config.run import load_run
from telescope.planning.calibration import Calibration, calibrate, measure_processor_step_s
from telescope.planning.forecast import adapt_latencies, forecast
from telescope.runlog.layout import RunDirectory
from telescope.runlog.reader import rows

CALIBRATED = "calibrated"
LIMIT = 0.15
ALWAYS = (
    "cluster.device=cpu", "cluster.trainer_num_workers=1", "cluster.inference_num_workers=1", "logging.progress=false",
    "logging.use_wandb=false", "checkpoint.at_end=none",
)  # fmt: skip
_REAL = ("number_of_steps=24",)
REAL = (
    ("calibrated", *_REAL),
    ("synchronous", *_REAL, "orchestrator.max_async_rollout=0"),
    ("half_batch", *_REAL, "orchestrator.prompts_batch_size_for_trainer=16"),
    ("one_ahead", *_REAL, "orchestrator.max_async_rollout=1"),
    ("calibrated_again", *_REAL),
    ("few_lanes", *_REAL, "orchestrator.max_concurrent_prompts_per_server=4", "orchestrator.max_async_rollout=1"),
    ("small_groups", *_REAL, "rollout.group_size=4", "seed=3"),
    ("seed", *_REAL, "seed=7"),
    ("calibrated_at_last", *_REAL),
)
"""In this order. Those that are called `calibrated` tell the others."""
_FAKE = (
    "experiment=fake", "number_of_steps=12", "inference.fake_token_s=0.02", "backend.step_s=0.3",
    "orchestrator.prompts_batch_size_for_trainer=16",
)  # fmt: skip
FAKE = (
    ("calibrated", *_FAKE),
    ("seed", *_FAKE, "seed=7"),
    ("synchronous", *_FAKE, "orchestrator.max_async_rollout=0"),
    ("half_batch", *_FAKE[:-1], "orchestrator.prompts_batch_size_for_trainer=8"),
    ("few_lanes", *_FAKE, "orchestrator.max_async_rollout=1", "orchestrator.max_concurrent_prompts_per_server=6"),
    ("calibrated_again", *_FAKE),
)


def play(folder: Path, name: str, overrides: tuple[str, ...]) -> RunDirectory:
    run = RunDirectory(folder / name)
    if not run.summary_json.exists():
        command = [sys.executable, "-m", "telescope.run", *overrides, *ALWAYS, f"run_dir={run.path}"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=600)
    return run


def calibrated(run: RunDirectory) -> Calibration:
    config = load_run(run.config_json)
    return calibrate(run, ranks=config.cluster.trainer_num_workers, epochs=config.trainer.epochs_per_batch)


def step_s(run: RunDirectory) -> float:
    """Median of the run's own step times, as its metrics have them."""
    return float(median(row["metrics"]["timing_step_total"] for row in rows(run, "step_metrics")))


def predicted_s(calibration: Calibration, run: RunDirectory) -> float:
    config = load_run(run.config_json)
    return forecast(config, adapt_latencies(calibration, config, shape_of(config.model.name), None)).step_s


def processor_s(run: RunDirectory) -> float:
    """Median of the processor seconds of its steps."""
    found = measure_processor_step_s([row["metrics"] for row in rows(run, "step_metrics")])
    if found is None:
        raise ValueError(f"{run.path} does not say its processor time")
    return found


def predicted_processor_s(calibration: Calibration, run: RunDirectory) -> float:
    config = load_run(run.config_json)
    if calibration.host_costs is None:
        raise ValueError("the calibrated run does not say its processor time")
    outcome = forecast(config, adapt_latencies(calibration, config, shape_of(config.model.name), None))
    return calibration.host_costs.estimate_step_s(outcome.steps)


def off(told_by: Sequence[Calibration], run: RunDirectory) -> float:
    """How far the mean of what these calibrations tell lies from what the run's median step took, as a share of it."""
    return fmean(predicted_processor_s(calibration, run) for calibration in told_by) / processor_s(run) - 1


def around(names: Sequence[str], place: int) -> list[str]:
    """The calibrations next to a run: the last one before it, the first one after it. Not the run itself."""
    before = [name for name in names[:place] if name.startswith(CALIBRATED)]
    after = [name for name in names[place + 1 :] if name.startswith(CALIBRATED)]
    return before[-1:] + after[:1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--fake", action="store_true")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    runs: dict[str, RunDirectory] = {}
    for name, *overrides in FAKE if given.fake else REAL:
        runs[name] = play(given.folder, name, tuple(overrides))
        print(f"{name} is there, load average {os.getloadavg()[0]:.1f}", flush=True)
    calibrations = {name: calibrated(run) for name, run in runs.items() if name.startswith(CALIBRATED)}
    worst = 0.0
    for place, (name, run) in enumerate(runs.items()):
        beside = [calibrations[other] for other in around(list(runs), place)]
        each = ", ".join(f"{off([one], run):+.1%}" for one in beside)
        wall, told_wall = step_s(run), fmean(predicted_s(one, run) for one in beside)
        print(
            f"{name:<18} processor seconds: real {processor_s(run):.3f}, told {off(beside, run):+.1%} ({each}); "
            f"wall-clock: real {wall:.3f} s, told {told_wall / wall - 1:+.1%}"
        )
        if name not in calibrations:
            worst = max(worst, abs(off(beside, run)))
    print(f"worst of the other configurations, in processor seconds: {worst:.1%}")
    return 0 if worst <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
