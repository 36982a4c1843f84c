"""What is wrong is said in a sentence, and the run ends. Deaths and interrupts: tests/process/test_real_run.py."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.run.conftest import Start

LONG = ("experiment=fake", "number_of_steps=100000", "backend.step_s=0.05")
LIMIT_S = 10.0


def test_a_process_that_stops_beating_is_named(start: Start):
    run = start(*LONG, "orchestrator.silent_s=2")
    run.until_step(2)
    os.kill(run.find("server-0").pid, signal.SIGSTOP)
    assert run.wait(LIMIT_S + 5) == 70
    assert "server-0" in run.said()
    assert "not heard" in run.said() or "silent" in run.said()
    assert run.left_after(5) == []


def test_a_broken_environment_class_gives_a_sentence(start: Start, tmp_path: Path):
    folder = tmp_path / "mine" / "plugins" / "environments"
    folder.mkdir(parents=True)
    (folder / "broken.py").write_text(
        "from telescope.environments.base import SingleTurn, Prompt, Reward\n"
        "class Broken(SingleTurn):\n"
        "    def prompts(self, split):\n"
        "        raise RuntimeError('the file of prompts is missing')\n"
        "    def reward(self, prompt, answer):\n"
        "        return Reward(0.0)\n"
    )
    run = start("experiment=fake", "--config-dir", str(tmp_path / "mine"), "env=broken")
    assert run.wait() != 0
    assert "the file of prompts is missing" in run.said()
    assert "environments.broken" in run.said()
    assert "Traceback" not in run.said()


def test_a_reward_that_always_fails_ends_the_run_with_its_error(start: Start, tmp_path: Path):
    folder = tmp_path / "mine" / "plugins" / "environments"
    folder.mkdir(parents=True)
    (folder / "grumpy.py").write_text(
        "from telescope.environments.base import SingleTurn, Prompt, Reward\n"
        "class Grumpy(SingleTurn):\n"
        "    def prompts(self, split):\n"
        "        return [Prompt(turns=({'role': 'user', 'content': 'hi'},))] * 10\n"
        "    def reward(self, prompt, answer):\n"
        "        raise ValueError('the grader is out of order')\n"
    )
    run = start("experiment=fake", "--config-dir", str(tmp_path / "mine"), "env=grumpy")
    assert run.wait() == 70
    assert "the grader is out of order" in run.said()
    assert run.summary()["rollouts"]["failed"] > 0


def test_a_missing_model_folder_gives_a_sentence_before_anything_starts(start: Start):
    run = start("experiment=fake", "model=any", "model.name=/nowhere/model")
    assert run.wait(20) == 1
    assert "/nowhere/model" in run.said()
    assert "Traceback" not in run.said()
    assert not run.directory.path.exists()


def test_a_run_directory_in_use_is_refused(start: Start, tmp_path: Path):
    (tmp_path / "run-0").mkdir()
    (tmp_path / "run-0" / "notes.txt").write_text("mine")
    run = start("experiment=fake")
    assert run.wait(20) == 1
    assert "never reused" in run.said()


def test_a_worker_that_never_comes_is_named_with_the_setting(start: Start, tmp_path: Path):
    folder = tmp_path / "mine" / "plugins" / "environments"
    folder.mkdir(parents=True)
    (folder / "hangs.py").write_text(
        "import threading\n"
        "from telescope.environments.base import SingleTurn, Prompt, Reward\n"
        "class Hangs(SingleTurn):\n"
        "    def prompts(self, split):\n"
        "        threading.Event().wait(300)\n"
        "        return []\n"
        "    def reward(self, prompt, answer):\n"
        "        return Reward(0.0)\n"
    )
    run = start("experiment=fake", "--config-dir", str(tmp_path / "mine"), "env=hangs", "cluster.placement_timeout_s=20")
    assert run.wait() == 70
    sentence = "worker-0 did not say hello within cluster.placement_timeout_s=20 s; their logs say why"
    assert run.summary()["exit_reason"] == sentence
    assert sentence in run.said()


def test_a_lost_terminal_is_named_in_the_summary(start: Start):
    run = start(*LONG)
    run.until_step(1)
    os.kill(run.process.pid, signal.SIGHUP)
    assert run.wait(LIMIT_S + 5) == 129
    assert (run.summary()["exit_code"], run.summary()["exit_reason"]) == (129, "interrupted by SIGHUP")
