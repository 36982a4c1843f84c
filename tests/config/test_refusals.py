"""Mistakes that a breaker made on the command line: each is one sentence that names what to change."""

from __future__ import annotations

from pathlib import Path

import pytest

from telescope.compose.load import UsageError
from telescope.config import plugins
from telescope.config.conflicts import MOST_LANES
from telescope.config.run import config_hash
from telescope.runlog.layout import RunDirectory, RunDirectoryInUse
from telescope.wire.hub_session import MAX_CAPACITY
from tests.config.conftest import compose_one, sentences, write

OPTIONS = " | ".join(sorted(plugins.find(plugins.ENVIRONMENTS)))


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("environments={}", "environments={} takes nothing away: choose with env=[…], or drop one with ~environments.<name>"),
        (
            "algorithm=[grpo,rloo]",
            "algorithm=[grpo,rloo] is a list, and algorithm takes one choice, e.g. algorithm=grpo; one run for each is "
            "-m algorithm=grpo,rloo",
        ),
        ("backend=[fsdp]", "backend=[fsdp] is a list, and backend takes one choice, e.g. backend=fsdp"),
        ("backend={a:b}", "backend={a:b} names no option: give a name, e.g. backend=NAME"),
        ("env=[[countdown]]", "env=[[countdown]] names no option: give a name, e.g. env=NAME, or a list of names"),
        ("env={a:b}", "env={a:b} names no option: give a name, e.g. env=NAME, or a list of names"),
        ("orchestrator.silent_s=0.001", "orchestrator.silent_s=0.001 must be at least 1.0"),
        ("rollout.temperature=0.009", "rollout.temperature=0.009 must be at least 0.01"),
        (
            "rollout.stop=[a,b,c,d,e,f,g,h,i,j,k,l,m,n,o,p,q]",
            'rollout.stop=["a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l", "m", "n", "o",  ... must have at most '
            "16 items",
        ),
        (f"name={'n' * 101}", f"name='{'n' * 75} ... must have at most 100 characters"),
        (
            "model.chat_template=/data/chat.jinja",
            "model.chat_template='/data/chat.jinja' is not a Jinja template, and every prompt would be this text: give the "
            "template itself, not a file's path (in a preset of your own as `chat_template: |` with the text below)",
        ),
        (
            "environments.countdown.kwargs.nope=1",
            "environments.countdown.kwargs.nope=1: there is no such setting. There are answer_tag, examples, format_bonus, "
            "instruction, max_number, max_target, min_number, min_target, num_eval, num_numbers, num_train, operators, seed, "
            "wrong_value_reward.",
        ),
        ("env=[]", f"env=[] chooses nothing: choose one at least of {OPTIONS}"),
        ("~environments.countdown", "environments is empty: a run needs one at least, e.g. env=countdown"),
        ("env=[countdown,countdown]", "env=[countdown,countdown] has countdown more than once: name each once"),
        ("run_dir=", "run_dir is empty: name a folder, or leave it out for runs/<date>_<time>_<name>"),
        ("number_of_steps=99999999999999999999999", "number_of_steps=99999999999999999999999 must be at most 1000000000"),
        (
            "cluster.placement_timeout_s=100000000000000000000",
            "cluster.placement_timeout_s=100000000000000000000 must be at most 1000000",
        ),
        (
            "model.dtype=float16",
            "model.dtype=float16 would keep the weights in training, their gradients and the optimiser's moments in float16, "
            "in which squares of small gradients are 0 and AdamW's steps far too large: set model.dtype=float32; "
            "backend.mixed_precision_dtype=float16 computes in half precision",
        ),
        ("rollout.timeout_s=1e20", "rollout.timeout_s=1e+20 must be at most 1000000.0"),
        ("cluster.env_num_workers=100000", "cluster.env_num_workers=100000 must be at most 1024"),
        ("cluster.rollouts_per_env_worker=1000001", "cluster.rollouts_per_env_worker=1000001 must be at most 1000000"),
        (
            "orchestrator.enable_individual_sample_lanes=false",
            "orchestrator.free_lane_after_generation=true needs orchestrator.enable_individual_sample_lanes=true: without it a "
            "lane belongs to a whole group; set orchestrator.free_lane_after_generation=false, or leave individual lanes on",
        ),
        (
            "inference.sleep_while_training=keep_weights",
            "inference.sleep_while_training=keep_weights needs orchestrator.max_async_rollout=0, and it is 2: a server that "
            "generates while the trainer trains can't sleep; set orchestrator.max_async_rollout=0, or "
            "inference.sleep_while_training=off",
        ),
        (
            "orchestrator.kv_soft=0.96",
            "orchestrator.kv_soft=0.96 must not be above orchestrator.kv_hard=0.95: lower the first or raise the second",
        ),
        (
            "rollout.normalize_rewards=true",
            "rollout.normalize_rewards=true needs environments.countdown.reward_min and environments.countdown.reward_max: "
            "give both, or set rollout.normalize_rewards=false",
        ),
        (
            "cluster.nodes=2",
            "cluster.nodes=2 does nothing with cluster.launcher=local, which is this machine alone: leave it out, or set "
            "cluster=bare_metal",
        ),
        (
            "cluster.head=10.0.0.1",
            "cluster.head=10.0.0.1 is not an address of a host and a port, such as 10.0.0.1:29400 or [fd00::1]:29400",
        ),
        (
            "checkpoint.dir=here",
            "checkpoint.dir='here' must be an absolute path, as every host and every attempt must find the same folder; or "
            "leave it out for the run directory's",
        ),
        ("checkpoint.every=-1", "checkpoint.every=-1 must be at least 0"),
        ("rollout.top_k=1", "rollout.top_k=1 must be at least 2, or null"),
        (
            "rollout.group_size=100000",
            "orchestrator.max_concurrent_prompts_per_server=32 times rollout.group_size=100000 are 3,200,000 requests in "
            "flight at one server, and 1,000,000 are the most: lower either",
        ),
    ],
)
def test_one_mistake_is_one_sentence(override: str, sentence: str):
    assert sentences(compose_one(override)) == sentence


