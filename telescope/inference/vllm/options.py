"""Which environment variables and engine arguments a server's vLLM gets. Settings in, dictionaries out; no vllm import,
and of files a checkpoint's headers alone.

The environment must stand before vllm is imported, so a process that will serve calls `vllm_environment` first of all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from telescope.config.secrets import reveal_all
from telescope.config.sections import InferenceSettings, ModelSettings, WeightSyncSettings
from telescope.config.vllm_arguments import merged
from telescope.inference.vllm.adapters import vllm_rank
from telescope.inference.vllm.model_tensors import checkpoint_tensors, is_tied, turn_bytes, version_bytes
from telescope.weights.base import Transport

Device = Literal["cpu", "gpu"]

CPU_MAX_NUM_SEQS = 256
GPU_MAX_NUM_SEQS = 1024
CPU_MAX_BATCHED_TOKENS = 8192
GRAPH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Batch sizes of captured decode steps; a batch is padded to the next. Few, because each takes time at the start."""
EXTENSION = "telescope.inference.vllm.worker_extension.WeightExtension"
ROUTING_EXTENSION = "telescope.inference.vllm.routing_extension.RoutingExtension"


@dataclass(frozen=True)
class ServerPlan:
    """All that a vLLM engine needs to know of a run. `lanes`: requests that may be in flight at once."""

    model: ModelSettings
    folder: Path
    inference: InferenceSettings
    device: Device
    lanes: int
    seed: int
    run: str
    """The run's id: names its segments in shared memory."""
    name: str = "server-0"
    """The server's name in the run, which its workers use in weight groups."""
    transport: Transport | None = None
    """By which versions come, as the run's plan has it; None: not known."""
    plugin_path: tuple[str, ...] = ()
    """Where a transport of the user's own lies."""
    version: int = 0
    """Of the weights in `folder`."""
    router_replay: bool = False
    """Whether answers bring the experts that their tokens went to."""


def vllm_environment(device: Device, given: Mapping[str, str]) -> dict[str, str]:
    """Variables to set; what the user has set already (`given`) is kept where it is a matter of taste, not of working at all.

    On a CPU one thread: two that spin for each other on contended cores were ten times slower.
    """
    taste = {"VLLM_LOGGING_LEVEL": "WARNING", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}
    if device == "cpu":
        taste |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    needed = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "DO_NOT_TRACK": "1",
        "VLLM_SERVER_DEV_MODE": "0",  # its HTTP routes pause the engine and change weights
        "HF_HUB_OFFLINE": "1",  # the model is a local folder by now
        "TOKENIZERS_PARALLELISM": "false",  # we fork
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if device == "cpu" else "1",  # on a CPU: allows the executor `uni`; not more
    }
    return needed | {key: value for key, value in taste.items() if key not in given}


def engine_arguments(plan: ServerPlan) -> dict[str, Any]:
    """Keyword arguments of vLLM's AsyncEngineArgs: what follows from settings, then what the user gives to the engine itself.

    Each that is set here is refused there: `telescope.config.vllm_arguments` says which, with the setting to use."""
    settings = plan.inference
    arguments: dict[str, Any] = {
        "model": str(plan.folder),
        "served_model_name": [plan.model.name],
        "trust_remote_code": plan.model.trust_remote_code,
        "dtype": served_dtype(plan),
        "seed": plan.seed % 2**32,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_num_seqs or _max_num_seqs(plan),
        "scheduling_policy": settings.scheduling_policy,
        "enable_prefix_caching": settings.enable_prefix_caching,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",  # sampling as the request says, not as the model's folder suggests
        "worker_extension_cls": ROUTING_EXTENSION if plan.router_replay else EXTENSION,
        "disable_log_stats": False,  # the queue and generation times of each answer come from them
    } | _graphs(plan)
    if settings.quantization is not None:
        arguments["quantization"] = settings.quantization
    if settings.reasoning_parser is not None:
        arguments["reasoning_parser"] = settings.reasoning_parser
    if settings.enable_tracing:
        arguments["otlp_traces_endpoint"] = f"http://127.0.0.1:{settings.otlp_receiver_port}/v1/traces"
    if (lora := plan.model.lora) is not None:
        slots = {"max_loras": settings.max_loras, "max_cpu_loras": settings.max_loras + 1}
        arguments |= {"enable_lora": True, "max_lora_rank": vllm_rank(lora.rank), **slots}
    if settings.tensor_parallel_size > 1:
        arguments["tensor_parallel_size"] = settings.tensor_parallel_size
    if batched := _max_num_batched_tokens(plan):
        arguments["max_num_batched_tokens"] = batched
    if plan.device == "cpu":
        arguments["distributed_executor_backend"] = "uni" if settings.tensor_parallel_size == 1 else "mp"
        arguments["kv_cache_memory_bytes"] = settings.cpu_kv_cache_mb * 2**20
    else:
        arguments["gpu_memory_utilization"] = settings.gpu_memory_utilization
        if settings.sleep_while_training != "off":
            arguments["enable_sleep_mode"] = True
    return merged(arguments, reveal_all(settings.vllm))


