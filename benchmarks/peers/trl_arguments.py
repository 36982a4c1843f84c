"""How TRL is set for the work: arguments of its trainers and of its vLLM server, each with the reason. Pure.

Names and advice are those of TRL 1.16.0: `trl/trainer/grpo_config.py`, `trl/experimental/async_grpo/async_grpo_config.py`,
`trl/scripts/vllm_serve.py`, and of its documentation "Speeding up training", "vLLM integration", "Asynchronous GRPO" and
"Kernels Hub". An argument that another version does not know ends the run with its name.

Two variants: `defaults` is the work and what a mode cannot start without; `tuned` adds what those pages advise for speed.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarks.peers.workload import Workload

Mode = Literal["server", "colocate", "async", "transformers"]
Variant = Literal["defaults", "tuned"]
CARDS: dict[str, int] = {"server": 2, "async": 2, "colocate": 1, "transformers": 0}
DEFAULT_PER_DEVICE = 8
"""`per_device_train_batch_size` of TRL's own."""
LARGEST_TUNED_ROW_TOKENS = {"4B": 9_216, "colocate": 18_432}
"""Tokens of a forward without checkpointing, of the model or where the card is shared; elsewhere `ROW_TOKENS`. By estimate of
memory on a card of 139 GiB: an activation takes 1.5 MB a token of 0.6B and 4.7 MB of 4B. `--per-device` sets another."""
ROW_TOKENS = 36_864


@dataclass
class TrlSettings:
    """`trainer`: keyword arguments of GRPOConfig or AsyncGRPOConfig; `server`: those of `vllm serve`."""

    trainer: dict[str, Any]
    server: list[str] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    """Advice that was not taken, and why."""

    def set(self, name: str, value: Any, why: str) -> None:
        self.trainer[name], self.reasons[name] = value, why


@dataclass(frozen=True)
class TrlChoices:
    """What the user of the benchmark may choose. `attention`: auto, or a name for `attn_implementation`."""

    mode: Mode
    variant: Variant
    steps: int
    masters: str = "float32"
    attention: str = "auto"
    hub_kernels: bool = False
    """Whether this machine reaches the hub that the package `kernels` loads from."""
    per_device: int | None = None
    port: int = 8000
    group_port: int = 51_216