ENV_CHOOSES = "env=[countdown] chooses environments, and environments.countdown holds the settings of one"


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (
            "environments=[countdown]",
            f'environments=["countdown"] must be a mapping, each value a section of settings: {ENV_CHOOSES}',
        ),
        ("environments.countdown=[1]", "environments.countdown=[1] must be a section of settings"),
        ("trainer=[1]", "trainer=[1] must be a section of settings"),
        ("rollout.stop={a:1}", 'rollout.stop={"a": 1} must be a list, each item text'),
        ("trainer.betas.x=1", 'trainer.betas={"x": 1} must be a list of 2: a number, a number'),
        (
            "environments.hendrycks_math.kwargs.tools={a:1}",
            "environments.hendrycks_math.kwargs.tools={a:1} has a list where environments.hendrycks_math.kwargs.tools has "
            "names with values, or these where it has a list",
        ),
        ("+experiment=fake", "+experiment=fake: experiment is in the defaults list already, so leave out the +"),
        ("+model=qwen3-4b", "+model=qwen3-4b: model is in the defaults list already, so leave out the +"),
        ("++algorithm=cispo", "++algorithm=cispo: algorithm is in the defaults list already, so leave out the ++"),
    ],
)
def test_a_list_in_place_of_names_and_a_plus_too_many_are_sentences(override: str, sentence: str):
    assert sentences(compose_one("env=hendrycks_math", override)) == sentence


def test_an_environment_may_be_added_to_the_default_one():
    assert list(compose_one("+env=wordle").config.environments) == ["countdown", "wordle"]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (
            "environments: [{name: countdown}]",
            f'environments=[{{"name": "countdown"}}] must be a mapping, each value a section of settings: {ENV_CHOOSES}',
        ),
        (
            "environments:\n  countdown:\n    kwargs: [1]",
            "environments.countdown.kwargs=[1] must be a mapping, each value anything",
        ),
        ("cluster: [local]", 'cluster=["local"] must be a section of settings'),
    ],
)
def test_a_list_in_place_of_names_in_a_preset_is_a_sentence_with_the_file(tmp_path: Path, content: str, sentence: str):
    file = tmp_path / "experiment" / "mine.yaml"
    write(file, f"# @package _global_\n{content}\n")
    assert sentences(compose_one("experiment=mine", config_dir=tmp_path)) == f"{file}: {sentence}"


def test_a_list_in_a_preset_of_a_group_is_a_sentence_with_the_file(tmp_path: Path):
    write(tmp_path / "env" / "hard.yaml", "defaults: [countdown, _self_]\nkwargs: [1]\n")
    said = sentences(compose_one("env=hard", config_dir=tmp_path))
    assert said == f"{tmp_path}/env/hard.yaml: environments.hard.kwargs=[1] must be a mapping, each value anything"


@pytest.mark.parametrize("chosen", ["mine", "outer"])
def test_an_experiment_without_its_package_is_told_so(tmp_path: Path, chosen: str):
    file = tmp_path / "experiment" / "mine.yaml"
    write(file, "seed: 3\n")
    write(tmp_path / "experiment" / "outer.yaml", "defaults: [mine]\n")
    write(tmp_path / "experiment" / "other.yaml", "number_of_steps: 3\n")
    assert sentences(compose_one(f"experiment={chosen}", config_dir=tmp_path)) == (
        f"{file} must begin with the line `# @package _global_`, without which its settings go below `experiment`"
    )


