"""What pip is to install, for scripts/_environment.sh. Standard library only: it runs in an empty environment.

project cpu,dev       prints the requirements of pyproject.toml with these extras, a line each
without-torch         prints the requirements of the package in pip's report on stdin, less torch and its kin
is-cpu-build          exits 0 where the package in pip's report on stdin needs no CUDA, 1 otherwise
is-installed A==1.2   exits 0 where that version is there (any build of it), 1 otherwise
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

TORCH_KIN = {"torch", "torchaudio", "torchvision", "torchcodec"}


def project(extras: str) -> list[str]:
    with (Path(__file__).resolve().parent.parent / "pyproject.toml").open("rb") as file:
        table = tomllib.load(file)["project"]
    lines = list(table["dependencies"])
    for extra in extras.split(","):
        lines += table["optional-dependencies"][extra]
    return lines


def reported() -> list[str]:
    """Requirements of the one package in pip's report, extras left out."""
    (package,) = json.load(sys.stdin)["install"]
    return [line for line in package["metadata"].get("requires_dist", []) if "extra ==" not in line]


def name_of(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0].lower()


def is_installed(pin: str) -> bool:
    name, _, wanted = pin.partition("==")
    try:
        return version(name).partition("+")[0] == wanted
    except PackageNotFoundError:
        return False


def main(arguments: list[str]) -> int:
    match arguments:
        case ["project", extras]:
            print(*project(extras), sep="\n")
        case ["without-torch"]:
            print(*(line for line in reported() if name_of(line) not in TORCH_KIN), sep="\n")
        case ["is-cpu-build"]:
            return int(any(name_of(line).startswith(("nvidia", "cuda")) for line in reported()))
        case ["is-installed", pin]:
            return int(not is_installed(pin))
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
