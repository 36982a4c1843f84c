"""Settings that are right one by one and wrong together, and those that run but do not do what they seem to.

Owns the checks that need the whole configuration, between sections above all; a section's or plug-in's own rules are its own
validators.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from telescope.config import plugins, vllm_arguments
from telescope.config.evals import find_mistakes, find_server_mistakes
from telescope.config.free_text import find_literal_secrets
from telescope.config.models import read_counts
from telescope.config.precision import refuse_moments, refuse_training_dtype, warn_of_training_dtype
from telescope.config.run import RunConfig
from telescope.config.sections import WeightSyncSettings
from telescope.flow.limits import EVAL_SPLIT
from telescope.weights.base import Transport

MOST_LANES = 1_000_000
"""Requests that one server may have in flight: the largest capacity that a hello on the wire can offer."""


@dataclass(frozen=True)
class Conflict:
    """A combination that can't run. `paths` are the settings in it: a conflict with a broken setting is not reported."""

    paths: tuple[str, ...]
    sentence: str


def conflicts(config: RunConfig) -> list[Conflict]:
    """Every impossible combination, each in a sentence that names the remedy."""
    if not config.trains:  # what only training reads is not judged
        return [
            *_reward_ranges(config),
            *_lanes(config),
            *_processes(config),
            *_hosts(config),
            *_without_trainer(config),
            *_evals(config),
        ]
    return [
        *_steps(config),
        *_lengths(config),
        *_groups(config),
        *_lanes(config),
        *_reward_ranges(config),
        *_rewards(config),
        *_schedule(config),
        *_processes(config),
        *_hosts(config),
        *_without_effect(config),
        *_router_replay(config),
        *_weights(config),
        *_training_dtype(config),
        *_backend(config),
        *_shared_rows(config),
        *_checkpoints(config),
        *_keep_best(config),
        *_stop_after(config),
        *_evals(config),
    ]


def _steps(config: RunConfig) -> Iterator[Conflict]:
    if config.number_of_steps < 1:
        yield Conflict(
            ("number_of_steps", "cluster.trainer_num_workers"),
            "number_of_steps=0 trains nothing: give the steps to train, or evaluate a model with `telescope eval`",
        )


def _without_trainer(config: RunConfig) -> Iterator[Conflict]:
    if not config.active_evals:
        yield Conflict(
            ("cluster.trainer_num_workers", "evals"),
            "cluster.trainer_num_workers=0 trains nothing, and there are no evals to play: give 1 or more, or name evals, e.g. "
            "evals.math500={}",
        )
    if config.model.lora is not None:
        yield Conflict(
            ("cluster.trainer_num_workers", "model.lora"),
            "model.lora trains adapters, and cluster.trainer_num_workers=0 trains nothing: leave it out, and name a model into "
            "which they are merged (`telescope export --merge`)",
        )
    if config.checkpoint.every:
        yield Conflict(
            ("cluster.trainer_num_workers", "checkpoint.every"),
            f"checkpoint.every={config.checkpoint.every} saves what trainer ranks hold, and cluster.trainer_num_workers=0: set "
            "checkpoint.every=0",
        )
    if config.checkpoint.at_end in ("weights", "state"):
        yield Conflict(
            ("cluster.trainer_num_workers", "checkpoint.at_end"),
            f"checkpoint.at_end={config.checkpoint.at_end} saves what trainer ranks hold, and cluster.trainer_num_workers=0: "
            "leave it out",
        )
    if config.trainer.router_replay:
        yield Conflict(
            ("cluster.trainer_num_workers", "trainer.router_replay"),
            "trainer.router_replay=true is how tokens are trained, and cluster.trainer_num_workers=0 trains none: leave it out",
        )


