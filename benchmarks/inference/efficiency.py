"""Tokens a second of the whole system over those of the bare engine: `python -m benchmarks.inference.efficiency --shape 3B`.

The system is one real run (hub, worker, orchestrator, server, run directory, a trainer that publishes the same weights) of as
many steps as rounds, each a batch of single-turn rollouts generated at once. The bare engine is vLLM's AsyncLLM with the same
arguments, prompts and lengths, and without log-probs (`--bare-logprobs`: with those of sampled tokens), fed by a loop that
keeps as many requests in flight. They take turns: while one
generates the other waits, so they may share a GPU (`--share 0.4`). Time is counted from the first request placed to the last
one done. `--spare N`: either may have N requests more at the engine than it computes at once, so that a lane that falls free
finds the next request there.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from benchmarks.shapes import SHAPES, make_model
from benchmarks.weights.pause import machine
from telescope.runlog.layout import RunDirectory
from telescope.runlog.reader import rows

ROOT = Path(__file__).resolve().parents[2]
START_S, RUN_S = 300.0, 300.0


def overrides(given: argparse.Namespace, model: Path) -> list[str]:
    groups, row = given.requests // given.group_size, (given.prompt + given.tokens + 127) // 64 * 64
    return [
        f"model.name={model}", "model=any", "env=letters", "backend=patient",
        f"number_of_steps={given.repeats}",
        f"environments.letters.kwargs.length={given.prompt}", f"rollout.group_size={given.group_size}",
        f"rollout.max_tokens={given.tokens}", f"orchestrator.prompts_batch_size_for_trainer={groups}",
        "orchestrator.max_async_rollout=0", "orchestrator.discard_group_zero_advantage=false",
        f"orchestrator.max_concurrent_prompts_per_server={(given.concurrent + given.spare) // given.group_size}",
        f"inference.max_num_seqs={given.concurrent}",
        "cluster.inference_num_workers=1", "cluster.trainer_num_workers=1", "inference.http=false",
        f"inference.max_model_len={given.prompt + given.tokens + 8}", f"trainer.seq_len={row}",
        "logging.use_wandb=false", f"rollout.timeout_s={RUN_S}", f"inference.gpu_memory_utilization={given.share}",
        *given.override,
    ]  # fmt: skip


# ---- the bare engine -------------------------------------------------------------------------------------------------


async def bare(given: argparse.Namespace, model: Path) -> None:
    """Serves orders on stdin: each line is one round, answered with one line of JSON."""
    from telescope.compose.load import load_points, places_for
    from telescope.inference.main import build_engine, device_of

    (point,) = load_points(overrides(given, model), places_for(str(ROOT / "benchmarks")), os.environ)
    assert point.config is not None, point.problems
    config = point.config
    engine = build_engine(config, "benchmark", device_of(config, os.environ))
    await engine.start()
    await engine.client.collective_rpc("telescope_drop_logprobs")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = config.environment("letters").prompts("train")[: given.requests // given.group_size]
    ids = [tokenizer(prompt.turns[0]["content"])["input_ids"] for prompt in prompts]
    print(json.dumps({"ready": True}), flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        await engine.client.reset_prefix_cache()
        print(json.dumps(await one_round(engine, ids, given)), flush=True)
    await engine.close()


async def one_round(engine: Any, ids: list[list[int]], given: argparse.Namespace) -> dict[str, float]:
    """AsyncLLM itself, not our engine around it: what a plain program would get from vLLM."""
    from vllm import SamplingParams
    from vllm.inputs import tokens_input
    from vllm.sampling_params import RequestOutputKind

    lanes = asyncio.Semaphore(given.concurrent + given.spare)

    async def one(index: int) -> tuple[int, float]:
        async with lanes:
            began = time.perf_counter()
            params = SamplingParams(
                temperature=1.0, max_tokens=given.tokens, seed=index, logprobs=0 if given.bare_logprobs else None,
                detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY,
            )  # fmt: skip
            prompt = tokens_input(prompt_token_ids=ids[index // given.group_size])
            tokens = 0
            async for output in engine.client.generate(prompt, params, f"{time.monotonic_ns()}-{index}"):
                tokens = len(output.outputs[0].token_ids)
            return tokens, time.perf_counter() - began

    began = time.perf_counter()
    done = await asyncio.gather(*map(one, range(given.requests)))
    return figures([tokens for tokens, _ in done], [served for _, served in done], time.perf_counter() - began, given)


def figures(tokens: Sequence[int], served: Sequence[float], seconds: float, given: argparse.Namespace) -> dict[str, float]:
    """Of one round. `served`: seconds of each request at the engine. All answers have the same length, so a round is waves of
    as many as are in flight: `outside_s` is what a round takes beyond the waves' medians, when lanes are empty."""
    found = {"tokens": sum(tokens), "seconds": seconds, "tokens_per_s": sum(tokens) / seconds}
    if not given.spare:
        waves = [
            statistics.median(served[start : start + given.concurrent]) for start in range(0, given.requests, given.concurrent)
        ]
        found |= {"wave_s": statistics.fmean(waves), "outside_s": seconds - sum(waves)}
    return found


