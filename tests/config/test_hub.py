"""Whether the hub has a model is asked before a run starts: in a bounded time, and whatever goes wrong is a sentence."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from telescope.config import models

NAME = "nobody/has-it"
REFUSED = (
    f"On this machine `telescope run` would refuse it: model.name={NAME} is not in the Hugging Face cache and can't be "
    "downloaded ("
)


@contextmanager
def hub(status: int, headers: dict[str, str]) -> Iterator[str]:
    """One that gives every question the same answer."""

    class Answer(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": "0", **headers}.items():
                self.send_header(name, value)
            self.end_headers()

        do_GET = do_CONNECT = do_HEAD

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def checked(folder: Path, endpoint: str, **more: str) -> str:
    """What `telescope check` says of a model of the hub at `endpoint`."""
    alone = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    environ = {**alone, "HF_ENDPOINT": endpoint, "HF_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "0", **more}
    command = [sys.executable, "-m", "telescope", "check", f"model.name={NAME}"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("status", "headers", "said"),
    [
        (200, {"X-Repo-Commit": "1" * 40, "ETag": '"1"'}, ""),
        (404, {"X-Error-Code": "RepoNotFound"}, "RepositoryNotFoundError: 404"),
        (200, {}, "what answers is not a hub"),  # a hotel's, which answers all questions
        (503, {}, ""),  # it says nothing of the model, and who downloads it asks again
    ],
)
def test_what_the_hub_answers_decides(status: int, headers: dict[str, str], said: str, tmp_path: Path):
    with hub(status, headers) as endpoint:
        told = checked(tmp_path, endpoint)
    assert f"{REFUSED}{said}" in told if said else "would refuse" not in told, told


def test_a_proxy_that_lets_nobody_through_is_a_sentence_too(tmp_path: Path):
    with hub(403, {}) as proxy:
        told = checked(tmp_path, "https://hub.invalid", HTTPS_PROXY=proxy)
    assert REFUSED in told
    assert "403" in told


def test_a_hub_that_never_answers_is_waited_for_once_whatever_its_client_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(models, "HUB_TIMEOUT_S", 0.5)
    monkeypatch.setattr(models, "HUB_TRIES", 100)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        started = time.monotonic()
        problem = models.hub_problem(NAME)
    assert problem is not None
    assert "can't be downloaded (no answer within 0.5 s); check the id, the network" in problem.sentence
    assert time.monotonic() - started < 20
