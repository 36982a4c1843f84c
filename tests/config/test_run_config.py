from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import Field, SecretStr, ValidationError

from telescope.config import plugins, run
from telescope.config.run import RunConfig, _with_references, as_json, config_hash, dump_run, load_run
from telescope.config.secrets import SecretMissing
from telescope.settings import Settings
from tests.config.older import as_an_earlier_version_wrote


@pytest.fixture
def container(plugin_path) -> dict:
    return {
        "plugin_path": list(plugin_path),
        "algorithm": {"name": "flat", "slope": 0.25},
        "backend": {"name": "toy"},
        "environments": {"echo": {"name": "echo", "kwargs": {"times": 3}}},
    }


def valid(container) -> RunConfig:
    return RunConfig.model_validate_json(json.dumps(container), strict=True)


def test_plugins_become_instances_of_their_own_classes(container):
    config = valid(container)
    assert config.algorithm.slope == 0.25
    assert config.algorithm_name == "flat"
    assert config.backend_name == "toy"


def test_an_environment_is_built_from_its_entry(container):
    environment = valid(container).environment("echo")
    assert len(environment.prompts("train")) == 3


def test_an_entry_is_completed_with_the_defaults_of_its_environment(container):
    kwargs = valid(container).environments["echo"].kwargs
    assert kwargs == {"word": "hello", "times": 3, "tone": "plain", "judge_api_key": None}


def test_load_run_gives_back_what_was_written(container, tmp_path):
    config = valid(container)
    (tmp_path / "config.json").write_text(dump_run(config))
    assert load_run(tmp_path / "config.json") == config


def test_another_process_reads_the_same_configuration_with_the_users_plugins(container, tmp_path):
    config = valid(container)
    (tmp_path / "config.json").write_text(dump_run(config))
    code = (
        "import sys; from pathlib import Path; from telescope.config.run import load_run, config_hash\n"
        "config = load_run(Path(sys.argv[1])); print(config_hash(config), config.environment('echo').times)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "config.json")]
    shown = subprocess.run(command, check=True, timeout=60, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert shown.stdout.split() == [config_hash(config), "3"]


def test_an_edited_file_is_refused(container, tmp_path):
    text = dump_run(valid(container)).replace('"slope": 0.25', '"slope": 0.75')
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"its settings have hash [0-9a-f]{16}: the file was edited"):
        load_run(tmp_path / "config.json")


def test_a_run_outlives_the_version_that_began_it(container, tmp_path):
    """Its checkpoints are exported, its kept steps replayed, its job queued again by a version with one setting more."""
    config = valid(container)
    (tmp_path / "config.json").write_text(as_an_earlier_version_wrote(config))
    assert load_run(tmp_path / "config.json") == config


def test_a_plug_in_that_reads_its_settings_otherwise_than_before_is_told(container, tmp_path, monkeypatch):
    config = valid(container)
    (tmp_path / "config.json").write_text(dump_run(config))
    slope = config.algorithm.slope
    monkeypatch.setattr(run, "as_json", lambda read: {**as_json(read), "algorithm": {"name": "flat", "slope": 2 * slope}})
    with pytest.raises(ValueError, match="the code of a plug-in changed"):
        load_run(tmp_path / "config.json")


def test_the_hash_depends_on_every_setting_but_name_and_place(container):
    config = valid(container)
    assert config_hash(config) == config_hash(valid({**container, "name": "other", "run_dir": "/elsewhere"}))
    assert config_hash(config) != config_hash(valid({**container, "seed": 1}))
    assert config_hash(config) != config_hash(valid({**container, "algorithm": {"name": "flat", "slope": 0.26}}))
    assert len(config_hash(config)) == 16


def test_the_hash_does_not_depend_on_the_order_of_keys(container):
    assert config_hash(valid(container)) == config_hash(valid(dict(reversed(container.items()))))


def test_a_dump_holds_the_name_of_each_plugin(container):
    dumped = as_json(valid(container))
    assert dumped["algorithm"].items() >= {"name": "flat", "slope": 0.25, "overlong_filter": False}.items()
    assert dumped["backend"] == {"name": "toy", "size": 3}


def test_a_configuration_can_be_made_from_instances(plugin_path):
    algorithm = plugins.load(plugins.ALGORITHMS, "flat", plugin_path)()
    backend = plugins.load(plugins.BACKENDS, "toy", plugin_path)()
    entries = {"countdown": {"name": "countdown"}}
    config = RunConfig(plugin_path=plugin_path, algorithm=algorithm, backend=backend, environments=entries)
    assert config.algorithm is algorithm
    assert config.number_of_steps == 300


def test_settings_are_frozen(container):
    with pytest.raises(ValidationError):
        valid(container).seed = 1


def test_not_a_number_and_infinity_are_no_settings(container):
    for value in (float("nan"), float("inf")):
        with pytest.raises(ValidationError):
            valid({**container, "rollout": {"temperature": value}})


def test_a_run_needs_an_environment(container):
    with pytest.raises(ValidationError, match="a run needs one at least"):
        valid({**container, "environments": {}})


def test_a_secret_is_read_where_the_environment_is_built(container, monkeypatch):
    container["environments"]["echo"]["kwargs"]["judge_api_key"] = "${oc.env:JUDGE_KEY}"
    config = valid(container)
    assert "s3cret" not in dump_run(config)
    with pytest.raises(SecretMissing, match="JUDGE_KEY is not set"):
        config.environment("echo")
    monkeypatch.setenv("JUDGE_KEY", "s3cret")
    assert config.environment("echo").judge_api_key == "s3cret"
    assert "s3cret" not in dump_run(config)


class Endpoint(Settings):
    url: str
    key: SecretStr


class Jury(Settings):
    first: Endpoint
    others: tuple[Endpoint, ...] = (Endpoint(url="b", key=SecretStr("${oc.env:B}")),)
    by_number: dict[int, SecretStr] = Field(default_factory=lambda: {3: SecretStr("${oc.env:C}")})
    none: SecretStr | None = None


def test_references_to_secrets_stay_at_any_depth_given_or_by_default():
    jury = Jury(first=Endpoint(url="a", key=SecretStr("${oc.env:A}")))
    assert _with_references(jury.model_dump(mode="json"), jury) == {
        "first": {"url": "a", "key": "${oc.env:A}"},
        "others": [{"url": "b", "key": "${oc.env:B}"}],
        "by_number": {"3": "${oc.env:C}"},
        "none": None,
    }
