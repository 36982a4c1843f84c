"""Settings of evals: which evals a run has, and what is refused in a sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from telescope.config.eval_measure import EvalMeasure
from telescope.config.run import RunConfig, dump_run, load_run
from tests.config.conftest import compose_one, sentences

OWN = "+evals.letters={environment:reverse_letters,kwargs:{num_eval:3}}"


def compose(*overrides: str) -> RunConfig:
    point = compose_one(*overrides)
    assert point.config is not None, sentences(point)
    return point.config


def test_without_a_line_a_run_has_no_eval():
    assert compose().active_evals == ()


def test_a_number_of_steps_alone_evaluates_what_is_trained_on():
    evals = compose("env=[countdown,wordle]", "eval.every=20", "eval.num_samples=4").active_evals
    assert [(one.name, one.label, one.every, one.num_samples) for one in evals] == [
        ("countdown", "countdown", 20, 4),
        ("wordle", "wordle", 20, 4),
    ]


def test_named_evals_are_all_there_are_and_inherit_what_they_do_not_set():
    config = compose("eval.every=20", "eval.pass_above=0.9", "+evals.often={environment:countdown,every:5}", OWN)
    often, letters = config.active_evals
    assert (often.label, often.every, often.pass_above) == ("countdown", 5, 0.9)
    assert (letters.label, letters.every) == ("letters", 20)
    assert config.played["letters"].name == "reverse_letters"
    assert list(config.environments) == ["countdown"]
    assert config.environment("letters").num_eval == 3  # type: ignore[attr-defined]


def test_the_environment_of_an_eval_is_completed_and_comes_back_from_its_file(tmp_path: Path):
    config = compose(OWN)
    assert config.evals["letters"].kwargs["num_train"] > 0
    file = tmp_path / "config.json"
    file.write_text(dump_run(config))
    assert load_run(file) == config
    assert json.loads(file.read_text())["evals"]["letters"]["kwargs"]["num_eval"] == 3


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["eval.every=5", "eval.num_samples=2", "eval.pass_at_k=[1,4]"],
            "eval.pass_at_k=[1, 4] asks for k=4 of the eval countdown, which has eval.num_samples=2 answers to a prompt: raise "
            "eval.num_samples to 4, or leave that k out",
        ),
        (
            ["+evals.countdown={pass_at_k:[0]}"],
            "evals.countdown.pass_at_k=[0] must be different whole numbers from 1 on, e.g. [1]",
        ),
        (
            [
                "eval.pass_above=0.9",
                "eval.top_p=0.5",
                "+evals.countdown={pass_above:0.1}",
                OWN.replace("}}", "},pass_above:0.2}"),
            ],
            "eval.pass_above does nothing: each of `evals` sets its own pass_above; leave it out",
        ),
        (
            ["eval.every=5", "eval.temperature=0.001"],
            "eval.temperature=0.001 is below 0.01, at which vLLM samples what is above 0 and below it: set 0, which takes the "
            "likeliest token each time, or that",
        ),
        (
            ["eval.every=5", "eval.num_samples=2", "eval.temperature=0"],
            "eval.temperature=0 takes the likeliest token each time, so the eval.num_samples=2 answers to a prompt of the eval "
            "countdown are one: set eval.num_samples=1, or a temperature above 0",
        ),
        (["eval.num_samples=4"], "eval.num_samples does nothing without an eval: set eval.every, or leave it out"),
        (
            ["+evals.countdown={baseline:false,final:false}"],
            "the eval countdown never plays: eval.every is null, evals.countdown.baseline and evals.countdown.final are false, "
            "and the run has 60 steps; set eval.every, or leave the eval out",
        ),
        (
            ["eval.every=5", "eval.max_tokens=100000"],
            "eval.max_tokens=100000 must be below inference.max_model_len=256, which holds the prompt too: lower "
            "eval.max_tokens, or raise inference.max_model_len",
        ),
        (
            ["+evals.countdown={kwargs:{num_eval:3}}"],
            "evals.countdown.kwargs make an environment of the eval's own, and environments.countdown has that name already: "
            "give the eval another name, with environment=countdown, or leave its kwargs out",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_sentence(overrides: list[str], sentence: str):
    assert sentence in sentences(compose_one(*overrides))


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (["+evals.nope={}"], "evals.nope"),
        (["+evals.letters={environment:reverse_letters,kwargs:{nim_eval:3}}"], "evals.letters.kwargs.nim_eval"),
        (["+evals.countdown={evry:3}"], "evals.countdown.evry"),
    ],
)
def test_mistakes_are_told_by_their_place(overrides: list[str], part: str):
    assert part in sentences(compose_one(*overrides))


def test_a_name_that_no_metric_can_have_is_refused():
    written = {"evals": {"a b": {}}, "environments": {"a b": {"name": "countdown"}}}
    parts = {"algorithm": {"name": "grpo"}, "backend": {"name": "fsdp"}}
    with pytest.raises(ValueError, match=r"evals\.a b: the name of an eval has letters, digits, '_' and '-'"):
        RunConfig.model_validate_json(json.dumps(written | parts), strict=True)


def test_an_environment_without_an_eval_split_is_refused_by_name(user: Path):
    file = user / "plugins" / "environments" / "echo.py"
    file.write_text(file.read_text().replace("    word: str", '    splits = ("train",)\n    word: str'))
    point = compose_one("env=echo", "eval.every=5", config_dir=user)
    assert point.config is None
    assert "the environment 'echo' of echo has no eval split" in sentences(point)


def test_an_eval_of_questions_of_which_none_is_held_out_is_refused_before_anything_starts():
    own = ("env=[questions]", "environments.questions.kwargs.path=q.jsonl", "environments.questions.kwargs.held_out=0")
    point = compose_one(*own, "eval.every=5")
    assert "environments.questions.kwargs.held_out=0 leaves no question for eval.every" in sentences(point)
    assert compose(*own).active_evals == ()


def servers_held(*overrides: str) -> int:
    return compose("eval.every=2", "number_of_steps=9", *overrides).eval_servers


@pytest.mark.parametrize(
    ("servers", "asked", "held"),
    [(1, "auto", 0), (2, "auto", 0), (3, "auto", 1), (8, "auto", 1), (3, 0, 0), (2, 1, 1), (8, 3, 3)],
)
def test_how_many_servers_are_held_for_evals(servers: int, asked: str | int, held: int):
    assert servers_held(f"cluster.inference_num_workers={servers}", f"eval.num_servers={asked}") == held


def test_where_servers_sleep_while_the_trainer_trains_none_is_held():
    turns = ("orchestrator.max_async_rollout=0", "inference.sleep_while_training=keep_weights", "cluster.device=gpu")
    assert servers_held("cluster.inference_num_workers=4", *turns) == 0
    assert compose("cluster.inference_num_workers=4").eval_servers == 0


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["eval.every=2", "eval.num_servers=3", "cluster.inference_num_workers=3"],
            "eval.num_servers=3 leaves training none of the run's 3 inference servers: set eval.num_servers=2, or raise "
            "cluster.inference_num_workers",
        ),
        (
            ["eval.every=2", "eval.num_servers=1"],
            "eval.num_servers=1 leaves training none of the run's 1 inference server: set eval.num_servers=0, or raise "
            "cluster.inference_num_workers",
        ),
        (
            [OWN, "eval.num_servers=1", "cluster.inference_num_workers=3", "number_of_steps=9"],
            "eval.num_servers=1 does nothing: no eval is due between the first step and the last of 9, and the others play on "
            "all servers; set eval.every, or leave it out",
        ),
        (
            [
                *("eval.every=2", "eval.num_servers=1", "cluster.inference_num_workers=3", "cluster.device=gpu"),
                *("orchestrator.max_async_rollout=0", "inference.sleep_while_training=keep_weights"),
            ],
            "eval.num_servers=1 is not possible with inference.sleep_while_training, where all servers sleep while the trainer "
            "trains: set eval.num_servers=0",
        ),
    ],
)
def test_servers_that_can_not_be_held_are_refused(overrides: list[str], sentence: str):
    assert sentence in sentences(compose_one(*overrides))


KEPT = ("eval.every=2", "number_of_steps=9", "checkpoint.every=5")


def test_what_the_best_checkpoint_and_an_early_end_go_by():
    config = compose(*KEPT, "eval.stop_after=2", "+evals.b={environment:countdown}", "+evals.a={environment:countdown}")
    assert (config.checkpoint.best, config.stop_measure) == (None, EvalMeasure("b"))
    best = compose(*KEPT, "eval.stop_after=2", "checkpoint.keep_best=countdown/pass@1:min")
    assert best.checkpoint.best == best.stop_measure == EvalMeasure("countdown", 1, lower_is_better=True)
    assert compose(*KEPT).stop_measure is None


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            [*KEPT, "checkpoint.keep_best=math500:max"],
            "checkpoint.keep_best=math500:max names no eval of the run: its evals are countdown",
        ),
        (
            ["checkpoint.every=5", "checkpoint.keep_best=countdown:max"],
            "checkpoint.keep_best=countdown:max names no eval of the run: it has none; set eval.every",
        ),
        (
            ["checkpoint.every=5", "+evals.own={environment:countdown}", "checkpoint.keep_best=own:max", "number_of_steps=9"],
            "checkpoint.keep_best=own:max has nothing to choose from: the eval own is not due between the first step and the "
            "last of 9; set evals.own.every or eval.every, or leave checkpoint.keep_best out",
        ),
        (
            [*KEPT, "checkpoint.keep_best=countdown/pass@4:max"],
            "checkpoint.keep_best=countdown/pass@4:max needs pass@4 of the eval countdown, whose pass_at_k is [1]: add 4 to it",
        ),
        ([*KEPT, "checkpoint.keep_best=countdown"], "must be an eval and which way is better, e.g. countdown:max"),
        (
            ["eval.every=2", "checkpoint.keep_best=countdown:max"],
            "checkpoint.keep_best=countdown:max does nothing without checkpoint.every: set checkpoint.every=10, say, or leave "
            "it out",
        ),
        (["eval.stop_after=2"], "eval.stop_after=2 does nothing without an eval: set eval.every, or leave it out"),
        (
            ["eval.every=4", "eval.stop_after=3", "number_of_steps=9"],
            "eval.stop_after=3 does nothing: the eval countdown is played 3 times before the last of 9 steps, and the first of "
            "these gains; lower evals.countdown.every or eval.every, or leave it out",
        ),
    ],
)
def test_a_best_checkpoint_or_an_early_end_that_can_not_be_is_refused(overrides: list[str], sentence: str):
    assert sentence in sentences(compose_one(*overrides))
