"""Does a calibrated simulation tell the step time of runs it has not seen? `python -m benchmarks.flow.predict FOLDER`.

Starts real runs (the embedded model, vLLM, FSDP; with `--fake` the engine and backend without a model), calibrates on the first
and predicts the others: another max_async_rollout, another batch, other groups, few lanes, another seed. What is told and
compared is a step's processor seconds, all processes together; the wall clock is shown beside it. Runs in FOLDER already are
not started again.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from statistics import median

from telescope.config.run import load_run
from telescope.planning.calibrate import Calibration, calibrate
from telescope.planning.costs import measured_step_s
from telescope.planning.forecast import fitted_load, forecast, processor_step_s
from telescope.planning.shapes import shape_of
from telescope.runlog.layout import RunDirectory
from telescope.runlog.reader import rows

ALWAYS = (
    "cluster.device=cpu", "cluster.trainer_num_workers=1", "cluster.inference_num_workers=1", "logging.progress=false",
    "logging.use_wandb=false",
)  # fmt: skip
REAL = (
    ("calibrated", "number_of_steps=20"),
    ("seed", "number_of_steps=20", "seed=7"),
    ("synchronous", "number_of_steps=20", "orchestrator.max_async_rollout=0"),
    ("half_batch", "number_of_steps=20", "orchestrator.prompts_batch_size_for_trainer=16"),
    ("one_ahead", "number_of_steps=20", "orchestrator.max_async_rollout=1"),
    ("small_groups", "number_of_steps=20", "rollout.group_size=4", "seed=3"),
    ("few_lanes", "number_of_steps=20", "orchestrator.max_concurrent_prompts_per_server=4", "orchestrator.max_async_rollout=1"),
)
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
    return forecast(config, fitted_load(calibration, config, shape_of(config.model.name), None)).step_s


def processor_s(run: RunDirectory) -> float:
    """Median of the processor seconds of its steps."""
    found = measured_step_s([row["metrics"] for row in rows(run, "step_metrics")])
    if found is None:
        raise ValueError(f"{run.path} does not say its processor time")
    return found


def predicted_processor_s(calibration: Calibration, run: RunDirectory) -> float:
    config = load_run(run.config_json)
    if calibration.costs is None:
        raise ValueError("the calibrated run does not say its processor time")
    outcome = forecast(config, fitted_load(calibration, config, shape_of(config.model.name), None))
    return processor_step_s(config, calibration.costs, outcome)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--fake", action="store_true")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    runs = [(name, play(given.folder, name, tuple(overrides))) for name, *overrides in (FAKE if given.fake else REAL)]
    calibration = calibrated(runs[0][1])
    print(f"{calibration.load.engine}\n{calibration.costs}")
    worst = 0.0
    for name, run in runs:
        real, told = processor_s(run), predicted_processor_s(calibration, run)
        wall, told_wall = step_s(run), predicted_s(calibration, run)
        worst = max(worst, abs(told / real - 1))
        print(
            f"{name:<14} processor seconds: real {real:.3f}, predicted {told:.3f}: {told / real - 1:+.1%}; "
            f"wall-clock: real {wall:.3f} s, predicted {told_wall:.3f} s: {told_wall / wall - 1:+.1%}"
        )
    print(f"worst, in processor seconds: {worst:.1%}")
    return 0 if worst <= 0.15 else 1


if __name__ == "__main__":
    sys.exit(main())
