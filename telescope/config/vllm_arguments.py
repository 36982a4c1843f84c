"""What `inference.vllm` may hold: arguments of vLLM's engine that Telescope has no setting of its own for.

Owns which arguments are ours and the setting to use instead, and which names the installed vLLM knows, read from its source:
to import it takes longer than a command line may. Refuses to know what an argument means.
"""

from __future__ import annotations

import ast
import importlib.util
import math
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from telescope.config.words import did_you_mean, typed

SETTING_OF = {
    "model": "model.name",
    "served_model_name": "model.name",
    "tokenizer": "model.name",
    "trust_remote_code": "model.trust_remote_code",
    "enable_lora": "model.lora",
    "max_lora_rank": "model.lora.rank",
    "seed": "seed",
    "dtype": "inference.dtype",
    "quantization": "inference.quantization",
    "max_model_len": "inference.max_model_len",
    "max_num_seqs": "inference.max_num_seqs",
    "max_num_batched_tokens": "inference.max_num_batched_tokens",
    "scheduling_policy": "inference.scheduling_policy",
    "enable_prefix_caching": "inference.enable_prefix_caching",
    "enforce_eager": "inference.cuda_graphs",
    "reasoning_parser": "inference.reasoning_parser",
    "otlp_traces_endpoint": "inference.enable_tracing and inference.otlp_receiver_port",
    "max_loras": "inference.max_loras",
    "max_cpu_loras": "inference.max_loras",
    "tensor_parallel_size": "inference.tensor_parallel_size",
    "pipeline_parallel_size": "inference.tensor_parallel_size",
    "data_parallel_size": "cluster.inference_num_workers",
    "gpu_memory_utilization": "inference.gpu_memory_utilization",
    "kv_cache_memory_bytes": "inference.gpu_memory_utilization, or inference.cpu_kv_cache_mb on a CPU",
    "enable_sleep_mode": "inference.sleep_while_training",
}
"""Arguments that follow from a setting."""
FIXED = {
    "logprobs_mode": "the trainer needs the log-probs after temperature",
    "generation_config": "sampling is what rollout.temperature, top_k, top_p and min_p say",
    "worker_extension_cls": "it is what brings new weights into the engine",
    "disable_log_stats": "lanes and the times of each answer follow from vLLM's statistics",
    "distributed_executor_backend": "weights reach the workers through the one that Telescope chooses",
    "hf_token": "a key must not stand in a configuration: put it into the environment variable HF_TOKEN",
}
"""Arguments that can't be others, and why."""


def refusals(given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(argument, sentence) of each that can't be given; unknown names only where vLLM is installed."""
    known = known_arguments() if given else None
    for name, value in given.items():
        path = f"inference.vllm.{name}"
        if name in SETTING_OF:
            yield name, f"{path}={typed(value)} follows from a setting of Telescope's: set {SETTING_OF[name]} instead"
        elif name in FIXED:
            shown = path if name == "hf_token" else f"{path}={typed(value)}"
            yield name, f"{shown} can't be given: {FIXED[name]}"
        elif _holds_no_number(value):
            yield name, f"{path} holds infinity or NaN, which no file of a run can: give a number"
        elif known is not None and name not in known:
            yield name, f"{path}={typed(value)}: the engine of the installed vLLM has no such argument.{_nearest(name, known)}"


def _holds_no_number(value: Any) -> bool:
    """Infinity or NaN, at any depth: JSON has neither, so they would reach the engine as null."""
    if isinstance(value, Mapping):
        return any(map(_holds_no_number, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_holds_no_number, value))
    return isinstance(value, float) and not math.isfinite(value)


def merged(ours: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The engine's arguments; of a mapping that both have (`compilation_config`) the given keys alone are replaced."""
    both = {name for name in ours.keys() & given.keys() if isinstance(ours[name], dict) and isinstance(given[name], dict)}
    return {**ours, **given, **{name: {**ours[name], **given[name]} for name in both}}


@cache
def known_arguments() -> frozenset[str] | None:
    """The fields of vLLM's `AsyncEngineArgs`, e.g. `max_num_partial_prefills`; None where vLLM is not installed, or is built
    another way."""
    found = importlib.util.find_spec("vllm")
    for place in found.submodule_search_locations or () if found is not None else ():
        source = Path(place, "engine", "arg_utils.py")
        if source.is_file():
            return _fields(ast.parse(source.read_text(encoding="utf-8"))) or None
    return None


def _fields(module: ast.Module) -> frozenset[str]:
    classes = [
        node for node in module.body if isinstance(node, ast.ClassDef) and node.name in ("EngineArgs", "AsyncEngineArgs")
    ]
    return frozenset(
        line.target.id
        for node in classes
        for line in node.body
        if isinstance(line, ast.AnnAssign)
        and isinstance(line.target, ast.Name)
        and "ClassVar" not in ast.unparse(line.annotation)
    )


def _nearest(name: str, known: frozenset[str]) -> str:
    near = did_you_mean(name.replace("-", "_"), known)
    return near if near.startswith(" Did you mean") else ""
