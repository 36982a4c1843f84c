"""Files of the older Telescope, of TRL and of verl become experiments that are valid here, and nothing is lost in silence."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from telescope.cli.main import main
from telescope.compose.load import load_points, places_for
from telescope.config.run import RunConfig

ROOT = Path(__file__).parents[2]
ECHO = """
from telescope.environments.base import Prompt, Reward, SingleTurn

class Echo(SingleTurn):
    word: str = "hello"
    judge_api_key: str | None = None

    def prompts(self, split):
        return [Prompt(({"role": "user", "content": self.word},))]

    def reward(self, prompt, answer):
        return Reward(1.0)
"""


class Migrated:
    """What the command made of a file."""

    def __init__(self, folder: Path, text: str, *options: str) -> None:
        self.source = folder / "theirs.yaml"
        self.source.write_text(text)
        self.to = folder / "mine" / "experiment" / "ours.yaml"
        self.code = main(["migrate", str(self.source), "--to", str(self.to), *options])

    @property
    def experiment(self) -> dict[str, Any]:
        found: dict[str, Any] = yaml.safe_load(self.to.read_text())
        return found

    def settings(self) -> dict[str, Any]:
        """What the experiment sets by full names, the choices of groups among them."""
        found: dict[str, Any] = {}
        for entry in self.experiment.pop("defaults"):
            if isinstance(entry, dict):
                found |= {name.removeprefix("override /"): value for name, value in entry.items()}
        return found | dict(flat({name: value for name, value in self.experiment.items() if name != "defaults"}))

    def config(self, **environ: str) -> RunConfig:
        """Composed and checked, as `telescope check` does."""
        (point,) = load_points(("experiment=ours",), places_for(str(self.to.parent.parent)), environ)
        assert point.problems == ()
        assert point.config is not None
        return point.config


def flat(tree: dict[str, Any], above: str = "") -> list[tuple[str, Any]]:
    found = []
    for name, value in tree.items():
        found += flat(value, f"{above}{name}.") if isinstance(value, dict) and value else [(f"{above}{name}", value)]
    return found


OLDER = {
    "model": "qwen2.5-3b",
    "cluster.inference_num_workers": 2,
    "cluster.trainer_num_workers": 2,
    "algorithm.use_tis": False,
}
"""What a file of the older Telescope means without saying so."""
CASES: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "older: moved and renamed": (
        "number_of_steps: 20\nlearning_rate: 1e-6\ngroup_size: 4\ninference_base_port: 8200\ncheckpoint_every: 5\n",
        {
            **OLDER,
            "number_of_steps": 20,
            "trainer.learning_rate": 1e-6,
            "rollout.group_size": 4,
            "inference.base_port": 8200,
            "checkpoint.every": 5,
        },
        ["5 of 5 settings are carried over", "No env is carried over: choose one with env=NAME"],
    ),
    "older: its defaults are written out where the file is silent, and not where it speaks": (
        "model: acme/llm\ninference_num_workers: 4\nalgorithm: rloo\nuse_tis: true\ntis_cap: 3.0\n",
        {
            "model": "any",
            "model.name": "acme/llm",
            "algorithm": "rloo",
            "algorithm.use_tis": True,
            "algorithm.tis_cap": 3.0,
            "cluster.inference_num_workers": 4,
            "cluster.trainer_num_workers": 2,
        },
        ["Written out, since their default is another here: trainer_num_workers."],
    ),
    "older: environments": (
        "environments:\n- {name: countdown, weight: 2, kwargs: {num_numbers: 4}}\n- countdown\n"
        "- {name: reverse_letters, colour: 1}\n",
        {
            **OLDER,
            "env": ["countdown", "reverse_letters"],
            "environments.countdown.weight": 2,
            "environments.countdown.kwargs.num_numbers": 4,
            "environments.countdown_2.name": "countdown",
        },
        ["- environments[2].colour: an entry has no such name", "1 of 1 settings are carried over"],
    ),
    "older: evals": (
        "environments: [{name: countdown}]\n"
        "evals:\n- {name: countdown, eval_every: 20, num_samples: 64, pass_k: {1: null, 4: null}}\n"
        "- {name: gsm8k, num_samples: -1, kwargs: {num_eval: 32}, separate_eval_samples: true}\n"
        "eval_before_training: false\n",
        {
            **OLDER,
            "env": ["countdown"],
            "eval.baseline": False,
            "evals.countdown.every": 20,
            "evals.countdown.num_prompts": 64,
            "evals.countdown.pass_at_k": [1, 4],
            "evals.countdown.num_samples": 4,
            "evals.gsm8k.every": 10,
            "evals.gsm8k.kwargs.num_eval": 32,
        },
        ["- evals[1].separate_eval_samples: Nothing is to be set: an eval plays its environment's eval split"],
    ),
    "older: corrections and filters": (
        "seq_is_masking: true\nseq_is_mask_low: 0.2\nseq_is_mask_high: 5.0\nfilter_overlong: true\nfilter_repetition: true\n"
        "repetition_compression_threshold: 0.3\nkl_penalty_tau: 0.01\ntis_floor: 0.5\n",
        {
            **OLDER,
            "algorithm.corrections": [{"name": "sequence_mask", "low": 0.2, "high": 5.0}],
            "algorithm.overlong_filter": True,
            "algorithm.repetition_filter_tokens": 3000,
            "algorithm.kl_rollout_coef": 0.01,
        },
        [
            "- repetition_compression_threshold: a ratio of compression is not a probability",
            "- tis_floor: a weight with two ends is the correction icepop",
            "- filter_repetition: algorithm.repetition_filter_tokens here; it counts near-certain tokens in a row",
        ],
    ),
    "older: what is refused in combination is left out": (
        "algorithm: gspo\nsapo_tau_pos: 1.0\nseq_len: 2048\nmax_model_len: 4096\nresume_from_checkpoint: true\n",
        {**OLDER, "algorithm": "gspo"},
        [
            "- seq_len: inference.max_model_len=4096 must not be above trainer.seq_len: a sequence has to fit",
            "- sapo_tau_pos: algorithm.sapo_tau_pos: there is no such setting",
            "- max_model_len: ",
            "- resume_from_checkpoint: a run of the older Telescope can't be resumed here",
        ],
    ),
    "older: no counterpart": (
        "debug: true\nray_address: auto\nwandb_upload_logs: true\nfilter_gibberish: false\nmegatron_tensor_parallel_size: 2\n"
        "train_backend: fsdp\ninterleaved_rollouts: false\nray_runtime_env: {env_vars: {MODE: fast}, pip: [numpy]}\n",
        {**OLDER, "debug": True, "backend": "fsdp", "cluster.env.MODE": "fast"},
        [
            "- ray_address: Nothing is to be set: the launcher starts, watches and ends the processes itself",
            "- wandb_upload_logs: Nothing is to be set: W&B gets numbers",
            "- filter_gibberish: There is no such filter here",
            "- megatron_tensor_parallel_size: it is for train_backend=megatron, which this file does not choose",
            "- interleaved_rollouts: Nothing is to be set: turns always go on from the exact tokens",
            "- ray_runtime_env: cluster.env.MODE here; its variables alone; packages are what is installed",
        ],
    ),
    "trl": (
        "model_name_or_path: Qwen/Qwen3-4B\nlearning_rate: 1e-6\nmax_steps: 100\ngeneration_batch_size: 128\n"
        "num_generations: 16\nmax_completion_length: 4000\nmax_prompt_length: 1000\nbeta: 0.04\nepsilon: 0.2\n"
        "num_iterations: 2\nloss_type: dr_grpo\nscale_rewards: false\nwarmup_ratio: 0.1\nlr_scheduler_type: cosine\n"
        "bf16: true\nfp16: false\nreport_to: [none]\nsave_steps: 50\nmask_truncated_completions: true\ntop_k: 0\n",
        {
            "model": "qwen3-4b",
            "algorithm": "dr_grpo",
            "number_of_steps": 100,
            "orchestrator.prompts_batch_size_for_trainer": 8,
            "rollout.group_size": 16,
            "rollout.max_tokens": 4000,
            "rollout.top_k": None,
            "trainer.learning_rate": 1e-6,
            "trainer.seq_len": 5056,
            "trainer.epochs_per_batch": 2,
            "trainer.warmup_steps": 10,
            "trainer.lr_scheduler": "cosine",
            "algorithm.kl_ref_coef": 0.04,
            "algorithm.use_ppo_clip": True,
            "algorithm.clip_low": 0.2,
            "algorithm.clip_high": 0.2,
            "algorithm.dr_grpo_loss_agg_mode": "token_sum_norm",
            "algorithm.advantage_norm": "none",
            "algorithm.overlong_filter": True,
            "backend.mixed_precision_dtype": "bfloat16",
            "inference.max_model_len": 5000,
            "checkpoint.every": 50,
            "logging.use_wandb": False,
        },
        [
            "a file of TRL's GRPOConfig: 19 of 20 settings are carried over",
            "- fp16: It has no effect there, as it is set",
            "What the file leaves out has the default here, not that of TRL's GRPOConfig.",
        ],
    ),
    "trl: sequences, adapters and what has no counterpart": (
        "model_name_or_path: Qwen/Qwen3-4B\nimportance_sampling_level: sequence\nepsilon: 3e-4\nepsilon_high: 4e-4\n"
        "use_peft: true\nlora_r: 8\nlora_alpha: 16\nper_device_train_batch_size: 8\nnum_train_epochs: 2\n"
        "reward_funcs: [accuracy]\nreport_to: [wandb, tensorboard]\nlearning_rat: 1e-6\nrepetition_penalty: 1.1\n",
        {
            "model": "qwen3-4b",
            "algorithm": "gspo",
            "algorithm.clip_low": 3e-4,
            "algorithm.clip_high": 4e-4,
            "model.lora.rank": 8,
            "model.lora.alpha": 16,
        },
        [
            "- per_device_train_batch_size: prompts are counted of all devices together here",
            "- num_train_epochs: Steps are counted here, not passes over the data",
            "- reward_funcs: A reward is an environment's code here",
            "- report_to: W&B is the only tracker here, and 1 of these are others",
            "- learning_rat: TRL's GRPOConfig has no such name in our table: did you mean learning_rate?",
            "- repetition_penalty: there is no such term here",
        ],
    ),
    "trl: a long answer has room for its prompt": (
        "model_name_or_path: Qwen/Qwen3-4B\nmax_completion_length: 8192\n",
        {"model": "qwen3-4b", "rollout.max_tokens": 8192, "inference.max_model_len": 8704, "trainer.seq_len": 8704},
        ["2 of 2 settings are carried over"],
    ),
    "trl: cispo": (
        "loss_type: cispo\nepsilon: 0.2\nepsilon_high: 5.0\nmodel_name_or_path: Qwen/Qwen3-4B\n",
        {
            "model": "qwen3-4b",
            "algorithm": "cispo",
            "algorithm.loss_aggregation": "token_mean",
            "algorithm.clip_high": 4.0,
        },
        ["- epsilon: algorithm=cispo has epsilon_high alone"],
    ),
    "verl": (
        """
