"""What settings of the older Telescope and of other trainers are called here: the hint for whoever types one of their names.

A name that says something else there than its neighbour here must not be taken for it, so it stands in this table: either with
the setting that does the same, or with a sentence where there is none.
"""

from __future__ import annotations

_LATER = "The Megatron backend does not have it yet"
_GONE = "Nothing is to be set"
NAMES: dict[str, str] = {
    # the older, Ray-based Telescope
    "model_dtype": "model.dtype",
    "mixed_precision_dtype": "backend.mixed_precision_dtype",
    "inference_num_workers": "cluster.inference_num_workers",
    "inference_tensor_parallel_size": "inference.tensor_parallel_size",
    "trainer_num_workers": "cluster.trainer_num_workers",
    "train_backend": "backend",
    "inference_host": "inference.host",
    "inference_base_port": "inference.base_port",
    "vllm_scheduling_policy": "inference.scheduling_policy",
    "checkpoint_every": "checkpoint.every",
    "checkpoint_save_training_state": "checkpoint.save_training_state",
    "resume_from_checkpoint": "checkpoint.resume",
    "checkpoint_dir": "checkpoint.dir",
    "checkpoint_keep_last": "checkpoint.keep_last",
    "checkpoint_keep_every": "checkpoint.keep_every",
    "weight_broadcast_mode": "weight_sync.mode",
    "weight_broadcast_bucket_mb": "weight_sync.bucket_mb",
    "weight_broadcast_cpu_staging": "weight_sync.cpu_staging",
    "weight_broadcast_pin_memory": "weight_sync.pin_memory",
    "weight_broadcast_free_grad_buffers": f"{_GONE}: gradients are released after each update",
    "ray_broadcast_init_timeout_s": "weight_sync.init_timeout_s",
    "ray_inference_cpus_per_worker": "cluster.inference_cpus_per_worker",
    "ray_trainer_cpus_per_worker": "cluster.trainer_cpus_per_worker",
    "ray_inference_placement_strategy": "cluster.inference_placement",
    "ray_trainer_placement_strategy": "cluster.trainer_placement",
    "ray_placement_timeout_s": "cluster.placement_timeout_s",
    "ray_torch_memory_drain_interval_seconds": "logging.torch_memory_drain_interval_seconds",
    "ray_runtime_env": "cluster.env",
    **dict.fromkeys(
        ("ray_address", "ray_auto_start_local", "ray_namespace", "ray_shutdown_on_exit", "ray_log_to_driver"),
        f"{_GONE}: the launcher starts, watches and ends the processes itself",
    ),
    **dict.fromkeys(
        (
            *("ray_disable_runtime_env_hook", "ray_pin_py_executable", "ray_propagate_active_venv", "ray_propagate_run_dir"),
            "ray_broadcast_prefer_loopback_if_single_node",
        ),
        f"{_GONE}: processes inherit the environment and the interpreter",
    ),
    "interleaved_rollouts": f"{_GONE}: turns always go on from the exact tokens",
    "enable_vllm_tracing": "inference.enable_tracing",
    "clip_ratio_c": "algorithm.dual_clip_c",
    "tis_mode": "algorithm.corrections",
    "tis_floor": "algorithm.corrections",
    "seq_is_masking": "algorithm.corrections",
    "seq_is_mask_low": "algorithm.corrections",
    "seq_is_mask_high": "algorithm.corrections",
    "kl_penalty_tau": "algorithm.kl_rollout_coef",
    "kl_estimator": "algorithm.kl_rollout_estimator",
    **dict.fromkeys(("weight", "reward_min", "reward_max"), "Settings of an environment stand at environments.<name>"),
    "num_samples": "Settings of an environment stand at environments.<name>.kwargs",
    "eager_prepare_resources": f"{_GONE}: environments are set up before the first rollout",
    **dict.fromkeys(("sapo_tau_pos", "sapo_tau_neg"), "It is a setting of algorithm=sapo"),
    "dr_grpo_loss_agg_mode": "It is a setting of algorithm=dr_grpo",
    "filter_overlong": "algorithm.overlong_filter",
    "overlong_penalty_factor": "algorithm.overlong_penalty",
    "filter_repetition": "algorithm.repetition_filter_tokens",
    "repetition_compression_threshold": "algorithm.repetition_filter_probability",
    "filter_gibberish": "There is no such filter here",
    "gibberish_token_threshold": "There is no such filter here",
    "gibberish_logprob_offset": "There is no such filter here",
    "fsdp_context_parallel_size": "backend.context_parallel_size",
    "wandb_upload_code": f"{_GONE}: W&B gets numbers and the configuration",
    **dict.fromkeys(
        ("wandb_upload_logs", "wandb_upload_logs_detailed", "wandb_upload_logs_stdout", "wandb_code_max_file_size_mb"),
        f"{_GONE}: W&B gets numbers and the configuration; logs stay in the run directory",
    ),
    "wandb_code_exclude_patterns": f"{_GONE}: W&B gets numbers and the configuration",
    **dict.fromkeys(
        (
            *("event_tail_window_seconds", "event_block_duration_seconds", "event_upload_interval_seconds"),
            *("metrics_logger_interval_seconds", "rollout_block_size", "system_metrics_collection_interval_seconds"),
        ),
        f"{_GONE}: the run directory seals its files by itself",
    ),
    **dict.fromkeys(
        (
            *("megatron_global_batch_size", "megatron_disable_unified_memory_jit"),
            "megatron_overlap_cpu_optimizer_d2h_h2d",
        ),
        _LATER,
    ),
    **{
        f"megatron_{name}": f"backend.{name}"
        for name in (
            *("tensor_parallel_size", "pipeline_parallel_size", "expert_parallel_size", "context_parallel_size"),
            *("grad_reduce_in_fp32", "use_transformer_engine", "fp8", "optimizer_cpu_offload", "optimizer_offload_fraction"),
            *("use_precision_aware_optimizer", "exp_avg_dtype", "exp_avg_sq_dtype"),
            *("gradient_checkpointing", "sequence_parallel", "use_distributed_optimizer", "overlap_grad_reduce"),
        )
    },
    "megatron_main_grads_dtype": "backend.grad_reduce_in_fp32",
    "megatron_main_params_dtype": "model.dtype",
    "eval_before_training": "eval.baseline",
    "eval_after_training": "eval.final",
    "eval_every": "eval.every",
    "pass_k": "eval.pass_at_k",
    "eval_num_servers": "eval.num_servers",
    "eval_start_end_use_all_servers": f"{_GONE}: the evals before and after training play on all servers",
    "separate_eval_samples": f"{_GONE}: an eval plays its environment's eval split, which training never sees",
    # what other trainers call it
    "lr": "trainer.learning_rate",
    "max_grad_norm": "trainer.grad_clip",
    "max_steps": "number_of_steps",
    "total_steps": "number_of_steps",
    "num_train_epochs": "number_of_steps",
    "batch_size": "orchestrator.prompts_batch_size_for_trainer (prompts) and rollout.group_size (answers of each)",
    "train_batch_size": "orchestrator.prompts_batch_size_for_trainer (prompts) and rollout.group_size (answers of each)",
    "per_device_train_batch_size": "orchestrator.prompts_batch_size_for_trainer (prompts, of all devices together)",
    "mini_batch_size": "trainer.number_of_minibatches",
    "ppo_mini_batch_size": "trainer.number_of_minibatches",
    "gradient_accumulation_steps": f"{_GONE}: rows are packed to trainer.seq_len, and as many as it takes are accumulated",
    "micro_batch_size": f"{_GONE}: rows are packed to trainer.seq_len, and as many as it takes are accumulated",
    "ppo_epochs": "trainer.epochs_per_batch",
    "num_iterations": "trainer.epochs_per_batch",
    "num_generations": "rollout.group_size",
    "rollouts_per_example": "rollout.group_size",
    "n_samples_per_prompt": "rollout.group_size",
    "max_completion_length": "rollout.max_tokens",
    "max_new_tokens": "rollout.max_tokens",
    "max_response_length": "rollout.max_tokens",
    "max_prompt_length": "inference.max_model_len (prompt and answer together)",
    "beta": "algorithm.kl_ref_coef",
    "kl_coef": "algorithm.kl_ref_coef",
    "kl_loss_coef": "algorithm.kl_ref_coef",
    "epsilon": "algorithm.clip_low",
    "epsilon_high": "algorithm.clip_high",
    "clip_ratio": "algorithm.clip_low and algorithm.clip_high",
    "clip_ratio_low": "algorithm.clip_low",
    "clip_ratio_high": "algorithm.clip_high",
    "loss_agg_mode": "algorithm.loss_aggregation",
    "importance_sampling_level": "algorithm=gspo (sequence) or grpo (token)",
    "async_level": "orchestrator.max_async_rollout",
    "max_async_level": "orchestrator.max_async_rollout",
    "save_steps": "checkpoint.every",
    "save_freq": "checkpoint.every",
    "output_dir": "run_dir",
    "report_to": "logging.use_wandb",
    "bf16": "backend.mixed_precision_dtype",
    "tp": "inference.tensor_parallel_size",
}
"""By the last part of the name: the setting here, or a sentence."""


def find_hint(name: str) -> str | None:
    """What to tell whoever typed it, as ` It is trainer.learning_rate here.`; None for a name that nobody else has."""
    found = NAMES.get(name)
    if found is None:
        return None
    return f" {found}." if found[0].isupper() else f" It is {found} here."
