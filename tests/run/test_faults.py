"""What is wrong is said in a sentence, and the run ends. Deaths and interrupts: tests/process/test_real_run.py; servers that
are started again: test_recovery.py."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.run.conftest import Start

LONG = ("experiment=fake", "number_of_steps=100000", "backend.step_s=0.05")


def test_a_process_that_stops_beating_is_named(start: Start):
    run = start(*LONG, "orchestrator.silent_s=6")
    run.until_step(2)
    os.kill(run.find("worker-0").pid, signal.SIGSTOP)
    assert run.wait() == 70
    assert "worker-0 (pid" in run.summary()["exit_reason"]
    assert "was not heard for" in run.summary()["exit_reason"]
    assert run.left_after(30) == []


def test_a_run_that_trains_nothing_any_more_ends_with_the_step_since_which_that_is_so(start: Start):
    """The first update throws the weights away, and no gradient after it is a finite number."""
    run = start("experiment=fake", "backend=fsdp", "trainer.learning_rate=1e30", "trainer.max_broken_steps=3",
                "number_of_steps=100000")  # fmt: skip
    assert run.wait() == 70
    reason = run.summary()["exit_reason"]
    assert "trainer.max_broken_steps=3: no gradient of the last 3 steps was a finite number" in reason
    assert "the weights have not moved since step 1" in reason
    assert run.summary()["steps"] == 4


@pytest.mark.slow
def test_a_run_whose_directory_is_moved_away_ends_with_its_name(start: Start, tmp_path: Path):
    """Its files are open and take every row, and nothing of it would be found; saves make a folder anew, not a run's."""
    run = start(*LONG, "checkpoint.every=20", "checkpoint.keep_last=1")
    run.until_step(2)
    run.remember()
    run.directory.path.rename(tmp_path / "elsewhere")
    assert run.wait() == 70
    assert f"The run failed: {run.directory.plan_json} has been gone for 2" in run.said()
    assert "the run directory was deleted or moved while the run went on" in run.said()
    assert "goes on from its latest checkpoint" not in run.said()
    assert "to go on from" not in run.said()
    assert "Traceback" not in run.said()
    shutil.rmtree(run.directory.path, ignore_errors=True)  # what was made anew
    (tmp_path / "elsewhere").rename(run.directory.path)
    assert run.left_after(30) == []


def test_a_run_that_ends_soon_after_its_directory_was_moved_away_is_no_success(start: Start, tmp_path: Path):
    """Its saves make the directory anew, and all steps are trained before the supervisor would end the run for it."""
    run = start("experiment=fake", "number_of_steps=8", "backend.step_s=0.3", "checkpoint.every=2", "cluster.device=cpu")
    run.until_step(3)
    run.remember()
    run.directory.path.rename(tmp_path / "elsewhere")
    assert run.wait() == 70
    assert f"The run failed: {run.directory.plan_json} is gone now that the run is over" in run.said()
    assert "Traceback" not in run.said()
    shutil.rmtree(run.directory.path)
    (tmp_path / "elsewhere").rename(run.directory.path)
    assert run.left_after(30) == []


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
    assert run.wait() == 1
    assert "/nowhere/model" in run.said()
    assert "Traceback" not in run.said()
    assert not run.directory.path.exists()


def test_a_model_that_the_hub_does_not_have_for_us_gives_a_sentence_before_anything_starts(start: Start, tmp_path: Path):
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")}
    run = start("experiment=fake", "model=any", "model.name=nobody/has-it", environ=offline)
    assert run.wait() == 1
    assert "model.name=nobody/has-it is not in the Hugging Face cache and can't be downloaded" in run.said()
    assert "Nothing was started." in run.said()
    assert not run.directory.path.exists()


def test_a_run_directory_in_use_is_refused(start: Start, tmp_path: Path):
    (tmp_path / "run-0").mkdir()
    (tmp_path / "run-0" / "notes.txt").write_text("mine")
    run = start("experiment=fake")
    assert run.wait() == 1
    assert "never reused" in run.said()


# ---- the disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[str]:
    """`run-0` on a file system of 400 kB, and what the system calls its being full. Who may not mount gets a limit on the
    size of each file instead, which the journal reaches in the same way."""
    folder = tmp_path / "run-0"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=400k,mode=0700", "tmpfs", folder], check=False, capture_output=True
    )
    if mounted.returncode == 0:
        yield "No space left on device"
        subprocess.run(["umount", "--lazy", folder], check=True)
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, hard))
    yield "File too large"
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_fills_up_ends_the_run_with_the_journals_sentence(start: Start, small_disk: str):
    run = start(*LONG)
    assert run.wait() == 1
    sentence = f"the journal {run.directory.journal} cannot be written ({small_disk}): free disk space or mend permissions"
    assert sentence in run.said()
    summary = run.summary()
    assert sentence in summary["exit_reason"]
    assert (summary["ok"], summary["exit_code"]) == (False, 1)
    assert summary["steps"] > 0
    assert summary["reasons"]["cancelled: the run ended"] > 0
    assert run.left_after(30) == []