data: {train_files: train.parquet, train_batch_size: 64, max_prompt_length: 512, max_response_length: 1024}
actor_rollout_ref:
  hybrid_engine: true
  model: {path: Qwen/Qwen3-4B, enable_gradient_checkpointing: true, lora_rank: 0}
  actor:
    _target_: some.Class
    strategy: fsdp2
    ppo_mini_batch_size: 16
    ppo_micro_batch_size_per_gpu: 4
    optim: {lr: 1e-6, lr_warmup_steps: -1, warmup_style: constant}
    clip_ratio: 0.2
    clip_ratio_low: 0.2
    clip_ratio_high: 0.28
    clip_ratio_c: 3.0
    loss_agg_mode: token-mean
    use_kl_loss: true
    kl_loss_coef: 0.001
    kl_loss_type: low_var_kl
    fsdp_config: {param_offload: false, optimizer_offload: true, fsdp_size: -1}
  rollout: {name: vllm, n: 8, tensor_model_parallel_size: 1, temperature: 0.9, top_k: -1, enforce_eager: false}
algorithm: {adv_estimator: grpo, norm_adv_by_std_in_grpo: false, gamma: 1.0}
critic: {optim: {lr: 1e-5}}
trainer:
  total_training_steps: 100
  project_name: mine
  experiment_name: first
  logger: [console, wandb]
  save_freq: 20
  test_freq: -1
  n_gpus_per_node: 8
  nnodes: ${trainer.n_gpus_per_node}
  made_up: 3