def arguments(work: Workload, choices: TrlChoices, modules: Collection[str], out: Path) -> TrlSettings:
    """`modules`: which of flash_attn and kernels TRL's Python has."""
    found = _work(work, choices, out)
    if choices.variant == "tuned":
        _tune(found, work, choices, modules)
    per_device = found.trainer["per_device_train_batch_size"]
    if work.rollouts % per_device:
        raise ValueError(f"per_device_train_batch_size={per_device} does not divide the {work.rollouts} rollouts of a step")
    found.set("gradient_accumulation_steps", work.rollouts // per_device, "one update a step, of all its rollouts")
    if choices.mode in ("server", "async"):
        found.server = _server(work, choices)
    return found


def _work(work: Workload, choices: TrlChoices, out: Path) -> TrlSettings:
    found = TrlSettings({"output_dir": str(out), "max_steps": choices.steps, "seed": 0})
    found.set("learning_rate", work.learning_rate, "the work's")
    found.set("lr_scheduler_type", "constant", "as Telescope's")
    found.set("num_generations", work.group_size, "the work's")
    found.set("max_completion_length", work.answer_tokens, "the work's")
    found.set("per_device_train_batch_size", choices.per_device or min(DEFAULT_PER_DEVICE, work.rollouts), "TRL's default")
    found.set("bf16", work.compute_dtype == "bfloat16", "the work's: autocast of forward and backward")
    for name, value in (("save_strategy", "no"), ("report_to", "none"), ("logging_steps", 1)):
        found.set(name, value, "nothing is stored; each step is told to the benchmark")
    if choices.mode == "async":
        found.set("dtype", choices.masters, "the precision of the weights that are updated")
        found.set("vllm_server_base_url", f"http://127.0.0.1:{choices.port}", "where the benchmark's server listens")
        found.set("token_budget", 0, "a step is then exactly the work's number of rollouts, not one that token counts decide")
        return found
    found.set("model_init_kwargs", {"dtype": choices.masters}, "the precision of the weights that are updated")
    if choices.mode == "transformers":
        found.set("use_cpu", work.compute_dtype == "float32", "a dry run")
        return found
    found.set("use_vllm", True, "what its pages advise first of all")
    found.set("vllm_mode", choices.mode, "the mode that is measured")
    if choices.mode == "server":
        found.set("vllm_server_base_url", f"http://127.0.0.1:{choices.port}", "where the benchmark's server listens")
        found.set("vllm_group_port", choices.group_port, "a free port")
    return found


def _tune(found: TrlSettings, work: Workload, choices: TrlChoices, modules: Collection[str]) -> None:
    found.set("gradient_checkpointing", False, "GRPOConfig: checkpointing trains some 20 % slower, and there is memory for it")
    if choices.per_device is None:
        limit = min(LARGEST_TUNED_ROW_TOKENS.get(key, ROW_TOKENS) for key in (work.shape, choices.mode))
        fits = [size for size in (64, 32, 16, 8, 4, 2, 1) if size * work.row <= limit and work.rollouts % size == 0]
        found.set("per_device_train_batch_size", fits[0], "as many samples a forward as memory holds without checkpointing")
    if choices.mode == "async":
        found.left_out["attn_implementation"] = "AsyncGRPOTrainer brings its own attention, FlashAttention 3 from the hub"
        found.left_out["use_kernels"] = "AsyncGRPOTrainer is left with the layers that it was made with"
        return
    _tune_attention(found, choices, modules)
    if choices.mode == "colocate":
        found.set("vllm_max_model_length", work.row, "its page: the longest prompt and answer, not the model's whole context")
        found.set("vllm_gpu_memory_utilization", 0.45, "room in the KV cache for all rollouts of a step; Telescope has as much")
        found.left_out["vllm_enable_sleep_mode"] = (
            "GRPOConfig: saves memory, and adds the time to wake up at every step; here there is memory for both"
        )
    found.left_out["vllm_importance_sampling_correction"] = (
        "stays on, as by default: Telescope corrects for the sampler's precision too. It costs a forward a step"
    )


def _tune_attention(found: TrlSettings, choices: TrlChoices, modules: Collection[str]) -> None:
    """Its page advises FlashAttention, from the hub or installed; and the hub's kernels for layers, in place of Liger."""
    chosen, model = choices.attention, found.trainer.get("model_init_kwargs", {})
    if chosen == "auto" and "flash_attn" in modules:
        chosen = "flash_attention_2"
    elif chosen == "auto" and choices.hub_kernels and "kernels" in modules:
        chosen = "kernels-community/flash-attn2"
    if chosen != "auto":
        model = {**model, "attn_implementation": chosen}
    else:
        found.left_out["attn_implementation"] = "neither flash_attn nor a hub of kernels can be had here: transformers' sdpa"
    if choices.hub_kernels and "kernels" in modules:
        model = {**model, "use_kernels": True}
    else:
        found.left_out["use_kernels"] = "no hub of kernels can be had here (--hub-kernels says that one can)"
    found.set("model_init_kwargs", model, "Speeding up training: optimised attention, and the hub's kernels of layers")


def _server(work: Workload, choices: TrlChoices) -> list[str]:
    """`vllm serve` as TRL's page starts it; tuned: with the length that is needed, for a larger KV cache."""
    tuned = ["--max-model-len", str(work.row)] if choices.variant == "tuned" else []
    return [
        "--host", "127.0.0.1", "--port", str(choices.port), "--weight-transfer-config", '{"backend": "nccl"}',
        "--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1", *tuned,
    ]  # fmt: skip


def handicaps(choices: TrlChoices) -> tuple[str, ...]:
    """What stays unequal, for or against TRL."""
    found = []
    if choices.masters == "bfloat16":
        found.append("TRL updates weights and moments in bfloat16: less to read and send, and small steps are lost.")
    if choices.masters == "float32" and choices.mode in ("server", "async"):
        found.append("TRL sends weights in the precision that it updates, float32: twice the bytes of Telescope's bfloat16.")
    if choices.mode in ("server", "colocate"):
        found.append("TRL's GRPOTrainer works by turns: its samples are always fresh, and one side waits for the other.")
    if choices.mode == "colocate":
        found.append("TRL fixes max_num_batched_tokens=4096 in this mode.")
    if choices.mode == "async":
        found.append("AsyncGRPOTrainer forwards a group's prompt once for all its samples; it counts here once for each.")
    if choices.mode == "transformers":
        found.append("transformers generates here: this shows that the plumbing works, and says nothing about TRL's speed.")
    return tuple(found)
