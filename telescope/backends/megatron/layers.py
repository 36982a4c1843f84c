"""What of a layer is this project's own: its norm, its rotation and attention within packed samples, its residual sum.

The matrices and how they are spread over ranks are megatron-core's, or Transformer Engine's (modules.py), whose norms are then
taken, too. megatron-core's own norm refuses a sequence that is spread, its own attention makes a [T, T] mask and shows packed
samples to each other, and its rotation knows fewer ways to scale than Hugging Face's. Owns these four modules and what a row
hands to them; formulas are those of Hugging Face's Llama.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn

from telescope.backends.common import attention
from telescope.backends.common.attention_choice import Kind
from telescope.backends.megatron.experts import ExpertLayer
from telescope.backends.megatron.modules import LayerModules
from telescope.backends.megatron.parallel import ExpertPlace
from telescope.backends.megatron.rules import ModelDimensions


@dataclass
class AttentionRow(PackedSeqParams):  # type: ignore[misc]
    """What attention is told of a row, of which T tokens are on this rank. megatron-core hands it on to each layer's attention,
    checkpointed or not, and itself looks only for the format `thd`, which this is not."""

    segments: attention.Segments | None = None
    cos: Tensor | None = None  # [1, T, D]
    sin: Tensor | None = None  # [1, T, D]


class Norm(nn.Module):
    """RMSNorm (arXiv:1910.07467), summed in float32. With a `spread` input each rank sees other tokens, and megatron-core sums
    the weight's gradient over them (finalize_model_grads, by the mark on the weight)."""

    def __init__(self, config: Any, hidden_size: int, eps: float, *, spread: bool, compiled: bool = False) -> None:
        super().__init__()
        device = torch.cuda.current_device()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = spread and config.sequence_parallel  # type: ignore[attr-defined]
        self.eps = eps
        self._normed: Callable[..., Tensor] = one_pass(normed) if compiled else normed

    def forward(self, hidden: Tensor) -> Tensor:
        """[…, H] -> […, H]."""
        return self._normed(hidden, self.weight, self.eps)


@cache
def one_pass(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled, once for all layers; for rows of any length."""
    return torch.compile(function, dynamic=True)


def normed(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[…, H] -> […, H]."""
    wide = hidden.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * scaled.to(hidden.dtype)


class PackedAttention(nn.Module):
    """Rotation of queries and keys, and causal attention inside each sample of a row. All tokens are here that this rank has of
    the row, and its share of the heads; where ranks share the row, the kernel has all tokens of fewer heads."""

    def __init__(
        self, kernel: attention.Function, windows: tuple[int | None, ...], scaling: float, compiled: bool, layer_number: int,
        **_: Any,
    ) -> None:  # fmt: skip
        """windows: of each layer, tokens that a token sees, itself included; None: all of its sample. `layer_number` from 1."""
        super().__init__()
        self._kernel, self._window, self._scaling = kernel, windows[layer_number - 1], scaling
        self._rotated: Callable[..., tuple[Tensor, Tensor]] = one_pass(both_rotated) if compiled else both_rotated

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, *,
        packed_seq_params: AttentionRow, **_: Any,
    ) -> Tensor:  # fmt: skip
        """query [T, 1, Hq, D], key and value [T, 1, Hkv, D] -> [T, 1, Hq · D]."""
        row = packed_seq_params
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))  # [1, H, T, D]
        q, k = self._rotated(q, k, row.cos, row.sin)
        told: dict[str, Any] = {"row": row.segments, "scaling": self._scaling, "sliding_window": self._window}
        out = self._kernel(self, q, k, v, None, **told)[0]
        return out.transpose(0, 1).flatten(2)


def both_rotated(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """[1, Hq, T, D] and [1, Hkv, T, D] turned by their tokens' angles, whose cosines and sines are [1, T, D]."""
    return rotated(query, cos, sin), rotated(key, cos, sin)


def rotated(tensor: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[1, H, T, D] turned by its tokens' angles, halves of a head as pairs."""
    first, second = tensor.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return tensor * cos[:, None] + turned * sin[:, None]


def residual_sum(training: bool, fused: bool) -> Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]:
    """megatron-core's place for bias, dropout and residual, of which there is the residual alone."""

    def added(output: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
        return residual + output[0]

    return added


def own_modules(compiled: bool) -> LayerModules:
    """megatron-core's products, beside the norm of this file."""
    spread, whole = (ModuleSpec(module=Norm, params={"spread": each, "compiled": compiled}) for each in (True, False))
    return LayerModules(
        norm=spread, head_norm=whole, entering=ColumnParallelLinear, leaving=RowParallelLinear, norm_enters=False
    )  # fmt: skip


def layer_spec(
    modules: LayerModules, kind: Kind, windows: tuple[int | None, ...], scaling: float, width: int, facts: ModelDimensions,
    experts: ExpertPlace, *, first: int = 0, compiled: bool = False,
) -> Any:  # fmt: skip
    """What megatron-core builds a block of layers from, which are the model's from layer `first` on, one a window. `width`: of
    the MLP, over all ranks; `compiled`: the rotation."""
    core = partial(PackedAttention, attention.over_ranks(attention.plain(kind)), windows, scaling, compiled)
    dense = ModuleSpec(
        module=MLP,
        params={"ffn_hidden_size": width},
        submodules=MLPSubmodules(linear_fc1=modules.entering, linear_fc2=modules.leaving),
    )
    head_norm = modules.head_norm if facts.head_norms else IdentityOp

    def of(mlp: Any, norm_before: Any) -> ModuleSpec:
        return ModuleSpec(
            module=TransformerLayer,
            submodules=TransformerLayerSubmodules(
                input_layernorm=modules.norm_before,
                self_attention=ModuleSpec(
                    module=SelfAttention,
                    params={"attn_mask_type": AttnMaskType.causal},
                    submodules=SelfAttentionSubmodules(
                        linear_qkv=modules.entering,
                        core_attention=core,
                        linear_proj=modules.leaving,
                        q_layernorm=head_norm,
                        k_layernorm=head_norm,
                    ),
                ),
                self_attn_bda=residual_sum,
                pre_mlp_layernorm=norm_before,
                mlp=mlp,
                mlp_bda=residual_sum,
            ),
        )

    def numbered(layer: int) -> ModuleSpec:
        if layer not in places:
            return of(dense, modules.norm_before)
        # not a ModuleSpec: megatron-core knows what each kind of these is handed, and warns of others
        told = {"facts": facts, "place": experts, "number": places[layer]}
        return of(SimpleNamespace(module=ExpertLayer, params=told), modules.norm)

    places = {layer: place for place, layer in enumerate(sorted(facts.expert_layers))}
    layers = [numbered(first + number) for number in range(len(windows))]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=modules.norm)
