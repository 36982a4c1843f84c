"""`telescope chat`: a history over several turns, pieces as they come, Ctrl-C, tools, refusals. The model is a script behind
HTTP; tests/run has a real one."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from telescope.cli import chat, server_process
from telescope.cli.chat_stream import (
    AnswerRefused,
    AnswerStopped,
    SamplingOptions,
    ServerUnreachable,
    StreamedTokens,
    StreamingClient,
)
from telescope.config.models import model_folder
from telescope.config.sections import ModelSettings
from telescope.environments.chat import TokenChat
from telescope.environments.tasks.look_up import LookUp
from telescope.workers.tokenizer import load_template
from tests.deadlines import refuse_late
from tests.product import ROOT

LIMIT_S = 60.0
PRESS_AGAIN_S = 10.0
Pieces = Callable[[dict[str, Any]], list[str]]


class Script(ThreadingHTTPServer):
    """Answers each request with the pieces that `answer` makes of it; `asked` has (path, key, body). After its first piece an
    answer waits for `go_on`."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.answer: Pieces = lambda body: [f"turn {len(body.get('messages', ())) // 2}\n", "done"]
        self.asked: list[tuple[str, str | None, dict[str, Any]]] = []
        self.models: dict[str, int | None] = {"stub": None}
        self.go_on = threading.Event()
        self.go_on.set()
        self.refusal: tuple[int, str] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    @property
    def messages(self) -> list[list[str]]:
        """Of each request the texts."""
        return [[message["content"] for message in body["messages"]] for _, _, body in self.asked]


class Answers(BaseHTTPRequestHandler):
    server: Script

    def do_GET(self) -> None:
        if self.server.models:
            self.write(200, {"data": [{"id": name, "max_model_len": room} for name, room in self.server.models.items()]})
        else:
            self.write(404, {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, self.headers.get("Authorization"), body))
        if self.server.refusal is not None:
            status, sentence = self.server.refusal
            self.server.refusal = None
            self.write(status, {"error": {"message": sentence}})
            return
        self.send_response(200)
        self.end_headers()
        chat = self.path.endswith("/chat/completions")
        for at, text in enumerate(pieces := self.server.answer(body)):
            if at == 1:
                self.server.go_on.wait(LIMIT_S)
            more = {"finish_reason": "stop" if at == len(pieces) - 1 else None}
            choice = {"delta": {"content": text}} if chat else {"text": text}
            try:
                self.wfile.write(b"data: " + json.dumps({"choices": [{**choice, **more}]}).encode() + b"\n\n")
            except OSError:
                return  # stopped
        with contextlib.suppress(OSError):
            self.wfile.write(b"data: [DONE]\n\n")

    def write(self, status: int, facts: dict[str, Any]) -> None:
        data = json.dumps(facts).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Silent."""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Script]:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    server = Script()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.go_on.set()
    server.shutdown()
    server.server_close()


# ---- from a script


def test_each_turn_is_told_what_was_said_before(script: Script, capsys: pytest.CaptureFixture[str]):
    code = chat.main(["--url", script.url, "--system", "be short", "--message", "a", "--message", "b", "--temperature", "0.5"])
    assert code == 0
    assert capsys.readouterr().out == "turn 1\ndone\nturn 2\ndone\n"
    assert script.messages == [["be short", "a"], ["be short", "a", "turn 1\ndone", "b"]]
    path, key, body = script.asked[0]
    assert (path, key) == ("/v1/chat/completions", None)
    assert (body["model"], body["temperature"], body["max_tokens"], body["stream"]) == ("stub", 0.5, 1024, True)
    assert "seed" not in body
    assert "top_p" not in body


def test_an_empty_answer_is_an_empty_line(script: Script, capsys: pytest.CaptureFixture[str]):
    script.answer = lambda body: [""] if len(body["messages"]) == 1 else ["b"]
    assert chat.main(["--url", script.url, "--message", "a", "--message", "b"]) == 0
    assert capsys.readouterr().out == "\nb\n"


def test_what_comes_on_stdin_is_one_message(
    script: Script, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "stdin", io.StringIO("two\nlines\n"))
    assert chat.main(["--url", script.url]) == 0
    assert script.messages == [["two\nlines"]]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n"))
    assert chat.main(["--url", script.url]) == 2
    assert "there is nothing to ask" in capsys.readouterr().err


def test_a_text_is_gone_on_with_and_has_no_history(script: Script, capsys: pytest.CaptureFixture[str]):
    assert chat.main(["--url", script.url, "--raw", "--message", "Once", "--message", "upon", "--stop", "."]) == 0
    assert [(path, body["prompt"], body["stop"]) for path, _, body in script.asked] == [
        ("/v1/completions", "Once", ["."]),
        ("/v1/completions", "upon", ["."]),
    ]


def test_a_key_goes_to_the_server_and_nowhere_else(
    script: Script, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("A_KEY_OF_MINE", "sesame-0a1b2c")
    assert chat.main(["--url", script.url, "--key-env", "A_KEY_OF_MINE", "--message", "a"]) == 0
    assert script.asked[0][1] == "Bearer sesame-0a1b2c"
    told = capsys.readouterr()
    assert "The key in A_KEY_OF_MINE is sent to 127.0.0.1" in told.err
    assert "sesame" not in told.out + told.err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "name one whom to talk to"),
        (["tiny", "--url", "http://x"], "name one whom to talk to"),
        (["tiny", "--model", "x"], "--model and --key-env go with --url"),
        (["--url", "http://x", "--step", "3"], "--step names a checkpoint of a run directory"),
        (["tiny", "--raw", "--env", "countdown"], "--raw is a text and no dialogue"),
        (["--url", "localhost:8000", "--message", "a"], "is not an address such as"),
        (["tiny", "--message", " "], "there is nothing to ask"),
        (["tiny", "--message", "a", "--max-tokens", "256"], "leaves no room for a prompt: inference.max_model_len=256"),
    ],
)
def test_a_wrong_command_line_is_told(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]):
    assert chat.main(arguments) == 2
    assert sentence in capsys.readouterr().err


def test_refusals_have_the_servers_own_sentence(script: Script, capsys: pytest.CaptureFixture[str]):
    script.refusal = (401, "this server asks for its key")
    assert chat.main(["--url", script.url, "--message", "a"]) == 1
    told = capsys.readouterr().err
    assert "answered 401: this server asks for its key; --key-env VARIABLE names what holds its key" in told
    script.models = {"one": None, "two": 256}
    assert chat.main(["--url", script.url, "--message", "a"]) == 2
    assert "serves one, two: --model NAME says which one is asked" in capsys.readouterr().err
    assert chat.main(["--url", script.url, "--model", "two", "--message", "a"]) == 0
    assert (script.asked[-1][2]["model"], script.asked[-1][2]["max_tokens"]) == ("two", 128)
    script.models = {}
    assert chat.main(["--url", script.url, "--model", "three", "--message", "a"]) == 0
    assert (script.asked[-1][2]["model"], script.asked[-1][2]["max_tokens"]) == ("three", 1024)
    script.shutdown()
    script.server_close()
    assert chat.main(["--url", script.url, "--message", "a"]) == 1
    assert "does not answer" in capsys.readouterr().err


def test_a_base_model_is_refused_with_the_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = tmp_path / "base"
    folder.mkdir()
    for file in model_folder("tiny").iterdir():
        if file.name == "tokenizer_config.json":
            settings = json.loads(file.read_text())
            settings.pop("chat_template", None)
            (folder / file.name).write_text(json.dumps(settings))
        elif "chat_template" not in file.name:
            (folder / file.name).symlink_to(file)
    assert chat.main([str(folder), "--message", "a", "cluster.device=cpu"]) == 1
    told = capsys.readouterr().err
    assert "has no chat template (a base model?): give one as model.chat_template" in told
    assert "--raw" in told


def test_the_limit_goes_under_its_other_name_where_a_server_wants_that(script: Script):
    script.refusal = (400, "use max_completion_tokens instead")
    assert chat.main(["--url", script.url, "--message", "a", "--max-tokens", "7"]) == 0
    assert [body.get("max_completion_tokens") for _, _, body in script.asked] == [None, 7]


# ---- the stream


async def reading(script: Script, show: Callable[[StreamingClient, str], None]) -> tuple[str, str]:
    """(text, reason) of one answer."""
    client = StreamingClient(script.url, None, lambda piece: show(client, piece))
    try:
        answer = await client.read("/completions", {"prompt": "a", "max_tokens": 9})
        return answer.text, answer.reason
    finally:
        await client.close()


async def test_a_piece_is_shown_before_the_next_one_is_made(script: Script):
    script.answer = lambda body: ["one ", "two ", "three"]
    script.go_on.clear()
    seen: list[str] = []

    def show(_: StreamingClient, piece: str) -> None:
        seen.append(piece)
        if piece == "one ":  # the server makes no other one before this
            assert seen == ["one "]
            script.go_on.set()

    assert await reading(script, show) == ("one two three", "stop")
    assert seen == ["one ", "two ", "three"]


async def test_a_stopped_answer_is_what_there_is_of_it(script: Script):
    script.answer = lambda body: ["one ", "two "]
    script.go_on.clear()
    assert await reading(script, lambda client, _: [client.stop()]) == ("one ", "length")


async def test_an_answer_that_is_stopped_before_its_first_piece_is_none(script: Script):
    script.answer = lambda body: ["", "the first piece"]
    script.go_on.clear()
    client = StreamingClient(script.url, None, print)
    asking = asyncio.create_task(client.read("/completions", {"prompt": "a", "max_tokens": 9}))
    assert not client.stop()
    async with asyncio.timeout(LIMIT_S):
        while not script.asked:
            await asyncio.sleep(0.01)
        client.stop()
        with pytest.raises(AnswerStopped):
            await asking
    await client.close()


async def test_what_is_no_stream_of_answers_is_told(script: Script):
    script.answer = lambda body: []
    client = StreamingClient(f"{script.url}/nowhere", None, print)
    assert (await client.read("/completions", {"prompt": "a"})).text == ""
    with pytest.raises(ServerUnreachable, match="does not answer"):
        await StreamingClient("http://127.0.0.1:9/v1", None, print).list_models()
    script.refusal = (500, "broken")
    with pytest.raises(AnswerRefused, match="answered 500: broken"):
        await client.read("/completions", {"prompt": "a"})
    await client.close()


async def test_of_a_model_served_here_the_next_prompt_goes_on_from_the_exact_tokens():
    template = load_template(ModelSettings(name="tiny"), model_folder("tiny"))
    asked: list[dict[str, Any]] = []

    class Client(StreamingClient):
        async def _stream(self, path: str, body: Any) -> Any:
            asked.append(body)
            ids = template.continuation("3+5+8").tolist()
            yield {"text": "3+5+8", "token_ids": ids, "finish_reason": None}
            yield {"text": "", "token_ids": [next(iter(template.end_texts))], "finish_reason": "stop"}

    client = Client("http://127.0.0.1:1/v1", None, lambda piece: None)
    options = SamplingOptions(20, temperature=1.0, top_k=5, seed=3)
    dialogue = TokenChat(template, StreamedTokens(client, "tiny", options, list(template.end_texts)), 200, max_tokens=20)
    assert await dialogue.say({"role": "user", "content": "use 3 5 8 make 16"}) == "3+5+8"
    await dialogue.say({"role": "user", "content": "use 1 2 3 make 6"}, max_tokens=4)
    first, second = asked
    opening = template.opening([{"role": "user", "content": "use 3 5 8 make 16"}]).ids.tolist()
    assert first["prompt"] == opening
    exact = [*opening, *template.continuation("3+5+8").tolist(), next(iter(template.end_texts))]
    assert second["prompt"][: len(exact)] == exact
    assert (first["max_tokens"], second["max_tokens"], first["top_k"], first["seed"]) == (20, 4, 5, 3)
    assert first["stop_token_ids"] == list(template.end_texts)
    assert first["skip_special_tokens"] is False
    recording = dialogue.recording()
    assert len(recording.branches) == 1
    assert np.flatnonzero(recording.branches[0].mask).tolist()[:3] == [len(opening), len(opening) + 1, len(opening) + 2]
    await client.close()


# ---- tools


def test_calls_are_run_by_the_environment_and_their_results_said(script: Script, capsys: pytest.CaptureFixture[str]):
    prompt = LookUp().prompts("train")[0]
    key = prompt.turns[-1]["content"].split()[-1]

    def answer(body: dict[str, Any]) -> list[str]:
        said = body["messages"][-1]["content"]
        return [f"<t>look(key='{key}')</t>"] if said.startswith("get") else ["it says ", said]

    script.answer = answer
    assert chat.main(["--url", script.url, "--env", "look_up", "--message", f"get {key}", "--message", f"get {key}"]) == 0
    told = capsys.readouterr()
    assert f"[result] {prompt.answer}" in told.err or prompt.answer in told.err
    assert f"<t>look(key='{key}')</t>\n" in told.out
    assert prompt.answer in told.out
    assert [len(messages) for messages in script.messages] == [1, 3, 5, 7]
    assert prompt.answer in script.messages[1][-1]


def test_an_environment_that_is_not_there_is_refused(script: Script, capsys: pytest.CaptureFixture[str]):
    assert chat.main(["--url", script.url, "--env", "look_down", "--message", "a"]) in (1, 2)
    assert "look_down" in capsys.readouterr().err


# ---- a server of its own


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(server_process, "PROGRAM", ("-m", "tests.cli.stub_server"))
    monkeypatch.setenv("STUB_PIDS", str(tmp_path / "pids"))
    return tmp_path / "pids"


def test_a_model_is_served_for_as_long_as_it_is_talked_to(stub: Path, capsys: pytest.CaptureFixture[str]):
    assert chat.main(["tiny", "--message", "use 3 5 8 make 10", "cluster.device=cpu"]) == 0
    told = capsys.readouterr()
    template = load_template(ModelSettings(name="tiny"), model_folder("tiny"))
    length = len(template.opening([{"role": "user", "content": "use 3 5 8 make 10"}]).ids)
    assert told.out == f"piece\nof {length}\n"
    assert "starting a server of tiny on the CPU" in told.err
    assert not Path(f"/proc/{stub.read_text().split()[0]}").exists()


def test_a_server_that_ends_while_it_is_asked_is_missed(
    stub: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("STUB", "crumble")
    assert chat.main(["tiny", "--message", "use 3 5 8 make 10", "cluster.device=cpu"]) == 1
    assert "telescope chat: " in capsys.readouterr().err


# ---- at a terminal


class Terminal:
    """One `telescope chat` at a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self._ours, theirs = pty.openpty()
        environ = {**os.environ, "TERM": "dumb", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "telescope", "chat", *arguments]
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=environ, cwd=ROOT, start_new_session=True
        )
        os.close(theirs)
        self.seen = ""

    def wait_for(self, text: str) -> None:
        """Until it stands there behind what was waited for last."""
        deadline = time.monotonic() + LIMIT_S
        while text not in self.seen:
            if not select.select([self._ours], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError(f"{text!r} did not come: {self.seen}")
            try:
                self.seen += os.read(self._ours, 4096).decode()
            except OSError:  # it has ended
                raise AssertionError(f"{text!r} did not come: {self.seen}") from None
        self.seen = self.seen.partition(text)[2]

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def interrupt(self) -> None:
        """As Ctrl-C does: the signal goes to the whole group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def interrupt_until_ended(self) -> int:
        """The exit code. As a person does, it presses Ctrl-C again where nothing happens: between its prompt and its wait for
        a key, Python's own `input` misses a signal (31 of 600 times on a busy machine)."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            self.interrupt()
            try:
                return self.process.wait(PRESS_AGAIN_S)
            except subprocess.TimeoutExpired:
                refuse_late(deadline, self.seen)

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(LIMIT_S)
        os.close(self._ours)


@pytest.fixture
def terminal(script: Script) -> Iterator[Terminal]:
    opened = Terminal("--url", script.url)
    yield opened
    opened.close()


def test_ctrl_c_stops_an_answer_and_ctrl_d_leaves(terminal: Terminal, script: Script):
    script.answer = lambda body: ["the beginning", " and the end"]
    script.go_on.clear()
    terminal.wait_for("stub listens.")
    terminal.wait_for(chat.PROMPT)
    terminal.type("hello\n")
    terminal.wait_for("the beginning")
    terminal.interrupt()
    terminal.wait_for("(stopped)")
    terminal.wait_for(chat.PROMPT)
    script.go_on.set()
    terminal.type("more\n")
    terminal.wait_for("and the end")
    terminal.wait_for(chat.PROMPT)
    assert script.messages[-1] == ["hello", "the beginning", "more"]
    terminal.type(f"{chat.NEW}\n")
    terminal.wait_for("A new dialogue.")
    terminal.type("again\n")
    terminal.wait_for("and the end")
    terminal.wait_for(chat.PROMPT)
    assert script.messages[-1] == ["again"]
    terminal.type("\x04")
    assert terminal.process.wait(LIMIT_S) == 0


def test_ctrl_c_at_the_prompt_leaves(terminal: Terminal):
    terminal.wait_for(chat.PROMPT)
    assert terminal.interrupt_until_ended() == 0


def test_a_script_that_is_interrupted_has_what_was_said_and_130(script: Script):
    script.answer = lambda body: ["one\n", "two\n"]
    script.go_on.clear()
    command = [sys.executable, "-m", "telescope", "chat", "--url", script.url, "--message", "a"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "one\n"
    os.killpg(process.pid, signal.SIGINT)
    assert process.communicate(timeout=LIMIT_S)[0] == ""
    assert process.returncode == 130


def test_options_are_the_runs_where_the_command_line_says_nothing():
    from tests.cli.test_eval import config

    given = argparse.Namespace(max_tokens=None, temperature=None, top_p=None, top_k=7, min_p=None, seed=None, stop=None)
    run = config(rollout={"temperature": 0.7, "max_tokens": 3000, "stop": ["\n"]}, inference={"engine": "fake"})
    found = chat.make_options(given, run, [])
    assert found == SamplingOptions(2048, temperature=0.7, top_p=1.0, top_k=7, min_p=0.0, stop=("\n",))
