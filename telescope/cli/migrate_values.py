"""Values of another system's settings as values of ours: what a name's entry in the table can't say by itself.

Owns the few names whose value changes, or depends on another's. All others keep their value. Refuses to know files and reports.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from telescope.config.foreign_names import System

Place = tuple[str, ...]
CLIPS = ("grpo", "rloo", "reinforce_pp", "dr_grpo")
"""The algorithms with algorithm.use_ppo_clip; the others bring a ratio of their own."""
MODEL_LEN = 4096
"""The default of inference.max_model_len and of trainer.seq_len."""
PROMPT_TOKENS = 512
"""What a prompt may have in TRL and verl where nobody says it."""
NOT_USED = "It has no effect there, as it is set, so nothing is to be set here"


class NotCarried(ValueError):
    """A value has no counterpart here; the text says why, without the value."""


@dataclass(frozen=True)
class Given:
    """One value of a file, with the others beside it by their full names. `None`: not given."""

    name: str
    value: Any
    others: Mapping[str, Any]

    def other(self, name: str, default: Any = None) -> Any:
        found = self.others.get(name)
        return default if found is None else found

    def number(self, name: str | None = None) -> float:
        """This value, or another's, where it is a number. Raises `NotCarried`."""
        name = name or self.name
        found = self.others.get(name)
        if isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found):
            raise NotCarried(f"{name} must be a number")
        return found

    def whole(self, name: str | None = None) -> int:
        """The same where it is a whole number above 0. Raises `NotCarried`."""
        found = self.number(name)
        if found != int(found) or found < 1:
            raise NotCarried(f"{name or self.name} must be a whole number from 1 on")
        return int(found)

    def whole_or(self, name: str, default: int) -> int:
        """Another value likewise, where it is given."""
        return default if self.others.get(name) is None else self.whole(name)

    def switch(self) -> bool:
        """This value where it is true or false. Raises `NotCarried`."""
        if not isinstance(self.value, bool):
            raise NotCarried("it must be true or false")
        return self.value

    def choice(self, choices: Mapping[str, str]) -> str:
        """What stands here for this value. Raises `NotCarried`."""
        if not isinstance(self.value, str) or self.value not in choices:
            raise NotCarried(f"of its values there is a counterpart for {', '.join(choices)} alone")
        return choices[self.value]


Convert = Callable[[Given], Mapping[str, Any]]
"""A value as settings here by their paths; raises `NotCarried`."""


def choose_algorithm(system: System, given: Mapping[str, Any]) -> str:
    """The algorithm that a file means, grpo where it does not say."""
    if system == "older":
        found = given.get("algorithm")
        return found if isinstance(found, str) else "grpo"
    if system == "trl":
        if given.get("importance_sampling_level") == "sequence":
            return "gspo"
        loss = given.get("loss_type")
        return loss if loss in ("dr_grpo", "cispo", "sapo") else "grpo"
    if given.get("actor_rollout_ref.actor.policy_loss.loss_mode") == "gspo":
        return "gspo"
    estimator = given.get("algorithm.adv_estimator")
    return _ESTIMATORS.get(estimator, "grpo") if isinstance(estimator, str) else "grpo"


# older


def _sequence_mask(given: Given) -> Mapping[str, Any]:
    if given.other("seq_is_masking") is not True:
        raise NotCarried(NOT_USED)
    ends = {end: given.other(f"seq_is_mask_{end}") for end in ("low", "high")}
    mask = {"name": "sequence_mask", **{end: value for end, value in ends.items() if value is not None}}
    return {"algorithm.corrections": [mask]}


def _icepop(given: Given) -> Mapping[str, Any]:
    raise NotCarried("a weight with two ends is the correction icepop: choose its low and high in algorithm.corrections")


def _filter_repetition(given: Given) -> Mapping[str, Any]:
    return {"algorithm.repetition_filter_tokens": 3000 if given.switch() else None}


def _repetition_threshold(given: Given) -> Mapping[str, Any]:
    raise NotCarried("a ratio of compression is not a probability: choose algorithm.repetition_filter_probability")


def _resume(given: Given) -> Mapping[str, Any]:
    if given.value is False:
        raise NotCarried(NOT_USED)
    raise NotCarried("a run of the older Telescope can't be resumed here: start from its exported model, model.name")


def _pass_at(given: Given) -> Mapping[str, Any]:
    return {f"eval.{name}": value for name, value in pass_at(given.value).items()}


