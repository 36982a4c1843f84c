"""The doctor of weights: a trained version on its whole way, and a verdict that can be no."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from telescope.cli import doctor
from telescope.cli.doctor_weights import WeightDelivery, spread
from telescope.inference.engine import WeightState
from telescope.inference.vllm.worker_protocol import Comparison
from tests.doctor.test_doctor import PROMPTS, answered

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 400
"""A start of vLLM and of two ranks, where other work goes on."""
GOOD = WeightDelivery(
    transport="nccl",
    tensors=3,
    nbytes=2_000_000_000,
    publish_s=0.001,
    first_s=0.7,
    again_s=0.01,
    commit=WeightState(version=1, prepared=None, checksum="all:1", pause_s=0.004),
    before=Comparison(3, ("a", "b")),
    after=Comparison(3, ()),
)


def test_the_verdict_needs_parameters_that_were_other_before_and_are_the_same_after():
    assert GOOD.agree
    assert "200.00 GB/s (the first time 0.7000 s)" in GOOD.report()
    assert "2 of 3 tensors were other before the commit, 0 after it\n" in GOOD.report()
    stale = replace(GOOD, after=Comparison(3, ("a",)))
    assert not stale.agree
    assert "1 after it a\n  trainer and server DO NOT hold the same weights" in stale.report()
    assert not replace(GOOD, before=Comparison(3, ())).agree  # nothing was changed, so nothing was shown


def test_parameters_that_can_not_be_compared_are_said_to_be_so():
    unknown = replace(GOOD, before=Comparison(0, ()), after=Comparison(0, ()))
    assert "not compared: the engine loads this model by its own loader" in unknown.report()
    assert "trainer and server are NOT KNOWN to hold the same weights" in unknown.report()
    assert not unknown.agree


def test_trajectories_are_dealt_out_to_ranks_with_opposite_advantages():
    whole = doctor.as_shard(
        [*PROMPTS, PROMPTS[0]],
        [answered([30, 1], [-1, -2]), answered([31], [-3]), answered([7, 8], [-4, -5])],
        [1.0, 1.0, 1.0],
    )
    first, second = spread(whole, 2)
    assert (first.ids.tolist(), second.ids.tolist()) == ([4, 20, 21, 30, 1, 4, 20, 21, 7, 8], [4, 22, 31])
    assert [item.advantage for item in (*first.items, *second.items)] == [1.0, 1.0, -1.0]
    assert first.denominators == second.denominators
    assert (first.denominators[0].tokens, first.denominators[0].groups) == (5, 3)
    assert np.isnan(second.logprobs).tolist() == [True, True, False]


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 10)
@pytest.mark.parametrize("transport", ["shared_memory", "gloo", "disk"])
def test_a_version_of_two_ranks_reaches_a_real_engine(transport):
    command = [sys.executable, "-m", "telescope", "doctor", "weights", "--samples", "4", "cluster.trainer_num_workers=2"]
    command += ["cluster.device=cpu", "rollout.max_tokens=16", f"weight_sync.transport={transport}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "LD_PRELOAD": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"weights version 1 by {transport}: 24 tensors" in done.stdout
    assert "24 of 24 tensors were other before the commit, 0 after it" in done.stdout
    assert "trainer and server hold the same weights" in done.stdout
