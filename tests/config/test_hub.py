"""Whether the hub has a model is asked before a run starts: in a bounded time, and whatever goes wrong is a sentence."""

from __future__ import annotations

import fnmatch
import json
import os
import shutil
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
from telescope.config.models import EMBEDDED, model_folder

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


COMMIT = "1" * 40
SHARDS = ("model-1.safetensors", "model-2.safetensors")
INDEX = json.dumps({"weight_map": {"one": SHARDS[0], "two": SHARDS[1]}})


class Cache:
    """What `snapshot_download` does on a cache without a listing: it gives any snapshot that is there as it is."""

    def __init__(self, folder: Path, files: dict[str, str]) -> None:
        self.snapshot = folder / "snapshots" / COMMIT
        self.files, self.asked = files, list[str | None]()
        self.snapshot.mkdir(parents=True)

    def download(
        self, name: str, *, allow_patterns: list[str], revision: str | None = None, local_files_only: bool = False
    ) -> str:
        if not local_files_only:
            self.asked.append(revision)
            for file, text in self.files.items():
                if any(fnmatch.fnmatch(file, pattern) for pattern in allow_patterns):
                    (self.snapshot / file).write_text(text)
        return str(self.snapshot)


def fill(place: Path, monkeypatch: pytest.MonkeyPatch, *, cached: tuple[str, ...], hub: dict[str, str]) -> Cache:
    small = {
        file: (EMBEDDED / "tiny" / file).read_text() for file in ("config.json", "tokenizer.json", "generation_config.json")
    }
    cache = Cache(place, {**small, **hub})
    for file in cached:
        (cache.snapshot / file).write_text(cache.files[file])
    monkeypatch.setattr("huggingface_hub.snapshot_download", cache.download)
    return cache


@pytest.mark.parametrize(
    ("cached", "hub"),
    [
        (("config.json", "tokenizer.json"), {"model.safetensors": "", "chat_template.jinja": "", "mine.tiktoken": ""}),
        (("config.json", "model.safetensors"), {"model.safetensors": "", "vocab.bpe": ""}),
        (
            ("config.json", "tokenizer.json", "model.safetensors.index.json", SHARDS[0]),
            {"model.safetensors.index.json": INDEX, **dict.fromkeys(SHARDS, "")},
        ),
        (
            ("config.json", "tokenizer.json", "model-1-of-2.safetensors"),
            {
                "model.safetensors.index.json": INDEX.replace(".safetensors", "-of-2.safetensors"),
                "model-1-of-2.safetensors": "",
                "model-2-of-2.safetensors": "",
            },
        ),
        (("config.json", "tokenizer.json"), {"pytorch_model.bin": ""}),
    ],
    ids=["no weights", "no tokenizer", "a shard is missing", "the index is missing", "pickled weights"],
)
def test_the_rest_of_a_partly_filled_cache_is_fetched_of_the_same_commit(
    cached: tuple[str, ...], hub: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    cache = fill(tmp_path, monkeypatch, cached=cached, hub=hub)
    assert model_folder(NAME) == cache.snapshot
    assert {file.name for file in cache.snapshot.iterdir()} == set(cache.files)
    assert set(cache.asked) == {COMMIT}
    asked = len(cache.asked)
    model_folder(NAME)
    assert len(cache.asked) == asked  # it is whole now


@pytest.mark.parametrize("cached", [("config.json", "tokenizer.json", "model.safetensors"), ("config.json", "tokenizer.json")])
def test_offline_a_cached_snapshot_is_taken_as_it_is(cached: tuple[str, ...], tmp_path: Path):
    home = tmp_path / "hub" / f"models--{NAME.replace('/', '--')}"
    snapshot = home / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(COMMIT)
    for file in cached:
        shutil.copyfile(EMBEDDED / "tiny" / file, snapshot / file)
    code = f"from telescope.config.models import model_folder; print(model_folder({NAME!r}))"
    environ = {**os.environ, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == str(snapshot), done.stderr
