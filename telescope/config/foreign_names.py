"""What settings of other trainers are called here: those of the older, Ray-based Telescope, of TRL's GRPOConfig and of verl.

One table for the hint that a typed name gets, for `telescope migrate` and for the tables of docs/migration.md. A name that says
something else there than its neighbour here must not be taken for it, so it stands in the table: either with the setting that
does the same, or with a sentence where there is none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

System = Literal["older", "trl", "verl", "others"]
CALLED: dict[System, str] = {
    "older": "the older, Ray-based Telescope",
    "trl": "TRL's GRPOConfig",
    "verl": "verl",
    "others": "other trainers",
}
ANY_BELOW = ".*"
"""At a name's end: it stands for all that lies below it and has no entry of its own."""
TARGET = "_target_"
"""The class of a section of verl's, wherever it stands."""


@dataclass(frozen=True)
class ForeignName:
    """One setting of another system, e.g. `ForeignName("trl", "beta", "algorithm.kl_ref_coef", "")`."""

    system: System
    name: str
    """As in its file, with dots where that is nested."""
    here: str
    """The setting that does the same, or several and how they share it; empty: none does."""
    said: str
    """Why there is none, or what is different about the one here; empty: nothing."""

    @property
    def last(self) -> str:
        """The last part of its name, which is what somebody types."""
        return self.name.removesuffix(ANY_BELOW).rpartition(".")[2]

    @property
    def keeps_its_name(self) -> bool:
        """Whether it has only moved into another section."""
        return self.here.rpartition(".")[2] == self.last