""",
        {
            "model": "qwen3-4b",
            "algorithm": "grpo",
            "backend": "fsdp",
            "name": "first",
            "number_of_steps": 100,
            "eval.every": None,
            "orchestrator.prompts_batch_size_for_trainer": 64,
            "rollout.group_size": 8,
            "rollout.max_tokens": 1024,
            "rollout.temperature": 0.9,
            "rollout.top_k": None,
            "trainer.number_of_minibatches": 4,
            "trainer.learning_rate": 1e-6,
            "trainer.lr_scheduler": "constant",
            "algorithm.use_ppo_clip": True,
            "algorithm.clip_low": 0.2,
            "algorithm.clip_high": 0.28,
            "algorithm.dual_clip_c": 3.0,
            "algorithm.loss_aggregation": "token_mean",
            "algorithm.kl_ref_coef": 0.001,
            "algorithm.kl_ref_estimator": "k3",
            "algorithm.advantage_norm": "none",
            "backend.gradient_checkpointing": True,
            "backend.offload": "optimizer",
            "inference.max_model_len": 1536,
            "inference.tensor_parallel_size": 1,
            "checkpoint.every": 20,
            "logging.wandb_project": "mine",
            "logging.use_wandb": True,
        },
        [
            "- data.train_files: An environment brings its data here",
            "- critic.optim.lr: There is no critic here",
            "- actor_rollout_ref.actor.clip_ratio: ",
            "- actor_rollout_ref.model.lora_rank: It has no effect there, as it is set",
            "- trainer.n_gpus_per_node: GPUs are shared out",
            "- trainer.made_up: verl has no such name in our table",
            "- _target_: Hydra's own",
        ],
    ),
    "verl: no counterpart for an algorithm": (
        "algorithm: {adv_estimator: gae}\nactor_rollout_ref: {model: {path: Qwen/Qwen3-4B}, rollout: {n: 4}}\n",
        {"model": "qwen3-4b", "rollout.group_size": 4},
        ["- algorithm.adv_estimator: of its values there is a counterpart for grpo, rloo, reinforce_plus_plus alone"],
    ),
    "verl: greedy evals": (
        "actor_rollout_ref:\n  model: {path: Qwen/Qwen3-4B}\n  rollout: {n: 4, val_kwargs: {do_sample: false, n: 1}}\n"
        "trainer: {test_freq: 10}\n",
        {"model": "qwen3-4b", "rollout.group_size": 4, "eval.every": 10, "eval.temperature": 0, "eval.num_samples": 1},
        [],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_file_becomes_an_experiment(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, expected, sentences = CASES[name]
    made = Migrated(tmp_path, text)
    said = capsys.readouterr()
    assert (made.code, said.err) == (0, "")
    assert made.settings() == expected
    assert [sentence for sentence in sentences if sentence not in unwrap(said.out)] == [], said.out
    assert max(map(len, said.out.splitlines()[1:-1])) <= 118  # the first and the last name files
    assert_each_is_carried_over_or_listed(said.out, made.to.read_text())
    made.config()
    env = " env=NAME" if "No env is carried over" in said.out else ""
    assert said.out.endswith(f"Next: telescope check --config-dir {tmp_path}/mine experiment=ours{env}\n")


def unwrap(said: str) -> str:
    """A line a setting, however long."""
    return said.replace("\n    ", " ")


def assert_each_is_carried_over_or_listed(said: str, made: str) -> None:
    carried, total = map(int, re.findall(r"(\d+) of (\d+) settings", said)[0])
    left = re.findall(r"^  - (\S+): ", said.partition("Not carried over:\n")[2], re.MULTILINE)
    assert carried + sum("[" not in label for label in left) == total
    listed = made.replace("\n# ", " ")
    assert [label for label in left if label not in listed] == []


ALIASES = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9)
)
"""Which stand for 43 million values."""


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "is empty: it holds no settings to carry over"),
        ("# nothing\n", "is empty"),
        ("- model: x\n", "holds a list: a file of settings has each as name: value"),
        ("just text\n", "holds a single value"),
        ("model: x\nmodel: y\n", "line 2: is not YAML: found duplicate key model"),
        ("model: [x\n", "is not YAML"),
        ("a: &a\n  b: *a\n", "more than 10,000 values"),
        pytest.param(f"a: {'[' * 5000}{']' * 5000}\n", "nested too deep", id="deep"),
        ("colour: red\n", "has no name that is known of the older, Ray-based Telescope, TRL's GRPOConfig, verl"),
        ("wandb_project: !!binary aGVsbG8=\n", "wandb_project: it is of the kind bytes"),
        ("group_size: !!set {a, b}\n", "group_size: it is of the kind set"),
        ("model: null\nnull: 4\n", "None is the name of a setting"),
        ('model: "\\ud800"\n', "characters that are not text"),
        pytest.param(f"group_size: {'9' * 5000}\n", "can't be read", id="digits"),
        (f"group_size: {'9' * 50}\n", "too large a number"),
        pytest.param(f"wandb_project: {'x' * 30_000}\n", "longer than 20,000 letters", id="long"),
        pytest.param(f"wandb_project: {'x' * 2_000_000}\n", "more than 1,000,000 bytes", id="large"),
        pytest.param(ALIASES, "more than 10,000 values", id="aliases"),
        ("model: ${oc.env\n", "model can't be read"),
    ],
)
def test_a_file_without_settings_is_refused_in_a_sentence(
    text: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = Migrated(tmp_path, text)
    assert made.code == 1
    assert sentence in capsys.readouterr().err
    assert not made.to.exists()


WRONG: dict[str, tuple[str, dict[str, str]]] = {
    "older": (
        """
