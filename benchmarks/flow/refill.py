"""How long do lanes stay empty where all answers of a server end in one engine step?

    python -m benchmarks.flow.refill [--requests 256] [--tokens 512] [--prompt 128] [--waves 12] [overrides ...]

A whole run (orchestrator, worker, trainer, server, each its own process) whose engine lets all of its requests end at the same
moment, and does so again when as many have come anew and the run is at rest. Prints one line of JSON: milliseconds from that
moment until the first and the last of the next requests are at the engine, and processor milliseconds of each process until
then and until all that a wave brings is done (rows, batches), as medians over waves, with the quartiles of `last_ms`. Other
work on the machine moves the wall times; the processor times move less.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.shapes import SHAPES, make_model

ROOT = Path(__file__).resolve().parents[2]
GROUP = 8
RUN_S = 300.0


def overrides(given: argparse.Namespace, folder: Path, model: Path) -> list[str]:
    """Batches as large as a wave, and enough groups open that a free lane always finds a rollout."""
    groups = given.requests // GROUP
    return [
        "experiment=fake", "model=any", f"model.name={model}",
        "env=letters", f"environments.letters.kwargs.length={given.prompt}", "environments.letters.kwargs.number=1000",
        f"run_dir={folder / 'run'}", f"number_of_steps={given.waves}", f"rollout.group_size={GROUP}",
        f"rollout.max_tokens={given.tokens}", f"inference.max_model_len={given.prompt + given.tokens + 8}",
        f"trainer.seq_len={(given.prompt + given.tokens + 127) // 64 * 64}", "cluster.device=cpu", "cluster.env_num_workers=1",
        f"orchestrator.prompts_batch_size_for_trainer={groups}", f"orchestrator.max_concurrent_prompts_per_server={groups}",
        "orchestrator.max_async_rollout=2", "orchestrator.discard_group_zero_advantage=false", "checkpoint.at_end=none",
        *given.overrides,
    ]  # fmt: skip


def start(arguments: list[str]) -> int:
    """`python -m telescope.run` whose servers are this benchmark's."""
    from telescope._launch import process_plan
    from telescope.cli import run

    process_plan.MODULES["server"] = "benchmarks.flow.waves"
    return run.main(arguments)


def measure(given: argparse.Namespace) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        out, said = folder / "waves.jsonl", folder / "said.txt"
        model = make_model(SHAPES["tiny"], folder / "model")
        waves = {"requests": given.requests, "tokens": given.tokens, "rest_s": given.rest, "out": str(out)}
        environ = {**os.environ, "WAVES": json.dumps(waves), "WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "benchmarks.flow.refill", "--start", "--config-dir", str(ROOT / "benchmarks")]
        with said.open("w") as file:
            process = subprocess.Popen(
                [*command, *overrides(given, folder, model)], stdout=file, stderr=file, cwd=ROOT, env=environ
            )
            try:
                code = process.wait(RUN_S)
            finally:
                if process.poll() is None:
                    process.terminate()
                    process.wait(60)
        if code != 0 or not out.exists():
            raise SystemExit(f"the run ended with {code}:\n{said.read_text()[-3000:]}")
        return [json.loads(line) for line in out.read_text().splitlines()]


def summary(waves: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians; the first wave, in which all is new, left out."""
    rows = waves[1:]
    found: dict[str, Any] = {"waves": len(rows), "requests": rows[0]["requests"]}
    for name in ("first_ms", "last_ms"):
        found[name] = round(statistics.median(row[name] for row in rows), 1)
    found["last_ms_quartiles"] = [round(value, 1) for value in statistics.quantiles([row["last_ms"] for row in rows], n=4)]
    for name in ("cpu_until_last_ms", "cpu_until_rest_ms"):
        parts = rows[0][name]
        found[name] = {part: round(statistics.median(row[name].get(part, 0.0) for row in rows)) for part in parts}
    return found


def main() -> int:
    if sys.argv[1:2] == ["--start"]:
        return start(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=512, help="of an answer")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--waves", type=int, default=12)
    parser.add_argument("--rest", type=float, default=0.7, help="seconds without an arrival that end a wave")
    given, overrides = parser.parse_known_args()
    given.overrides = overrides
    print(json.dumps(summary(measure(given))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