# A line reads `names there | the setting here | what is different`. `section.=` is the same name in that section, `-` none at
# all. `[prefix]` stands before the names of the lines below it. A line goes on where the next one is indented.
_OLDER = """
model | model.name
model_dtype | model.dtype
enable_thinking chat_template | model.=
algorithm | algorithm
train_backend | backend
debug | debug
number_of_steps | number_of_steps
environments | environments.<name> | a list there; by name here, chosen with env
weight reward_min reward_max kwargs | - | Settings of an environment stand at environments.<name>
max_concurrent_prompts_per_server prompts_batch_size_for_trainer max_async_rollout max_off_policy_steps
    discard_group_zero_advantage enable_prompt_prefetch prompt_prefetch_buffer_size enable_individual_sample_lanes
    free_lane_after_generation | orchestrator.=
group_size temperature top_p max_tokens | rollout.=
interleaved_rollouts | - | Nothing is to be set: turns always go on from the exact tokens
learning_rate weight_decay grad_clip lr_scheduler warmup_steps min_lr_ratio number_of_minibatches seq_len
    pad_to_multiple_of entropy_chunk_size | trainer.=
advantage_norm use_ppo_clip ppo_clip_ref_logprobs clip_low clip_high use_tis tis_cap tis_logprob_clamp entropy_coef
    overlong_buffer_tokens | algorithm.=
sapo_tau_pos | algorithm.sapo_tau_pos | a setting of algorithm=sapo
sapo_tau_neg | algorithm.sapo_tau_neg | a setting of algorithm=sapo
dr_grpo_loss_agg_mode | algorithm.dr_grpo_loss_agg_mode | a setting of algorithm=dr_grpo
clip_ratio_c | algorithm.dual_clip_c
kl_penalty_tau | algorithm.kl_rollout_coef
kl_estimator | algorithm.kl_rollout_estimator
filter_overlong | algorithm.overlong_filter
overlong_penalty_factor | algorithm.overlong_penalty
seq_is_masking | algorithm.corrections | the correction sequence_mask
seq_is_mask_low | algorithm.corrections | `low` of the correction sequence_mask
seq_is_mask_high | algorithm.corrections | `high` of the correction sequence_mask
tis_mode tis_floor | algorithm.corrections | icepop is the correction with two ends: choose its own
filter_repetition | algorithm.repetition_filter_tokens | it counts near-certain tokens in a row, and does not
    measure how far a text compresses
repetition_compression_threshold | algorithm.repetition_filter_probability | a probability of tokens, and no ratio
    of compression
filter_gibberish gibberish_token_threshold gibberish_logprob_offset | - | There is no such filter here
inference_num_workers trainer_num_workers | cluster.=
gpu_memory_utilization max_model_len max_num_seqs max_num_batched_tokens otlp_receiver_port | inference.=
inference_host | inference.host | loopback is the default; at any other address requests need a key
inference_tensor_parallel_size | inference.tensor_parallel_size
inference_base_port | inference.base_port
vllm_scheduling_policy | inference.scheduling_policy
enable_vllm_tracing | inference.enable_tracing
mixed_precision_dtype | backend.=
fsdp_context_parallel_size | backend.context_parallel_size
megatron_tensor_parallel_size | backend.tensor_parallel_size
megatron_pipeline_parallel_size | backend.pipeline_parallel_size
megatron_context_parallel_size | backend.context_parallel_size
megatron_expert_parallel_size | backend.expert_parallel_size
megatron_grad_reduce_in_fp32 | backend.grad_reduce_in_fp32
megatron_gradient_checkpointing | backend.gradient_checkpointing
megatron_sequence_parallel | backend.sequence_parallel
megatron_use_distributed_optimizer | backend.use_distributed_optimizer
megatron_overlap_grad_reduce | backend.overlap_grad_reduce
megatron_use_transformer_engine | backend.use_transformer_engine
megatron_fp8 | backend.fp8
megatron_optimizer_cpu_offload | backend.optimizer_cpu_offload
megatron_optimizer_offload_fraction | backend.optimizer_offload_fraction
megatron_use_precision_aware_optimizer | backend.use_precision_aware_optimizer
megatron_exp_avg_dtype | backend.exp_avg_dtype
megatron_exp_avg_sq_dtype | backend.exp_avg_sq_dtype
megatron_main_params_dtype | - | Weights are updated in model.dtype
megatron_main_grads_dtype | - | Gradients are summed as backend.grad_reduce_in_fp32 says
megatron_global_batch_size megatron_disable_unified_memory_jit
    megatron_overlap_cpu_optimizer_d2h_h2d | - | The Megatron backend does not have it
checkpoint_every | checkpoint.every
checkpoint_save_training_state | checkpoint.save_training_state
checkpoint_dir | checkpoint.dir
checkpoint_keep_last | checkpoint.keep_last
checkpoint_keep_every | checkpoint.keep_every
resume_from_checkpoint | checkpoint.resume | of a run of this Telescope alone
evals | evals.<name> | a list there; by name here
eval_every | eval.every | or evals.<name>.every, of one eval
pass_k | eval.pass_at_k | a list of k here; the largest is how many answers a prompt gets
num_samples | - | Of an eval, evals.<name>.num_prompts says how many prompts are played
separate_eval_samples | - | Nothing is to be set: an eval plays its environment's eval split, which training never
    sees
eval_before_training | eval.baseline
eval_after_training | eval.final
eval_num_servers | eval.num_servers
eval_start_end_use_all_servers | - | Nothing is to be set: the evals before and after training play on all servers
use_wandb wandb_project wandb_run_name wandb_tags track_gpu_events torch_memory_sample_interval_seconds | logging.=
wandb_upload_code wandb_upload_logs wandb_upload_logs_detailed wandb_upload_logs_stdout wandb_code_max_file_size_mb
    wandb_code_exclude_patterns | - | Nothing is to be set: W&B gets numbers and the configuration; logs stay in the
    run directory
event_tail_window_seconds event_block_duration_seconds event_upload_interval_seconds metrics_logger_interval_seconds
    rollout_block_size system_metrics_collection_interval_seconds | - | Nothing is to be set: the run directory
    seals its files by itself
weight_broadcast_mode | weight_sync.mode
weight_broadcast_bucket_mb | weight_sync.bucket_mb
weight_broadcast_cpu_staging | weight_sync.cpu_staging
weight_broadcast_pin_memory | weight_sync.pin_memory
weight_broadcast_free_grad_buffers | - | Nothing is to be set: gradients are released after each update
ray_inference_placement_strategy | cluster.inference_placement
ray_trainer_placement_strategy | cluster.trainer_placement
ray_inference_cpus_per_worker | cluster.inference_cpus_per_worker
ray_trainer_cpus_per_worker | cluster.trainer_cpus_per_worker
ray_placement_timeout_s | cluster.placement_timeout_s
ray_broadcast_init_timeout_s | weight_sync.init_timeout_s
ray_torch_memory_drain_interval_seconds | logging.torch_memory_drain_interval_seconds
ray_runtime_env | cluster.env | its variables alone; packages are what is installed
ray_address ray_auto_start_local ray_namespace ray_shutdown_on_exit | - | Nothing is to be set: the launcher starts,
    watches and ends the processes itself
ray_log_to_driver | logging.log_to_console | off by default: logs are in the run directory
ray_disable_runtime_env_hook ray_pin_py_executable ray_propagate_active_venv ray_propagate_run_dir
    ray_broadcast_prefer_loopback_if_single_node | - | Nothing is to be set: processes inherit the environment and
    the interpreter
eager_prepare_resources | - | Nothing is to be set: environments are set up before the first rollout
"""
_TRL = """
model_name_or_path | model.name
torch_dtype | model.dtype
dtype trust_remote_code | model.=
max_steps | number_of_steps
seed | seed
output_dir | run_dir
run_name | name
chat_template_kwargs | model.enable_thinking | of its arguments enable_thinking alone
num_train_epochs | - | Steps are counted here, not passes over the data: set number_of_steps
dataset_name dataset_config dataset_train_split dataset_test_split dataset_streaming | - | An environment brings its
    data here: choose one with env
reward_funcs reward_weights reward_model_name_or_path | - | A reward is an environment's code here: write one, and
    choose it with env
per_device_train_batch_size | orchestrator.prompts_batch_size_for_trainer | prompts of a step, of all devices
    together: this times the devices and steps_per_generation, over num_generations
generation_batch_size | orchestrator.prompts_batch_size_for_trainer | answers there, prompts here
steps_per_generation | trainer.number_of_minibatches | this over gradient_accumulation_steps
gradient_accumulation_steps | - | Nothing is to be set: rows are packed to trainer.seq_len, and as many as it takes
    are accumulated
num_generations | rollout.group_size
num_generations_eval | eval.num_samples
max_completion_length | rollout.max_tokens
vllm_max_model_length | inference.max_model_len
max_prompt_length | inference.max_model_len | prompt and answer together, nothing is cut off a prompt
temperature top_p top_k min_p | rollout.=
repetition_penalty | - | Sampling has no such term: the trainer could not repeat it
learning_rate weight_decay warmup_steps | trainer.=
max_grad_norm | trainer.grad_clip
lr_scheduler_type | trainer.lr_scheduler
num_iterations | trainer.epochs_per_batch
warmup_ratio | trainer.warmup_steps | steps, and no share of them
adam_beta1 | trainer.betas | the first of the two
adam_beta2 | trainer.betas | the second of the two
adam_epsilon | - | AdamW's epsilon is fixed here, 1e-8
optim | backend.optimizer
loss_type | algorithm | and algorithm.loss_aggregation
importance_sampling_level | algorithm | gspo for sequence, grpo for token
scale_rewards | algorithm.advantage_norm
beta | algorithm.kl_ref_coef
epsilon | algorithm.clip_low | clips only with algorithm.use_ppo_clip, which is set with it; without epsilon_high
    algorithm.clip_high, too
epsilon_high | algorithm.clip_high | clips only with algorithm.use_ppo_clip, which is set with it
delta | algorithm.dual_clip_c
sapo_temperature_pos | algorithm.sapo_tau_pos
sapo_temperature_neg | algorithm.sapo_tau_neg
mask_truncated_completions | algorithm.overlong_filter
vllm_importance_sampling_correction | algorithm.use_tis | weights of tokens, cut off at algorithm.tis_cap
vllm_importance_sampling_cap | algorithm.tis_cap
vllm_importance_sampling_mode | algorithm.corrections | token_truncate is algorithm.use_tis
top_entropy_quantile | - | Every sampled token is trained: there is no filter by entropy
sync_ref_model ref_model_mixup_alpha ref_model_sync_steps | - | The reference of algorithm.kl_ref_coef is the base
    model and stays so
bf16 fp16 | backend.mixed_precision_dtype
gradient_checkpointing | backend.=
torch_compile | backend.compile
use_peft lora_r lora_alpha lora_target_modules | model.lora
lora_dropout | - | LoRA has no dropout here
load_in_4bit load_in_8bit | - | A model is loaded in its own precision, without quantisation
attn_implementation | - | Nothing is to be set: the kernel is chosen by backend.attention
vllm_gpu_memory_utilization | inference.gpu_memory_utilization
vllm_tensor_parallel_size | inference.tensor_parallel_size | one server of it, unless cluster.inference_num_workers is
    raised
use_vllm use_transformers_paged cache_implementation | - | Nothing is to be set: vLLM is the engine
vllm_mode | - | GPUs are shared out by cluster: cluster=one_gpu shares one, the others keep servers and trainer
    apart
vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port | - | Nothing is to be
    set: the run starts its own servers and tells the workers where they are
vllm_enable_sleep_mode | inference.sleep_while_training | for a GPU that server and trainer share, one after the
    other
deepspeed fsdp fsdp_config ddp_find_unused_parameters ds3_gather_for_generation | - | Nothing is to be set: backend
    shards weights, gradients and moments over the trainer's ranks
use_liger_kernel use_liger_loss logits_to_keep | - | Nothing is to be set: the loss is computed in chunks of
    trainer.entropy_chunk_size
shuffle_dataset dataloader_num_workers dataloader_pin_memory remove_unused_columns data_seed | - | Nothing is to be
    set: prompts are shuffled by seed, and made ready ahead
disable_dropout | - | Nothing is to be set: nothing drops out while a rollout is trained
model_init_kwargs model_revision cast_lm_head_to_fp32 vllm_model_impl | - | A model is its folder or its id: there
    is no such setting
generation_kwargs vllm_structured_outputs_regex | - | Sampling takes rollout.temperature, top_p, top_k, min_p and
    stop, which the trainer knows of
save_steps | checkpoint.every
save_strategy | checkpoint.every | no is 0; steps come from save_steps
save_total_limit | checkpoint.keep_last
save_only_model | checkpoint.save_training_state | the opposite
resume_from_checkpoint | - | A run of another program can't be resumed here: start from its exported model,
    model.name
eval_steps | eval.every
eval_strategy | eval.every | no is null; steps come from eval_steps
eval_on_start | eval.baseline
per_device_eval_batch_size | - | Nothing is to be set: rollouts of an eval are packed by the servers
report_to | logging.use_wandb
logging_steps logging_strategy logging_first_step log_level log_completions num_completions_to_print
    log_unique_prompts wandb_log_unique_prompts logging_dir | - | Nothing is to be set: the run directory has each
    step and the text of every answer
push_to_hub hub_model_id hub_strategy hub_private_repo | - | No model is pushed: `telescope export` writes one, to
    push by hand
"""
_VERL = """
defaults hydra.* _target_ | - | Hydra's own: what is chosen here stands in the file's defaults
actor_rollout_ref.hybrid_engine | - | GPUs are shared out by cluster: cluster=one_gpu shares one, the others keep
    servers and trainer apart
actor_rollout_ref.ref.* | - | The reference of algorithm.kl_ref_coef is a frozen copy that the trainer keeps: it has
    no settings of its own
critic.* | - | There is no critic here: advantages compare the answers of a group
reward_model.* reward.* custom_reward_function.* sandbox_fusion.* | - | A reward is an environment's code here:
    write one, and choose it with env
actor_rollout_ref.nccl_timeout | backend.collective_timeout_s
ray_init.* ray_kwargs.* | - | Nothing is to be set: the launcher starts, watches and ends the processes itself
global_profiler.* | - | `telescope doctor` and the metrics say where time goes
[data.]
train_batch_size | orchestrator.prompts_batch_size_for_trainer
max_response_length | rollout.max_tokens
max_prompt_length | inference.max_model_len | prompt and answer together, nothing is cut off a prompt
seed | seed
train_files val_files prompt_key reward_fn_key | - | An environment brings its data here: env=questions reads such a
    file, with its question_field and answer_field
* | - | Nothing is to be set: an environment makes its prompts, and a prompt that is too long is dropped and counted
[actor_rollout_ref.model.]
path | model.name
trust_remote_code | model.=
enable_gradient_checkpointing | backend.gradient_checkpointing
lora_rank lora_alpha target_modules | model.lora
use_remove_padding use_fused_kernels use_liger fused_kernel_options.* | - | Nothing is to be set: rows are packed
    without padding, and the loss is computed in chunks
external_lib override_config.* | - | A model is its folder or its id: there is no such setting
[actor_rollout_ref.actor.]
strategy | backend
ppo_mini_batch_size | trainer.number_of_minibatches | the prompts of a batch over those of a part
ppo_epochs | trainer.epochs_per_batch
ppo_max_token_len_per_gpu | trainer.seq_len
ppo_micro_batch_size ppo_micro_batch_size_per_gpu use_dynamic_bsz | - | Nothing is to be set: rows are packed to
    trainer.seq_len, and as many as it takes are accumulated
grad_clip | trainer.=
clip_ratio | algorithm.clip_low and algorithm.clip_high | clips only with algorithm.use_ppo_clip, which is set with
    it
clip_ratio_low | algorithm.clip_low | clips only with algorithm.use_ppo_clip, which is set with it
clip_ratio_high | algorithm.clip_high | clips only with algorithm.use_ppo_clip, which is set with it
clip_ratio_c | algorithm.dual_clip_c
loss_agg_mode | algorithm.loss_aggregation
policy_loss.loss_mode | algorithm
entropy_coeff | algorithm.entropy_coef
use_kl_loss | algorithm.kl_ref_coef | 0 without it
kl_loss_coef | algorithm.kl_ref_coef
kl_loss_type | algorithm.kl_ref_estimator
policy_loss.* | - | There is no such loss here: algorithm names those that there are
use_torch_compile entropy_from_logits_with_chunking entropy_checkpointing use_fused_kernels use_remove_padding | - |
    Nothing is to be set: log-probs and entropy are computed in chunks, and nothing of them is kept for the backward
    pass
ulysses_sequence_parallel_size | backend.context_parallel_size
megatron.tensor_model_parallel_size | backend.tensor_parallel_size
megatron.pipeline_model_parallel_size | backend.pipeline_parallel_size
megatron.context_parallel_size | backend.=
megatron.expert_model_parallel_size | backend.expert_parallel_size
checkpoint.* | - | Nothing is to be set: a checkpoint has all that a run goes on from
shuffle | - | Nothing is to be set: batches are packed and shuffled by seed
profiler.* | - | `telescope doctor` and the metrics say where time goes
[actor_rollout_ref.actor.fsdp_config.]
param_offload | backend.offload | parameters
optimizer_offload | backend.offload | optimizer
reshard_after_forward | backend.=
* | - | Nothing is to be set: backend shards a model layer by layer
[actor_rollout_ref.actor.optim.]
lr | trainer.learning_rate
weight_decay betas min_lr_ratio | trainer.=
lr_warmup_steps | trainer.warmup_steps
lr_warmup_steps_ratio | trainer.warmup_steps | steps, and no share of them
warmup_style lr_scheduler_type | trainer.lr_scheduler
total_training_steps | - | Nothing is to be set: schedules run over number_of_steps
[actor_rollout_ref.rollout.]
n | rollout.group_size
temperature top_k top_p | rollout.=
gpu_memory_utilization max_model_len max_num_seqs max_num_batched_tokens dtype enable_prefix_caching
    engine_kwargs.vllm | inference.=
tensor_model_parallel_size | inference.tensor_parallel_size | one server of it, unless cluster.inference_num_workers is
    raised
enforce_eager | inference.cuda_graphs | off
free_cache_engine | inference.sleep_while_training | for a GPU that server and trainer share
update_weights_bucket_megabytes | weight_sync.bucket_mb
name engine_kwargs.* | - | The engine is vLLM
agent.num_workers | cluster.env_num_workers
multi_turn.* agent.* | - | Turns and tools are an environment's code here: write one, and choose it with env
mode calculate_log_probs log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu log_prob_use_dynamic_bsz
    log_prob_max_token_len_per_gpu enable_chunked_prefill load_format disable_log_stats ignore_eos do_sample
    prompt_length response_length layered_summon | - | Nothing is to be set: every token's log-prob comes with it
    from the server, and the trainer packs its rows
profiler.* | - | `telescope doctor` and the metrics say where time goes
[actor_rollout_ref.rollout.val_kwargs.]
temperature top_p | eval.=
n | eval.num_samples
do_sample | - | An eval samples at eval.temperature; 0 takes the likeliest token each time
top_k | - | An eval samples with rollout.top_k
[algorithm.]
adv_estimator | algorithm
norm_adv_by_std_in_grpo | algorithm.advantage_norm
filter_groups.enable | orchestrator.discard_group_zero_advantage | by the reward alone
filter_groups.metric filter_groups.max_num_gen_batches | - | Nothing is to be set: groups are generated until a
    batch is full
rollout_correction.rollout_is | algorithm.use_tis | token; a sequence has its own
rollout_correction.rollout_is_threshold | algorithm.tis_cap
use_kl_in_reward kl_penalty kl_ctrl.* | - | A KL is part of the loss here, not of the reward: algorithm.kl_ref_coef
gamma lam | - | There is no critic here: advantages compare the answers of a group
[trainer.]
total_training_steps | number_of_steps
total_epochs | - | Steps are counted here, not passes over the data: set number_of_steps
project_name | logging.wandb_project
experiment_name | name
logger | logging.use_wandb
save_freq | checkpoint.every
max_actor_ckpt_to_keep | checkpoint.keep_last
default_local_dir | checkpoint.dir
test_freq | eval.every
val_before_train | eval.baseline
n_gpus_per_node nnodes | - | GPUs are shared out: cluster.inference_num_workers to servers,
    cluster.trainer_num_workers to the trainer
resume_mode resume_from_path | - | A run of another program can't be resumed here: start from its exported model,
    model.name
log_val_generations rollout_data_dir validation_data_dir | - | Nothing is to be set: the run directory has each step
    and the text of every answer
balance_batch | - | Nothing is to be set: rows are packed so that ranks have alike loads
critic_warmup max_critic_ckpt_to_keep | - | There is no critic here: advantages compare the answers of a group
val_only | - | `telescope eval` plays evals alone
ray_wait_register_center_timeout device use_legacy_worker_impl | - | Nothing is to be set: the launcher starts,
    watches and ends the processes itself
profile_steps | - | `telescope doctor` and the metrics say where time goes
"""
_OTHERS = """
total_steps | number_of_steps
batch_size train_batch_size | orchestrator.prompts_batch_size_for_trainer (prompts) and rollout.group_size (answers
    of each)
mini_batch_size | trainer.number_of_minibatches
rollouts_per_example n_samples_per_prompt | rollout.group_size
max_new_tokens | rollout.max_tokens
kl_coef | algorithm.kl_ref_coef
async_level max_async_level | orchestrator.max_async_rollout
tp | inference.tensor_parallel_size
micro_batch_size | - | Nothing is to be set: rows are packed to trainer.seq_len, and as many as it takes are
    accumulated
"""