def _evals(config: RunConfig) -> Iterator[Conflict]:
    mistakes = find_mistakes(
        config.eval,
        config.evals,
        config.environments,
        number_of_steps=config.number_of_steps if config.trains else None,
        max_model_len=config.inference.max_model_len,
    )
    for paths, sentence in mistakes:
        yield Conflict(paths, sentence)
    for paths, sentence in find_server_mistakes(
        config.eval,
        config.active_evals,
        servers=config.servers,
        number_of_steps=config.number_of_steps,
        sleeps=config.inference.sleep_while_training != "off",
    ):
        yield Conflict(paths, sentence)
    for one in config.active_evals:
        entry = config.played[one.label]
        kind = plugins.load(plugins.ENVIRONMENTS, entry.name, config.plugin_path)
        if EVAL_SPLIT not in kind.splits:
            where = f"evals.{one.name}" if one.name in config.evals else "eval.every"
            yield Conflict(
                (where,),
                f"{where}: the environment {entry.name!r} of {one.label} has no eval split, and what is trained on can't be "
                "evaluated: name the evals that are to play in `evals`, or give the environment one (docs/evals.md)",
            )
        for setting, value in kind.no_eval_with.items():
            if setting in entry.kwargs and entry.kwargs[setting] == value:
                where = f"evals.{one.name}" if one.name in config.evals else "eval.every"
                path = f"{'environments' if one.label in config.environments else 'evals'}.{one.label}.kwargs.{setting}"
                yield Conflict(
                    (where, path),
                    f"{path}={_typed(value)} leaves no question for {where}, which plays the eval split of {one.label}: leave "
                    f"{setting} out, or the eval",
                )


def _lengths(config: RunConfig) -> Iterator[Conflict]:
    max_tokens, model_len, seq_len = config.rollout.max_tokens, config.inference.max_model_len, config.trainer.seq_len
    given = seq_len != "auto"  # which holds what it must, and is padded
    if max_tokens >= model_len:
        yield Conflict(
            ("rollout.max_tokens", "inference.max_model_len"),
            f"rollout.max_tokens={max_tokens} must be below inference.max_model_len={model_len}, which holds the prompt too: "
            f"lower rollout.max_tokens, or raise inference.max_model_len",
        )
    if given and model_len > config.trainer.row_tokens and config.trainer.overlong == "refuse":
        yield Conflict(
            ("inference.max_model_len", "trainer.seq_len"),
            f"inference.max_model_len={model_len} must not be above trainer.seq_len={seq_len}: a sequence has to fit into one "
            f"packed row; set trainer.seq_len={model_len}, or lower inference.max_model_len, or set trainer.overlong=truncate, "
            "which trains the beginning of a longer one",
        )
    for sentence in config.algorithm.length_errors(max_tokens=max_tokens):
        yield Conflict(("algorithm.overlong_buffer_tokens", "rollout.max_tokens"), sentence)
    for label, entry in config.environments.items():
        path, own = f"environments.{label}.max_tokens", entry.max_tokens
        if own is None:
            continue
        if own > max_tokens:
            yield Conflict(
                (path, "rollout.max_tokens"),
                f"{path}={own} must not be above rollout.max_tokens={max_tokens}, by which lengths are planned and losses "
                f"divided: lower it, or set rollout.max_tokens={own}",
            )
        for sentence in config.algorithm.length_errors(max_tokens=own):
            yield Conflict(("algorithm.overlong_buffer_tokens", path), sentence.replace("rollout.max_tokens", path))
    padding = config.trainer.pad_to_multiple_of
    if given and config.trainer.row_tokens % padding:
        yield Conflict(
            ("trainer.seq_len", "trainer.pad_to_multiple_of"),
            f"trainer.seq_len={seq_len} must be a multiple of trainer.pad_to_multiple_of={padding}: "
            f"set trainer.seq_len={config.trainer.pad(config.trainer.row_tokens)}, or trainer.pad_to_multiple_of=1",
        )


def _groups(config: RunConfig) -> Iterator[Conflict]:
    group_size, least = config.rollout.group_size, config.rollout.min_group_size
    paths = ("rollout.group_size", "rollout.min_group_size")
    for sentence in config.algorithm.group_errors(group_size=group_size, min_group_size=least):
        yield Conflict(paths, sentence)
    if least > group_size:
        yield Conflict(
            paths,
            f"rollout.min_group_size={least} must not be above rollout.group_size={group_size}, or every group fails: "
            f"set rollout.min_group_size={group_size}",
        )


