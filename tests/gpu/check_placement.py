"""Who really gets which GPU on a host with two or more: `python -m tests.gpu.check_placement`. About a minute.

Runs with processes, sockets and a fake model are started in each shape, all at once; of every process the variables are read
from the kernel and compared with what the strategy means, and CUDA's driver is asked which cards they open. Beside them one
real run: FSDP over NCCL on two cards, a vLLM server on one of them, twelve steps. Exits 0 only if all hold.

`--pretend N` does the first part on a machine without GPUs, with a stand-in for nvidia-smi; `--real cpu` the second on a CPU.
No pytest module: it needs GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from telescope.runlog.layout import RunDirectory
from telescope.runlog.reader import rows
from tests.gpu.needed import need_gpus

LIMIT_S = 90.0
MODULES = ("telescope.inference", "telescope.trainer", "telescope.workers", "telescope.orchestrator")
FAKE = (
    "experiment=fake",
    "number_of_steps=1000",
    "backend.step_s=0.1",
    "weight_sync.transport=shared_memory",
    "inference.gpu_memory_utilization=0.45",
)
IN_USE_MIB = 100
"""Of a card on which somebody has a CUDA context; one that nobody uses grows by nothing. A rank of this model had 336."""
STEPS = 12
REAL = (
    f"number_of_steps={STEPS}",
    "orchestrator.prompts_batch_size_for_trainer=8",
    "inference.gpu_memory_utilization=0.3",
    "logging.use_wandb=false",
)
ASK_CUDA = """
import ctypes, sys
cuda, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
if cuda.cuInit(0) == 0:
    cuda.cuDeviceGetCount(ctypes.byref(count))
for index in range(count.value):
    device, uuid = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    cuda.cuDeviceGet(ctypes.byref(device), index)
    cuda.cuDeviceGetUuid(uuid, device)
    print(bytes(uuid).hex())