def pass_at(value: Any) -> Mapping[str, Any]:
    """`{1: …, 8: …}` of the older Telescope as `{"pass_at_k": [1, 8], "num_samples": 8}`. Raises `NotCarried`."""
    asked = value if isinstance(value, Mapping) else {}
    names = [str(key) for key in asked]
    if not names or not all(name.isdigit() and int(name) > 0 for name in names):
        raise NotCarried("only the numbers k of pass@k are known here: set pass_at_k and num_samples")
    found = sorted(map(int, names))
    return {"pass_at_k": found, "num_samples": found[-1]}


def _runtime_env(given: Given) -> Mapping[str, Any]:
    value = given.value if isinstance(given.value, Mapping) else {}
    variables = value.get("env_vars")
    if not isinstance(variables, Mapping) or not variables:
        raise NotCarried("of it only env_vars has a counterpart, cluster.env; packages are what is installed")
    return {f"cluster.env.{name}": str(text) for name, text in variables.items()}


def _context_parallel(other: str) -> Convert:
    def convert(given: Given) -> Mapping[str, Any]:
        if given.other("train_backend", "fsdp") != other:
            raise NotCarried(f"it is for train_backend={other}, which this file does not choose")
        return {"backend.context_parallel_size": given.value}

    return convert


def _megatron_only(setting: str) -> Convert:
    def convert(given: Given) -> Mapping[str, Any]:
        if given.other("train_backend", "fsdp") != "megatron":
            raise NotCarried("it is for train_backend=megatron, which this file does not choose")
        return {setting: given.value}

    return convert


# TRL

_PER_DEVICE = (
    "prompts are counted of all devices together here: orchestrator.prompts_batch_size_for_trainer is this times the devices "
    "and steps_per_generation (gradient_accumulation_steps without it), over num_generations"
)


def _per_device(given: Given) -> Mapping[str, Any]:
    if given.other("generation_batch_size") is not None:
        raise NotCarried("generation_batch_size says how many answers a step has")
    raise NotCarried(_PER_DEVICE)