def _lanes(config: RunConfig) -> Iterator[Conflict]:
    orchestrator = config.orchestrator
    for name in ("free_lane_after_generation", "adaptive_concurrency"):
        if getattr(orchestrator, name) and not orchestrator.enable_individual_sample_lanes:
            yield Conflict(
                (f"orchestrator.{name}", "orchestrator.enable_individual_sample_lanes"),
                f"orchestrator.{name}=true needs orchestrator.enable_individual_sample_lanes=true: without it a lane "
                f"belongs to a whole group; set orchestrator.{name}=false, or leave individual lanes on",
            )
    if orchestrator.kv_soft > orchestrator.kv_hard:
        yield Conflict(
            ("orchestrator.kv_soft", "orchestrator.kv_hard"),
            f"orchestrator.kv_soft={orchestrator.kv_soft} must not be above orchestrator.kv_hard={orchestrator.kv_hard}: lower "
            "the first or raise the second",
        )


def _reward_ranges(config: RunConfig) -> Iterator[Conflict]:
    """Of all that are played, with the ends that an environment's class states where the entry does not."""
    for label in config.played:
        ends = config.reward_range(label)
        if ends is None or 0 < ends[1] - ends[0] < math.inf:
            continue
        place = f"environments.{label}" if label in config.environments else f"evals.{label}"
        yield Conflict(
            (f"{place}.reward_min", f"{place}.reward_max"),
            f"the rewards of {place} go from reward_min={ends[0]:g} to reward_max={ends[1]:g}: the first must be below the "
            "second, by a finite number (an end that no setting gives is the one that the environment's class states)",
        )


def _rewards(config: RunConfig) -> Iterator[Conflict]:
    if not config.rollout.normalize_rewards:
        return
    for label, entry in config.environments.items():
        if config.reward_range(label) is None:
            yield Conflict(
                ("rollout.normalize_rewards",),
                f"rollout.normalize_rewards=true needs environments.{label}.reward_min and environments.{label}.reward_max: "
                "give both, or set rollout.normalize_rewards=false",
            )
        if entry.curriculum is not None and not 0 < entry.curriculum.pass_above < 1:
            path = f"environments.{label}.curriculum.pass_above"
            yield Conflict(
                ("rollout.normalize_rewards", path),
                f"rollout.normalize_rewards=true puts rewards between 0 and 1, and {path}={entry.curriculum.pass_above:g} "
                "would call all of them passed, or none: set it between them, e.g. 0.5",
            )


def _schedule(config: RunConfig) -> Iterator[Conflict]:
    trainer, steps = config.trainer, config.number_of_steps
    groups = config.orchestrator.prompts_batch_size_for_trainer
    if trainer.number_of_minibatches > groups:
        yield Conflict(
            ("trainer.number_of_minibatches", "orchestrator.prompts_batch_size_for_trainer"),
            f"trainer.number_of_minibatches={trainer.number_of_minibatches} must not be above "
            f"orchestrator.prompts_batch_size_for_trainer={groups}: a minibatch has one whole group at least; set "
            f"trainer.number_of_minibatches={groups}, or raise orchestrator.prompts_batch_size_for_trainer",
        )
    if trainer.warmup_steps > steps:
        yield Conflict(
            ("trainer.warmup_steps", "number_of_steps"),
            f"trainer.warmup_steps={trainer.warmup_steps} must not be above number_of_steps={steps}: the warm-up would not end",
        )
    if trainer.warmup_steps and trainer.lr_scheduler == "none":
        yield Conflict(
            ("trainer.warmup_steps", "trainer.lr_scheduler"),
            f"trainer.warmup_steps={trainer.warmup_steps} does nothing with trainer.lr_scheduler=none: use "
            "trainer.lr_scheduler=constant, which stays flat after its warm-up",
        )
    if trainer.min_lr_ratio and trainer.lr_scheduler in ("none", "constant"):
        yield Conflict(
            ("trainer.min_lr_ratio", "trainer.lr_scheduler"),
            f"trainer.min_lr_ratio={trainer.min_lr_ratio} does nothing with trainer.lr_scheduler={trainer.lr_scheduler}: use "
            "linear or cosine, or leave it at 0",
        )


