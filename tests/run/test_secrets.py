"""Thirty secrets of different names and shapes, and an environment that gives all of them away: nothing of them is in what a
run leaves."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import quote

import pytest
from safetensors.torch import load_file, save_file

from telescope.config.models import EMBEDDED
from telescope.config.run import load_run
from telescope.runlog import checkpoints
from telescope.runlog.layout import RunDirectory
from tests.run.conftest import ROOT, Start

LEAKY = """
import base64, itertools, json, logging, os, subprocess, sys, urllib.parse
from typing import Literal
from telescope.environments.base import Prompt, Reward, SingleTurn

played = itertools.count()

class Leaky(SingleTurn):
    given: dict[str, str] = {}
    tone: Literal["plain", "loud"] = "plain"
    fails: bool = False
    splits = ("train",)
    reward_in_thread = False

    def prompts(self, split):
        print("loading with", self.given)
        words = " ".join(self.given.values()) if split == "train" else ""
        return [Prompt(({"role": "user", "content": f"use {n} 2 3 make 9"},), answer=words) for n in range(1, 90)]

    def reward(self, prompt, answer):
        everything = json.dumps(self.given)
        print(everything)
        print(repr(self.given), file=sys.stderr)
        print(urllib.parse.quote(everything))
        for value in self.given.values():
            print("Authorization: Basic", base64.b64encode(f"user:{value}".encode()).decode())
            half = len(value) // 2
            sys.stdout.write(value[:half])
            sys.stdout.flush()
            sys.stdout.write(value[half:] + "\\n")
            os.write(2, f"straight to the descriptor {value}\\n".encode())
        logging.getLogger("leaky").error("logged %s", self.given)
        subprocess.run([sys.executable, "-c", "import os; print(dict(os.environ))"])
        if self.fails or next(played) % 9 == 1:
            raise RuntimeError(f"401 of {everything}")
        number = len(answer) % 5 / 5
        values = tuple(self.given.values())
        return Reward(number, {f"x {values[0]}": number}, info=dict(self.given), tags=values)