def test_as_many_lanes_as_a_servers_hello_can_offer_are_allowed():
    assert MOST_LANES == MAX_CAPACITY


@pytest.mark.parametrize("value", ["a=b", "/data/läufe/1", "/data/a(b", "/tmp/ein 'q'=1"])
def test_a_value_that_needs_quotes_comes_back_quoted_and_works_so(value: str):
    with pytest.raises(UsageError) as refused:
        compose_one(f"run_dir={value}")
    assert str(refused.value).endswith(f"""quoted twice: 'run_dir="{value}"'""")
    assert compose_one(f'run_dir="{value}"').config.run_dir == value


def test_a_text_with_a_comma_comes_back_quoted():
    with pytest.raises(UsageError, match="or a text with a comma, 'run_dir=\"a,b\"'"):
        compose_one("run_dir=a,b")


def test_a_run_directory_that_is_a_file_is_called_no_folder():
    with pytest.raises(RunDirectoryInUse, match="run_dir=/dev/null is not a folder: name another"):
        RunDirectory.create(Path("/dev/null"))


@pytest.mark.parametrize(
    ("code", "error"), [("import sys\nsys.exit(3)\n", "SystemExit: 3"), ("raise BaseException('no')\n", "BaseException: no")]
)
def test_a_plugin_that_leaves_at_import_breaks_only_the_runs_that_choose_it(tmp_path: Path, code: str, error: str):
    file = tmp_path / "plugins" / "algorithms" / "leaver.py"
    write(file, code)
    assert compose_one("algorithm=rloo", config_dir=tmp_path).config is not None
    said = sentences(compose_one("algorithm=leaver", config_dir=tmp_path))
    assert said == f"algorithm: algorithm 'leaver' can't be imported: {error} (in {file})"


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"# @package _global_\nname: caf\xe9\n", "is not text in UTF-8: save it as UTF-8"),
        (b"", "is empty: a preset holds settings, such as seed: 1, or a list of defaults"),
        (b"# @package _global_\n- a\n", "holds a list: a preset holds settings, each as name: value"),
        (b"hello\n", "holds a single value: a preset holds settings, each as name: value"),
    ],
)
def test_a_preset_that_is_none_is_named_by_its_file_and_breaks_no_other(tmp_path: Path, content: bytes, sentence: str):
    file = tmp_path / "experiment" / "odd.yaml"
    write(file, "")
    file.write_bytes(content)
    assert compose_one("experiment=fake", config_dir=tmp_path).config is not None
    assert sentences(compose_one("experiment=odd", config_dir=tmp_path)) == f"{file} {sentence}"


def test_a_preset_that_another_preset_chooses_is_named_too(tmp_path: Path):
    write(tmp_path / "experiment" / "outer.yaml", "# @package _global_\ndefaults:\n  - override /model: odd\n")
    write(tmp_path / "model" / "odd.yaml", "")
    (tmp_path / "model" / "odd.yaml").write_bytes(b"name: caf\xe9\n")
    said = sentences(compose_one("experiment=outer", config_dir=tmp_path))
    assert said == f"{tmp_path / 'model' / 'odd.yaml'} is not text in UTF-8: save it as UTF-8"


def test_lanes_of_groups_run_without_the_two_settings_of_sample_lanes():
    lanes = ("orchestrator.enable_individual_sample_lanes=false", "orchestrator.free_lane_after_generation=false")
    assert compose_one(*lanes).config is not None
    assert "orchestrator.adaptive_concurrency=true needs" in sentences(
        compose_one(*lanes, "orchestrator.adaptive_concurrency=true")
    )


def test_normalised_rewards_need_pools_that_ask_for_more_than_0():
    given = ("rollout.normalize_rewards=true", "environments.countdown.reward_min=-1", "environments.countdown.reward_max=1")
    pools = "+environments.countdown.curriculum={}"
    assert "pass_above=0 would call all of them passed, or none" in sentences(compose_one(*given, pools))
    assert compose_one(*given, "+environments.countdown.curriculum={pass_above:0.5}").config is not None


def test_a_reward_range_must_rise_and_pools_must_cover_every_rate():
    said = sentences(compose_one("environments.countdown.reward_min=1", "environments.countdown.reward_max=0"))
    assert "the rewards of environments.countdown go from reward_min=1 to reward_max=0: the first must be below" in said
    said = sentences(compose_one("environments.countdown.curriculum={pools:[{name:hard,up_to:0.5}]}"))
    assert "must rise from above 0 to exactly 1" in said
    assert "behind which every answer would end at once" in sentences(compose_one("rollout.stop=['']"))


RANGED = """
from telescope.environments.base import Prompt, Reward, SingleTurn

class Ranged(SingleTurn):
    reward_min = {low}
    reward_max = {high}

    def prompts(self, split):
        return [Prompt(({{"role": "user", "content": "2+2"}},))]

    def reward(self, prompt, answer):
        return Reward(1.0)
"""