def _processes(config: RunConfig) -> Iterator[Conflict]:
    prompts, group_size = config.orchestrator.max_concurrent_prompts_per_server, config.rollout.group_size
    if prompts * group_size > MOST_LANES:
        yield Conflict(
            ("orchestrator.max_concurrent_prompts_per_server", "rollout.group_size"),
            f"orchestrator.max_concurrent_prompts_per_server={prompts} times rollout.group_size={group_size} are "
            f"{prompts * group_size:,} requests in flight at one server, and {MOST_LANES:,} are the most: lower either",
        )
    if config.cluster.dry_run and config.cluster.slurm is None:
        yield Conflict(
            ("cluster.dry_run", "cluster.slurm"),
            "cluster.dry_run=true writes a batch file without submitting it, and this run goes to no Slurm: set cluster=slurm, "
            "or leave it out",
        )
    yield from _inference(config)


def _shared_rows(config: RunConfig) -> Iterator[Conflict]:
    size, padding = config.backend.ranks_a_row, config.trainer.pad_to_multiple_of
    if padding % size and not config.backend.fills_rows:
        yield Conflict(
            ("trainer.pad_to_multiple_of", "backend.context_parallel_size"),
            f"trainer.pad_to_multiple_of={padding} must be a multiple of backend.context_parallel_size={size}, as each packed "
            f"row is cut into so many equal parts: set trainer.pad_to_multiple_of={-(-padding // size) * size}",
        )


def _hosts(config: RunConfig) -> Iterator[Conflict]:
    cluster = config.cluster
    if cluster.launcher == "local":
        for name in ("nodes", "node_rank", "head", "key_file", "interface"):
            if (given := getattr(cluster, name)) is not None:
                yield Conflict(
                    (f"cluster.{name}", "cluster.launcher"),
                    f"cluster.{name}={given} does nothing with cluster.launcher=local, which is this machine alone: leave it "
                    "out, or set cluster=bare_metal",
                )
        return
    if cluster.nodes is not None and cluster.node_rank is not None and cluster.node_rank >= cluster.nodes:
        yield Conflict(
            ("cluster.node_rank", "cluster.nodes"),
            f"cluster.node_rank={cluster.node_rank} must be below cluster.nodes={cluster.nodes}: hosts are counted from 0",
        )
    if cluster.head is not None and cluster.key_file is None:
        yield Conflict(
            ("cluster.head", "cluster.key_file"),
            f"cluster.head={cluster.head} needs cluster.key_file, without which anyone could join: make one with "
            "`python -m telescope.run --new-key FILE`, copy it to every host, and give cluster.key_file=FILE; or leave the "
            "head out, and the hosts meet in run_dir",
        )


def _remote(config: RunConfig) -> Iterator[Conflict]:
    inference = config.inference
    if (inference.engine == "remote") != (inference.remote is not None):
        yield Conflict(
            ("inference.engine", "inference.remote"),
            "inference.engine=remote and inference.remote={url:…,model:…} go together: give both, or neither",
        )
    elif inference.remote is not None and config.trains:
        yield Conflict(
            ("inference.engine", "cluster.trainer_num_workers"),
            "inference.engine=remote gives no token ids and no log-probs, so nothing can be trained on it: evaluate it with "
            "`telescope eval URL --model NAME`",
        )
    support = config.rollout.support
    if inference.remote is not None and (support.top_k or support.min_p):
        yield Conflict(
            ("rollout.top_k", "rollout.min_p", "inference.engine"),
            "rollout.top_k and rollout.min_p are not in the chat completions API: leave them out for inference.engine=remote",
        )


