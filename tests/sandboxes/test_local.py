"""What local sandboxes do when nobody attacks, how they refuse to start, and the parts that can be looked at alone."""

from __future__ import annotations

import logging
import os
import platform
import struct
from pathlib import Path

import pytest
from pydantic import ValidationError

from telescope.environments.sandboxes import apptainer, bubblewrap, cgroups, docker, gvisor, local, seccomp
from telescope.environments.sandboxes.base import Limits, Provider, SandboxUnavailable
from telescope.environments.sandboxes.pool import SandboxSettings
from telescope.runlog import temporary

LIMITS = Limits(memory_mb=128, disk_mb=16, time_s=60.0)


async def test_the_unsafe_mode_warns_at_each_start(caplog: pytest.LogCaptureFixture) -> None:
    provider = SandboxSettings(provider="unsafe_subprocess").make_provider()
    with caplog.at_level(logging.WARNING):
        await provider.start(LIMITS)
    await provider.close()
    assert "Run nothing there that a model wrote" in caplog.text


def test_the_unsafe_mode_is_never_the_default() -> None:
    assert SandboxSettings().provider == "bubblewrap"
    with pytest.raises(ValidationError, match=r"there is no sandbox provider 'subprocess'\. Did you mean unsafe_subprocess"):
        SandboxSettings.model_validate({"provider": "subprocess"})


@pytest.mark.parametrize(
    ("provider", "line"),
    [
        (bubblewrap.Bubblewrap(), "apt-get install bubblewrap"),
        (gvisor.GVisor(), "apt-get install runsc"),
        (docker.Docker(), "apt-get install podman"),
        (docker.Docker(program="docker"), r"sandbox\.program=docker.*https://docs\.docker\.com"),
        (apptainer.Apptainer(), "module load apptainer"),
    ],
    ids=["bubblewrap", "gvisor", "podman", "docker", "apptainer"],
)
async def test_a_missing_program_gives_the_line_that_installs_it(
    provider: Provider, line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxUnavailable, match=line):
        await provider.start(LIMITS)


async def test_a_sandbox_that_can_not_be_made_is_refused_with_what_was_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "bwrap"
    program.write_text("#!/bin/sh\necho 'bwrap: No permissions to create a new namespace' >&2\nexit 1\n")
    program.chmod(0o755)
    tmp_path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    provider = bubblewrap.Bubblewrap()
    monkeypatch.setattr(bubblewrap.Bubblewrap, "_user", lambda self: None)
    with pytest.raises(SandboxUnavailable, match=r"No permissions to create a new namespace.*unprivileged_userns_clone"):
        await provider.start(LIMITS)


async def test_a_local_sandbox_gets_no_network() -> None:
    provider = bubblewrap.Bubblewrap()
    with pytest.raises(SandboxUnavailable, match=r"sandbox\.limits\.network=true with provider=bubblewrap"):
        await provider.start(Limits(network=True))


def test_version_2_groups_get_their_limits_as_files(tmp_path: Path) -> None:
    """On a copy of the tree: the kernel's own files only exist where version 2 is mounted."""
    tree = tmp_path / "telescope"
    tree.mkdir()
    made = cgroups.Cgroups(2, (tree,))
    wanted = made._files(Path("/nothing"), LIMITS, 4, 16)
    assert wanted == {}  # a controller that is not there is not written to
    folder = tree / "one"
    folder.mkdir()
    for name in ("memory.max", "memory.swap.max", "pids.max", "cpu.max"):
        (folder / name).touch()
    assert made._files(folder, LIMITS, 4, 16) == {
        "memory.max": str(144 << 20), "memory.swap.max": "0", "pids.max": "36", "cpu.max": "100000 100000"
    }  # fmt: skip
    (folder / "memory.events").write_text("low 0\noom 1\noom_kill 1\n")
    assert cgroups.Group((folder,)).out_of_memory()


def test_where_no_group_can_be_made_there_is_none(tmp_path: Path) -> None:
    assert cgroups.find(tmp_path / "nothing") is None
    (tmp_path / "cgroup.controllers").write_text("memory pids")
    (tmp_path / "own").write_text("0::/here\n")
    (tmp_path / "here").write_text("a file where a folder should be")
    found = cgroups.find(tmp_path, tmp_path / "own")
    assert found is not None  # the root of this tree can be written
    assert found.parents[0].parent == tmp_path


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_denies_what_it_lists_and_allows_the_rest(machine: str) -> None:
    program = seccomp.program(machine)
    assert program is not None
    lines = [struct.unpack("<HBBI", program[at : at + 8]) for at in range(0, len(program), 8)]
    arch = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}[machine]

    def verdict(number: int, argument: int = 0, architecture: int = arch) -> int:
        at, value = 0, 0
        while True:
            code, yes, no, k = lines[at]
            at += 1
            match code:
                case 0x20:
                    value = {0: number, 4: architecture, 16: argument}[k]
                case 0x15:
                    at += yes if value == k else no
                case 0x35:
                    at += yes if value >= k else no
                case 0x45:
                    at += yes if value & k else no
                case _:
                    return k

    allow, eperm, enosys, kill = 0x7FFF0000, 0x50001, 0x50026, 0x80000000
    denied = seccomp.DENIED[machine].values()
    assert {verdict(number) for number in denied} == {eperm}
    socket_call, clone = {"x86_64": (41, 56), "aarch64": (198, 220)}[machine]
    assert [verdict(socket_call, family) for family in (1, 2, 10, 16, 40)] == [allow, eperm, eperm, eperm, eperm]
    assert [verdict(clone, flags) for flags in (17, 0x10000000 | 17)] == [allow, eperm]
    assert verdict(435) == enosys
    assert verdict(0, architecture=0x40000003) == kill
    others = set(range(460)) - set(denied) - {socket_call, 435}
    assert {verdict(number) for number in others} == {allow}


def test_no_filter_is_made_up_for_a_machine_whose_numbers_are_not_known() -> None:
    assert seccomp.program("riscv64") is None
    assert platform.machine() in seccomp.DENIED


def test_the_groups_of_a_killed_worker_are_removed_and_those_of_a_living_one_stay(tmp_path: Path) -> None:
    gone = next(pid for pid in range(4_000_000, 1, -1) if not Path("/proc", str(pid)).exists())
    for pid in (gone, os.getpid()):
        (tmp_path / f"telescope-{pid}-00ff" / "sandbox-1").mkdir(parents=True)
    cgroups._sweep(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [f"telescope-{os.getpid()}-00ff"]


def test_two_environments_of_one_process_have_groups_of_their_own(tmp_path: Path) -> None:
    """Once both began at the same name: the second one's first sandbox was refused while the first one's stood."""
    (tmp_path / "cgroup.controllers").write_text("memory pids")
    ours, others = (cgroups.find(tmp_path, tmp_path / "own") for _ in range(2))
    assert ours is not None
    assert others is not None
    for places in (ours, others):  # what the kernel would not keep from removing a group
        (places.parents[0] / "cgroup.subtree_control").unlink()
    group = ours.make(LIMITS)
    others.make(LIMITS)
    others.forget(others.make(LIMITS))
    ours.forget(group)
    ours.close()
    assert not ours.parents[0].exists()
    assert [path.name for path in others.parents[0].iterdir()] == ["sandbox-1"]
    others.make(LIMITS)


def test_the_folder_of_sandboxes_is_one_that_the_launcher_sweeps_after_a_worker_that_was_killed() -> None:
    assert local.FOLDER.startswith(temporary.PREFIX)