"""
"""The cards that a process with these variables opens, in its own order: without torch, in a tenth of a second."""


@dataclass(frozen=True)
class Shape:
    """One run: what is asked for, and the cards that servers and ranks must then have."""

    name: str
    servers: int
    ranks: int
    tensor_parallel: int = 1
    inference: str = "PACK"
    trainer: str = "PACK"
    cards: dict[str, str] = field(default_factory=dict)

    @property
    def settings(self) -> tuple[str, ...]:
        return (
            "cluster.device=gpu",
            f"cluster.inference_num_workers={self.servers * self.tensor_parallel}",
            f"cluster.trainer_num_workers={self.ranks}",
            f"inference.tensor_parallel_size={self.tensor_parallel}",
            f"cluster.inference_placement={self.inference}",
            f"cluster.trainer_placement={self.trainer}",
        )


def shapes(gpus: int) -> Iterator[Shape]:
    """Those of two cards, whatever more there is; with four the same idea once more."""
    for strategy in ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"):
        yield Shape(
            f"a card each, {strategy}", 1, 1, inference=strategy, trainer=strategy, cards={"server-0": "0", "trainer-0": "1"}
        )
    if gpus == 2:
        yield Shape("two ranks, a server shares", 1, 2, cards={"server-0": "0", "trainer-0": "1", "trainer-1": "0"})
        yield Shape("two servers, a rank shares", 2, 1, cards={"server-0": "0", "server-1": "1", "trainer-0": "0"})
        yield Shape(
            "two servers and two ranks", 2, 2, cards={"server-0": "0", "server-1": "1", "trainer-0": "0", "trainer-1": "1"}
        )
        yield Shape("a server of both, two ranks", 1, 2, 2, cards={"server-0": "0,1", "trainer-0": "0", "trainer-1": "1"})
    else:
        yield Shape("a server of two, two ranks", 1, 2, 2, cards={"server-0": "0,1", "trainer-0": "2", "trainer-1": "3"})
        yield Shape("two servers, a rank", 2, 1, cards={"server-0": "0", "server-1": "1", "trainer-0": "2"})


def refusals(gpus: int) -> Iterator[tuple[Shape, str]]:
    """What must be refused, and words of the sentence."""
    yield Shape("more servers than cards", gpus + 1, 1), f"or {gpus + 1} where a server and a rank share one"
    yield Shape("servers of which each wants a host", 2, 1, inference="STRICT_SPREAD"), "STRICT_SPREAD"
    yield Shape("a server of more cards than there are", 1, 1, gpus + 1), f"or {gpus + 1} where"


class Report:
    def __init__(self) -> None:
        self.good = True

    def note(self, what: str, holds: bool, found: object = "") -> None:
        self.good &= bool(holds)
        print("ok " if holds else "BAD", what, "|", found, flush=True)


class Run:
    """One `python -m telescope.run` in a folder and a process group of its own."""

    def __init__(self, folder: Path, settings: tuple[str, ...], environ: dict[str, str]) -> None:
        self.directory = RunDirectory(folder / "run")
        self._said = folder / "said.txt"
        folder.mkdir()
        with self._said.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "telescope.run", f"run_dir={self.directory.path}", "checkpoint.at_end=none", *settings],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environ,
                start_new_session=True,
            )

    def said(self, characters: int = 1500) -> str:
        return self._said.read_text()[-characters:]

    def step(self) -> int:
        try:
            return int(json.loads(self.directory.status_json.read_text()).get("step") or 0)
        except (FileNotFoundError, json.JSONDecodeError):
            return 0

    def until_step(self, step: int, limit_s: float) -> bool:
        deadline = time.monotonic() + limit_s
        while self.step() < step:
            if self.process.poll() is not None or time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return True

    def wait(self, limit_s: float) -> int | None:
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            if self.wait(30) is None:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait(10)

    def environments(self) -> dict[str, dict[str, str]]:
        """The variables of each process of the plan as the kernel has them, by name."""
        found = {}
        for process in psutil.Process(self.process.pid).children(recursive=True):
            try:
                line, variables = process.cmdline(), process.environ()
            except psutil.Error:
                continue
            if line[1:2] == ["-m"] and line[2] in MODULES and "--name" in line:
                found[line[line.index("--name") + 1]] = variables
        return found


def cards_of_machine() -> dict[str, str]:
    """nvidia-smi's index to the card's UUID as CUDA prints it."""
    command = ["nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader"]
    lines = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.splitlines()
    pairs = (line.partition(",")[::2] for line in lines)
    return {index.strip(): uuid.strip().removeprefix("GPU-").replace("-", "") for index, uuid in pairs}


def opened(visible: str) -> list[str]:
    """UUIDs of the cards that CUDA opens for a process with this CUDA_VISIBLE_DEVICES."""
    environ = os.environ | {"CUDA_VISIBLE_DEVICES": visible}
    answer = subprocess.run(
        [sys.executable, "-c", ASK_CUDA], capture_output=True, text=True, timeout=60, env=environ, check=True
    )
    return answer.stdout.split()


def look(
    report: Report, name: str, environments: dict[str, dict[str, str]], expected: dict[str, str], uuids: dict[str, str]
) -> None:
    """What the processes of one run have against what they must have."""
    seen = {who: variables.get("CUDA_VISIBLE_DEVICES", "-") for who, variables in sorted(environments.items())}
    wanted = {who: expected.get(who, "") for who in seen}
    report.note(f"{name}: variables", expected.keys() <= seen.keys() and seen == wanted, seen)
    shared = {card for who, cards in expected.items() if who.startswith("server") for card in cards.split(",")}
    told = {who: variables.get("TELESCOPE_GPU_SHARE") for who, variables in environments.items() if who.startswith("trainer")}
    right = all((share is not None) == (expected[who] in shared) for who, share in told.items())
    report.note(f"{name}: only ranks that share are told so", right, told)
    if uuids:
        by_cuda = {visible: opened(visible) for visible in sorted({*seen.values()})}
        fine = all(cards == [uuids[index] for index in visible.split(",") if index] for visible, cards in by_cuda.items())
        report.note(f"{name}: CUDA opens those cards", fine, {visible: len(cards) for visible, cards in by_cuda.items()})


def fake_runs(report: Report, folder: Path, gpus: int, environ: dict[str, str], uuids: dict[str, str]) -> None:
    """All shapes side by side: that they are several shows besides that they do not meet."""
    wanted = list(shapes(gpus))
    with ExitStack() as ending:
        runs = []
        for number, shape in enumerate(wanted):
            runs.append(Run(folder / f"fake-{number}", (*FAKE, *shape.settings), environ))
            ending.callback(runs[-1].stop)
        deadline = time.monotonic() + LIMIT_S
        for shape, run in zip(wanted, runs, strict=True):
            if run.until_step(1, deadline - time.monotonic()):
                look(report, shape.name, run.environments(), shape.cards, uuids)
            else:
                report.note(f"{shape.name}: trains", False, run.said())
        for run in runs:
            run.process.send_signal(signal.SIGTERM)
        codes = [run.wait(30) for run in runs]
        report.note("all end as they are told", set(codes) == {143}, codes)


def all_shapes(report: Report, folder: Path, gpus: int, environ: dict[str, str], uuids: dict[str, str]) -> None:
    started = time.monotonic()
    refused_runs(report, folder, gpus, environ)
    fake_runs(report, folder, gpus, environ, uuids)
    print(f"{time.monotonic() - started:.1f} s for the shapes", flush=True)


def refused_runs(report: Report, folder: Path, gpus: int, environ: dict[str, str]) -> None:
    tried = [
        (shape, words, Run(folder / f"refused-{number}", (*FAKE, *shape.settings), environ))
        for number, (shape, words) in enumerate(refusals(gpus))
    ]
    for shape, words, run in tried:
        code = run.wait(60)
        run.stop()
        report.note(
            f"{shape.name}: refused",
            code == 1 and words in run.said() and not run.directory.path.exists(),
            run.said(400).strip(),
        )


def used_mib() -> dict[str, int]:
    command = ["nvidia-smi", "--query-gpu=index,memory.used", "--format=csv,noheader,nounits"]
    lines = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.splitlines()
    return {index.strip(): int(used) for index, used in (line.split(",") for line in lines)}


def real_run(report: Report, folder: Path, device: str, environ: dict[str, str], uuids: dict[str, str]) -> None:
    """The embedded model on two ranks, a vLLM server on the card of one of them."""
    shape = Shape("real", 1, 2, cards={"server-0": "0", "trainer-0": "1", "trainer-1": "0"})
    settings = ("cluster.device=cpu", *shape.settings[1:]) if device == "cpu" else shape.settings
    if len(uuids) > 2:
        environ = environ | {"CUDA_VISIBLE_DEVICES": "0,1"}
    before = used_mib() if uuids else {}
    started = time.monotonic()
    run = Run(folder / "real", (*REAL, *settings), environ)
    try:
        trains = run.until_step(1, 4 * LIMIT_S if device == "cpu" else LIMIT_S)
        report.note("real: trains", trains, f"first step after {time.monotonic() - started:.1f} s")
        if trains and uuids:
            environments, used = run.environments(), used_mib()  # before the last step: then they are gone
            look(report, "real", environments, shape.cards, uuids)
            grown = {index: now - before[index] for index, now in used.items()}
            report.note(
                "real: both cards are in use", all(grown[index] > IN_USE_MIB for index in ("0", "1")), f"MiB more: {grown}"
            )
        code = run.wait(60)
    finally:
        run.stop()
    steps = rows(run.directory, "step_metrics") if run.directory.path.exists() else []
    gaps = [round(row["metrics"]["kl_divergence_inference"], 5) for row in steps]
    report.note(
        "real: all steps and the end", code == 0 and len(steps) == STEPS, f"{time.monotonic() - started:.1f} s, exit {code}"
    )
    report.note("real: server and ranks agree after each update", bool(gaps) and max(map(abs, gaps)) < 0.05, gaps)
    if not report.good:
        print(run.said(3000))


def pretend(folder: Path, gpus: int) -> dict[str, str]:
    """A stand-in for nvidia-smi in front of PATH."""
    folder.mkdir()
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nseq 0 {gpus - 1}\n")
    program.chmod(0o755)
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--pretend", type=int, metavar="N", help="N GPUs that are not there; no real run unless it is asked for"
    )
    parser.add_argument("--real", choices=["gpu", "cpu", "no"], default=None)
    arguments = parser.parse_args()
    if arguments.pretend is None:
        need_gpus(2, instead="--pretend 2 looks at the plan alone")
    elif arguments.pretend < 2:
        parser.error(f"--pretend {arguments.pretend}: the check needs two GPUs or more")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # `timeout` must leave no run behind
    real = arguments.real or ("no" if arguments.pretend else "gpu")
    report = Report()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fakes = pretend(folder / "bin", arguments.pretend) if arguments.pretend else {}
        environ = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"} | {
            "WANDB_MODE": "disabled"
        }
        uuids = {} if arguments.pretend else cards_of_machine()
        gpus = arguments.pretend or len(uuids)
        if gpus == 3:
            environ["CUDA_VISIBLE_DEVICES"], gpus = "0,1", 2
        with ThreadPoolExecutor(1) as beside:  # the real one mostly waits for its engine
            shapes_too = beside.submit(all_shapes, report, folder, gpus, environ | fakes, uuids)
            if real != "no":
                real_run(report, folder, real, environ, uuids)
            shapes_too.result()
    print("all is well" if report.good else "NOT all is well")
    return 0 if report.good else 1


if __name__ == "__main__":
    sys.exit(main())