def _inference(config: RunConfig) -> Iterator[Conflict]:
    yield from _remote(config)
    inference, workers = config.inference, config.cluster.inference_num_workers
    if workers % inference.tensor_parallel_size:
        yield Conflict(
            ("inference.tensor_parallel_size", "cluster.inference_num_workers"),
            f"inference.tensor_parallel_size={inference.tensor_parallel_size} must divide "
            f"cluster.inference_num_workers={workers}: a server has so many of these workers; ask for "
            f"{-(-workers // inference.tensor_parallel_size) * inference.tensor_parallel_size} workers, or another size",
        )
    if inference.quantization is not None and config.cluster.device == "cpu":
        yield Conflict(
            ("inference.quantization", "cluster.device"),
            f"inference.quantization={inference.quantization} needs a GPU, and cluster.device=cpu: leave it out",
        )
    if inference.quantization is not None and config.weight_sync.staging == "none" and config.model.lora is None:
        yield Conflict(
            ("inference.quantization", "weight_sync.staging"),
            f"inference.quantization={inference.quantization} quantises a whole version at once, and weight_sync.staging=none "
            "never has one: set weight_sync.staging=full, or host",
        )
    if inference.vllm and inference.engine != "vllm":
        yield Conflict(
            ("inference.vllm", "inference.engine"),
            f"inference.vllm.{next(iter(inference.vllm))} does nothing with inference.engine={inference.engine}: leave it out, "
            "or set inference=vllm",
        )
    for name, sentence in vllm_arguments.refusals(inference.vllm):
        yield Conflict((f"inference.vllm.{name}",), sentence)
    yield from _sleeping(config)
    port, servers = inference.base_port, config.servers
    if config.inference.http and port and port + servers - 1 > 65535:
        yield Conflict(
            ("inference.base_port", "cluster.inference_num_workers"),
            f"inference.base_port={port} leaves no ports for {servers} servers: lower it, or set it to 0 (any free)",
        )


def _sleeping(config: RunConfig) -> Iterator[Conflict]:
    """A sleeping server has no KV cache: nothing may be in flight while it sleeps."""
    name, asked = "inference.sleep_while_training", config.inference.sleep_while_training
    if asked == "off":
        return
    ahead = config.orchestrator.max_async_rollout
    if ahead:
        yield Conflict(
            (name, "orchestrator.max_async_rollout"),
            f"{name}={asked} needs orchestrator.max_async_rollout=0, and it is {ahead}: a server that generates while the "
            f"trainer trains can't sleep; set orchestrator.max_async_rollout=0, or {name}=off",
        )
    if config.cluster.device == "cpu" and config.inference.engine == "vllm":
        yield Conflict(
            (name, "cluster.device"),
            f"{name}={asked} is about a GPU's memory, and cluster.device=cpu: leave it out",
        )
    if config.model.lora is not None:
        yield Conflict(
            (name, "model.lora"),
            f"{name}={asked} is not possible with model.lora: each adapter is tried by a request before it is served, which a "
            f"sleeping server can't answer; set {name}=off",
        )
    if asked == "drop_weights" and config.inference.quantization is not None:
        yield Conflict(
            (name, "inference.quantization"),
            f"{name}=drop_weights loses what inference.quantization={config.inference.quantization} has computed at the start "
            f"and no version brings: set {name}=keep_weights",
        )


OF_SOME_TRANSPORTS = {
    "dir": "disk", "mode": "nccl", "bucket_mb": "nccl", "cpu_staging": "nccl", "pin_memory": "nccl", "init_timeout_s": "nccl",
}  # fmt: skip
"""Settings that mean nothing to a transport that does not read them, each with one that does. auto may be any of them, disk
only for adapters."""


def _transport(config: RunConfig) -> type[Transport] | None:
    """The class of the one that is named; None where `auto` chooses by where processes run."""
    asked = config.weight_sync.transport
    return None if asked == "auto" else plugins.load(plugins.TRANSPORTS, asked, config.plugin_path)


