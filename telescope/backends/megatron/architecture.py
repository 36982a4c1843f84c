"""From a model's config.json to megatron-core's configuration of it, and what of it must be refused.

Owns both. What is not computed here as Hugging Face's own model computes it is refused in a sentence: nothing is left out.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from telescope.backends.common.models import ModelCheckpoint, UnfitModel, model_files, parameters_on_meta, refuse_quantised
from telescope.backends.common.rotations import check_rotations
from telescope.backends.megatron import FP8_BLOCK
from telescope.backends.megatron.rules import ARCHITECTURES, EXPERT, ModelDimensions, files, named
from telescope.config.models import (
    ModelBroken,
    ModelCounts,
    ModelNotFound,
    check_weights,
    model_folder,
    read_json_object,
)
from telescope.maths.flops import TrainingWork

if TYPE_CHECKING:
    from telescope.backends.base import Job
    from telescope.backends.megatron import Megatron

log = logging.getLogger(__name__)

OFF = "set it to false"


@dataclass(frozen=True)
class Architecture:
    """A model that can be trained here, without its weights."""

    config: Any
    """transformers' own."""
    facts: ModelDimensions
    shapes: dict[str, tuple[int, ...]]
    """Of its tensors by name, in the order of Hugging Face's model; tied ones once."""
    windows: tuple[int | None, ...]
    """Of each layer: tokens that a token sees, itself included; None: all."""
    rotation: nn.Module
    """Hugging Face's module of the angles: (something of a dtype, position ids [1, T]) -> cosines and sines [1, T, D]."""
    files: ModelCheckpoint

    @property
    def parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values())

    @property
    def head_layers(self) -> float:
        """As many layers as cost what the head does."""
        in_layers = self._trained("model.layers.")
        return math.prod(self.shapes["model.embed_tokens.weight"]) * self.facts.layers / in_layers

    def _trained(self, prefix: str = "") -> float:
        """Parameters whose name begins so; of experts those count that a token goes to."""
        active = self.facts.top_k / self.facts.experts if self.facts.experts else 1.0
        sizes = ((name, math.prod(shape)) for name, shape in self.shapes.items() if name.startswith(prefix))
        return sum(size * (active if EXPERT in name else 1.0) for name, size in sizes)

    @property
    def work(self) -> TrainingWork:
        """Of experts those count that a token goes to; an embedding that is only looked up does not."""
        facts = self.facts
        trained = self._trained()
        if not facts.tied:
            trained -= math.prod(self.shapes["model.embed_tokens.weight"])
        return TrainingWork.of(trained=trained, layers=facts.layers, heads=facts.heads, head_dim=facts.head_dim)


def read(settings: Megatron, job: Job) -> Architecture:
    """Raises `UnfitModel`, and what telescope.config.models raises on broken folders."""
    from transformers import AutoConfig, AutoModelForCausalLM

    name = job.model.name
    try:
        folder = model_folder(name)
    except ModelBroken:
        raise
    except ModelNotFound as error:
        raise UnfitModel(str(error)) from error
    check_weights(name, folder)
    refuse_quantised(name, folder)
    if job.model.trust_remote_code:
        _refuse_own_code(name, folder)
    try:
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UnfitModel(f"model.name={name}: it can't be loaded: {said}") from error
    kind = getattr(config, "model_type", None)
    if kind not in ARCHITECTURES:
        raise UnfitModel(
            f"model.name={name}: backend=megatron trains {named()}, and this is a model of type {kind}: set backend=fsdp"
        )
    for problem in _strange(config, settings):
        raise UnfitModel(f"model.name={name}: {problem}")
    if job.trainer.router_replay and not _facts(config).expert_layers:
        raise UnfitModel(f"model.name={name}: trainer.router_replay=true is for models with experts, and this has none: {OFF}")
    with parameters_on_meta():
        lm = AutoModelForCausalLM.from_config(config)
    check_rotations(config, type(lm).__name__, job)
    there = model_files(folder)
    shapes = {each: tuple(parameter.shape) for each, parameter in lm.named_parameters()}
    if absent := [each for each in files(shapes, _facts(config)) if each not in there]:
        raise UnfitModel(
            f"model.name={name}: {absent[0]} is not in its safetensors files under this name, and backend=megatron reads no "
            "others: save the model with transformers' save_pretrained, or set backend=fsdp"
        )
    if extra := sorted(set(there) - set(files(shapes, _facts(config))) - set(lm.state_dict())):
        log.warning("%s: its files have %d tensors that the model has no use for, %s first", name, len(extra), extra[0])
    return Architecture(
        config=config,
        facts=_facts(config),
        shapes=shapes,
        windows=_windows(config),
        rotation=lm.get_decoder().rotary_emb,
        files=ModelCheckpoint(name, there),
    )


def _refuse_own_code(name: str, folder: Path) -> None:
    """The server and backend=fsdp run the model that its files bring, and here transformers' own of that type would be."""
    brought = read_json_object(name, folder / "config.json").get("auto_map") or {}
    if any(each in brought for each in ("AutoConfig", "AutoModelForCausalLM")):
        raise UnfitModel(
            f"model.name={name}: its config.json brings code of its own (auto_map), which model.trust_remote_code=true runs "
            "and backend=megatron does not: set backend=fsdp, or model.trust_remote_code=false to train transformers' own"
        )


def _facts(config: Any) -> ModelDimensions:
    return ModelDimensions(
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        groups=config.num_key_value_heads,
        head_dim=_head_dim(config),
        vocabulary=config.vocab_size,
        tied=config.tie_word_embeddings,
        qkv_bias=config.model_type == "qwen2",
        head_norms=config.model_type in ("qwen3", "qwen3_moe"),
        **_expert_facts(config),
    )


