"""What an eval has otherwise than training where its answers are played, and prompts that both have."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from telescope.config.evals import Eval, digest_sampling
from telescope.config.run import RunConfig
from telescope.environments.base import Prompt
from telescope.environments.identity import divide, identify
from telescope.environments.questions.dataset import NoRows, hold_out
from telescope.environments.tasks.agent_program import AgentProgram
from telescope.environments.tasks.dapo_math import DapoMath
from telescope.workers.loading import load_environments
from telescope.workers.play import PlayLimits
from telescope.workers.shared_prompts import count_shared


def config_of(**settings: object) -> RunConfig:
    base = {
        "environments": {"letters": {"name": "reverse_letters"}},
        "algorithm": {"name": "grpo"},
        "backend": {"name": "fsdp"},
    }
    return RunConfig.model_validate_json(json.dumps({**base, **settings}), strict=True)


def test_an_eval_is_sampled_as_it_says_and_otherwise_as_its_environment():
    environments = {"letters": {"name": "reverse_letters", "temperature": 0.9, "max_tokens": 50}}
    config = config_of(
        environments=environments,
        rollout={"max_tokens": 100, "top_k": 40},
        inference={"max_model_len": 200},
        evals={"cold": {"environment": "letters", "temperature": 0.2, "top_p": 0.7, "max_tokens": 120}, "letters": {}},
    )
    limits, loaded = PlayLimits.from_config(config), load_environments(config)["letters"]
    cold, plain, training = (limits.of(loaded, name) for name in ("cold", "letters", ""))
    assert (cold.temperature, cold.max_tokens, cold.max_prompt_tokens) == (0.2, 120, 80)
    assert (cold.support.top_p, cold.support.top_k) == (0.7, 40)
    assert plain == training
    assert (training.temperature, training.max_tokens, training.support.top_p) == (0.9, 50, 1.0)
    made = {one.name: one for one in config.active_evals}
    digests = [digest_of(config, made[name]) for name in ("cold", "letters")]
    assert len(set(digests)) == 2


def test_each_environment_is_named_by_where_it_stands_in_the_configuration():
    own = {"environment": "reverse_letters", "kwargs": {"num_eval": 3}}
    loaded = load_environments(config_of(evals={"own": own, "again": {"environment": "letters"}}))
    assert {label: one.place for label, one in loaded.items()} == {"letters": "environments.letters", "own": "evals.own"}


def digest_of(config: RunConfig, one: Eval) -> str:
    return digest_sampling(one, config.played[one.label], config.rollout, config.inference.max_model_len)


@pytest.mark.parametrize(
    "change",
    [
        {"rollout": {"temperature": 0.3}},
        {"rollout": {"top_p": 0.5}},
        {"rollout": {"top_k": 5}},
        {"rollout": {"min_p": 0.1}},
        {"rollout": {"max_tokens": 30}},
        {"rollout": {"stop": ["\n"]}},
        {"inference": {"max_model_len": 200}},
        {"environments": {"letters": {"name": "reverse_letters", "temperature": 0.3}}},
        {"environments": {"letters": {"name": "reverse_letters", "max_tokens": 30}}},
        {"eval": {"temperature": 0.3}},
        {"eval": {"top_p": 0.3}},
        {"eval": {"max_tokens": 30}},
    ],
)
def test_whatever_an_evals_answers_are_sampled_with_is_in_its_digest(change: dict[str, Any]):
    known, other = config_of(evals={"letters": {}}), config_of(**{"evals": {"letters": {}}, **change})
    assert digest_of(other, other.active_evals[0]) != digest_of(known, known.active_evals[0])
    sampled = [PlayLimits.from_config(one).of(load_environments(one)["letters"], "letters") for one in (known, other)]
    assert replace(sampled[0], evals={}) != replace(sampled[1], evals={}), "and it is so where they are played"


def test_what_another_setting_decides_leaves_the_digest_and_what_is_set_below_hides_what_is_above():
    known = config_of(evals={"letters": {"temperature": 0.2}})
    for change in ({"rollout": {"temperature": 0.3}}, {"number_of_steps": 7}, {"eval": {"num_prompts": 3, "pass_above": 0.1}}):
        other = config_of(**{"evals": {"letters": {"temperature": 0.2}}, **change})
        assert digest_of(other, other.active_evals[0]) == digest_of(known, known.active_evals[0])


def test_workers_load_what_evals_alone_play_and_count_what_both_have():
    config = config_of(
        environments={"letters": {"name": "reverse_letters", "kwargs": {"num_train": 500}}},
        eval={"num_prompts": 40},
        evals={"letters": {}, "again": {"environment": "reverse_letters", "kwargs": {"num_train": 500, "seed": 5}}},
    )
    loaded = load_environments(config)
    counted = count_shared(loaded, config.active_evals, list(config.environments))
    train = {identify(prompt) for prompt in loaded["letters"].prompts["train"]}
    for label in ("letters", "again"):
        first = [loaded[label].prompts["eval"][at] for at in range(40)]
        assert (counted[label].card.in_training or 0) == sum(identify(prompt) in train for prompt in first)
    assert not count_shared(loaded, (), ["letters"])["letters"].card.in_training


def test_one_that_is_trained_on_as_it_is_evaluated_shares_every_prompt():
    kwargs = {"num_train": 30, "num_eval": 30}
    config = config_of(environments={"letters": {"name": "reverse_letters", "kwargs": kwargs}}, evals={"letters": {}})
    loaded = load_environments(config)
    same = dict.fromkeys(("train", "eval"), loaded["letters"].prompts["train"])
    loaded["letters"].prompts.update(same)
    assert count_shared(loaded, config.active_evals, ["letters"])["letters"].card.in_training == 30


def ask(text: str) -> Prompt:
    return Prompt(({"role": "user", "content": text},), answer=text)


def test_prompts_that_a_file_has_twice_are_never_on_both_sides():
    prompts = [ask(str(at % 30)) for at in range(60)]
    rest, held_out = hold_out(prompts, 10, "held out", 0)
    assert not {identify(prompt) for prompt in rest} & {identify(prompt) for prompt in held_out}
    assert len(held_out) == 10
    assert len(rest) == 50


def test_rows_that_are_moved_change_no_side_and_new_ones_change_few():
    prompts = [ask(str(at)) for at in range(200)]
    _, held_out = divide(prompts, 20, ("key",), identify)
    _, moved = divide(list(reversed(prompts)), 20, ("key",), identify)
    assert {prompt.answer for prompt in moved} == {prompt.answer for prompt in held_out}
    _, more = divide([*prompts, *(ask(f"new {at}") for at in range(5))], 20, ("key",), identify)
    gone = {prompt.answer for prompt in held_out} - {prompt.answer for prompt in more}
    came = {prompt.answer for prompt in more} - {prompt.answer for prompt in held_out}
    assert len(more) == 20
    assert len(gone) == len(came) <= 5
    assert came <= {f"new {at}" for at in range(5)}
    _, other = divide(prompts, 20, ("another",), identify)
    assert other != held_out


def test_each_new_row_brings_one_held_out_prompt_into_training_at_most():
    prompts = [ask(str(at)) for at in range(60)]
    moved = 0
    for at in range(40):
        before = {prompt.answer for prompt in divide(prompts, 20, ("key",), identify)[1]}
        prompts.insert(at, ask(f"new {at}"))
        gone = before - {prompt.answer for prompt in divide(prompts, 20, ("key",), identify)[1]}
        assert len(gone) <= 1
        moved += len(gone)
    assert moved > 0, "some do: the count is met whatever is added"


def test_a_prompt_that_is_repeated_often_is_passed_over_and_the_count_is_met():
    prompts = [*[ask("again and again")] * 500, *(ask(str(at)) for at in range(40))]
    for count in (1, 10, 40):
        for key in range(10):
            rest, held_out = divide(prompts, count, (key,), identify)
            assert (len(held_out), len(rest)) == (count, 540 - count)


def test_repeats_that_leave_no_such_count_make_it_as_little_larger_as_they_can():
    pairs = [ask(str(at % 30)) for at in range(60)]
    assert len(divide(pairs, 5, ("key",), identify)[1]) == 6
    assert len(divide(pairs, 1, ("key",), identify)[1]) == 2
    assert len(divide([*pairs, *[ask("again")] * 9], 69, ("key",), identify)[1]) == 69


def test_holding_out_everything_is_refused():
    for prompts in ([ask("1"), ask("2")], [ask("1")] * 5):
        with pytest.raises(NoRows, match="leaves none to train on"):
            hold_out(prompts, 2 if len(prompts) == 2 else 1, "held out", 0)


def test_training_on_a_single_file_never_sees_a_prompt_of_its_evals(tmp_path: Path):
    """dapo_math has a train split alone: what is held out of it, and what is left, with rows that the file has twice."""
    rows = [
        {"prompt": [{"role": "user", "content": f"What is {at} plus {at}?"}], "solution": str(2 * at)}
        for at in [*range(40), *range(20)]
    ]
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    environment = DapoMath(data_dir=str(file), held_out=12)
    train, held_out = ({identify(prompt) for prompt in environment.prompts(split)} for split in ("train", "eval"))
    assert len(held_out) >= 6
    assert len(train | held_out) == 40
    assert not train & held_out


def test_an_agents_tasks_are_held_out_by_their_own_words_or_not_at_all(tmp_path: Path):
    file = tmp_path / "tasks.jsonl"
    file.write_text("".join(json.dumps({"task": f"say {at % 9}", "answer": "1"}) + "\n" for at in range(18)))
    none = AgentProgram(command=("true",), tasks=str(file))
    assert (len(none.prompts("train")), len(none.prompts("eval"))) == (18, 0)
    some = AgentProgram(command=("true",), tasks=str(file), held_out=4)
    train, held_out = ({identify(prompt) for prompt in some.prompts(split)} for split in ("train", "eval"))
    assert (len(train), len(held_out)) == (7, 2)
    assert not train & held_out
