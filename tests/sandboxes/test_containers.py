"""Containers: what they are asked for, whose they are, and what becomes of those of a killed worker; by Podman where it is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from telescope.environments.sandboxes import apptainer
from telescope.environments.sandboxes.base import Limits, SandboxUnavailable
from telescope.environments.sandboxes.docker import LABEL, Docker, is_left_behind
from tests.sandboxes.contract import CONTRACT, LIMITS
from tests.sandboxes.machine import container_image

WORKER = """
import asyncio, sys
from telescope.environments.sandboxes.base import Limits
from telescope.environments.sandboxes.docker import Docker

async def work():
    provider = Docker(program="podman", image=sys.argv[1])
    limits = Limits(time_s=600.0)
    await provider.start(limits)
    sandbox = await provider.create(limits)
    await sandbox.exec(["sh", "-c", "echo begun > begun"])
    print("ready", flush=True)
    await sandbox.exec(["sleep", "600"])

asyncio.run(work())
"""


@pytest.fixture
async def podman() -> AsyncIterator[Docker]:
    provider = Docker(program="podman", image=container_image("podman"))
    yield provider
    await provider.close()


def containers() -> set[str]:
    asked = ["podman", "ps", "--all", f"--filter=label={LABEL}", "--format={{.Names}}"]
    return set(subprocess.run(asked, capture_output=True, text=True, timeout=60, check=True).stdout.split())


async def test_the_containers_of_a_killed_worker_are_removed_by_the_next_and_those_of_a_living_one_stay(podman: Docker) -> None:
    living = Docker(program="podman", image=podman.image)
    await living.start(LIMITS)
    await living.create(LIMITS)
    process = subprocess.Popen([sys.executable, "-c", WORKER, podman.image], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        theirs = {name for name in containers() if f"-{process.pid}-" in name}
        assert len(theirs) == 1
        assert not any(map(is_left_behind, theirs))
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=60)
        assert theirs <= containers()  # a command runs there for minutes yet
        await podman.start(LIMITS)
        mine = {name for name in containers() if f"-{os.getpid()}-" in name}
        assert len(mine) == 1
        assert not theirs & containers()
        await living.close()
        assert not mine & containers()
    finally:
        process.kill()
        process.wait(timeout=60)


async def test_the_close_of_one_provider_leaves_anothers_containers_of_the_same_worker(podman: Docker) -> None:
    other = Docker(program="podman", image=podman.image)
    await podman.start(LIMITS)
    await other.start(LIMITS)
    sandbox = await podman.create(LIMITS)
    await other.create(LIMITS)
    await other.close()
    assert (await sandbox.exec(["echo", "here"])).text == "here\n"


async def test_an_image_that_is_not_there_is_refused_with_the_line_that_pulls_it() -> None:
    container_image("podman")  # skips where there is no Podman
    with pytest.raises(SandboxUnavailable, match=r"sandbox\.image=localhost/nothing:1 .*`podman pull localhost/nothing:1`"):
        await Docker(program="podman", image="localhost/nothing:1").start(LIMITS)


async def test_what_podman_says_of_a_container_that_it_can_not_make_is_told(podman: Docker) -> None:
    wrong = Docker(program="podman", image=podman.image, options=("--runtime=no-such-runtime",))
    with pytest.raises(SandboxUnavailable, match=r"sandbox\.provider=docker does not work here: .*no-such-runtime"):
        await wrong.start(LIMITS)


async def test_limits_that_are_not_found_inside_are_not_claimed(podman: Docker, monkeypatch: pytest.MonkeyPatch) -> None:
    held = await podman.start(LIMITS)
    assert any("the container's cgroup" in what for what in held.holds)
    monkeypatch.setattr(Docker, "own_processes", 5)
    looser = Docker(program="podman", image=podman.image, options=("--pids-limit=999",))
    found = await looser.start(LIMITS)
    await looser.close()
    assert "memory of all processes together" in " ".join(found.lacks)


def test_only_a_worker_of_this_machine_that_is_no_more_leaves_containers_behind() -> None:
    mine = Docker()._name
    label, kind, machine, pid, started, _ = mine.split("-")
    assert (f"{label}-{kind}", pid) == (LABEL, str(os.getpid()))
    gone = next(number for number in range(4_000_000, 1, -1) if not Path("/proc", str(number)).exists())
    assert not is_left_behind(f"{mine}-1")
    assert is_left_behind(f"{LABEL}-{machine}-{gone}-{started}-x-1")
    assert is_left_behind(f"{LABEL}-{machine}-{pid}-{int(started) + 1}-x-1")  # its number belongs to another process now
    assert not is_left_behind(f"{LABEL}-elsewhere-{gone}-{started}-x-1")
    assert not is_left_behind("somebody-elses")


@pytest.mark.parametrize("program", ["docker", "podman"])
def test_a_container_is_asked_for_with_every_limit(program: str, tmp_path: Path) -> None:
    provider = Docker(image="mine:1", options=("--runtime=runsc",))
    provider._program = f"/usr/bin/{program}"
    limits = Limits(memory_mb=128, disk_mb=16, processes=16, cpus=0.5, open_files=64)
    argv = provider.launch(limits, None, tmp_path).argv
    assert {
        "--rm", "--pull=never", "--network=none", "--user=65534:65534", "--cap-drop=ALL", "--security-opt=no-new-privileges",
        "--read-only", "--memory=144m", "--memory-swap=144m", "--pids-limit=20", "--cpus=0.5", "--ulimit=nofile=64:64",
        "--tmpfs=/tmp:rw,exec,nosuid,nodev,mode=1777,size=16777216", "--shm-size=4194304", "--log-driver=none",
    } <= set(argv)  # fmt: skip
    assert ("--read-only-tmpfs=false" in argv) == (program == "podman")
    assert argv[argv.index("--runtime=runsc") + 1 :][:3] == ["--entrypoint=python3", "mine:1", "-I"]


STAND_IN = """#!/bin/sh
# In place of Apptainer: takes its words up to the image, and runs what follows as the first process of a pid namespace.
printf '%s\\n' "$@" > {asked}
while [ "$1" != {image} ]; do shift; done
shift
exec bwrap --unshare-all --unshare-user --die-with-parent --as-pid-1 --ro-bind / / --proc /proc --dev /dev --tmpfs /tmp "$@"
"""


@pytest.mark.parametrize("rule", CONTRACT, ids=lambda rule: rule.__name__)
async def test_apptainers_provider_keeps_the_contract_with_a_stand_in_for_its_program(
    rule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What Apptainer does itself is not tested here: its command line is taken apart, and our half is used."""
    image, program = tmp_path / "python.sif", tmp_path / "apptainer"
    image.write_bytes(b"")
    program.write_text(STAND_IN.format(asked=tmp_path / "asked", image=image))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    provider = apptainer.Apptainer(image=str(image))
    found = await provider.start(LIMITS)
    assert "no network" in found.holds
    sandbox = await provider.create(LIMITS)
    try:
        await rule(sandbox)
    finally:
        await provider.close()
    asked = (tmp_path / "asked").read_text().splitlines()
    assert {"exec", "--userns", "--containall", "--no-init", "--no-home", "--no-privs", "--net", "--network=none"} <= set(asked)


async def test_apptainer_refuses_root_and_an_image_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "apptainer"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(SandboxUnavailable, match="is for a worker that is not root"):
        await apptainer.Apptainer(image=str(program)).start(LIMITS)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(SandboxUnavailable, match=r"`apptainer pull python\.sif docker://python:3\.11-slim` makes one"):
        await apptainer.Apptainer(image=str(tmp_path / "python.sif")).start(LIMITS)


async def test_a_container_whose_memory_runs_out_leaves_no_file_where_the_worker_stands(
    podman: Docker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Podman's monitor writes a file `oom` into the folder that it was started in."""
    monkeypatch.chdir(tmp_path)
    limits = Limits(memory_mb=64, disk_mb=256, time_s=60.0)
    await podman.start(limits)
    sandbox = await podman.create(limits)
    filled = await sandbox.exec(["sh", "-c", "head -c 200000000 /dev/zero > /tmp/large"])
    assert not filled.ok  # files in memory count to the container's
    await sandbox.delete()
    assert list(tmp_path.iterdir()) == []
