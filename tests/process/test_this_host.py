"""What a machine has, found by the tools that it has."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from telescope._launch.process_environment import make_child_environment
from telescope._launch.this_host import (
    find_compute_capability,
    find_smallest_card,
    has_compilers,
    inspect_this_host,
    list_driver_gpus,
)
from telescope.config.secrets import SecretMissing


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host whose nvidia-smi reports three GPUs."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nprintf '0\\n1\\n2\\n'\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.usefixtures("nvidia_smi")
def test_the_host_has_what_nvidia_smi_lists() -> None:
    assert inspect_this_host().gpus == ("0", "1", "2")
    assert inspect_this_host().cpus == len(os.sched_getaffinity(0))


@pytest.mark.usefixtures("nvidia_smi")
@pytest.mark.parametrize(
    ("value", "left"),
    [
        ("2,0", ("2", "0")),
        ("", ()),
        ("GPU-5f0,GPU-77a", ("GPU-5f0", "GPU-77a")),
        ("-1", ()),
        ("1,-1,0", ("1",)),
        ("NoDevFiles", ()),
        ("1,1", ("1",)),
    ],
)
def test_cuda_visible_devices_limits_the_run(monkeypatch: pytest.MonkeyPatch, value: str, left: tuple[str, ...]) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert inspect_this_host().gpus == left


def test_without_nvidia_smi_the_drivers_list_counts(tmp_path: Path) -> None:
    for address in ("0000:04:00.0", "0000:05:00.0"):
        (tmp_path / address).mkdir()
    assert list_driver_gpus(tmp_path) == ("0", "1")
    assert list_driver_gpus(tmp_path / "none") == ()


def test_looking_at_the_host_needs_no_torch() -> None:
    code = "import sys; from telescope._launch import this_host as t; t.inspect_this_host(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_a_reference_to_a_secret_becomes_its_value_in_the_child_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "s3cret")
    assert make_child_environment({"OPENAI_API_KEY": "${oc.env:JUDGE_KEY}"})["OPENAI_API_KEY"] == "s3cret"
    with pytest.raises(SecretMissing, match="NO_SUCH_KEY"):
        make_child_environment({"OPENAI_API_KEY": "${oc.env:NO_SUCH_KEY}"})


def test_children_import_this_checkout_from_anywhere(tmp_path: Path) -> None:
    code = "import telescope._launch.process_plan as plan; print(plan.__file__)"
    answer = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=make_child_environment({}),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert answer.stdout.startswith(str(Path(__file__).resolve().parents[2]))


@pytest.mark.parametrize(
    ("lines", "major"),
    [("9.0\\n9.0\\n", 9), ("12.0\\n", 12), ("8.0\\n9.0\\n", None), ("[N/A]\\n", None), ("0\\n1\\n", None)],
)
def test_the_cards_compute_capability_is_told_where_they_are_alike(lines: str, major, tmp_path: Path, monkeypatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\ntest \"$1\" = --query-gpu=compute_cap && printf '{lines}'\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert find_compute_capability() == major


@pytest.mark.parametrize(
    ("lines", "card"),
    [
        (
            "[N/A], 9.0, 143771 MiB, NVIDIA H200\\nDisabled, 8.9, 81559 MiB, NVIDIA H100 80GB HBM3\\n",
            ("NVIDIA H100 80GB HBM3", 81_559 << 20, 8),
        ),
        ("[N/A], [N/A], 81559 MiB, A, B\\n", ("A, B", 81_559 << 20, None)),
        ("[N/A], 12.1, [N/A], NVIDIA GB10\\n", None),
        ("Disabled, 9.0, 143771 MiB, NVIDIA H200\\nEnabled, 9.0, 81559 MiB, NVIDIA H100 80GB HBM3\\n", None),
        ("No devices were found\\n", None),
    ],
)
def test_the_card_with_least_memory_is_told(lines: str, card, tmp_path: Path, monkeypatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        f"#!/bin/sh\ntest \"$1\" = --query-gpu=mig.mode.current,compute_cap,memory.total,name && printf '{lines}'\n"
    )
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert find_smallest_card() == card


def test_only_cards_that_are_visible_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\ntest "$3" = --id=1,0 && echo "Disabled, 9.0, 143771 MiB, NVIDIA H200"\n')
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    found = []
    for visible in ("1,0", "2", "", "MIG-5f0"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        found.append(find_smallest_card())
    assert found == [("NVIDIA H200", 143_771 << 20, 9), None, None, None]


def test_without_nvidia_smi_nothing_is_known_of_the_cards(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_compute_capability() is None
    assert find_smallest_card() is None


def test_compilers_are_those_of_the_path_or_of_cc_and_cxx(tmp_path: Path, monkeypatch) -> None:
    include = tmp_path / "include"
    include.mkdir()
    (include / "Python.h").touch()
    monkeypatch.setattr("telescope._launch.this_host.sysconfig.get_path", lambda name: str(include))
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    assert not has_compilers()
    for name in ("gcc", "own-c++"):
        (tmp_path / name).touch(mode=0o755)
    assert not has_compilers()
    monkeypatch.setenv("CXX", "own-c++")
    assert has_compilers()
    (include / "Python.h").unlink()
    assert not has_compilers()