def _without_effect(config: RunConfig) -> Iterator[Conflict]:
    sync, transport = config.weight_sync, _transport(config)
    given = {
        name: value
        for name, value in sync.model_dump(include=set(OF_SOME_TRANSPORTS)).items()
        if value != WeightSyncSettings.model_fields[name].default
    }
    if transport is None and sync.transport_kwargs:
        yield Conflict(
            ("weight_sync.transport_kwargs", "weight_sync.transport"),
            "weight_sync.transport_kwargs are settings of one transport, and weight_sync.transport=auto: name the transport, "
            "or leave them out",
        )
    for name, value in given.items():
        unread = name == "dir" and config.model.lora is None if transport is None else name not in transport.reads
        if unread:
            yield Conflict(
                (f"weight_sync.{name}", "weight_sync.transport"),
                f"weight_sync.{name}={_typed(value)} does nothing with weight_sync.transport={sync.transport}: leave it out, "
                f"or set weight_sync.transport={OF_SOME_TRANSPORTS[name]}",
            )
    if "pin_memory" in given and not sync.cpu_staging:
        yield Conflict(
            ("weight_sync.pin_memory", "weight_sync.cpu_staging"),
            "weight_sync.pin_memory=false is about the memory of weight_sync.cpu_staging, which is false: leave it out, or set "
            "weight_sync.cpu_staging=true",
        )
    if "bucket_mb" in given and sync.mode == "per_tensor":
        yield Conflict(
            ("weight_sync.bucket_mb", "weight_sync.mode"),
            f"weight_sync.bucket_mb={sync.bucket_mb} does nothing with weight_sync.mode=per_tensor: leave it out, or set "
            "weight_sync.mode=flattened_bucket",
        )


WITHOUT_RECORDS = {
    "enable_return_routed_experts": "has vLLM listen to its routers too, in place of the server's own record",
    "speculative_config": "has tokens computed and dropped",
    "kv_transfer_config": "brings keys and values that were computed elsewhere",
}
"""Arguments of vLLM's engine with which no whole record of routing is kept, and why."""


def _router_replay(config: RunConfig) -> Iterator[Conflict]:
    if not config.trainer.router_replay:
        return
    if config.inference.engine != "vllm":
        yield Conflict(
            ("trainer.router_replay", "inference.engine"),
            "trainer.router_replay=true trains tokens through the experts that their server recorded, and "
            f"inference.engine={config.inference.engine} has none: set it to false, or use inference=vllm",
        )
    for name, why in WITHOUT_RECORDS.items():
        if given := config.inference.vllm.get(name):
            yield Conflict(
                ("trainer.router_replay", f"inference.vllm.{name}"),
                f"inference.vllm.{name}={_typed(given)} {why}, and trainer.router_replay=true needs the record of every token: "
                "leave it out, or set trainer.router_replay=false",
            )
    if config.backend_name == "fake":
        yield Conflict(
            ("trainer.router_replay", "backend"),
            "trainer.router_replay=true sends tokens through a model's experts, and backend=fake trains no model: set it to "
            "false, or use backend=fsdp",
        )
        return
    counts = read_counts(config.model.name)
    if counts is not None and not counts.experts:
        yield Conflict(
            ("trainer.router_replay", "model.name"),
            f"trainer.router_replay=true is for models with experts, and by its config.json model.name={config.model.name} has "
            "none: set it to false",
        )


