"""Updates of models with experts: their weights as a loader fills them, and as vLLM's kernels read them.

vLLM keeps the experts of a layer as two stacks and arranges these for its kernel once they are loaded: on a CPU packed for
its grouped products, on a GPU by some kernels turned or in blocks, by others left alone. Where they are left alone they are
copies as all else (copy_plan.py). Where not, a layer's new stacks are filled beside the old ones, arranged by vLLM's own
code, and copied to where the old ones lie. Both are tried on the checkpoint that vLLM has loaded itself, before a server
serves (of what is arranged the first and the last layer): what does not come out as vLLM left it, in any element, is no way to
update. Refuses to know any kernel's order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from telescope.inference.vllm.copy_plan import UNREADABLE, Arranged, CopyPlan, Loader, NoPlan, record

STACKS = ("w13_weight", "w2_weight")
"""What vLLM calls the stacks of gates and ups, and of downs, of all experts of a layer."""


def layers_with_experts(model: nn.Module) -> dict[str, nn.Module]:
    """By name."""
    return {name: module for name, module in model.named_modules() if all(hasattr(module, stack) for stack in STACKS)}


def record_arranged(model: Any, load: Loader, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> CopyPlan:
    """As `record`, with each layer's experts arranged after they are filled. Raises `NoPlan`."""
    layers = list(layers_with_experts(model).values())
    stood = [[getattr(layer, stack) for stack in STACKS] for layer in layers]
    stand_ins = [[_as_loaded(layer, stack) for stack in STACKS] for layer in layers]
    with _replace_stacks(layers, stand_ins):
        whole = record(dict(model.named_parameters()), load, shapes, dtype)
    arranged = []
    for layer, parameters, loaded in zip(layers, stood, stand_ins, strict=True):
        own = {tensor.untyped_storage()._cdata for tensor in loaded}
        copies = [copy for copy in whole.copies if copy.target.untyped_storage()._cdata in own]
        arranged.append(Arranged(copies, loaded, [tensor.data for tensor in parameters], _arranging(layer, parameters)))
    return CopyPlan(tuple(copy for copy in whole.copies if not copy.target.is_meta), tuple(arranged))


def check_arranged(plan: CopyPlan, tensor: Any) -> None:
    """Arrange the checkpoint's experts of the first and the last layer and compare them with what vLLM has made of them; each
    element is looked at. Raises `NoPlan`."""
    for one in dict.fromkeys((plan.arranged[0], plan.arranged[-1])):
        try:
            found = one.differing(lambda name: tensor(name).reshape(-1))
        except UNREADABLE as error:
            raise NoPlan(f"vLLM's code for arranging experts fails: {type(error).__name__}: {error}") from error
        if found:
            raise NoPlan(f"arranged again, the experts of {found[0]} and its like are not what vLLM holds")


def _as_loaded(layer: nn.Module, stack: str) -> nn.Parameter:
    """A stack without memory, in the shape and with the attributes (its loader above all) that it had when it was loaded."""
    stood = getattr(layer, stack)
    made = nn.Parameter(torch.empty(_loaded_shape(layer, stack), dtype=stood.dtype, device="meta"), requires_grad=False)
    made.__dict__.update(stood.__dict__)
    return made


def _loaded_shape(layer: nn.Module, stack: str) -> torch.Size:
    """vLLM notes it for its own reload; kernels may have padded the stack since."""
    try:
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    except ImportError as error:
        raise NoPlan("this vLLM does not say in which shapes it loaded the experts") from error
    known: Tensor = get_layerwise_info(layer).restore_metadata[0].get(stack, getattr(layer, stack))
    return known.shape


def _arranging(layer: Any, stood: list[nn.Parameter]) -> Any:
    """A layer's own preparation of its experts after loading."""

    def arrange(loaded: list[Tensor]) -> list[Tensor]:
        fresh = [nn.Parameter(tensor, requires_grad=False) for tensor in loaded]
        for parameter, old in zip(fresh, stood, strict=True):
            parameter.__dict__.update(old.__dict__)
        with torch.no_grad(), _replace_stacks([layer], [fresh]):
            layer.quant_method.process_weights_after_loading(layer)
            kernel = getattr(layer.quant_method, "moe_kernel", None)
            # vLLM does this part at the first load alone, as if a later one needed none
            if (finish := getattr(getattr(kernel, "fused_experts", None), "process_weights_after_loading", None)) is not None:
                finish(layer)
            return [getattr(layer, stack).data for stack in STACKS]

    return arrange


@contextmanager
def _replace_stacks(layers: list[nn.Module], stacks: list[list[nn.Parameter]]) -> Iterator[None]:
    """Other stacks in the place of the layers' own, which come back whatever happens."""
    stood = [[getattr(layer, stack) for stack in STACKS] for layer in layers]
    try:
        _place(layers, stacks)
        yield
    finally:
        _place(layers, stood)


def _place(layers: list[nn.Module], stacks: list[list[nn.Parameter]]) -> None:
    for layer, own in zip(layers, stacks, strict=True):
        for name, parameter in zip(STACKS, own, strict=True):
            layer.register_parameter(name, parameter)