learning_rate: fast
weight_decay: -1.0
group_size: [8]
lr_scheduler: cosign
algorithm: ppo
model: 7
debug: true
filter_repetition: often
chat_template: ${wherever}{{x}}
evals: math500
environments:
- {weight: 1}
- {name: countdown, weight: heavy, kwargs: {colour: 1}}
- {name: reverse_letters, kwargs: 3}
- {name: of_mine}
""",
        {
            "learning_rate": "trainer.learning_rate must be a number",
            "weight_decay": "trainer.weight_decay must be at least 0",
            "group_size": "rollout.group_size must be a whole number",
            "lr_scheduler": "trainer.lr_scheduler must be none | constant | linear | cosine",
            "algorithm": "there is no such algorithm here: choose cispo, dr_grpo",
            "model": "model.name must be text",
            "filter_repetition": "it must be true or false",
            "chat_template": "write the value out",
            "evals": "it must be a list, each entry with a name",
            "environments[0]": "an entry must have a name",
            "environments[1].weight": "must be a number",
            "environments[1].kwargs.colour": "no such setting",
            "environments[2].kwargs": "it must be a mapping of settings",
            "environments[3]": "there is no environment of_mine here",
        },
    ),
    "trl": (
        "max_steps: many\ngeneration_batch_size: 9\nnum_generations: 4\nbf16: maybe\nloss_type: luspo\nsave_steps: 0.1\n",
        {
            "max_steps": "max_steps must be a number",
            "generation_batch_size": "not a multiple of num_generations",
            "bf16": "it must be true or false",
            "loss_type": "of its values there is a counterpart for grpo, bnpo, dapo, dr_grpo, cispo, sapo alone",
            "save_steps": "a share of the steps is not known here",
        },
    ),
    "trl, others beside it that are not numbers": (
        "max_steps: .inf\ngeneration_batch_size: 8\nnum_generations: 0\nsteps_per_generation: 4\n"
        "gradient_accumulation_steps: auto\nwarmup_ratio: 0.1\nwarmup_steps: few\n",
        {
            "max_steps": "max_steps must be a number",
            "generation_batch_size": "num_generations must be a whole number from 1 on",
            "num_generations": "must be at least 1",
            "steps_per_generation": "gradient_accumulation_steps must be a number",
            "gradient_accumulation_steps": "Nothing is to be set",
            "warmup_ratio": "warmup_steps must be a number",
            "warmup_steps": "must be",
        },
    ),
    "verl": (
        "actor_rollout_ref:\n  rollout:\n    n: ???\n    top_k: few\n  actor: {loss_agg_mode: [token-mean], use_kl_loss: 1}\n",
        {
            "actor_rollout_ref.rollout.n": "??? must be given",
            "actor_rollout_ref.rollout.top_k": "must be a number",
            "actor_rollout_ref.actor.loss_agg_mode": "of its values there is a counterpart for token-mean",
            "actor_rollout_ref.actor.use_kl_loss": "It has no effect there",
        },
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_value_is_left_out_with_the_reason(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, reasons = WRONG[name]
    made = Migrated(tmp_path, text)
    said = unwrap(capsys.readouterr().out)
    assert made.code == 0
    told = dict(re.findall(r"^  - (\S+): (.*)$", said.partition("Not carried over:\n")[2], re.MULTILINE))
    assert {label: reason for label, reason in reasons.items() if reason not in told.get(label, "")} == {}, said
    assert told.keys() == reasons.keys()
    made.config()


KEY = "hunter2-hunter2-hunter2"
TOKEN = "hf_abcdefghijklmnopqrstuvwxyz"
SECRETS = f"""
model: Qwen/Qwen2.5-3B
learning_rate: {KEY}
checkpoint_dir: {KEY}
wandb_project: {TOKEN}
judge_token: {KEY}
ray_runtime_env: {{env_vars: {{HF_TOKEN: {KEY}}}}}
environments:
- name: echo
  kwargs: {{judge_api_key: {KEY}}}
