from __future__ import annotations

from omegaconf import OmegaConf

from telescope.compose.resolve import resolve
from telescope.config.run import dump_run
from telescope.config.secrets import is_secret_name, redacted, reveal_all, scrubbed, secret_values
from tests.config.conftest import compose_one, sentences


def test_what_counts_as_a_secret_by_its_name():
    secret = [
        "api_key",
        "HF_TOKEN",
        "judge_api_key",
        "password",
        "DB_PASSWORD",
        "client-secret",
        "aws_secret_access_key",
        "key",
    ]
    harmless = ["max_tokens", "monkey", "token_count", "keyword", "num_train", "instruction", "tokenizer"]
    assert all(map(is_secret_name, secret))
    assert not any(map(is_secret_name, harmless))


def test_a_secret_given_literally_is_refused_with_the_reference_to_give():
    point = compose_one("cluster.env.HF_TOKEN=hf_abcdefgh")
    assert point.config is None
    assert "cluster.env.HF_TOKEN is a secret: give a reference and nothing else" in sentences(point)
    assert "'${oc.env:HF_TOKEN}'" in sentences(point)
    assert "hf_abcdefgh" not in sentences(point)


def test_a_reference_stays_a_reference_in_everything_written():
    environ = {"HF_TOKEN": "hf_abcdefgh"}
    config = compose_one("cluster.env.HF_TOKEN=${oc.env:HF_TOKEN}", environ=environ).config
    assert config.cluster.env == {"HF_TOKEN": "${oc.env:HF_TOKEN}"}
    assert "hf_abcdefgh" not in dump_run(config)
    assert reveal_all(config.cluster.env, environ) == environ


def test_a_reference_to_a_variable_that_is_not_set_is_refused():
    assert "HF_TOKEN, which is not set" in sentences(compose_one("cluster.env.HF_TOKEN=${oc.env:HF_TOKEN}"))


def test_a_reference_with_a_literal_default_is_refused():
    assert "is a secret" in sentences(compose_one("cluster.env.HF_TOKEN=${oc.env:HF_TOKEN,hf_abcdefgh}"))


def test_a_secret_variable_under_a_harmless_name_stays_a_reference():
    config = compose_one("cluster.env.WHO=${oc.env:HF_TOKEN}", environ={"HF_TOKEN": "hf_abcdefgh"}).config
    assert config.cluster.env == {"WHO": "${oc.env:HF_TOKEN}"}


def test_the_value_of_a_secret_variable_typed_in_anywhere_is_refused():
    point = compose_one("logging.wandb_project=hf_abcdefgh", environ={"HF_TOKEN": "hf_abcdefgh"})
    assert "logging.wandb_project holds the value of the environment variable HF_TOKEN" in sentences(point)
    assert "hf_abcdefgh" not in sentences(point)


def test_what_is_no_secret_is_resolved(monkeypatch):
    monkeypatch.setenv("WHERE", "/data")
    values, problems = resolve(OmegaConf.create({"a": "${oc.env:WHERE}/x", "b": ["${a}", 1], "c": {"d": "${b}"}}), {})
    assert values == {"a": "/data/x", "b": ["/data/x", 1], "c": {"d": ["/data/x", 1]}}
    assert problems == []


def test_what_can_not_be_resolved_is_listed_all_at_once():
    config = OmegaConf.create({"a": "${nowhere}", "b": "???", "c": "${oc.env:NOT_SET_ANYWHERE}", "d": 1})
    values, problems = resolve(config, {})
    assert values == {"d": 1}
    assert [problem.path for problem in problems] == ["a", "b", "c"]
    assert problems[2].sentence.endswith("refers to the environment variable NOT_SET_ANYWHERE, which is not set")


def test_a_copy_for_mirrors_hides_literal_secrets_only():
    settings = {"judge_api_key": "abc", "list": [{"token": "x", "max_tokens": 3}], "other_key": "${oc.env:K}"}
    assert redacted(settings) == {
        "judge_api_key": "<redacted>",
        "list": [{"token": "<redacted>", "max_tokens": 3}],
        "other_key": "${oc.env:K}",
    }


def test_a_secret_is_scrubbed_without_the_white_space_around_it_and_whole_where_another_begins_it():
    secrets = secret_values({"A_TOKEN": "sk-abcdef\n", "B_TOKEN": "sk-abcdefghijk", "C_TOKEN": "short"})
    assert scrubbed("no such key: sk-abcdef", secrets) == "no such key: <redacted>"
    assert scrubbed("no such key: sk-abcdefghijk, short", secrets) == "no such key: <redacted>, short"
