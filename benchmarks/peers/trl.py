"""TRL's line of the table, in a Python environment of its own: GRPOTrainer with a vLLM server or within the trainer, or
AsyncGRPOTrainer.

    python -m benchmarks.peers.trl --mode server --shape 0.6B --variant tuned --steps 8 --python TRL_VENV/bin/python
    python -m benchmarks.peers.trl --mode colocate --variant defaults --python TRL_VENV/bin/python
    python -m benchmarks.peers.trl --mode async --variant tuned --hub-kernels --python TRL_VENV/bin/python
    python -m benchmarks.peers.trl --mode transformers --shape tiny --cpu --steps 4 --prompt 16 --answer 16      # dry run

`--python`: one with `pip install "trl[vllm]"`, and for the tuned variant flash-attn or kernels. AsyncGRPOTrainer loads its
attention, kernels-community/flash-attn3, with the package kernels: give `--hub-kernels` where this machine reaches the hub, or
has it in its cache. `--set NAME=VALUE` sets an argument of GRPOConfig or AsyncGRPOConfig by hand; all that is not at its
default is in the file of figures, with versions and the server's command.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from benchmarks.peers.host import PeerCard, describe_machine, end, find_cards, start, tail, wait
from benchmarks.peers.result import PeerResult, PeerStep, write_result
from benchmarks.peers.trl_arguments import CARDS, TrlChoices, TrlSettings, arguments, handicaps
from benchmarks.peers.workload import ROOT, Workload, add_arguments, draw_prompts, make_endless_model, workload_of

WORKER = "benchmarks.peers.trl_worker"
READY_S, ASK_S, LOOK_S = 600.0, 120.0, 0.2
RUNNING = "vllm:num_requests_running"


def read_peer(python: str) -> dict[str, Any]:
    """Versions and modules of TRL's Python. Ends the program where it has no TRL."""
    try:
        asked = subprocess.run(
            [python, "-m", WORKER, "--versions"], capture_output=True, text=True, timeout=ASK_S, cwd=ROOT, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or error
        raise SystemExit(f"--python={python} cannot be asked for its versions: {said}") from None
    found: dict[str, Any] = json.loads(asked.stdout)
    if "trl" not in found["modules"]:
        raise SystemExit(f'--python={python} has no trl: pip install "trl[vllm]" there')
    return found


class ServerWatch:
    """How many requests the server computes, looked up while it works: (monotonic seconds, number)."""

    def __init__(self, port: int) -> None:
        self._url, self._ended = f"http://127.0.0.1:{port}/metrics", threading.Event()
        self.seen: list[tuple[float, float]] = []
        self._thread = threading.Thread(target=self._watch, daemon=True, name="server-watch")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join(ASK_S)

    def _watch(self) -> None:
        while not self._ended.wait(LOOK_S):
            try:
                with urllib.request.urlopen(self._url, timeout=5) as answer:
                    self.seen.append((time.monotonic(), running_requests(answer.read().decode())))
            except (OSError, ValueError):
                continue  # busy, or about to end: the next look may tell


def running_requests(metrics: str) -> float:
    """From the text of a vLLM server's /metrics, over its engines. Raises ValueError where it does not say."""
    lines = [line for line in metrics.splitlines() if line.startswith((RUNNING + "{", RUNNING + " "))]
    if not lines:
        raise ValueError(f"the server's metrics have no {RUNNING}")
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def server_load(seen: Sequence[tuple[float, float]], start_s: float, end_s: float) -> tuple[float, float] | None:
    """(Seconds with a request under way, requests on average) of a window, by the looks that fell into it; None: none did."""
    within = [number for at, number in seen if start_s <= at <= end_s]
    if not within:
        return None
    return (end_s - start_s) * sum(number > 0 for number in within) / len(within), sum(within) / len(within)


def read_step(row: Mapping[str, Any], mode: str, seen: Sequence[tuple[float, float]]) -> PeerStep:
    """A step as the worker noted it, with the server's load. By turns, what is neither generation nor weights is training."""
    load = server_load(seen, row["started"], row["ended"])
    generation_s, weights_s = row.get("generation_s"), row.get("weights_s", 0.0)
    if mode == "async":
        training_s, generation_s = row.get("training_s"), load[0] if load else None
    else:
        training_s = row["seconds"] - (generation_s or 0.0) - weights_s
    return PeerStep(
        step=row["step"],
        seconds=row["seconds"],
        tokens=round(row["tokens"]),
        answer_tokens=round(row["answer_tokens"]),
        training_s=training_s,
        generation_s=generation_s,
        weights_s=weights_s,
        in_flight=load[1] if load else None,
    )


@contextmanager
def served(command: Sequence[str], log: Path, environ: Mapping[str, str], port: int) -> Iterator[ServerWatch]:
    """A vLLM server that is ready, watched until it is no longer needed."""
    process, load = start(command, log, environ, ROOT), ServerWatch(port)
    try:
        _wait_ready(process, log, port)
        load.start()
        yield load
        load.stop()
    finally:
        end(process)


def _wait_ready(process: subprocess.Popen[bytes], log: Path, port: int) -> None:
    deadline, pause = time.monotonic() + READY_S, threading.Event()
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except OSError:
            pause.wait(LOOK_S)  # it listens only once it is ready, and tells nobody
    raise SystemExit(f"TRL's vLLM server was not ready within {READY_S:g} s; its log, {log}, ends so:\n{tail(log)}")


def train(
    given: argparse.Namespace, work: Workload, settings: TrlSettings, model: Path, cards: Sequence[PeerCard], folder: Path
) -> tuple[dict[str, Any], list[tuple[float, float]], list[list[str]]]:
    """What the worker wrote, what was seen of the server, and the commands that were run."""
    order, out = folder / "order.json", folder / "steps.json"
    prompts = draw_prompts(work.groups * (given.steps + 1), work.prompt_tokens)
    asked = {"mode": given.mode, "model": str(model), "out": str(out), "prompts": prompts, "trainer": settings.trainer}
    order.write_text(json.dumps(asked), encoding="utf-8")
    environ = {**os.environ, "WANDB_MODE": "disabled", "HF_HUB_OFFLINE": "0" if given.hub_kernels else "1"}
    trainer = [given.python, "-m", WORKER, str(order)]
    placed = environ | {"CUDA_VISIBLE_DEVICES": cards[-1].ident if cards else ""}
    log, seen, commands = folder / "trainer.txt", [], [trainer]
    if settings.server:
        command = [given.python, "-m", "vllm.entrypoints.cli.main", "serve", str(model), *settings.server]
        own = environ | {"CUDA_VISIBLE_DEVICES": cards[0].ident, "VLLM_SERVER_DEV_MODE": "1"}
        commands.append(command)
        with served(command, folder / "server.txt", own, given.port) as load:
            wait(start(trainer, log, placed, ROOT), log, given.limit_s, "TRL's trainer")
        seen = load.seen
    else:
        wait(start(trainer, log, placed, ROOT), log, given.limit_s, "TRL's trainer")
    return json.loads(out.read_text(encoding="utf-8")), seen, commands


def measure(given: argparse.Namespace) -> PeerResult:
    work, peer = workload_of(given), read_peer(given.python)
    choices = TrlChoices(
        mode=given.mode, variant=given.variant, steps=given.steps, masters=given.masters, attention=given.attention,
        hub_kernels=given.hub_kernels, per_device=given.per_device, port=given.port, group_port=given.group_port,
    )  # fmt: skip
    if CARDS[given.mode] and "vllm" not in peer["modules"]:
        raise SystemExit(f'--mode={given.mode} needs vLLM in --python={given.python}: pip install "trl[vllm]" there')
    cards = find_cards(os.environ, CARDS[given.mode])
    model = make_endless_model(work.shape, given.models)
    with tempfile.TemporaryDirectory() as folder:
        try:
            settings = arguments(work, choices, peer["modules"], Path(folder, "trl"))
        except ValueError as error:
            raise SystemExit(f"--per-device: {error}") from None
        for setting in given.set:
            name, _, value = setting.partition("=")
            settings.set(name, yaml.safe_load(value), "given by hand with --set")
        told, seen, commands = train(given, work, settings, model, cards, Path(folder))
    return PeerResult(
        system="trl",
        mode=given.mode,
        variant=given.variant,
        workload=work,
        cards=tuple(card.name for card in cards),
        masters=given.masters,
        steps=tuple(read_step(row, given.mode, seen) for row in told["steps"]),
        versions=peer["versions"],
        machine=describe_machine(cards),
        settings=told["settings"] | ({"vllm serve": " ".join(settings.server)} if settings.server else {}),
        reasons=settings.reasons | {f"not {name}": why for name, why in settings.left_out.items()},
        handicaps=handicaps(choices),
        commands=tuple(map(tuple, commands)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--mode", choices=list(CARDS), default="server", help="transformers: the plumbing alone, for --cpu")
    parser.add_argument("--variant", choices=["defaults", "tuned"], default="tuned")
    parser.add_argument("--python", default=sys.executable, help="the Python that has TRL")
    parser.add_argument("--masters", choices=["float32", "bfloat16"], default="float32", help="weights that are updated")
    parser.add_argument("--attention", default="auto", help="attn_implementation, e.g. flash_attention_2")
    parser.add_argument("--hub-kernels", action="store_true", help="this machine reaches the hub of kernels, or has its cache")
    parser.add_argument("--per-device", type=int, help="per_device_train_batch_size")
    parser.add_argument("--port", type=int, default=8000, help="of TRL's vLLM server")
    parser.add_argument("--group-port", type=int, default=51_216, help="over which its weights go")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="an argument of TRL's configuration")
    given = parser.parse_args()
    if given.cpu != (given.mode == "transformers"):
        parser.error("--cpu goes with --mode=transformers, and the other modes need GPUs")
    out = given.out or Path("runs/peers") / f"trl_{given.shape}_{given.mode}_{given.variant}.json"
    result = measure(given)
    write_result(result, out)
    print(f"{out}: {len(result.steps)} steps, {[round(step.seconds, 2) for step in result.steps]} s")


if __name__ == "__main__":
    main()