def _expert_facts(config: Any) -> dict[str, Any]:
    if config.model_type != "qwen3_moe":
        return {}
    return {
        "experts": config.num_experts,
        "expert_layers": frozenset(
            layer
            for layer in range(config.num_hidden_layers)
            if config.num_experts > 0 and layer not in config.mlp_only_layers and (layer + 1) % config.decoder_sparse_step == 0
        ),
        "top_k": config.num_experts_per_tok,
        "expert_width": config.moe_intermediate_size,
        "normalised": config.norm_topk_prob,
    }


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _windows(config: Any) -> tuple[int | None, ...]:
    """As Hugging Face's attention of each architecture is told them."""
    layers = int(config.num_hidden_layers)
    if config.model_type in ("mistral", "qwen3_moe"):
        window: int | None = getattr(config, "sliding_window", None)
        return (window,) * layers
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * layers
    return tuple(config.sliding_window if kind == "sliding_attention" else None for kind in kinds)


def _strange(config: Any, settings: Megatron) -> Iterator[str]:
    """What of the configuration is not computed here, or does not divide."""
    size, facts = settings.tensor_parallel_size, _facts(config)
    counts = ModelCounts(facts.layers, facts.heads, facts.groups, facts.experts if facts.expert_layers else 0)
    yield from (sentence for _, sentence in settings.model_errors(counts))
    for name in ("attention_bias", "mlp_bias"):
        if getattr(config, name, False):
            yield f"its config.json has {name}=true, which backend=megatron does not compute: set backend=fsdp"
    if config.hidden_act != "silu":
        yield f"its config.json has hidden_act={config.hidden_act}, and backend=megatron computes silu alone: set backend=fsdp"
    yield from _strange_in_fp8(config, facts, settings)
    if config.intermediate_size % size and len(facts.expert_layers) < facts.layers:
        yield (
            f"backend.tensor_parallel_size={size} must divide the width of its MLP, intermediate_size="
            f"{config.intermediate_size}: set another"
        )
    if -(-config.vocab_size // size) * (size - 1) >= config.vocab_size:
        yield f"backend.tensor_parallel_size={size} is too many for its vocabulary of {config.vocab_size} tokens: set fewer"


def _strange_in_fp8(config: Any, facts: ModelDimensions, settings: Megatron) -> Iterator[str]:
    if not settings.fp8:
        return
    size, recipe = settings.tensor_parallel_size, settings.fp8_recipe
    heads = facts.heads * facts.head_dim // size
    widths = {
        "hidden_size": config.hidden_size,
        "attention heads": heads,
        "queries, keys and values": heads + 2 * facts.groups * facts.head_dim // size,
    }
    if len(facts.expert_layers) < facts.layers:
        widths["intermediate_size"] = config.intermediate_size // size
    for name, width in widths.items():
        if width % FP8_BLOCK[recipe]:
            instead = "fp8=false" if recipe == "tensorwise" or width % FP8_BLOCK["tensorwise"] else "fp8_recipe=tensorwise"
            yield (
                f"backend.fp8_recipe={recipe} computes with widths that are multiples of {FP8_BLOCK[recipe]}, and its {name} "
                f"{'is' if name.endswith('size') else 'are'} {width} wide on each of backend.tensor_parallel_size={size} "
                f"ranks: set {instead}, or another tensor_parallel_size"
            )
    kept = settings.num_layers_at_start_in_bf16 + settings.num_layers_at_end_in_bf16
    if kept > facts.layers:
        yield (
            f"backend.num_layers_at_start_in_bf16={settings.num_layers_at_start_in_bf16} and num_layers_at_end_in_bf16="
            f"{settings.num_layers_at_end_in_bf16} are more than its {facts.layers} layers: set fewer"
        )


def core_config(architecture: Architecture, settings: Megatron, computing: torch.dtype) -> TransformerConfig:
    """Without dropout, without what needs Apex, and with gradients summed over ranks, not averaged: the denominators of the
    loss count all ranks already (megatron-core's word for that is calculate_per_token_loss).

    In FP8 weights are rounded anew in each pass, rather than kept rounded between updates (megatron-core's word for that is
    disable_parameter_transpose_cache): nothing has to be told that weights have changed, and no rounded copy takes memory.
    """
    config, facts = architecture.config, architecture.facts
    in_bf16 = settings.num_layers_at_start_in_bf16, settings.num_layers_at_end_in_bf16
    return TransformerConfig(
        num_layers=facts.layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=facts.heads,
        num_query_groups=facts.groups,
        kv_channels=facts.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        qk_layernorm=facts.head_norms,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=facts.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=settings.tensor_parallel_size,
        context_parallel_size=settings.context_parallel_size,
        sequence_parallel=settings.spreads_sequence(),
        params_dtype=computing,
        pipeline_dtype=computing,
        bf16=computing == torch.bfloat16,
        fp16=computing == torch.float16,
        perform_initialization=False,
        use_cpu_initialization=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=True,  # of gate and up: one kernel, which keeps neither of their products
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        calculate_per_token_loss=True,
        fp8=settings.fp8_format,
        fp8_recipe=settings.fp8_recipe,
        first_last_layers_bf16=any(in_bf16),
        num_layers_at_start_in_bf16=in_bf16[0],
        num_layers_at_end_in_bf16=in_bf16[1],
        disable_parameter_transpose_cache=True,
    )
