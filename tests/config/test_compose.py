from __future__ import annotations

import os

import pytest
from hydra.core.config_store import ConfigStore

from telescope.compose.load import UsageError, load_points, places_for
from telescope.config.models import model_path, model_problem
from tests.config.conftest import compose_one, sentences, write


def test_an_option_from_python_needs_no_yaml():
    config = compose_one("algorithm=cispo", "algorithm.clip_high=0.3").config
    assert (config.algorithm_name, config.algorithm.clip_high, config.algorithm.clip_low) == ("cispo", 0.3, 1.0)


def test_several_environments_stand_side_by_side():
    config = compose_one("env=[countdown,reverse_letters]", "environments.reverse_letters.weight=2").config
    assert {name: entry.weight for name, entry in config.environments.items()} == {"countdown": 1.0, "reverse_letters": 2.0}


def test_a_working_directory_that_is_gone_is_wrong_usage(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(UsageError, match="the folder in which this command was given is not there any more"):
        load_points([], places_for(None), {})


def test_no_experiment_is_as_if_it_had_not_been_given():
    assert compose_one("experiment=null").config == compose_one().config


def test_one_environment_needs_no_brackets():
    assert list(compose_one("env=reverse_letters").config.environments) == ["reverse_letters"]


def test_an_environment_may_be_used_twice_under_two_names():
    config = compose_one("+env@environments.hard=countdown", "environments.hard.kwargs.max_number=20").config
    assert {name: config.environment(name).max_number for name in config.environments} == {"countdown": 9, "hard": 20}


def test_a_typo_is_refused_however_it_is_typed():
    for override in ("trainer.learning_rat=1", "+trainer.learning_rat=1", "++trainer.learning_rat=1"):
        assert sentences(compose_one(override)) == (
            "trainer.learning_rat=1: there is no such setting. Did you mean trainer.learning_rate?"
        )


def test_a_typo_in_a_preset_file_is_refused(user):
    write(user / "experiment" / "mine.yaml", "# @package _global_\nalgorithm:\n  clip_hihg: 0.3\n")
    point = compose_one("experiment=mine", config_dir=user)
    assert sentences(point) == "algorithm.clip_hihg=0.3: there is no such setting. Did you mean algorithm.clip_high?"


def test_wrong_options_and_wrong_settings_are_listed_together():
    point = compose_one("algorithm=cipso", "algorithm.clip_hihg=1", "env=[countdwn]", "seed=x", "rollout.max_tokens=999")
    assert sentences(point).splitlines() == [
        "algorithm=cipso: there is no such option. Did you mean cispo? One of your own needs --config-dir FOLDER.",
        "env=countdwn: there is no such option. Did you mean countdown? One of your own needs --config-dir FOLDER.",
        "seed='x' must be a whole number",
        "algorithm.clip_hihg=1: there is no such setting. Did you mean algorithm.clip_high?",
        "rollout.max_tokens=999 must be below inference.max_model_len=256, which holds the prompt too: lower "
        "rollout.max_tokens, or raise inference.max_model_len",
    ]


def test_a_wrong_option_has_the_folders_in_which_it_was_looked_for(user):
    said = sentences(compose_one("env=[equation]", config_dir=user))
    assert f"Your own are looked for in {user / 'env'} and {user / 'plugins'}." in said


def test_a_misspelt_group_gets_its_name():
    assert sentences(compose_one("algoritm=cispo")) == "algoritm='cispo': there is no such setting. Did you mean algorithm?"


def test_settings_of_environments_have_another_section_than_their_group():
    assert "Settings of an environment stand at environments.<name>" in sentences(compose_one("env.countdown.max_number=3"))


def test_a_value_that_must_be_given_is_asked_for():
    assert sentences(compose_one("model=any")) == "model.name must be given"


def test_a_model_that_can_not_be_found_is_refused_before_anything_starts(tmp_path):
    assert "neither an embedded model" in sentences(compose_one("model=any", "model.name=tinny"))
    assert "Did you mean tiny?" in sentences(compose_one("model=any", "model.name=tinny"))
    assert "there is no such folder" in sentences(compose_one("model=any", f"model.name={tmp_path}/nothing"))
    assert "without config.json" in sentences(compose_one("model=any", f"model.name={tmp_path}"))


def test_a_local_model_is_found_from_any_folder(tmp_path, monkeypatch):
    write(tmp_path / "models" / "mine" / "config.json", "{}")
    monkeypatch.chdir(tmp_path)
    config = compose_one("model=any", "model.name=models/mine").config
    assert config.model.name == str(tmp_path / "models" / "mine")


def test_embedded_models_are_folders_of_the_package_and_hub_ids_are_taken_on_trust():
    assert (model_path("tiny") / "config.json").is_file()
    assert model_path("Qwen/Qwen2.5-3B") is None
    assert model_problem("Qwen/Qwen2.5-3B") is None


def test_a_users_folder_brings_options_with_their_defaults(user):
    overrides = ("algorithm=flat", "algorithm.slope=0.1", "backend=toy", "env=echo", "environments.echo.kwargs.times=4")
    config = compose_one(*overrides, config_dir=user).config
    assert (config.algorithm.slope, config.backend.size, config.environment("echo").times) == (0.1, 3, 4)
    assert config.plugin_path == (str(user / "plugins"),)


def test_a_users_preset_inherits_the_defaults_of_his_class(user):
    write(user / "algorithm" / "flat.yaml", "defaults: [_flat, _self_]\nslope: 0.9\n")
    assert compose_one("algorithm=flat", config_dir=user).config.algorithm.slope == 0.9


def test_a_preset_may_begin_with_our_preset_or_with_the_class(user):
    write(user / "algorithm" / "like_grpo.yaml", "defaults: [grpo, _self_]\nclip_high: 0.3\n")
    write(user / "algorithm" / "as_the_class.yaml", "defaults: [_grpo, _self_]\nclip_high: 0.3\n")
    write(user / "cluster" / "mine.yaml", "defaults: [_default, _self_]\ndevice: cpu\n")
    theirs = compose_one("algorithm=like_grpo", "cluster=mine", config_dir=user).config
    plain = compose_one("algorithm=as_the_class", config_dir=user).config
    assert (theirs.algorithm.use_tis, theirs.algorithm.clip_high, theirs.cluster.trainer_num_workers) == (True, 0.3, 2)
    assert (plain.algorithm.use_tis, plain.algorithm.clip_high) == (False, 0.3)


def test_a_preset_of_an_environment_is_another_environment_of_its_class(user):
    write(user / "env" / "hard.yaml", "defaults: [countdown, _self_]\nkwargs:\n  max_number: 20\n")
    config = compose_one("env=[countdown,hard]", "environments.hard.weight=2", config_dir=user).config
    assert {name: config.environment(name).max_number for name in config.environments} == {"countdown": 9, "hard": 20}
    assert [(entry.name, entry.weight) for entry in config.environments.values()] == [("countdown", 1), ("countdown", 2)]
    assert list(compose_one("env=hard", config_dir=user).config.environments) == ["hard"]


def test_presets_of_environments_build_on_each_other_and_on_a_users_own_class(user):
    write(user / "env" / "loud.yaml", "defaults: [echo, _self_]\nkwargs: {tone: loud}\n")
    write(user / "env" / "louder.yaml", "defaults: [loud, _self_]\nkwargs: {word: HELLO}\n")
    write(user / "env" / "quiet.yaml", "# @package environments.calm\ndefaults: [_echo@_here_, _self_]\nweight: 3.0\n")
    config = compose_one("env=[echo,louder,quiet]", "+env@environments.two=loud", config_dir=user).config
    assert {
        label: (entry.name, entry.weight, entry.kwargs["word"], entry.kwargs["tone"])
        for label, entry in config.environments.items()
    } == {
        "echo": ("echo", 1, "hello", "plain"),
        "louder": ("echo", 1, "HELLO", "loud"),
        "calm": ("echo", 3, "hello", "plain"),
        "two": ("echo", 1, "hello", "loud"),
    }


def test_an_experiment_chooses_a_users_environment(user):
    write(user / "env" / "hard.yaml", "defaults: [countdown, _self_]\nkwargs:\n  max_number: 20\n")
    text = "# @package _global_\ndefaults:\n  - override /env: [hard]\n  - _self_\nenvironments:\n  hard: {weight: 2.0}\n"
    write(user / "experiment" / "mine.yaml", text)
    entry = compose_one("experiment=mine", config_dir=user).config.environments["hard"]
    assert (entry.weight, entry.kwargs["max_number"]) == (2.0, 20)


def test_the_path_of_a_users_folder_may_have_any_character(user):
    odd = user.rename(user.parent / 'o\'brien \\ "$HOME" ü%41 [a=b]')
    write(odd / "experiment" / "mine.yaml", "# @package _global_\nseed: 7\n")
    config = compose_one("experiment=mine", "algorithm=flat", config_dir=odd).config
    assert (config.seed, config.algorithm_name) == (7, "flat")


def test_a_users_options_are_gone_without_his_folder(user):
    before = {str(name) for name in ConfigStore.instance().repo}
    assert compose_one("algorithm=flat", config_dir=user).config is not None
    assert "algorithm=flat: there is no such option" in sentences(compose_one("algorithm=flat"))
    assert {str(name) for name in ConfigStore.instance().repo} == before


def test_a_users_preset_with_one_of_our_names_is_refused(user):
    write(user / "algorithm" / "grpo.yaml", "clip_high: 0.9\n")
    assert "has the name of Telescope's own preset algorithm=grpo: rename it" in sentences(compose_one(config_dir=user))


def test_a_users_broken_plugin_spoils_only_the_run_that_chooses_it(user):
    write(user / "plugins" / "environments" / "broken.py", "1 / 0\n")
    assert compose_one(config_dir=user).config is not None
    said = sentences(compose_one("env=broken", config_dir=user))
    assert "environment 'broken' can't be imported: ZeroDivisionError" in said
    assert "broken.py" in said


def test_a_broken_yaml_file_is_named(user):
    write(user / "experiment" / "bad.yaml", "a: [1\n")
    assert "bad.yaml" in sentences(compose_one("experiment=bad", config_dir=user))


def test_a_sweep_has_a_point_for_every_combination():
    points = load_points(["algorithm=grpo,rloo", "seed=1,2"], places_for(None), os.environ, sweep=True)
    assert [(point.config.algorithm_name, point.config.seed) for point in points] == [
        ("grpo", 1), ("grpo", 2), ("rloo", 1), ("rloo", 2)
    ]  # fmt: skip


def test_wrong_points_of_a_sweep_are_found_before_any_runs():
    points = load_points(["algorithm=grpo,gspo", "algorithm.use_tis=true"], places_for(None), os.environ, sweep=True)
    assert [bool(point.problems) for point in points] == [False, True]


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("seed=1,2", "seed has several values: add -m"),
        ("foo", "can't read 'foo'"),
        ("=3", "can't read '=3': it names no setting; an override reads name=value"),
        ("algorithm=[", r"can't read 'algorithm=\['"),
        ("hydra.job.chdir=true", "Hydra only composes here"),
        ("hydra.verbose=true", "debug=true logs in more detail"),
        ("hydra/launcher=submitit_slurm", "type cluster=slurm to submit one to Slurm"),
        ("hydra.launcher.partition=gpu", "type cluster=slurm to submit one to Slurm"),
        ("hydra.run.dir=x", "run_dir=… names the run's directory"),
        ("hydra/sweeper=optuna", "a sweeper chooses the points of a sweep: add -m"),
        ("hydra.searchpath=[file:///x]", "use --config-dir"),
    ],
)
def test_a_command_line_that_can_not_be_read_is_wrong_usage(override, sentence):
    with pytest.raises(UsageError, match=sentence):
        load_points([override], places_for(None), {})


def test_a_group_can_not_be_taken_away():
    assert "a group can't be taken away" in sentences(compose_one("~algorithm"))
    assert sentences(compose_one("env=null")).startswith("env needs a choice: agent_program |")


def test_plug_in_folders_follow_from_the_config_dir():
    assert "plugin_path follows from --config-dir" in sentences(compose_one("plugin_path=[/x]"))


def test_a_missing_config_dir_is_wrong_usage(tmp_path):
    with pytest.raises(UsageError, match="there is no such folder"):
        places_for(str(tmp_path / "nothing"))
