"""The offline bundle: cut, checked and installed without a network; a damaged part is found before anything is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from telescope.cli import bundle_check
from telescope.cli.bundle import BundleError, Target, describe, main, make, needed, pack, platforms, requirements, resolved
from tests.packaging.test_pythons import find

ROOT = Path(__file__).resolve().parents[2]
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


def test_a_host_takes_wheels_for_its_glibc_and_all_older_ones():
    names = list(platforms("manylinux_2_17_x86_64"))
    assert names[:3] == ["manylinux_2_17_x86_64", "manylinux2014_x86_64", "manylinux_2_16_x86_64"]
    assert names[-2:] == ["manylinux1_x86_64", "linux_x86_64"]
    assert "manylinux_2_18_x86_64" not in names
    with pytest.raises(BundleError, match="write it as manylinux_2_"):
        list(platforms("win_amd64"))


def test_pip_is_asked_for_the_hosts_python_and_not_for_this_one():
    asked = list(Target("3.12", "manylinux_2_28_x86_64").pip_arguments())
    assert asked[:5] == ["--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp"]
    assert asked[5:7] == ["--abi", "cp312"]


@pytest.mark.parametrize(
    ("python", "platform", "wanted"),
    [("3.11", "manylinux_2_28_x86_64", ["for_old", "x"]), ("3.13", "manylinux_2_28_aarch64", ["for_arm", "for_new", "x"])],
)
def test_what_only_the_hosts_python_or_processor_needs_is_in_the_bundle(
    tmp_path: Path, python: str, platform: str, wanted: list[str]
):
    """pip itself reads a requirement's marker as on the machine where it runs."""
    markers = {
        "for_old": 'python_version < "3.12"',
        "for_new": 'python_version > "3.11"',
        "for_arm": 'platform_machine == "aarch64"',
    }
    for name in ("x", *markers):
        needs = [f"Requires-Dist: {each}; {marker}" for each, marker in markers.items()] if name == "x" else []
        lines = ("Metadata-Version: 2.1", f"Name: {name}", "Version: 1.0", *needs)
        with zipfile.ZipFile(tmp_path / f"{name}-1.0-py3-none-any.whl", "w") as archive:
            archive.writestr(f"{name}-1.0.dist-info/METADATA", "\n".join(lines) + "\n")
            archive.writestr(f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            archive.writestr(f"{name}-1.0.dist-info/RECORD", "")
    report = resolved(Target(python, platform), tmp_path, "--no-index", "--find-links", str(tmp_path), "x")
    assert sorted(item["metadata"]["name"] for item in report["install"]) == wanted
    assert needed(report, ["x"], frozenset()) == [f"{name}==1.0" for name in wanted]


def test_parts_are_no_larger_than_asked_and_together_the_archive(tmp_path: Path):
    files = []
    for name, size in (("a.whl", 5000), ("b.whl", 70_000)):
        files.append(tmp_path / name)
        files[-1].write_bytes(os.urandom(size))
    out = tmp_path / "out"
    out.mkdir()
    parts = pack(files, out, 20_000)
    assert [path.stat().st_size for path in sorted(out.iterdir())[:-1]] == [20_000] * (len(parts) - 1)
    whole = tmp_path / "whole.tar"
    whole.write_bytes(b"".join((out / part).read_bytes() for part in parts))
    told = subprocess.check_output(["tar", "-tf", str(whole)], text=True)
    assert told == "wheels/a.whl\nwheels/b.whl\n"


def test_a_damaged_part_is_found_before_anything_is_installed(tmp_path: Path):
    wheel = tmp_path / "x.whl"
    wheel.write_bytes(b"x" * 1000)
    out = tmp_path / "out"
    out.mkdir()
    told = {"python": [HERE], "platform": ["any"], "install": ["telescope-rl"], "parts": pack([wheel], out, 4096), "wheels": []}
    describe(out, told, frozenset())
    part = out / told["parts"][0]
    part.write_bytes(part.read_bytes()[:-1] + b"!")
    ended = subprocess.run(
        ["bash", str(out / "install.sh"), str(tmp_path / "venv")],
        capture_output=True, text=True, env=os.environ | {"PYTHON": sys.executable}, check=False,
    )  # fmt: skip
    assert ended.returncode == 1
    assert "A part is missing or damaged: copy the bundle again." in ended.stderr
    assert not (tmp_path / "venv").exists()


def test_a_folder_with_something_in_it_is_refused(tmp_path: Path, capsys):
    (tmp_path / "x").write_text("mine")
    assert main([str(tmp_path)]) == 1
    assert "is not empty: name a new folder" in capsys.readouterr().err
    assert requirements(["gpu", "math"], "2.11.0", ["Torch_X"]) == (
        ["telescope-rl[gpu,math]", "torch==2.11.0"],
        frozenset({"torch-x"}),
    )


def item(name: str, *needs: str, url: str = "https://x/y.whl") -> dict[str, object]:
    return {"metadata": {"name": name, "version": "1.0", "requires_dist": list(needs)}, "download_info": {"url": url}}


def test_with_a_package_goes_what_only_it_needs():
    items = [
        item(
            "telescope-rl",
            "numpy",
            'torch; extra == "cpu"',
            'transformers; extra == "cpu"',
            'ray; extra == "gpu"',
            url="file:///a/telescope_rl.whl",
        ),
        item("numpy"),
        item("torch", "numpy", "Nvidia_Cudnn[fast]", "sympy"),
        item("nvidia-cudnn", 'cublas; extra == "fast"'),
        item("cublas"),
        item("sympy", "mpmath"),
        item("mpmath"),
        item("transformers", "mpmath", 'colorama; sys_platform == "win32"'),
        item("colorama"),
        item("ray"),
    ]
    report = {"install": items, "environment": {"sys_platform": "linux", "python_version": "3.12"}}
    own = frozenset({"telescope_rl.whl"})
    whole = needed(report, ["telescope-rl[cpu]"], frozenset(), own)
    assert [pin.partition("==")[0] for pin in whole] == [
        "cublas", "mpmath", "numpy", "nvidia-cudnn", "sympy", "torch", "transformers",
    ]  # fmt: skip
    assert needed(report, ["telescope-rl[cpu]"], frozenset({"torch"}), own) == [
        "mpmath==1.0",
        "numpy==1.0",
        "transformers==1.0",
    ]
    assert needed(report, ["telescope-rl", "torch==1.0"], frozenset({"torch"}), own) == ["numpy==1.0"]


def installed(site: Path, name: str, version: str, *needs: str) -> None:
    folder = site / f"{name}-{version}.dist-info"
    folder.mkdir(parents=True)
    lines = ("Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {need}" for need in needs))
    (folder / "METADATA").write_text("\n".join(lines) + "\n")