- {KEY}: {KEY}
"""


def test_no_secret_is_copied_or_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = tmp_path / "mine" / "plugins" / "environments" / "echo.py"
    task.parent.mkdir(parents=True)
    task.write_text(ECHO)
    made = Migrated(tmp_path, SECRETS, "--config-dir", str(tmp_path / "mine"))
    said = capsys.readouterr()
    assert made.code == 0
    for text in (said.out, said.err, made.to.read_text()):
        assert KEY not in text
        assert TOKEN not in text
    for name in ("wandb_project", "ray_runtime_env", "environments[0].kwargs.judge_api_key"):
        assert f"- {name}: a secret is never copied: set it by hand as a reference" in unwrap(said.out)
    assert made.config().environments["echo"].name == "echo"
    assert main(["migrate", str(made.source)]) == 0
    said = capsys.readouterr()
    assert KEY not in said.out + said.err


def test_a_reference_to_a_variable_stays_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = Migrated(tmp_path, "ray_runtime_env: {env_vars: {HF_TOKEN: '${oc.env:NOT_SET_HERE}'}}\n")
    assert made.code == 0
    assert made.experiment["cluster"]["env"] == {"HF_TOKEN": "${oc.env:NOT_SET_HERE}"}
    assert made.config(NOT_SET_HERE="x").cluster.env == {"HF_TOKEN": "${oc.env:NOT_SET_HERE}"}


def test_an_environment_of_ones_own_is_carried_over_where_its_folder_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = tmp_path / "mine" / "plugins" / "environments" / "echo.py"
    task.parent.mkdir(parents=True)
    task.write_text(ECHO)
    made = Migrated(tmp_path, "environments: [{name: echo, kwargs: {word: hi}}]\n", "--config-dir", str(tmp_path / "mine"))
    assert made.settings() == {**OLDER, "env": ["echo"], "environments.echo.kwargs.word": "hi"}
    assert made.config().environments["echo"].kwargs["word"] == "hi"


def test_without_to_the_experiment_is_printed_and_the_list_goes_to_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "old.yaml"
    file.write_text("group_size: 4\nray_address: auto\n")
    assert main(["migrate", str(file)]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("# @package _global_\n# From old.yaml, a file of the older, Ray-based Telescope")
    assert yaml.safe_load(said.out)["rollout"] == {"group_size": 4}
    assert "1 of 2 settings are carried over" in said.err
    assert "Next:" not in said.err


def test_from_says_whose_file_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The names are TRL's and the older Telescope's."""
    assert Migrated(tmp_path, "learning_rate: 1e-6\ntemperature: 0.8\n", "--from", "trl").settings() == {
        "trainer.learning_rate": 1e-6,
        "rollout.temperature": 0.8,
    }
    assert "a file of TRL's GRPOConfig" in capsys.readouterr().out