def _read(system: System, text: str) -> Iterator[ForeignName]:
    before = ""
    for line in re.sub(r"\n +", " ", text).strip().splitlines():
        if line.startswith("["):
            before = line.strip("[]")
            continue
        names, here, *said = line.split(" | ")
        for name in names.split():
            entry = ForeignName(system, f"{before}{name}", "" if here == "-" else here, *(said or [""]))
            yield ForeignName(system, entry.name, here.replace("=", entry.last), entry.said) if here.endswith(".=") else entry


TABLE: tuple[ForeignName, ...] = (
    *_read("older", _OLDER),
    *_read("trl", _TRL),
    *_read("verl", _VERL),
    *_read("others", _OTHERS),
)
"""Every name, in the order of the sections of its own system."""
_TOO_COMMON = """
n name path mode strategy dtype device optim model shuffle seed defaults hydra data agent reward ref critic fsdp gamma lam
kwargs checkpoint environments evals enable metric type logger vllm profiler _target_ *
"""
"""Last parts that somebody may have typed without having one of these systems in mind."""


def of_system(system: System) -> tuple[ForeignName, ...]:
    return tuple(entry for entry in TABLE if entry.system == system)


def find_entry(system: System, name: str) -> ForeignName | None:
    """The entry of a name as it stands in its file, or the nearest one above that stands for all below it."""
    known = {entry.name: entry for entry in of_system(system)}
    if name in known:
        return known[name]
    parts = name.split(".")
    above = (".".join(parts[:depth]) + ANY_BELOW for depth in range(len(parts), 0, -1))
    return next((known[pattern] for pattern in above if pattern in known), None)


def _make_hints() -> dict[str, str]:
    found: dict[str, str] = {}
    common = _TOO_COMMON.split()
    for entry in TABLE:
        if not entry.keeps_its_name and entry.last not in common:
            found.setdefault(entry.last, entry.here or entry.said)
    return found


HINTS = _make_hints()
"""By the last part of a name: the setting here, or a sentence. Not of a name that has only moved: that it stands in another
section is said of every name."""


def find_hint(name: str) -> str | None:
    """What to tell whoever typed it, as ` It is trainer.learning_rate here.`; None for a name that nobody else has."""
    found = HINTS.get(name)
    if found is None:
        return None
    return f" {found}." if found[0].isupper() or found[0] == "`" else f" It is {found} here."
