"""Several ranks from one process that has imported all they need: `python -m tests.backends.forking RANKS MODULE [ARGUMENTS]`.

Each rank runs `MODULE.main()` with RANK set, in a fork of its own; imports of torch and transformers, half of what such a test
costs, are paid once. What the ranks say and how they end is written as JSON, `[[exit code, output], …]`.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import IO

IMPORTED = (
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "telescope.backends.fsdp.backend",
)


def run_forked(
    ranks: int, module: str, arguments: Sequence[str], environment: Mapping[str, str], limit_s: float
) -> list[tuple[int, str]]:
    """Exit code and output of each rank of `python -m module arguments…`."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.backends.forking", str(ranks), module, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        said, _ = process.communicate(timeout=limit_s)
        assert process.returncode == 0, said[-6000:]
        return [(code, output) for code, output in json.loads(said.splitlines()[-1])]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(60)


def main() -> None:
    ranks, module = int(sys.argv[1]), importlib.import_module(sys.argv[2])
    del sys.argv[1:3]
    for name in IMPORTED:
        importlib.import_module(name)
    outputs = [tempfile.TemporaryFile() for _ in range(ranks)]  # noqa: SIM115 as long as the process
    children = [_fork(rank, module.main, output) for rank, output in enumerate(outputs)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    for output in outputs:
        output.seek(0)
    print(json.dumps([[code, output.read().decode()] for code, output in zip(codes, outputs, strict=True)]))


def _fork(rank: int, run: Callable[[], int], output: IO[bytes]) -> int:
    child = os.fork()
    if child:
        return child
    os.environ["RANK"] = str(rank)
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    code = 1
    try:
        code = run()
    except BaseException:  # noqa: BLE001 the edge of a forked process: it must not return into its parent's code
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # as the trainer's own process does: gloo's threads may not outlive the interpreter


if __name__ == "__main__":
    main()