def test_what_a_bundle_leaves_out_must_be_on_the_host_and_another_version_is_told(tmp_path: Path, capsys, monkeypatch):
    site, bundle = tmp_path / "site", tmp_path / "bundle.json"
    needs = ('here-host==2.11.0; extra == "gpu"', 'here-other; extra == "cpu"', 'here-windows; sys_platform == "win32"')
    installed(site, "here_own", "0.1", "here_engine<2", *needs)
    installed(site, "here_engine", "1.0", "here-host>=2")
    wheels = ["here_own-0.1-py3-none-any.whl", "here_engine-1.0-cp38-abi3-manylinux_2_28_x86_64.whl"]
    bundle.write_text(json.dumps({"install": ["here-own[gpu]", "here-host==2.11.0"], "wheels": wheels}))
    monkeypatch.syspath_prepend(str(site))
    assert bundle_check.main([str(bundle)]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "here-host is neither in the bundle nor on this host: this bundle needs here-host==2.11.0",
        "here-host is neither in the bundle nor on this host: here-own 0.1 needs here-host==2.11.0",
        "here-host is neither in the bundle nor on this host: here-engine 1.0 needs here-host>=2",
    ]
    installed(site, "here_host", "2.11.0a0+ours")
    assert bundle_check.main([str(bundle)]) == 0
    assert capsys.readouterr().err.splitlines() == [
        "Warning: here-host is 2.11.0a0+ours here, and this bundle asks for here-host==2.11.0",
        "Warning: here-host is 2.11.0a0+ours here, and here-own 0.1 asks for here-host==2.11.0",
    ]
    (site / "here_host-2.11.0a0+ours.dist-info").rename(site / "here_host-2.11.0.dist-info")
    (site / "here_host-2.11.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: here_host\nVersion: 2.11.0\n")
    assert bundle_check.main([str(bundle)]) == 0
    assert capsys.readouterr().err == ""


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """The interpreter of a virtual environment that has a torch, as far as other packages can tell."""
    folder = tmp_path / "host"
    subprocess.run([find("3.12"), "-m", "venv", "--without-pip", folder], check=True, timeout=100)
    site = folder / "lib" / "python3.12" / "site-packages"
    installed(site, "torch", "2.13.0")
    (site / "torch.py").write_text("__version__ = '2.13.0'\n")
    return folder / "bin" / "python"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_bundle_for_another_python_whose_host_has_torch_installs_and_runs_without_a_network(tmp_path: Path, host: Path):
    """All of the extra `cpu` but torch and what only torch needs: for a host with a build of its own, whose pip is set to
    something else."""
    out, other = tmp_path / "bundle", "3.12"
    wanted = requirements(["cpu"], None, ["torch"])
    told = make(out, Target(other, "manylinux_2_28_x86_64"), wanted, source=ROOT)
    names = {name.split("-")[0] for name in told["wheels"]}
    assert {"telescope_rl", "transformers", "peft", "wandb", "pyarrow"} <= names
    assert not {name for name in names if name.startswith(("torch", "nvidia", "cuda", "triton", "sympy"))}
    (tmp_path / "constraints").write_text("numpy==1.26.4\ntransformers==4.1.0\n")
    environ = {**os.environ, "PYTHON": str(host), "WANDB_MODE": "disabled", "LD_PRELOAD": ""}
    environ |= {"PIP_CONSTRAINT": str(tmp_path / "constraints"), "PIP_INDEX_URL": "http://127.0.0.1:9/"}
    environ.pop("PYTHONPATH", None)
    subprocess.run(["bash", str(out / "install.sh"), str(tmp_path / "venv")], env=environ, check=True, timeout=900)
    inside = tmp_path / "venv/bin/python"
    seen = subprocess.check_output([inside, "-c", "import torch; print(torch.__file__)"], env=environ, text=True)
    assert Path(seen.strip()).is_relative_to(host.parent.parent)
    of_the_host = tmp_path / "venv/lib/python3.12/site-packages/of_the_host.pth"
    of_the_host.rename(tmp_path / "aside")
    check = [inside, "-m", "telescope.cli.bundle_check", out / "bundle.json"]
    without = subprocess.run(check, env=environ, capture_output=True, text=True, check=False, timeout=60)
    assert (without.returncode, "torch is neither in the bundle nor on this host: " in without.stderr) == (1, True)
    (tmp_path / "aside").rename(of_the_host)
    (tmp_path / "elsewhere").mkdir()
    command = [str(tmp_path / "venv/bin/telescope"), "run", "experiment=fake", "cluster.device=cpu", "run_dir=a"]
    run = subprocess.run(command, cwd=tmp_path / "elsewhere", env=environ, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    assert json.loads((tmp_path / "elsewhere/a/summary.json").read_text())["steps"] == 3


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_bundle_of_the_core_installs_without_a_network_and_answers(tmp_path: Path):
    out = tmp_path / "bundle"
    told = make(out, Target(HERE, "manylinux_2_28_x86_64"), (["telescope-rl"], frozenset()), source=ROOT, part_bytes=20 << 20)
    assert len(told["parts"]) > 1
    assert json.loads((out / "bundle.json").read_text()) == told
    environ = {**os.environ, "PYTHON": sys.executable, "PIP_NO_INDEX": "1"}
    environ.pop("PYTHONPATH", None)
    subprocess.run(["bash", str(out / "install.sh"), str(tmp_path / "venv")], env=environ, check=True, timeout=300)
    command = [str(tmp_path / "venv/bin/telescope"), "check", "experiment=fake"]
    answer = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False, timeout=60)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.startswith("experiment=fake: valid, hash ")
