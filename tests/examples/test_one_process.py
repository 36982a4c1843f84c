"""The example for readers: it learns, and what it trains on is what was sampled."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.one_process import Recipe, logprobs, sample, train
from telescope.algorithms.cispo import CISPO
from telescope.algorithms.grpo import GRPO
from telescope.config.models import model_folder
from telescope.environments.tasks.countdown import Countdown


def test_it_is_short_enough_to_be_read():
    assert len(Path("examples/one_process.py").read_text().splitlines()) <= 250


def test_the_reward_rises(capsys):
    means = train(Recipe(steps=12), GRPO())
    assert sum(means[-3:]) / 3 > sum(means[:3]) / 3 + 0.1, means
    assert capsys.readouterr().out.count("reward") == 12


def test_another_algorithm_of_the_package_takes_its_place(capsys):
    assert len(train(Recipe(steps=1, prompts=4), CISPO())) == 1


def test_what_is_trained_is_what_was_sampled():
    """Padded in a batch, an answer has the log-probs that it has alone; behind its end nothing is trained."""
    folder = model_folder("tiny")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder, padding_side="left")
    prompts = [Countdown(num_numbers=number).prompts("train")[0] for number in (2, 3, 5)]  # of three lengths
    torch.manual_seed(1)
    rollouts = sample(model, tokenizer, prompts, Recipe())
    with torch.no_grad():
        batched, _ = logprobs(model, rollouts, temperature=0.7)
    for at, sampled in enumerate(rollouts.sampled):
        own = rollouts.ids[at][rollouts.attention[at].bool()]
        answer = int(sampled.sum())
        if answer < len(sampled):
            assert own[-1] == tokenizer.eos_token_id
        with torch.no_grad():
            logits = model(own[None]).logits[0, -answer - 1 : -1] / 0.7
        alone = logits.log_softmax(-1).gather(-1, own[-answer:, None]).squeeze(-1)
        assert batched[at, :answer].tolist() == pytest.approx(alone.tolist(), abs=1e-4)
