"""`telescope eval` with whole runs: a checkpoint scores what its run said of it, a kill repeats nothing, a URL is played."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from telescope.runlog.eval_rows import read_eval_rows
from telescope.runlog.layout import RunDirectory
from telescope.runlog.reader import rows
from tests.deadlines import refuse_late
from tests.run.conftest import ROOT, Start

LETTERS = "evals.letters={environment:reverse_letters,kwargs:{num_eval:6}}"
FAKE = ("inference=fake", "cluster.device=cpu", "cluster.inference_num_workers=1")

Begin = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def begin() -> Iterator[Begin]:
    """`begin("tiny", …)`: one `telescope eval …` in a session of its own."""
    begun: list[subprocess.Popen[str]] = []

    def start(*arguments: str, **environ: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "telescope", "eval", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled", **environ},
            cwd=ROOT,
            text=True,
            start_new_session=True,
        )
        begun.append(process)
        return process

    yield start
    for process in begun:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=30)


def printed(process: subprocess.Popen[str], limit_s: float = 110.0) -> list[dict[str, Any]]:
    out, said = process.communicate(timeout=limit_s)
    assert process.returncode == 0, said
    return [json.loads(line) for line in out.splitlines()]


def scored(run: RunDirectory) -> list[dict[str, Any]]:
    return [row for row in rows(run, "eval_samples") if row["status"] == "scored"]


def test_after_a_kill_the_same_command_plays_what_is_left(begin: Begin, tmp_path: Path):
    run = RunDirectory(tmp_path / "out")
    slow = (*FAKE, "evals.countdown={num_prompts:20,num_samples:2}", "orchestrator.max_concurrent_prompts_per_server=1")
    command = ("tiny", "--to", str(run.path), "--json", *slow)
    killed = begin(*command, "inference.fake_token_s=0.1")
    deadline = time.monotonic() + 60
    while not (run.path / "live").exists() or len(scored(run)) < 5:
        assert killed.poll() is None, killed.communicate()
        refuse_late(deadline, "nothing was scored")
        time.sleep(0.1)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait(10)
    before = len(scored(run))
    (row,) = printed(begin(*command, "inference.fake_token_s=0"))
    assert (row["eval"], row["step"], row["state"], row["scored"]) == ("countdown", 0, "complete", 40)
    counted = Counter((each["index"], each["sample"]) for each in scored(run))
    assert set(counted.values()) == {1}
    assert len(counted) == 40
    assert len([each for each in scored(run) if each["seq"]]) >= before >= 5
    assert row["reward"] == pytest.approx(sum(each["reward"] for each in scored(run)) / 40, abs=1e-12)
    again = begin(*command)
    assert printed(again) == [row]


class _Reverser(BaseHTTPRequestHandler):
    """A chat completion that spells the last word backwards; the first four requests are turned away, and so are all with a
    wrong key."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        seen: list[Any] = self.server.seen  # type: ignore[attr-defined]
        seen.append((self.path, self.headers.get("Authorization"), asked))
        word = asked["messages"][-1]["content"].split()[-1]
        choice = {"message": {"role": "assistant", "content": word[::-1]}, "finish_reason": "stop"}
        body = json.dumps({"choices": [choice], "usage": {"prompt_tokens": 5, "completion_tokens": 3}}).encode()
        wrong = self.headers.get("Authorization") == "Bearer wrong-0a1b2c"
        self.send_response(401 if wrong else 429 if len(seen) <= 4 else 200)
        self.send_header("Retry-After", "0.2")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Silent."""


@pytest.fixture
def reverser() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Reverser)
    server.seen = []  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


def test_a_url_is_asked_in_text(begin: Begin, tmp_path: Path, reverser: ThreadingHTTPServer):
    run, key = RunDirectory(tmp_path / "out"), "k-2f9e8d7c6b5a"
    url = f"http://127.0.0.1:{reverser.server_address[1]}/v1"
    overrides = (LETTERS, "eval.num_samples=2", "eval.temperature=0.5", "rollout.max_attempts=1")
    given = (url, "--model", "some/model", "--to", str(run.path), "--key-env", "A_KEY", "--json", *overrides)
    (row,) = printed(begin(*given, A_KEY=key))
    assert (row["eval"], row["scored"], row["failed"], row["reward"]) == ("letters", 12, 0, 1.0)
    seen: list[Any] = reverser.seen  # type: ignore[attr-defined]
    assert len(seen) == 16
    path, authorization, asked = seen[-1]
    assert (path, authorization) == ("/v1/chat/completions", f"Bearer {key}")
    assert (asked["model"], asked["temperature"]) == ("some/model", 0.5)
    sample = scored(run)[0]
    assert "version_first" not in sample
    assert "logprob_mean" not in sample
    assert (sample["prompt_tokens"], sample["completion_tokens"], sample["turns"]) == (5, 3, 1)
    assert sample["prompt"].startswith("[user] rev ")
    assert sample["completion"] == sample["prompt"].split()[-1][::-1]
    written = [file.read_bytes() for file in run.path.rglob("*") if file.is_file()]
    assert not [text for text in written if key.encode() in text]
    assert not [text for text in written if b"HTTP Request" in text]


def test_a_refused_key_ends_it_at_once(begin: Begin, tmp_path: Path, reverser: ThreadingHTTPServer):
    url = f"http://127.0.0.1:{reverser.server_address[1]}/v1"
    ended = begin(url, "--model", "m", "--to", str(tmp_path / "out"), "--key-env", "A_KEY", LETTERS, A_KEY="wrong-0a1b2c")
    _, said = ended.communicate(timeout=110)
    assert ended.returncode not in (0, None)
    assert "answered 401" in said
    assert "it does not take the key in A_KEY; --key-env VARIABLE names" in said
    assert "wrong-0a1b2c" not in said
    assert len(reverser.seen) <= 6  # type: ignore[attr-defined]  # each of the six prompts once


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_checkpoint_scores_what_its_run_said_of_it(start: Start, begin: Begin):
    trained = start(
        *("experiment=fake", "backend=fsdp", "cluster.device=cpu", "number_of_steps=5", "checkpoint.every=5"),
        *("+evals.countdown={num_prompts:5,num_samples:4}", f"+{LETTERS}"),
    )
    assert trained.wait(600) == 0, trained.said()
    run, journal = trained.directory, trained.directory.journal.read_bytes()
    played = printed(begin(str(run.path), "--steps", "0,5", "--json"), 300)
    assert [(row["step"], row["eval"]) for row in played] == [
        (step, name) for step in (0, 5) for name in ("countdown", "letters")
    ]
    assert run.journal.read_bytes() == journal
    both: dict[str, dict[tuple[Any, ...], Any]] = {"own": {}, "alone": {}}
    for row in read_eval_rows(run, "eval_samples"):
        place = tuple(row[name] for name in ("eval", "step", "index", "sample"))
        told = {
            name: row[name]
            for name in ("reward", "seed", "prompt", "completion", "temperature", "version_first", "version_last")
        }
        both["alone" if "standalone" in row else "own"][place] = told
    assert len(both["own"]) == 2 * (20 + 6)
    assert both["alone"] == both["own"]
    assert not list(run.evals.glob("*/*.model"))
    same = begin("compare", f"{run.path}@5", str(next(run.evals.glob("*/step_00000005"))), "--own", "--json")
    assert [(one["difference_mean"], one["changed"]) for one in printed(same)] == [(0.0, []), (0.0, [])]