def test_a_file_that_is_there_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = Migrated(tmp_path, "group_size: 4\n")
    before = made.to.read_text()
    assert main(["migrate", str(made.source), "--to", str(made.to)]) == 1
    assert "is there already: name another file, or delete it" in capsys.readouterr().err
    assert made.to.read_text() == before


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nowhere.yaml"], "nowhere.yaml can't be read: No such file or directory"),
        (["{file}", "--config-dir", "nowhere"], "--config-dir=nowhere: there is no such folder"),
    ],
)
def test_wrong_places_are_told(arguments: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "old.yaml"
    file.write_text("group_size: 4\n")
    assert main(["migrate", *(argument.format(file=file) for argument in arguments)]) in (1, 2)
    assert sentence in capsys.readouterr().err


def test_a_preset_must_end_in_yaml(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["migrate", "old.yaml", "--to", "new.yml"])
    assert ended.value.code == 2
    assert "does not end in .yaml, as presets do" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("page", "source"), [("migration", "old.yaml"), ("migration_trl", "grpo.yaml"), ("migration_verl", "grpo.yaml")]
)
def test_the_page_shows_what_the_command_makes(
    page: str, source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    theirs, ours = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)[:2]
    file = tmp_path / source
    file.write_text(theirs)
    assert main(["migrate", str(file)]) == 0
    assert capsys.readouterr().out == ours


def test_a_pipe_is_not_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "settings.yaml")
    assert main(["migrate", str(tmp_path / "settings.yaml")]) == 1
    assert "is not a file" in capsys.readouterr().err