class NoRoom(ValueError):
    """The card can't hold what the settings ask for; the sentence has the numbers and the remedy."""


def share_beside(share: float, card_bytes: int, weights_bytes: int, spare_bytes: int, purpose: str) -> float:
    """What vLLM may take of a card of which `share` is the server's: the buffers of updates are charged against it. `purpose`:
    what needs them, e.g. `weight_sync.staging=full`.

    Raises `NoRoom` where the weights themselves would then not fit.
    """
    left = share * card_bytes - spare_bytes
    if left <= weights_bytes:
        raise NoRoom(
            f"{purpose} needs {spare_bytes / 1e9:.2f} GB beside {weights_bytes / 1e9:.2f} GB of weights, and "
            f"inference.gpu_memory_utilization={share:g} gives the server {share * card_bytes / 1e9:.2f} of "
            f"{card_bytes / 1e9:.2f} GB: none is left for the KV cache; set weight_sync.staging=host, or raise the share"
        )
    return left / card_bytes


def spare_bytes(plan: ServerPlan, sync: WeightSyncSettings) -> int:
    """Bytes on each of a server's cards that updates need beside vLLM: the staging buffer, or the two buckets in which a
    broadcast comes that waits elsewhere. 0: what is in the card already, or in host memory, is copied straight to its place."""
    buckets_wait = plan.transport is not None and plan.transport.cost.server_buckets
    if sync.staging != "full" and not buckets_wait:
        return 0
    checkpoint, tied, dtype = checkpoint_tensors(plan.folder), is_tied(plan.folder), served_dtype(plan)
    if sync.staging == "full":
        return version_bytes(checkpoint, tied, dtype)
    return turn_bytes(checkpoint, tied, dtype, sync.bucket_bytes)


def logprob_bytes(plan: ServerPlan) -> int:
    """Bytes on a server's first card in which log-probs are kept until a request ends: a float32 for each token of each."""
    return 4 * (plan.inference.max_num_seqs or _max_num_seqs(plan)) * (plan.inference.max_model_len + 1)


def served_dtype(plan: ServerPlan) -> str:
    """`auto` is bfloat16 on a GPU and the master weights' precision on a CPU."""
    if plan.inference.dtype != "auto":
        return plan.inference.dtype
    return "bfloat16" if plan.device == "gpu" else plan.model.dtype


def _graphs(plan: ServerPlan) -> dict[str, Any]:
    """CUDA graphs of whole decode steps without compilation start in half the time and decode as fast (docs/inference.md)."""
    kind = plan.inference.cuda_graphs
    if plan.device == "cpu" or kind == "off":
        return {"enforce_eager": True}
    if kind == "default":
        return {"enforce_eager": False}
    most = plan.inference.max_num_seqs or _max_num_seqs(plan)
    sizes = [size for size in GRAPH_SIZES if size < most] + [min(most, GRAPH_SIZES[-1])]
    compilation = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sorted(set(sizes))}
    return {"enforce_eager": False, "compilation_config": compilation}


def _max_num_seqs(plan: ServerPlan) -> int:
    """As many as may be in flight, up to what a step of the device carries well."""
    return max(1, min(plan.lanes, CPU_MAX_NUM_SEQS if plan.device == "cpu" else GPU_MAX_NUM_SEQS))


def _max_num_batched_tokens(plan: ServerPlan) -> int | None:
    """On a CPU enough for a whole wave of short prompts in one step; on a GPU vLLM's own choice."""
    if plan.inference.max_num_batched_tokens is not None or plan.device == "gpu":
        return plan.inference.max_num_batched_tokens
    return max(CPU_MAX_BATCHED_TOKENS, plan.inference.max_model_len)