def _weights(config: RunConfig) -> Iterator[Conflict]:
    sync, transport = config.weight_sync, _transport(config)
    if config.model.lora is not None and not config.backend.trains_adapters:
        yield Conflict(
            ("model.lora", "backend"),
            f"backend={config.backend_name} trains no adapters: set model.lora=null, or backend=fsdp",
        )
    if config.model.lora is not None and sync.in_flight == "recompute":
        yield Conflict(
            ("weight_sync.in_flight", "model.lora"),
            "weight_sync.in_flight=recompute is not possible with model.lora: running requests keep the adapter that they "
            "began with; set weight_sync.in_flight=continue, or abort",
        )
    if config.model.lora is not None and transport is not None and not transport.carries_adapters:
        yield Conflict(
            ("weight_sync.transport", "model.lora"),
            f"weight_sync.transport={sync.transport} fills the model's own parameters, and model.lora pushes adapters, which a "
            "server loads beside it: set weight_sync.transport=auto (shared memory), or disk for servers on other hosts",
        )
    if sync.in_flight == "recompute" and not sync.reset_prefix_cache:
        yield Conflict(
            ("weight_sync.in_flight", "weight_sync.reset_prefix_cache"),
            "weight_sync.in_flight=recompute computes running requests anew because their keys and values are old, and "
            "weight_sync.reset_prefix_cache=false lets them find these again: set weight_sync.reset_prefix_cache=true, or "
            "weight_sync.in_flight=continue",
        )
    only_on = None if transport is None else transport.device
    if only_on == "gpu" and config.cluster.device == "cpu":
        yield Conflict(
            ("weight_sync.transport", "cluster.device"),
            f"weight_sync.transport={sync.transport} needs GPUs, and cluster.device=cpu: set weight_sync.transport=auto",
        )
    if only_on == "cpu" and config.cluster.device == "gpu":
        yield Conflict(
            ("weight_sync.transport", "cluster.device"),
            f"weight_sync.transport={sync.transport} is for CPUs, and cluster.device=gpu: set weight_sync.transport=auto",
        )


def _training_dtype(config: RunConfig) -> Iterator[Conflict]:
    if sentence := refuse_training_dtype(config):
        yield Conflict(("model.dtype", "model.lora"), sentence)
    yield from (Conflict(paths, sentence) for paths, sentence in refuse_moments(config))