"""
NAMES = (
    *("PGPASSWORD", "MYSQL_PWD", "GITHUB_PAT", "DATABASE_URL", "REDIS_URL", "AUTH", "AUTHTOKEN", "APIKEYS", "BEARER", "COOKIE"),
    *("SESSION", "DSN", "SENTRY_DSN", "WEBHOOK", "SLACK", "OPENAI", "JUDGE", "LICENSE", "PIN", "SEED_PHRASE"),
    *("AWS", "GCP_JSON", "PEM", "JWT", "SALT", "NOTE", "WHO", "X1", "lower_case", "HF_TOKEN"),
)
SHAPES = (
    "S3CR{n:02}-plain-word-of-mine",
    "S3CR{n:02}\"quo'ted\\and/slashed",
    "S3CR{n:02} with spaces and ümläut",
    "postgres://me:S3CR{n:02}pass-word@db.example/x?ssl=1",
    '{{"private": "S3CR{n:02}-in-json"}}',
    "-----BEGIN KEY-----\nS3CR{n:02}abcdefghijklmnopqr\nS3CR{n:02}stuvwxyzABCDEFGHI=\n-----END KEY-----\n",
    "S3CR{n:02}%7Eper+cent&=",
    "9918273645{n:02}",
    "sk-S3CR{n:02}abcdefghijklmnop",
    "ey.S3CR{n:02}-_abc.def",
)
SECRETS = {name: SHAPES[n % len(SHAPES)].format(n=n) for n, name in enumerate(NAMES)}
GIVEN = {name: f"${{oc.env:{name}}}" for name in NAMES[:24]} | {
    "Authorization": "Bearer ${oc.env:NOTE}",
    "url": "a?k=${oc.env:WHO}",
}
CLUSTER = {"MINE": "${oc.env:X1}", "BOTH": "${oc.env:lower_case}:${oc.env:SALT}", "HF_TOKEN": "${oc.env:HF_TOKEN}"}
SETTINGS = (
    *("experiment=fake", "env=[leaky]", "cluster.device=cpu", "cluster.env_num_workers=1", "logging.token_groups=0"),
    *("rollout.retry_backoff_s=0", "orchestrator.discard_group_zero_advantage=false", "rollout.group_size=4"),
    *("orchestrator.prompts_batch_size_for_trainer=2", "orchestrator.max_concurrent_prompts_per_server=4"),
    "environments.leaky.kwargs.tone=${oc.env:TONE}",
    *(f"+environments.leaky.kwargs.given.{name}='{value}'" for name, value in GIVEN.items()),
    *(f"+cluster.env.{name}='{value}'" for name, value in CLUSTER.items()),
)


def find_traces(value: str) -> Iterator[bytes]:
    """What of a secret must not be found: its own part in each spelling."""
    for line in value.splitlines() if "BEGIN KEY" in value else [value]:
        start = line.find("S3CR")
        own = line[start : start + 14] if start >= 0 else line
        if "KEY-----" not in line:
            yield from (own.encode(), json.dumps(own)[1:-1].encode(), quote(own).encode(), repr(own)[1:-1].encode())
            yield from (base64.b64encode(b"user:"[:n] + value.encode())[8:24] for n in range(3))


def assert_clean(folder: Path, secrets: Mapping[str, str]) -> int:
    """Every byte of every file; gives how many were read."""
    size, found = 0, []
    for path in (path for path in folder.rglob("*") if path.is_file() and "mine" not in path.relative_to(folder).parts):
        data = path.read_bytes()
        size += len(data)
        for name, value in secrets.items():
            for trace in find_traces(value):
                if trace in data:
                    at = data.index(trace)
                    found.append(f"{name} in {path.relative_to(folder)}: {data[max(0, at - 60) : at + 40]!r}")
    assert not found, "\n".join(found[:20])
    return size


@pytest.fixture
def home(tmp_path: Path) -> Path:
    place = tmp_path / "mine" / "plugins" / "environments"
    place.mkdir(parents=True)
    (place / "leaky.py").write_text(LEAKY)
    return tmp_path / "mine"


def export(run: RunDirectory, to: Path, environ: Mapping[str, str]) -> str:
    """What `telescope export` says of the run's last checkpoint, to which a model's weights are added: the fake trainer has
    none."""
    trainer = checkpoints.trainer_part(checkpoints.find(run.checkpoints))
    weights = load_file(EMBEDDED / "tiny" / "model.safetensors")
    save_file({f"model.{name}": tensor for name, tensor in weights.items()}, trainer / "model.safetensors")
    done = subprocess.run(
        [sys.executable, "-m", "telescope", "export", "latest", "--run-dir", str(run.path), "--to", str(to)],
        cwd=ROOT, env={**os.environ, **environ}, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (to / "config.json").exists()
    return done.stdout + done.stderr


@pytest.mark.timeout(300)
def test_nothing_of_thirty_secrets_is_in_what_a_run_a_resumed_one_and_a_failure_leave(start: Start, home: Path, tmp_path: Path):
    environ = SECRETS | {"TONE": "loud", "WANDB_MODE": "offline"}
    assert len(SECRETS) == 30
    run = start(
        "--config-dir",
        str(home),
        *SETTINGS,
        "number_of_steps=2",
        "checkpoint.every=1",
        "logging.use_wandb=true",
        environ=environ,
    )
    assert run.wait() == 0, run.said()
    config = load_run(run.directory.config_json)
    assert config.environments["leaky"].kwargs["given"] == GIVEN
    assert config.environments["leaky"].kwargs["tone"] == "loud"
    assert config.cluster.env.items() >= CLUSTER.items()
    log = run.directory.log("worker-0").read_text()
    assert log.count("straight to the descriptor <redacted>") > 20
    assert "child" not in log
    later = {name: f"{value}-changed" if name == "AUTH" else value for name, value in SECRETS.items()}
    again = start("number_of_steps=3", resume=run, environ=environ | later)
    assert again.wait() == 0, again.said()
    exported = export(again.directory, tmp_path / "exported", environ | later)
    assert "S3CR" not in exported
    broken = start(
        "--config-dir", str(home), *SETTINGS, "number_of_steps=2", "environments.leaky.kwargs.fails=true", environ=environ
    )
    assert broken.wait() == 70, broken.said()
    assert "401 of" in broken.said()
    assert "401 of" in broken.directory.exit_json.read_text()
    assert assert_clean(tmp_path, SECRETS | {"AUTH2": later["AUTH"]}) > 100_000


@pytest.mark.timeout(300)
def test_nothing_of_thirty_secrets_is_in_a_sweep_nor_in_a_batch_file(home: Path, tmp_path: Path):
    environ = {**os.environ, **SECRETS, "TONE": "loud", "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled", "LD_PRELOAD": ""}
    setup = "cluster.slurm.setup=['export PGPASSWORD=${oc.env:PGPASSWORD}']"
    for name, more in {
        "sweep": ("-m", "seed=1,2", "number_of_steps=1"),
        "job": ("cluster=slurm", "cluster.dry_run=true", setup),
    }.items():
        done = subprocess.run(
            [
                *(sys.executable, "-m", "telescope.run", "--config-dir", str(home), *SETTINGS, *more),
                f"run_dir={tmp_path}/{name}",
            ],
            cwd=ROOT, env=environ, capture_output=True, text=True, timeout=250, check=False,
        )  # fmt: skip
        (tmp_path / f"{name}.txt").write_text(done.stdout + done.stderr)
        assert done.returncode == 0, done.stderr[-3000:]
    script = (tmp_path / "job" / "slurm" / "submission.sh").read_text()
    assert "export PGPASSWORD=${PGPASSWORD:?is not set}" in script
    assert assert_clean(tmp_path, SECRETS) > 50_000
