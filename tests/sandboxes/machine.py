"""The providers that can run on this machine, and an image for those that need one, made of this machine's own files."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from telescope.environments.sandboxes.base import Provider
from telescope.environments.sandboxes.pool import SandboxSettings

IMAGE = f"localhost/telescope-test-sandbox:{os.getpid()}"
PROGRAMS = ("sh", "cat", "wc", "ls", "head", "sleep", "echo", "printf", "true", "env", "mkdir")
PROVIDERS: dict[str, dict[str, Any]] = {
    "bubblewrap": {"provider": "bubblewrap"},
    "gvisor": {"provider": "gvisor"},
    "unsafe_subprocess": {"provider": "unsafe_subprocess"},
    "podman": {"provider": "docker", "program": "podman"},
    "docker": {"provider": "docker", "program": "docker"},
    "apptainer": {"provider": "apptainer"},
}


def provider_named(name: str) -> Provider:
    """Of the table above, not started yet. Skips the test, with the reason, where its program can't run here."""
    own: dict[str, Any] = {}
    if name in ("podman", "docker"):
        own = {"image": container_image(name)}
    elif name == "apptainer":
        own = {"image": apptainer_image()}
    return SandboxSettings.model_validate({**PROVIDERS[name], **own}).make_provider()


@cache
def container_image(program: str) -> str:
    """An image with python3 and a few programs; `TELESCOPE_TEST_IMAGE` names another, e.g. `python:3.11-slim`."""
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed on this host")
    try:
        subprocess.run([program, "info"], capture_output=True, timeout=60, check=True)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"`{program} info` does not work on this host: {(error.stderr or b'').decode().strip()[:200]}")
    if given := os.environ.get("TELESCOPE_TEST_IMAGE"):
        return given
    subprocess.run([program, "import", "-", IMAGE], input=_system(), capture_output=True, timeout=120, check=True)
    _imported.append(program)
    return IMAGE


_imported: list[str] = []


def remove_images() -> None:
    """Those that tests have made."""
    while _imported:
        subprocess.run([_imported.pop(), "rmi", "--force", IMAGE], capture_output=True, timeout=60, check=False)


def apptainer_image() -> str:
    if shutil.which("apptainer") is None:
        pytest.skip("apptainer is not installed on this host")
    if os.geteuid() == 0:
        pytest.skip("apptainer's provider is not for root, and these tests run as root")
    given = os.environ.get("TELESCOPE_TEST_SIF")
    if not given:
        pytest.skip("TELESCOPE_TEST_SIF names no image: `apptainer pull python.sif docker://python:3.11-slim` makes one")
    return given


def _system() -> bytes:
    """A tar file of a small system: an interpreter with its library, a few programs, and what they link to."""
    python = Path("/usr/bin/python3")
    asked = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('stdlib'))"]
    library = Path(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip())
    programs = [python, *(Path(shutil.which(name, path="/usr/bin:/bin") or name) for name in PROGRAMS)]
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w", dereference=True) as tar:
        for folder in ("dev", "proc", "sys", "tmp", "etc"):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if folder == "tmp" else 0o755
            tar.addfile(entry)
        for name in ("bin", "sbin", "lib", "lib64"):
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, f"usr/{name}"
            tar.addfile(entry)
        for file in sorted({*programs, *_linked([*programs, *library.glob("lib-dynload/*.so")])}):
            tar.add(file, arcname=_below_usr(file))
        tar.add(library, arcname=_below_usr(library), filter=_unless_left_out)
    return written.getvalue()


def _linked(binaries: Iterable[Path]) -> Iterator[Path]:
    """The shared libraries of programs, and the loader."""
    told = subprocess.run(["ldd", *map(str, binaries)], capture_output=True, text=True, check=False).stdout
    for line in told.splitlines():
        yield from (Path(word) for word in line.split() if word.startswith("/") and not word.endswith(":"))


def _below_usr(path: Path) -> str:
    return str(path).lstrip("/") if path.is_relative_to("/usr") else f"usr{path}"


def _unless_left_out(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if {"__pycache__", "test", "ensurepip", "idlelib"} & set(Path(entry.name).parts) else entry