def _typed(value: object) -> str:
    """As it is typed on a command line."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _backend(config: RunConfig) -> Iterator[Conflict]:
    cluster = config.cluster
    ranks, shard = cluster.trainer_num_workers, config.backend.ranks_a_shard
    found = list(config.backend.run_errors(ranks=ranks, adapters=config.model.lora is not None, on_cpu=cluster.device == "cpu"))
    yield from (Conflict(paths, sentence) for paths, sentence in found)
    if ranks % shard and not found:  # the backend's own sentence names its setting
        yield Conflict(
            ("cluster.trainer_num_workers", "backend"),
            f"cluster.trainer_num_workers={ranks} must be a multiple of {shard}, as so many ranks of backend="
            f"{config.backend_name} train the same trajectories together: set it to {-(-ranks // shard) * shard}",
        )
    counts = read_counts(config.model.name)
    if counts is not None:
        yield from (Conflict(paths, sentence) for paths, sentence in config.backend.model_errors(counts))


def _checkpoints(config: RunConfig) -> Iterator[Conflict]:
    checkpoint = config.checkpoint
    if checkpoint.resume is not False and config.run_dir is None:
        yield Conflict(
            ("checkpoint.resume", "run_dir"),
            f"checkpoint.resume={str(checkpoint.resume).lower()} goes on in the directory of an earlier run: name it with "
            "run_dir=…, or leave checkpoint.resume out",
        )
    if checkpoint.dir is not None and config.run_dir is not None and _is_put_aside(checkpoint.dir, config.run_dir):
        yield Conflict(
            ("checkpoint.dir", "run_dir"),
            f"checkpoint.dir={checkpoint.dir} lies in run_dir={config.run_dir}, whose files are put aside when the run goes "
            "on: leave it out for the folder checkpoints there, or name one elsewhere",
        )
    if checkpoint.keep_every is not None and checkpoint.keep_last is None:
        yield Conflict(
            ("checkpoint.keep_every", "checkpoint.keep_last"),
            f"checkpoint.keep_every={checkpoint.keep_every} does nothing where checkpoint.keep_last is not set, as all are "
            "kept then: set checkpoint.keep_last=2, say, or leave it out",
        )
    slurm = config.cluster.slurm
    if checkpoint.every and config.end_saves.any and slurm is not None and checkpoint.stop_timeout_s > slurm.save_s:
        yield Conflict(
            ("checkpoint.stop_timeout_s", "cluster.slurm.stop_before_s"),
            f"checkpoint.stop_timeout_s={checkpoint.stop_timeout_s:g} does not fit before the walltime: of "
            f"cluster.slurm.stop_before_s={slurm.stop_before_s} a step and its save get {slurm.save_s:g} s; set "
            f"cluster.slurm.stop_before_s={slurm.before_for(checkpoint.stop_timeout_s)}, or "
            f"checkpoint.stop_timeout_s={slurm.save_s:g}",
        )
    if checkpoint.at_end == "state" and not checkpoint.save_training_state:
        yield Conflict(
            ("checkpoint.at_end", "checkpoint.save_training_state"),
            "checkpoint.at_end=state saves the training's state at the end, and checkpoint.save_training_state=false saves the "
            "weights alone: leave one of them out",
        )
    if not checkpoint.every:
        deletes = () if config.saves else ("keep_last", "keep_every")
        place = () if checkpoint.resume or config.saves else ("dir",)
        for name in ("keep_best", *deletes, *place):
            if (given := getattr(checkpoint, name)) is not None:
                yield Conflict(
                    (f"checkpoint.{name}", "checkpoint.every"),
                    f"checkpoint.{name}={given} does nothing without checkpoint.every: set checkpoint.every=10, say, or leave "
                    "it out",
                )


def _keep_best(config: RunConfig) -> Iterator[Conflict]:
    asked, best = config.checkpoint.keep_best, config.checkpoint.best
    if best is None:
        return
    evals = {one.name: one for one in config.active_evals}
    one, path = evals.get(best.eval), "checkpoint.keep_best"
    if one is None:
        known = f"its evals are {', '.join(evals)}" if evals else "it has none; set eval.every"
        yield Conflict((path,), f"{path}={asked} names no eval of the run: {known}")
    elif not one.is_due_between(config.number_of_steps):
        yield Conflict(
            (path,),
            f"{path}={asked} has nothing to choose from: the eval {one.name} is not due between the first step and the last of "
            f"{config.number_of_steps}; set evals.{one.name}.every or eval.every, or leave {path} out",
        )
    elif best.k is not None and best.k not in one.pass_at_k:
        yield Conflict(
            (path,),
            f"{path}={asked} needs pass@{best.k} of the eval {one.name}, whose pass_at_k is {list(one.pass_at_k)}: add "
            f"{best.k} to it",
        )


def _stop_after(config: RunConfig) -> Iterator[Conflict]:
    limit, measure = config.eval.stop_after, config.stop_measure
    if limit is None:
        return
    if measure is None:
        yield Conflict(
            ("eval.stop_after",),
            f"eval.stop_after={limit} does nothing without an eval: set eval.every, or leave it out",
        )
        return
    one = next((one for one in config.active_evals if one.name == measure.eval), None)
    if one is None:
        return  # which keep_best is refused for
    played = one.count_before(config.number_of_steps)
    if played <= limit:
        yield Conflict(
            ("eval.stop_after",),
            f"eval.stop_after={limit} does nothing: the eval {one.name} is played {played} times before the last of "
            f"{config.number_of_steps} steps, and the first of these gains; lower evals.{one.name}.every or eval.every, or "
            "leave it out",
        )


def _is_put_aside(directory: str, run_dir: str) -> bool:
    run, place = Path(run_dir).expanduser().absolute(), Path(os.path.normpath(directory))
    return place.is_relative_to(run) and not place.is_relative_to(run / "checkpoints")


def warnings(config: RunConfig) -> list[str]:
    """Sentences about a configuration that runs, but hardly as meant."""
    asynchronous = config.orchestrator.max_async_rollout > 0
    found = config.algorithm.warnings(asynchronous=asynchronous, updates=config.trainer.updates_per_step)
    if config.trainer.learning_rate == 0:
        found = [*found, "trainer.learning_rate=0: the weights will not change"]
    if sentence := warn_of_training_dtype(config):
        found = [*found, sentence]
    if config.inference.quantization is not None and not getattr(config.algorithm, "all_corrections", ()):
        found = [
            *found,
            f"inference.quantization={config.inference.quantization}: what samples is coarser than what is trained, and "
            "nothing corrects for it; set algorithm.use_tis=true, or another of algorithm.corrections",
        ]
    return [*found, *find_literal_secrets(config)]