class Bare:
    """The bare engine's process, seen from outside."""

    def __init__(self, arguments: list[str], environ: dict[str, str]) -> None:
        command = [sys.executable, "-m", "benchmarks.inference.efficiency", "--bare", *arguments]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environ
        )

    def ready(self) -> None:
        self._answer()

    def round(self) -> dict[str, float]:
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                answer: dict[str, float] = json.loads(line)
                return answer
        raise SystemExit(f"the bare engine ended with {self._process.wait()}")


# ---- the system ------------------------------------------------------------------------------------------------------


class System:
    """A run whose trainer waits after each batch until it may go on."""

    def __init__(self, given: argparse.Namespace, model: Path, folder: Path, environ: dict[str, str]) -> None:
        self._given, self._folder, self._gate = given, folder / "run", folder / "gate"
        self._gate.mkdir()
        self._log = folder / "run.txt"
        self.cpu: list[dict[str, float]] = []
        command = [sys.executable, "-m", "telescope.run", "--config-dir", str(ROOT / "benchmarks"), f"run_dir={self._folder}"]
        settings = [*overrides(given, model), f"backend.gate={self._gate}"]
        with self._log.open("w") as said:
            self._process = subprocess.Popen(
                [*command, *settings], stdout=said, stderr=subprocess.STDOUT, cwd=ROOT, env=environ
            )

    def batch(self, step: int) -> None:
        """Wait until the batch of the step is generated; meanwhile look at the processes' CPU seconds."""
        seen: dict[tuple[str, int], tuple[float, float]] = {}
        end, playing, mark = time.monotonic() + START_S + RUN_S, False, self._gate / f"batch-{step}"
        while not mark.exists():
            if self._process.poll() is not None or time.monotonic() > end:
                self.close()
                raise SystemExit(f"the run made no batch of step {step}:\n{self._log.read_text()[-3000:]}")
            watch_cpu(self._process.pid, seen, started=playing)
            playing = playing or in_flight(self._folder) > 0
            time.sleep(0.1)  # watching from outside: the run tells nobody
        watch_cpu(self._process.pid, seen, started=playing)
        spent: dict[str, float] = {}
        for (name, _), (first, last) in seen.items():
            spent[f"cpu_s_{name}"] = spent.get(f"cpu_s_{name}", 0.0) + last - first
        self.cpu.append(spent)

    def go_on(self, step: int) -> None:
        (self._gate / f"go-{step}").touch()

    def rounds(self) -> list[dict[str, float]]:
        """Wait for the run's end; what its rows say of each batch."""
        self._process.wait(RUN_S)
        turns = sorted(rows(RunDirectory(self._folder), "turns"), key=lambda turn: turn["placed_ns"])
        size = self._given.requests
        if len(turns) != size * self._given.repeats:
            raise SystemExit(f"{len(turns)} turns were done:\n{self._log.read_text()[-3000:]}")
        found = []
        for number, cpu in enumerate(self.cpu):
            batch = turns[number * size : (number + 1) * size]
            seconds = (max(turn["done_ns"] for turn in batch) - batch[0]["placed_ns"]) / 1e9
            served = [turn["queued_s"] + turn["generated_s"] for turn in batch]
            found.append(figures([turn["completion_tokens"] for turn in batch], served, seconds, self._given) | cpu)
        return found

    def close(self) -> None:
        """Ask it to end; its supervisor ends all processes below it."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(40)
            except subprocess.TimeoutExpired:
                self._process.kill()


def in_flight(folder: Path) -> int:
    """Rollouts that the run has under way, by its status file."""
    try:
        return int(json.loads((folder / "status.json").read_bytes()).get("in_flight", 0))
    except (OSError, ValueError):
        return 0


def watch_cpu(pid: int, seen: dict[tuple[str, int], tuple[float, float]], *, started: bool) -> None:
    """Own CPU seconds of each of our processes: (at the first look after rollouts had begun, now)."""
    try:
        processes = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return
    for process in processes:
        try:
            line = process.cmdline()
            if len(line) > 2 and line[1] == "-m" and line[2].startswith("telescope."):
                key = line[2].removeprefix("telescope."), process.pid
                now = sum(process.cpu_times()[:2])
                seen[key] = (seen[key][0] if started and key in seen else now, now)
        except psutil.Error:
            continue


# ---- both ------------------------------------------------------------------------------------------------------------


def visible_cards(environ: Mapping[str, str]) -> list[str]:
    """The cards that may be used: the system's is the first, the bare engine's the last. Asks the driver, not CUDA."""
    if (said := environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [card for card in said.split(",") if card]
    from torch.cuda import device_count

    return [str(card) for card in range(device_count())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="tiny")
    parser.add_argument("--models", type=Path, default=Path("runs/models"))
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--concurrent", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of an answer")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--share", type=float, default=0.8, help="of its card, for an engine")
    parser.add_argument("--spare", type=int, default=0, help="requests that either may have waiting at the engine")
    parser.add_argument("--bare-logprobs", action="store_true", help="the bare engine is asked for log-probs")
    parser.add_argument("--out", type=Path, help="a file for the figures, JSON")
    parser.add_argument("--override", action="append", default=[], help="a setting of telescope.run, for both")
    parser.add_argument("--bare", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    model = make_model(SHAPES[given.shape], given.models.absolute() / given.shape)
    given.on_gpu = "cluster.device=cpu" not in given.override
    if given.bare:
        asyncio.run(bare(given, model))
        return
    cards = visible_cards(os.environ)
    environ = {**os.environ, "WANDB_MODE": "disabled", "LD_PRELOAD": ""}
    with TemporaryDirectory() as folder:
        alone = Bare(sys.argv[1:], {**environ, "CUDA_VISIBLE_DEVICES": cards[-1] if cards else ""})
        if cards[:1] == cards[-1:]:  # an engine measures how much of its card is free while it starts
            alone.ready()
        system = System(given, model, Path(folder), {**environ, "CUDA_VISIBLE_DEVICES": cards[0] if cards else ""})
        try:
            bare_rounds = []
            for step in range(1, given.repeats + 1):
                system.batch(step)
                if step == 1 and cards[:1] != cards[-1:]:
                    alone.ready()
                bare_rounds.append(alone.round())
                system.go_on(step)
            rounds = {"system": system.rounds(), "bare": bare_rounds}
        finally:
            system.close()
            alone.close()
    for kind, found in rounds.items():
        for figures in found:
            print(kind, json.dumps({key: round(value, 3) for key, value in figures.items()}))
    speed = {kind: statistics.median(one["tokens_per_s"] for one in found) for kind, found in rounds.items()}
    print(f"efficiency {speed['system'] / speed['bare']:.3f} (system {speed['system']:.0f}, bare {speed['bare']:.0f} tokens/s)")
    if given.out is not None:
        asked = {key: str(value) if isinstance(value, Path) else value for key, value in vars(given).items()}
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(
            json.dumps({"arguments": asked, "machine": machine(given.on_gpu), "rounds": rounds}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
