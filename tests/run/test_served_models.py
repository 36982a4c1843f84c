"""`telescope serve` and `chat` with real engines: what a run has trained is what answers, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from telescope.config.models import model_folder
from telescope.config.sections import LoraSettings, ModelSettings
from telescope.environments.template import ChatTemplate
from telescope.runlog.identity import new_identity, write_identity
from telescope.workers.tokenizer import load_template
from tests.cli.test_export import Trained
from tests.run.conftest import ROOT

START_S, END_S = 240.0, 60.0
"""This machine may be busy."""
SHORT = ("cluster.device=cpu", "inference.max_model_len=256", "rollout.max_tokens=24")
QUESTIONS = ("rev hhfje", "rev abc")
TOKENS = 8

Begin = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def begin() -> Iterator[Begin]:
    """`begin("serve", "tiny", …)`: one command in a session of its own."""
    begun: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "telescope", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
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


def make_run(folder: Path, lora: LoraSettings | None = None) -> Trained:
    """With checkpoints of the steps 1 and 2, whose weights are far from those that the run began with."""
    trained = Trained(folder, ModelSettings(name="tiny_reverse", lora=lora))
    write_identity(trained.run, new_identity("x", datetime.now(UTC), "0" * 16))
    return trained


def template() -> ChatTemplate:
    return load_template(ModelSettings(name="tiny_reverse"), model_folder("tiny_reverse"))


def answer(model: Any, turns: Sequence[str]) -> str:
    """By transformers, greedily, after a dialogue in which person and model take turns."""
    import torch

    roles = ("user", "assistant")
    own = template()
    ids = own.render([{"role": roles[at % 2], "content": text} for at, text in enumerate(turns)]).ids.tolist()
    said: list[int] = []
    with torch.no_grad():
        while len(said) < TOKENS and not (said and said[-1] in own.end_texts):
            said.append(int(model(torch.tensor([ids + said])).logits[0, -1].argmax()))
    return own.decode(said[:-1] if said[-1] in own.end_texts else said)


def load(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def wait_for_url(process: subprocess.Popen[str]) -> tuple[str, str]:
    """(URL, the model's name) of a `telescope serve` that has begun to listen."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.communicate(timeout=END_S)
    url, name = line.split()
    return url, name


def ask(url: str, name: str, question: str) -> str:
    body = {"model": name, "messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": TOKENS}
    found = httpx.post(f"{url}/chat/completions", json=body, timeout=START_S, trust_env=False)
    assert found.status_code == 200, found.text
    said: str = found.json()["choices"][0]["message"]["content"]
    return said


def are_gone(processes: Sequence[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, timeout=END_S)[1]


@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_a_checkpoint_is_served_until_ctrl_c_and_leaves_nothing_behind(begin: Begin, tmp_path: Path):
    trained = make_run(tmp_path / "mine")
    assert trained.export("2", "--to", str(tmp_path / "model")) == 0
    expected = answer(load(tmp_path / "model"), QUESTIONS[:1])
    assert expected != answer(load(model_folder("tiny_reverse")), QUESTIONS[:1]), "the weights have not moved"

    process = begin("serve", str(trained.run.path), "--port", "0", *SHORT)
    url, name = wait_for_url(process)
    below = psutil.Process(process.pid).children(recursive=True)
    assert len(below) >= 3, "a shim, a server and its engine"
    assert name == "mine@2"
    models = httpx.get(f"{url}/models", trust_env=False).json()["data"]
    assert [model["id"] for model in models] == ["mine@2"]
    assert ask(url, name, QUESTIONS[0]) == expected
    assert httpx.post(f"{url}/embeddings", json={}, trust_env=False).status_code == 404
    messages = [part for question in QUESTIONS for part in ("--message", question)]
    talk = begin("chat", "--url", url, *messages, "--temperature", "0", "--max-tokens", str(TOKENS))
    said, told = talk.communicate(timeout=START_S)
    assert talk.returncode == 0, told
    second = answer(load(tmp_path / "model"), (QUESTIONS[0], expected, QUESTIONS[1]))
    assert said == f"{expected}\n{second}\n"

    os.killpg(process.pid, signal.SIGINT)
    _, told = process.communicate(timeout=END_S)
    assert process.returncode == 0, told
    assert are_gone(below)
    assert not trained.run.served.exists()


@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_of_a_run_with_adapters_these_answer_over_its_model(begin: Begin, tmp_path: Path):
    trained = make_run(tmp_path / "mine", LoraSettings(rank=4, alpha=64))
    assert trained.export("2", "--to", str(tmp_path / "merged"), "--merge") == 0
    merged = load(tmp_path / "merged")
    first = answer(merged, QUESTIONS[:1])
    assert first != answer(load(model_folder("tiny_reverse")), QUESTIONS[:1]), "the adapters do nothing"
    second = answer(merged, (QUESTIONS[0], first, QUESTIONS[1]))
    messages = [part for question in QUESTIONS for part in ("--message", question)]
    draws = ("--temperature", "0", "--max-tokens", str(TOKENS))
    process = begin("chat", str(trained.run.path), *messages, *draws, *SHORT)
    said, told = process.communicate(timeout=START_S)
    assert process.returncode == 0, told
    assert said == f"{first}\n{second}\n"
    assert not trained.run.served.exists()


@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_a_folder_of_adapters_is_served_and_a_kill_leaves_no_process(begin: Begin, tmp_path: Path):
    trained = make_run(tmp_path / "mine", LoraSettings(rank=4, alpha=64))
    assert trained.export("2", "--to", str(tmp_path / "merged"), "--merge") == 0
    assert trained.export("2", "--to", str(tmp_path / "adapters")) == 0
    process = begin("serve", str(tmp_path / "adapters"), "--port", "0", "cluster.device=cpu")
    url, name = wait_for_url(process)
    assert name == "adapters"
    assert ask(url, name, QUESTIONS[0]) == answer(load(tmp_path / "merged"), QUESTIONS[:1])
    refused = httpx.post(
        f"{url}/completions", json={"model": name, "prompt": "rev", "echo": True, "max_tokens": 1}, trust_env=False
    )
    assert refused.status_code == 400
    assert "--merge" in refused.text
    below = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    assert are_gone(below)
