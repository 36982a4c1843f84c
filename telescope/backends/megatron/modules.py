"""What a layer's norms and matrix products are: Megatron-Core's own products beside this project's norm, or Transformer
Engine's modules of both.

Of Transformer Engine a layer has the norms, the products, and in FP8 the rounding of what goes into these; where a norm and a
product follow each other, one module is both. It does not have its attention: cuDNN's kernel, which that calls, is among those
that `backend.attention` chooses from, and windows, packed samples and shared rows are theirs already. Nor its rotation, which
knows no scaled cosines; nor its checkpointing, which is there for scales of passes before, and a recipe that has such is not
offered: log-probs taken before an update would have other scales than training has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.core.transformer.identity_op import IdentityOp


@dataclass(frozen=True)
class LayerModules:
    """Classes or specs that megatron-core builds modules from."""

    norm: Any
    """Of hidden states, which may be spread over ranks."""
    head_norm: Any
    """Of queries and keys, where all tokens are here."""
    entering: Any
    """The product that goes into heads, or into the MLP, cut by columns."""
    leaving: Any
    """The product that comes back, cut by rows."""
    norm_enters: bool
    """Whether `entering` begins with the norm: its weight is then `layer_norm_weight` there."""

    @property
    def norm_before(self) -> Any:
        """What stands before `entering`."""
        return IdentityOp if self.norm_enters else self.norm


def engine_modules() -> LayerModules:
    """Transformer Engine's, as megatron-core wraps them. Where it is not installed these are stand-ins that build nothing."""
    from megatron.core.extensions import transformer_engine as engine

    return LayerModules(
        norm=engine.TENorm,
        head_norm=engine.TENorm,
        entering=engine.TELayerNormColumnParallelLinear,
        leaving=engine.TERowParallelLinear,
        norm_enters=True,
    )


def engine_version() -> str:
    """For the log."""
    from megatron.core.utils import get_te_version

    return str(get_te_version())


def refuse_fp8(recipe: str) -> None:
    """Raise ValueError where this GPU's products do not know the recipe."""
    from transformer_engine import pytorch as engine

    known = engine.is_fp8_block_scaling_available if recipe == "blockwise" else engine.is_fp8_available
    able, reason = known(return_reason=True)
    if not able:
        instead = "fp8_recipe=tensorwise, or fp8=false" if recipe == "blockwise" else "fp8=false"
        raise ValueError(f"backend.fp8_recipe={recipe} can't be computed here ({reason}): set backend.{instead}")


def fuse_gradient_sums(models: Any) -> None:
    """Let products add to the sums of gradients themselves, rather than make a gradient that is added afterwards.

    megatron-core's own flag for it can't be set: the head would ask for a kernel of Apex, and the head's gradient is computed
    elsewhere.
    """
    for module in models.modules():
        if hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = True