def test_rows_that_cannot_be_written_stop_no_training(start: Start):
    run = start("experiment=fake", "number_of_steps=5", "backend.step_s=0.05")
    live = run.directory.path / "live"
    run.until(live.is_dir, "a run directory")
    (live / "orchestrator").write_text("a file where the rows' folder should be")
    assert run.wait() == 0
    summary = run.summary()
    assert (summary["ok"], summary["steps"]) == (True, 5)
    assert summary["log"]["rows_unlogged"] > 5 * 4 * 4
    assert run.rows("step_metrics") == []
    log = run.directory.log("orchestrator").read_text()
    complaints = [line for line in log.splitlines() if "training goes on, and they are tried again" in line]
    assert len(complaints) == len({line.partition("rows of ")[2].split()[0] for line in complaints}) > 1  # once a stream
    assert "rows of this run are lost, since they could not be written" in run.said()


def put_in_the_way(path: Path) -> bool:
    """Whether a folder lies there now; what the run has written there meanwhile goes first."""
    try:
        path.unlink(missing_ok=True)
        path.mkdir()
    except FileExistsError:
        return False
    return True


def test_a_status_that_cannot_be_written_stops_no_training_and_is_said_once(start: Start):
    run = start("experiment=fake", "number_of_steps=5", "backend.step_s=0.3")
    run.until(run.directory.path.joinpath("live").is_dir, "a run directory")
    run.until(lambda: put_in_the_way(run.directory.status_json), "a folder in the way of status.json")
    (run.directory.status_json / "in-the-way").write_text("")
    assert run.wait() == 0
    assert run.directory.log("orchestrator").read_text().count("status.json cannot be written") == 1


def test_a_journal_that_cannot_be_opened_is_the_reason_in_the_summary(start: Start):
    run = start("experiment=fake")
    run.until(run.directory.journal.parent.is_dir, "a run directory")
    run.directory.journal.write_text("somebody else's")
    assert run.wait() == 1
    assert "core.jsonl cannot be written (File exists)" in run.summary()["exit_reason"]
    assert "core.jsonl cannot be written (File exists)" in run.said()


def test_an_error_in_the_orchestrator_is_the_reason_in_the_summary(start: Start, tmp_path: Path):
    folder = tmp_path / "mine" / "plugins" / "algorithms"
    folder.mkdir(parents=True)
    (folder / "broken.py").write_text(
        "from telescope.algorithms.grpo import GRPO\n"
        "class Broken(GRPO):\n"
        "    def advantages(self, rewards, groups, *, group_size):\n"
        "        import telescope.orchestrator.batch as batch\n"
        "        batch._count_denominators = None  # an error of the orchestrator's own\n"
        "        return super().advantages(rewards, groups, group_size=group_size)\n"
    )
    run = start("experiment=fake", "--config-dir", str(tmp_path / "mine"), "algorithm=broken")
    assert run.wait() == 1
    summary = run.summary()
    assert summary["exit_reason"] == "orchestrator ended with TypeError: 'NoneType' object is not callable"
    assert (summary["ok"], summary["exit_code"]) == (False, 1)
    assert summary["reasons"]["cancelled: the run ended"] > 0
    assert "'NoneType' object is not callable" in run.said()
    assert "Traceback" in run.directory.log("orchestrator").read_text()


def test_an_algorithm_that_raises_in_step_3_ends_the_run_with_its_line_and_the_way_on(start: Start, tmp_path: Path):
    folder = tmp_path / "mine" / "plugins" / "algorithms"
    folder.mkdir(parents=True)
    (folder / "broken.py").write_text(
        "from telescope.algorithms.grpo import GRPO\n"
        "taken = []\n"
        "class Broken(GRPO):\n"
        "    def advantages(self, rewards, groups, *, group_size):\n"
        "        taken.append(1)\n"
        "        if len(taken) == 3:\n"
        "            raise LookupError('no baseline for this group')\n"
        "        return super().advantages(rewards, groups, group_size=group_size)\n"
    )
    saving = ("checkpoint.every=1", "checkpoint.max_restarts=0")
    slow = ("orchestrator.max_async_rollout=0", "backend.step_s=0.5")  # the save of step 1 is whole before step 3 is cut
    run = start("experiment=fake", "--config-dir", str(tmp_path / "mine"), "algorithm=broken", *saving, *slow)
    assert run.wait() == 70
    raised = "step 3: Broken.advantages raised LookupError: no baseline for this group"
    assert run.summary()["exit_reason"] == f"{raised} (broken.py, line 7)"
    assert raised in run.said()
    assert "to go on from the checkpoint of step " in run.said()
    assert "Traceback" in run.directory.log("orchestrator").read_text()
    assert run.left_after(30) == []


@pytest.mark.slow
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
    run = start("experiment=fake", "--config-dir", str(tmp_path / "mine"), "env=hangs", "cluster.placement_timeout_s=30")
    assert run.wait() == 70
    sentence = "worker-0 did not say hello within cluster.placement_timeout_s=30 s; their logs say why"
    assert run.summary()["exit_reason"] == sentence
    assert sentence in run.said()


def test_a_lost_terminal_is_named_in_the_summary(start: Start):
    run = start(*LONG)
    run.until_step(1)
    os.kill(run.process.pid, signal.SIGHUP)
    assert run.wait() == 129
    assert (run.summary()["exit_code"], run.summary()["exit_reason"]) == (129, "interrupted by SIGHUP")