def _generation_batch(given: Given) -> Mapping[str, Any]:
    answers, group = given.whole(), given.whole_or("num_generations", 8)
    if answers % group:
        raise NotCarried("it is not a multiple of num_generations, the answers of a prompt")
    return {"orchestrator.prompts_batch_size_for_trainer": answers // group}


def _minibatches_of_steps(given: Given) -> Mapping[str, Any]:
    steps, accumulated = given.whole(), given.whole_or("gradient_accumulation_steps", 1)
    if steps % accumulated:
        raise NotCarried("it is not a multiple of gradient_accumulation_steps")
    return {"trainer.number_of_minibatches": steps // accumulated}


def _steps_of_trl(given: Given) -> Mapping[str, Any]:
    if given.number() <= 0:
        raise NotCarried("num_train_epochs says how long it trains there: set number_of_steps")
    return {"number_of_steps": given.value}


def _length_of_prompt(answer: str, at_most: str) -> Convert:
    """A prompt's tokens and an answer's, which share inference.max_model_len."""

    def convert(given: Given) -> Mapping[str, Any]:
        if given.other(at_most) is not None:
            raise NotCarried(f"{at_most} says how long prompt and answer are together")
        return _lengths(given.whole() + given.whole(answer))

    return convert


def _length_of_answer(prompt: str, at_most: str) -> Convert:
    """An answer's tokens; where no name says how long a prompt is, with room for one."""

    def convert(given: Given) -> Mapping[str, Any]:
        alone = given.other(prompt) is None and given.other(at_most) is None
        longer = _lengths(given.whole() + PROMPT_TOKENS) if alone and given.whole() >= MODEL_LEN else {}
        return {"rollout.max_tokens": given.value, **longer}

    return convert


def _model_len(given: Given) -> Mapping[str, Any]:
    return _lengths(given.whole())


def _lengths(tokens: int) -> Mapping[str, Any]:
    longer_row = {} if tokens <= MODEL_LEN else {"trainer.seq_len": -(-tokens // 64) * 64}
    return {"inference.max_model_len": tokens, **longer_row}


def _tensor_parallel(given: Given) -> Mapping[str, Any]:
    size = given.whole()
    return {"inference.tensor_parallel_size": size, **({"cluster.inference_num_workers": size} if size > 1 else {})}


def _top_k(given: Given) -> Mapping[str, Any]:
    return {"rollout.top_k": given.value if given.number() > 0 else None}


def _no_penalty(given: Given) -> Mapping[str, Any]:
    if given.number() == 1:
        raise NotCarried(NOT_USED)
    raise NotCarried("there is no such term here: the trainer could not repeat it")


def _schedule(given: Given) -> Mapping[str, Any]:
    known = {"constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine"}
    return {"trainer.lr_scheduler": given.choice(known)}


def _warmup_share(steps: str, share_of: str) -> Convert:
    def convert(given: Given) -> Mapping[str, Any]:
        share = given.number()
        if share <= 0:
            raise NotCarried(NOT_USED)
        if given.other(steps) is not None and given.number(steps) > 0:
            raise NotCarried(f"{steps} says it in steps")
        return {"trainer.warmup_steps": round(share * given.whole(share_of))}

    return convert


def _betas(given: Given) -> Mapping[str, Any]:
    return {"trainer.betas": [given.other("adam_beta1", 0.9), given.other("adam_beta2", 0.999)]}


def _optimizer(given: Given) -> Mapping[str, Any]:
    known = dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf"), "adamw")
    return {
        "backend.optimizer": given.choice({**known, "adamw_8bit": "adamw_8bit", "adamw_bnb_8bit": "adamw_8bit", "sgd": "sgd"})
    }


def _thinking(given: Given) -> Mapping[str, Any]:
    value = given.value if isinstance(given.value, Mapping) else {}
    if set(value) != {"enable_thinking"}:
        raise NotCarried("of a chat template's arguments there is enable_thinking alone")
    return {"model.enable_thinking": value["enable_thinking"]}


def _loss_type(given: Given) -> Mapping[str, Any]:
    known = {"grpo": "grpo", "bnpo": "grpo", "dapo": "grpo", "dr_grpo": "dr_grpo", "cispo": "cispo", "sapo": "sapo"}
    chosen = given.choice(known)
    if given.other("importance_sampling_level") == "sequence":
        raise NotCarried("importance_sampling_level chooses algorithm=gspo, which has one loss a rollout")
    means = {"grpo": "seq_mean_token_mean", "bnpo": "token_mean", "dapo": "token_mean", "cispo": "token_mean"}
    if chosen == "dr_grpo":
        return {"algorithm": chosen, "algorithm.dr_grpo_loss_agg_mode": "token_sum_norm"}
    mean = means.get(given.value)
    return {"algorithm": chosen, **({} if mean is None else {"algorithm.loss_aggregation": mean})}


def _sampling_level(given: Given) -> Mapping[str, Any]:
    if given.choice({"token": "token", "sequence": "sequence"}) == "token":
        raise NotCarried("loss_type chooses the algorithm; ratios of tokens are what it has anyway")
    return {"algorithm": "gspo"}


def _scale(given: Given) -> Mapping[str, Any]:
    if isinstance(given.value, bool):
        return {"algorithm.advantage_norm": "group" if given.value else "none"}
    return {"algorithm.advantage_norm": given.choice({"group": "group", "batch": "batch", "none": "none"})}


def _clip(system: System, ends: Mapping[str, str]) -> Convert:
    """`ends`: which of clip_low and clip_high it sets, each with the name that sets it instead where that is given."""

    def convert(given: Given) -> Mapping[str, Any]:
        algorithm = choose_algorithm(system, given.others)
        asked = [end for end, instead in ends.items() if given.other(instead) is None]
        if algorithm == "sapo":
            raise NotCarried("algorithm=sapo does not clip")
        if not asked:
            raise NotCarried(f"{' and '.join(ends.values())} say it")
        if algorithm == "cispo":
            if asked != ["clip_high"]:
                raise NotCarried("algorithm=cispo has epsilon_high alone")
            return {"algorithm.clip_high": given.number() - 1}
        switched = {"algorithm.use_ppo_clip": True} if algorithm in CLIPS else {}
        return {**switched, **{f"algorithm.{end}": given.value for end in asked}}

    return convert


def _dual_clip(system: System) -> Convert:
    def convert(given: Given) -> Mapping[str, Any]:
        if choose_algorithm(system, given.others) not in CLIPS:
            raise NotCarried("the algorithm that is chosen has no such bound")
        return {"algorithm.use_ppo_clip": True, "algorithm.dual_clip_c": given.value}

    return convert


def _is_mode(given: Given) -> Mapping[str, Any]:
    if given.value != "token_truncate":
        raise NotCarried("of its values token_truncate has a counterpart: the others are corrections, algorithm.corrections")
    return {"algorithm.use_tis": given.other("vllm_importance_sampling_correction", True)}


def _corrects(given: Given) -> Mapping[str, Any]:
    if given.other("vllm_importance_sampling_mode", "token_truncate") != "token_truncate":
        raise NotCarried("vllm_importance_sampling_mode says how, and of its values token_truncate alone has a counterpart")
    return {"algorithm.use_tis": given.value}


def _precision(dtype: str) -> Convert:
    def convert(given: Given) -> Mapping[str, Any]:
        if not given.switch():
            raise NotCarried(f"{NOT_USED}; float32 throughout is backend.mixed_precision_dtype=float32")
        return {"backend.mixed_precision_dtype": dtype}

    return convert


def _lora(rank: str, alpha: str, modules: str, uses: str = "") -> Convert:
    """`uses`: the name that turns it on, where not the rank does."""

    def convert(given: Given) -> Mapping[str, Any]:
        on = given.other(uses) is True if uses else bool(given.other(rank, 0))
        if not on:
            raise NotCarried(NOT_USED)
        asked = {"rank": given.other(rank), "alpha": given.other(alpha), "target_modules": given.other(modules)}
        if isinstance(asked["target_modules"], str):
            asked["target_modules"] = None  # a pattern, or all matrices, which the default are
        return {"model.lora": {name: value for name, value in asked.items() if value is not None} or {"rank": 16}}

    return convert


def _sleeps(given: Given) -> Mapping[str, Any]:
    if not given.switch():
        raise NotCarried(NOT_USED)
    raise NotCarried(
        "choose it with the GPU that server and trainer share: cluster=one_gpu_in_turns sets inference.sleep_while_training"
    )


def _saves(given: Given) -> Mapping[str, Any]:
    if given.other("save_strategy") == "no":
        raise NotCarried("save_strategy says that nothing is saved")
    if given.number() < 1:
        raise NotCarried("a share of the steps is not known here: set checkpoint.every")
    return {"checkpoint.every": given.value}


def _when(setting: str, never: Any, steps: str) -> Convert:
    def convert(given: Given) -> Mapping[str, Any]:
        if given.value is False or given.value == "no":
            return {setting: never}
        if given.value == "steps":
            raise NotCarried(f"{steps} says how often")
        raise NotCarried(f"steps are counted here, not passes over the data: set {setting}")

    return convert


def _whole_state(given: Given) -> Mapping[str, Any]:
    return {"checkpoint.save_training_state": not given.switch()}


def _eval_steps(given: Given) -> Mapping[str, Any]:
    if given.other("eval_strategy", "steps") != "steps":
        raise NotCarried("eval_strategy says otherwise")
    if given.number() < 1:
        raise NotCarried("a share of the steps is not known here: set eval.every")
    return {"eval.every": given.value}


def _tracker(given: Given) -> Mapping[str, Any]:
    asked = given.value if isinstance(given.value, list) else [given.value]
    if others := [name for name in asked if name not in ("wandb", "none", "console", "all")]:
        raise NotCarried(f"W&B is the only tracker here, and {len(others)} of these are others")
    return {"logging.use_wandb": "wandb" in asked or "all" in asked}


# verl

_ESTIMATORS = {"grpo": "grpo", "rloo": "rloo", "reinforce_plus_plus": "reinforce_pp"}
_ACTOR = "actor_rollout_ref.actor."
_MODEL = "actor_rollout_ref.model."
_ROLLOUT = "actor_rollout_ref.rollout."


def _estimator(given: Given) -> Mapping[str, Any]:
    if given.other(f"{_ACTOR}policy_loss.loss_mode") == "gspo":
        raise NotCarried("policy_loss.loss_mode chooses algorithm=gspo, whose advantages are those of a group")
    return {"algorithm": given.choice(_ESTIMATORS)}


def _loss_mode(given: Given) -> Mapping[str, Any]:
    if given.choice({"vanilla": "", "gspo": "gspo"}) == "gspo":
        return {"algorithm": "gspo"}
    raise NotCarried("algorithm.adv_estimator chooses the algorithm")


def _strategy(given: Given) -> Mapping[str, Any]:
    return {"backend": given.choice({"fsdp": "fsdp", "fsdp2": "fsdp", "megatron": "megatron"})}


def _norm_by_std(given: Given) -> Mapping[str, Any]:
    return {"algorithm.advantage_norm": "group" if given.switch() else "none"}


def _aggregation(given: Given) -> Mapping[str, Any]:
    known = {"token-mean": "token_mean", "seq-mean-token-mean": "seq_mean_token_mean"}
    return {"algorithm.loss_aggregation": given.choice(known)}


def _minibatches_of_prompts(given: Given) -> Mapping[str, Any]:
    prompts, part = given.whole("data.train_batch_size"), given.whole()
    if prompts % part:
        raise NotCarried("data.train_batch_size is not a multiple of it")
    return {"trainer.number_of_minibatches": prompts // part}


def _kl(given: Given) -> Mapping[str, Any]:
    if given.other(f"{_ACTOR}use_kl_loss") is not True:
        raise NotCarried(NOT_USED)
    return {"algorithm.kl_ref_coef": given.other(f"{_ACTOR}kl_loss_coef", 0.001)}


def _kl_kind(given: Given) -> Mapping[str, Any]:
    if given.other(f"{_ACTOR}use_kl_loss") is not True:
        raise NotCarried(NOT_USED)
    known = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
    return {"algorithm.kl_ref_estimator": given.choice(known)}


def _row(given: Given) -> Mapping[str, Any]:
    if given.other(f"{_ACTOR}use_dynamic_bsz") is not True:
        raise NotCarried(NOT_USED)
    return {"trainer.seq_len": given.value}


def _offload(given: Given) -> Mapping[str, Any]:
    if not given.switch():
        raise NotCarried(NOT_USED)
    both = given.other(f"{_ACTOR}fsdp_config.param_offload") is True
    return {"backend.offload": "parameters" if both else "optimizer"}


def _eager(given: Given) -> Mapping[str, Any]:
    if not given.switch():
        raise NotCarried(NOT_USED)
    return {"inference.cuda_graphs": "off"}


def _greedy(given: Given) -> Mapping[str, Any]:
    if given.switch():
        raise NotCarried("an eval samples here, always")
    return {"eval.temperature": 0}


def _val_temperature(given: Given) -> Mapping[str, Any]:
    if given.other(f"{_ROLLOUT}val_kwargs.do_sample") is False:
        raise NotCarried("do_sample=false says that answers are not sampled")
    return {"eval.temperature": given.number()}


def _when_positive(setting: str, never: Any) -> Convert:
    """-1 and 0 say never, or not given."""

    def convert(given: Given) -> Mapping[str, Any]:
        return {setting: given.value if given.number() > 0 else never}

    return convert


def _warmup_steps(given: Given) -> Mapping[str, Any]:
    if given.number() < 0:
        raise NotCarried(NOT_USED)
    return {"trainer.warmup_steps": given.value}


def _sequence_weights(given: Given) -> Mapping[str, Any]:
    if given.value != "token":
        raise NotCarried("of its values token has a counterpart; weights of sequences are corrections, algorithm.corrections")
    return {"algorithm.use_tis": True}


_PEFT = ("use_peft", "lora_r", "lora_alpha", "lora_target_modules")
CONVERSIONS: Mapping[System, Mapping[str, Convert]] = {
    "older": {
        **dict.fromkeys(("seq_is_masking", "seq_is_mask_low", "seq_is_mask_high"), _sequence_mask),
        **dict.fromkeys(("tis_mode", "tis_floor"), _icepop),
        "filter_repetition": _filter_repetition,
        "repetition_compression_threshold": _repetition_threshold,
        "resume_from_checkpoint": _resume,
        "pass_k": _pass_at,
        "ray_runtime_env": _runtime_env,
        "fsdp_context_parallel_size": _context_parallel("fsdp"),
        "megatron_context_parallel_size": _context_parallel("megatron"),
        **{
            f"megatron_{name}": _megatron_only(f"backend.{name}")
            for name in (
                *("tensor_parallel_size", "pipeline_parallel_size", "expert_parallel_size", "grad_reduce_in_fp32"),
                *("gradient_checkpointing", "sequence_parallel", "use_distributed_optimizer", "overlap_grad_reduce"),
                *("use_transformer_engine", "fp8"),
            )
        },
    },
    "trl": {
        "max_steps": _steps_of_trl,
        "chat_template_kwargs": _thinking,
        "per_device_train_batch_size": _per_device,
        "generation_batch_size": _generation_batch,
        "steps_per_generation": _minibatches_of_steps,
        "max_completion_length": _length_of_answer("max_prompt_length", "vllm_max_model_length"),
        "max_prompt_length": _length_of_prompt("max_completion_length", "vllm_max_model_length"),
        "vllm_max_model_length": _model_len,
        "top_k": _top_k,
        "repetition_penalty": _no_penalty,
        "lr_scheduler_type": _schedule,
        "warmup_ratio": _warmup_share("warmup_steps", "max_steps"),
        "adam_beta1": _betas,
        "adam_beta2": _betas,
        "optim": _optimizer,
        "loss_type": _loss_type,
        "importance_sampling_level": _sampling_level,
        "scale_rewards": _scale,
        "epsilon": _clip("trl", {"clip_low": "", "clip_high": "epsilon_high"}),
        "epsilon_high": _clip("trl", {"clip_high": ""}),
        "delta": _dual_clip("trl"),
        "vllm_importance_sampling_correction": _corrects,
        "vllm_importance_sampling_mode": _is_mode,
        "bf16": _precision("bfloat16"),
        "fp16": _precision("float16"),
        **dict.fromkeys(_PEFT, _lora("lora_r", "lora_alpha", "lora_target_modules", uses="use_peft")),
        "vllm_tensor_parallel_size": _tensor_parallel,
        "vllm_enable_sleep_mode": _sleeps,
        "save_steps": _saves,
        "save_strategy": _when("checkpoint.every", 0, "save_steps"),
        "save_only_model": _whole_state,
        "eval_steps": _eval_steps,
        "eval_strategy": _when("eval.every", None, "eval_steps"),
        "report_to": _tracker,
    },
    "verl": {
        "data.max_response_length": _length_of_answer("data.max_prompt_length", f"{_ROLLOUT}max_model_len"),
        "data.max_prompt_length": _length_of_prompt("data.max_response_length", f"{_ROLLOUT}max_model_len"),
        **dict.fromkeys(
            (f"{_MODEL}lora_rank", f"{_MODEL}lora_alpha", f"{_MODEL}target_modules"),
            _lora(f"{_MODEL}lora_rank", f"{_MODEL}lora_alpha", f"{_MODEL}target_modules"),
        ),
        f"{_ACTOR}strategy": _strategy,
        f"{_ACTOR}ppo_mini_batch_size": _minibatches_of_prompts,
        f"{_ACTOR}ppo_max_token_len_per_gpu": _row,
        f"{_ACTOR}clip_ratio": _clip("verl", {"clip_low": f"{_ACTOR}clip_ratio_low", "clip_high": f"{_ACTOR}clip_ratio_high"}),
        f"{_ACTOR}clip_ratio_low": _clip("verl", {"clip_low": ""}),
        f"{_ACTOR}clip_ratio_high": _clip("verl", {"clip_high": ""}),
        f"{_ACTOR}clip_ratio_c": _dual_clip("verl"),
        f"{_ACTOR}loss_agg_mode": _aggregation,
        f"{_ACTOR}policy_loss.loss_mode": _loss_mode,
        f"{_ACTOR}use_kl_loss": _kl,
        f"{_ACTOR}kl_loss_coef": _kl,
        f"{_ACTOR}kl_loss_type": _kl_kind,
        f"{_ACTOR}fsdp_config.param_offload": _offload,
        f"{_ACTOR}fsdp_config.optimizer_offload": _offload,
        f"{_ACTOR}optim.lr_warmup_steps": _warmup_steps,
        f"{_ACTOR}optim.lr_warmup_steps_ratio": _warmup_share(f"{_ACTOR}optim.lr_warmup_steps", "trainer.total_training_steps"),
        f"{_ACTOR}optim.warmup_style": _schedule,
        f"{_ACTOR}optim.lr_scheduler_type": _schedule,
        f"{_ROLLOUT}top_k": _top_k,
        f"{_ROLLOUT}max_model_len": _model_len,
        f"{_ROLLOUT}tensor_model_parallel_size": _tensor_parallel,
        f"{_ROLLOUT}enforce_eager": _eager,
        f"{_ROLLOUT}free_cache_engine": _sleeps,
        f"{_ROLLOUT}val_kwargs.temperature": _val_temperature,
        f"{_ROLLOUT}val_kwargs.do_sample": _greedy,
        "algorithm.adv_estimator": _estimator,
        "algorithm.norm_adv_by_std_in_grpo": _norm_by_std,
        "algorithm.rollout_correction.rollout_is": _sequence_weights,
        "trainer.logger": _tracker,
        "trainer.save_freq": _when_positive("checkpoint.every", 0),
        "trainer.test_freq": _when_positive("eval.every", None),
    },
}
"""By the name in the file; a name without one keeps its value at the setting that its entry in the table names."""