@pytest.mark.parametrize(
    ("overrides", "ends", "refused"),
    [
        (("reward_max=0",), (0.0, 1.0), "reward_min=0 to reward_max=0: the first must be below the second"),
        (("reward_max=-1",), (0.0, 1.0), "reward_min=0 to reward_max=-1"),
        (("reward_min=1",), (0.0, 1.0), "reward_min=1 to reward_max=1"),
        (("reward_min=2", "reward_max=1"), (None, None), "reward_min=2 to reward_max=1"),
        ((), (1.0, 0.0), "reward_min=1 to reward_max=0"),
        ((), (0.0, "float('inf')"), "reward_min=0 to reward_max=inf"),
        ((), (0.0, "float('nan')"), "reward_min=0 to reward_max=nan"),
        (("reward_max=0",), (None, 1.0), ""),
        (("reward_max=0",), (-1.0, 1.0), ""),
    ],
)
def test_both_ends_of_a_reward_range_are_judged_wherever_they_stand(
    tmp_path: Path, overrides: tuple[str, ...], ends: tuple[object, object], refused: str
):
    write(tmp_path / "plugins" / "environments" / "ranged.py", RANGED.format(low=ends[0], high=ends[1]))
    given = (f"environments.ranged.{override}" for override in overrides)
    said = sentences(compose_one("env=[ranged]", *given, config_dir=tmp_path))
    assert (f"the rewards of environments.ranged go from {refused}" in said) if refused else not said


def test_the_reward_range_of_an_evals_own_environment_is_judged_too(tmp_path: Path):
    write(tmp_path / "plugins" / "environments" / "ranged.py", RANGED.format(low=1.0, high=0.0))
    said = sentences(compose_one("+evals.other={environment:ranged,every:1}", config_dir=tmp_path))
    assert "the rewards of evals.other go from reward_min=1 to reward_max=0" in said


def test_a_curriculum_without_settings_has_three_pools():
    point = compose_one("+environments.countdown.curriculum={}")
    assert [pool.name for pool in point.config.environments["countdown"].curriculum.pools] == ["hard", "medium", "easy"]


def test_hosts_are_counted_from_0_and_a_head_needs_a_key_file():
    assert sentences(compose_one("cluster=bare_metal", "cluster.nodes=2", "cluster.node_rank=2")) == (
        "cluster.node_rank=2 must be below cluster.nodes=2: hosts are counted from 0"
    )
    assert "cluster.head=a:1 needs cluster.key_file, without which anyone could join: make one with" in sentences(
        compose_one("cluster=bare_metal", "cluster.head=a:1")
    )


def test_where_a_host_stands_does_not_change_what_is_computed():
    alone = compose_one("cluster=bare_metal", "cluster.nodes=2").config
    second = compose_one("cluster=bare_metal", "cluster.nodes=2", "cluster.node_rank=1", "cluster.interface=eth1").config
    third = compose_one("cluster=bare_metal", "cluster.nodes=3").config
    assert config_hash(alone) == config_hash(second) != config_hash(third)


SLEEP = ("inference.sleep_while_training=drop_weights", "orchestrator.max_async_rollout=0")


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ("cluster.device=cpu",),
            "inference.sleep_while_training=drop_weights is about a GPU's memory, and cluster.device=cpu",
        ),
        (
            ("model.lora={}",),
            "inference.sleep_while_training=drop_weights is not possible with model.lora: each adapter is tried by a request",
        ),
        (
            ("inference.quantization=fp8",),
            "inference.sleep_while_training=drop_weights loses what inference.quantization=fp8 has computed at the start and "
            "no version brings: set inference.sleep_while_training=keep_weights",
        ),
    ],
)
def test_a_server_that_can_not_sleep_is_refused(overrides: tuple[str, ...], sentence: str):
    assert sentence in sentences(compose_one(*SLEEP, *overrides))


def test_a_server_may_sleep_where_nothing_runs_ahead():
    config = compose_one("cluster=one_gpu", *SLEEP).config
    assert config is not None
    assert config.inference.sleep_while_training == "drop_weights"


def test_one_gpu_in_turns_is_synchronous_and_stages_nothing():
    config = compose_one("cluster=one_gpu_in_turns", "model=qwen2.5-3b").config
    assert config is not None
    assert (config.cluster.inference_num_workers, config.cluster.trainer_num_workers, config.cluster.device) == (1, 1, "gpu")
    assert (config.inference.sleep_while_training, config.inference.gpu_memory_utilization) == ("keep_weights", 0.6)
    assert (config.orchestrator.max_async_rollout, config.weight_sync.staging) == (0, "none")
