"""The doctor says whether trainer and server agree, and means it."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from telescope.algorithms.grpo import GRPO
from telescope.backends.fsdp import FSDP
from telescope.cli import doctor
from telescope.config.run import RunConfig
from telescope.config.sections import EnvironmentEntry, ModelSettings
from telescope.inference.engine import Generated

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = [np.array([4, 20, 21], np.int32), np.array([4, 22], np.int32)]


def answered(ids: list[int], logprobs: list[float]) -> Generated:
    count = len(ids)
    return Generated(np.array(ids, np.int32), np.array(logprobs, np.float32), np.zeros(count, np.int32), "stop", 0, 0.0, 0.0)


def shard():
    answers = [answered([30, 1], [-1.0, -2.0]), answered([31, 32, 1], [-3.0, -4.0, -5.0])]
    return doctor.as_shard(PROMPTS, answers, [1.0, 0.7])


def test_prompts_and_answers_become_trajectories():
    made = shard()
    assert made.ids.tolist() == [4, 20, 21, 30, 1, 4, 22, 31, 32, 1]
    assert made.mask.tolist() == [0, 0, 0, 1, 1, 0, 0, 1, 1, 1]
    assert made.logprobs[made.mask == 1].tolist() == [-1, -2, -3, -4, -5]
    assert np.isnan(made.logprobs[made.mask == 0]).all()
    assert [item.length for item in made.items] == [5, 5]
    assert [item.temperature for item in made.items] == [1.0, 0.7]
    assert made.denominators[0].tokens == 5


def test_the_differences_are_measured_on_sampled_tokens_alone():
    made = shard()
    trainer = np.where(made.mask == 1, made.logprobs, 7.0).astype(np.float32)
    trainer[3] += 0.5
    found = doctor.compare(made, trainer, limit=1e-3)
    assert (found.tokens, found.mean, found.largest) == (5, pytest.approx(0.1), pytest.approx(0.5))
    assert found.ratio == pytest.approx((4 + np.exp(0.5)) / 5)
    assert not found.agree
    assert replace(found, limit=0.2).agree


def test_a_missing_log_prob_is_no_agreement():
    made = shard()
    assert not doctor.compare(made, np.full(10, np.nan, np.float32), limit=1.0).agree


def config(**changes: object) -> RunConfig:
    fsdp = FSDP(mixed_precision_dtype=None)
    entries = {"reverse_letters": EnvironmentEntry(name="reverse_letters")}
    settings = {"model": ModelSettings(name="tiny_reverse"), "backend": fsdp} | changes
    return RunConfig(environments=entries, algorithm=GRPO(), **settings)


def test_the_trainers_log_probs_are_those_of_transformers_at_each_answers_temperature():
    import torch
    from transformers import AutoModelForCausalLM

    from telescope.config.models import model_source

    run = config(backend=FSDP(mixed_precision_dtype=None, context_parallel_size=2, replicas=2, reshard_after_forward=2))
    made = shard()
    found = doctor.score(made, run, "cpu")
    model = AutoModelForCausalLM.from_pretrained(model_source("tiny_reverse")).float().eval()
    for first, last, temperature in ((0, 5, 1.0), (5, 10, 0.7)):
        ids = torch.from_numpy(made.ids[first:last].astype(np.int64))[None]
        with torch.no_grad():
            logp = (model(ids).logits[0, :-1] / temperature).log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].numpy()
        here = made.mask[first:last] == 1
        assert np.abs(found[first:last][here] - logp[here[1:]]).max() < 1e-5
        assert np.isnan(found[first:last][~here]).all()


def ask(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "telescope", "doctor", *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        check=False,
    )


def test_a_typo_and_a_fake_engine_are_told_in_words():
    typo = ask("logprobs", "rollout.temprature=0.7")
    assert (typo.returncode, "temperature" in typo.stderr) == (1, True)
    fake = ask("logprobs", "inference=fake")
    assert (fake.returncode, fake.stderr) == (
        2,
        "telescope doctor: a fake engine or backend has no model; use inference=vllm and a real backend\n",
    )


def test_temperatures_that_cannot_be_are_told_in_words(capsys: pytest.CaptureFixture[str]):
    assert doctor.main(["logprobs", "-t", "1", "-t", "0"]) == 1
    assert "rollout.temperature=0 must be" in capsys.readouterr().err
    assert doctor.main(["weights", "-t", "1", "-t", "0.7"]) == 2
    assert "give --temperature once or not" in capsys.readouterr().err


@pytest.mark.vllm
@pytest.mark.timeout(300)
def test_vllm_and_fsdp_agree_on_the_embedded_model():
    said = ask("logprobs", "--temperature", "1", "--temperature", "0.7", "--samples", "16")
    assert said.returncode == 0, said.stderr[-3000:]
    lines = said.stdout.splitlines()
    assert len(lines) == 10
    for temperature, first in (("1", 0), ("0.7", 5)):
        assert lines[first].endswith(f"tokens of tiny at temperature {temperature}")
        assert float(lines[first + 1].split()[4]) < 1e-4
        assert lines[first + 4] == "  trainer and server agree"
    assert lines[1] != lines[6]  # two samplings, each scored at its own temperature
