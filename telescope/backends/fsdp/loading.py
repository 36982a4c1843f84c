"""A model's weights from its safetensors files to the ranks, each rank reading the rows of its own shards and no others.

Owns the outline of a model (its modules without weights) and what fills it. Refuses files whose tensors are not the model's
own, one by one: those that transformers has to convert (experts fused, names of former days, other formats) are loaded whole.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from telescope.backends.common import attention
from telescope.backends.common.attention_choice import Kind
from telescope.backends.common.local_parts import local
from telescope.backends.common.models import ModelCheckpoint, TensorFiles, UnfitModel, model_files, refuse_quantised
from telescope.backends.common.models import parameters_on_meta as parameters_on_meta
from telescope.backends.fsdp.policy import fitted, load
from telescope.backends.fsdp.sharding import ModelMesh
from telescope.config.models import ModelBroken, ModelNotFound, check_weights, model_folder

if TYPE_CHECKING:
    from telescope.backends.fsdp.policy import Policy
    from telescope.config.sections import ModelSettings

log = logging.getLogger(__name__)

BASE = ".base_layer."
"""In the names of matrices that have an adapter."""


def outline(
    model: ModelSettings, kind: Kind, dtype: torch.dtype, *, adapters: bool = True
) -> tuple[Any, ModelCheckpoint | None]:
    """The model without its weights, and where they are; adapters, buffers and all else are there.

    None: the files are not the model's own tensors one by one, and the model has its weights already. Raises `UnfitModel`, and
    what `telescope.config.models` raises on broken folders.
    """
    lm, checkpoint = _outline(model, kind, dtype)
    if checkpoint is None:
        return load(model, kind, dtype, adapters=adapters), None
    with _lent_memory(lm):
        fitted(lm, model, adapters=adapters)
    return lm, checkpoint


def _outline(model: ModelSettings, kind: Kind, dtype: torch.dtype) -> tuple[Any, ModelCheckpoint | None]:
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        folder = model_folder(model.name)
    except ModelBroken:
        raise
    except ModelNotFound as error:
        raise UnfitModel(str(error)) from error
    check_weights(model.name, folder)
    refuse_quantised(model.name, folder)
    files = model_files(folder)
    if not files:
        return None, None
    try:
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=model.trust_remote_code)
        with parameters_on_meta():
            lm = AutoModelForCausalLM.from_config(
                config,
                dtype=dtype,
                attn_implementation=attention.register(kind),
                trust_remote_code=model.trust_remote_code,
            )
    except (OSError, ValueError, KeyError) as error:
        log.debug("no outline of %s, so transformers loads it whole", model.name, exc_info=error)
        return None, None
    wanted = {name: tensor.shape for name, tensor in _stored(lm)}
    absent = [name for name in wanted if name not in files]
    if absent:
        log.info("%s: %s is not in its files under this name, so transformers loads it whole", model.name, absent[0])
        return None, None
    if extra := sorted(set(files) - set(lm.state_dict())):
        log.warning("%s: its files have %d tensors that the model has no use for, %s first", model.name, len(extra), extra[0])
    return lm, ModelCheckpoint(model.name, files)


@contextmanager
def _lent_memory(lm: nn.Module) -> Iterator[None]:
    """Parameters seem to be on the CPU (one number, seen everywhere): adapters made beside them then get memory and values."""
    bare = [
        (module, name, p) for module in lm.modules() for name, p in module._parameters.items() if p is not None and p.is_meta
    ]
    for module, name, p in bare:
        lent = torch.zeros((), dtype=p.dtype).expand(p.shape)
        module._parameters[name] = nn.Parameter(lent, requires_grad=p.requires_grad)
    try:
        yield
    finally:
        for module, name, p in bare:
            p.requires_grad_(module._parameters[name].requires_grad)  # type: ignore[union-attr]
            module._parameters[name] = p


def fill(policy: Policy, checkpoint: ModelCheckpoint | None, device: torch.device, spread: ModelMesh) -> None:
    """Give a spread policy its weights, on `device`. None: it has them."""
    if checkpoint is None:
        return
    policy._apply(  # type: ignore[no-untyped-call]
        lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor
    )
    with TensorReader(checkpoint) as reader:
        for name, tensor in _stored(policy.lm):
            if BASE not in name and name not in checkpoint.files:
                continue  # an adapter
            reader.fill(name.replace(BASE, "."), tensor, spread)


class TensorReader(TensorFiles):
    """Rows of tensors. `read_bytes`: of the rows so far."""

    def __init__(self, checkpoint: ModelCheckpoint) -> None:
        super().__init__(checkpoint)
        self.read_bytes = 0

    def __enter__(self) -> TensorReader:
        return self

    @torch.no_grad()
    def fill(self, name: str, target: Tensor, spread: ModelMesh) -> None:
        """This rank's rows of one tensor, cast to the target's dtype."""
        source, shape = self.of(name, target.shape), tuple(target.shape)
        part = local(target)
        if target is part:  # a buffer, which every rank has whole
            rows = source[:] if shape else self.whole(name)
        else:
            first, count = spread.rows(shape[0])
            if not count:
                return
            rows = source[first : first + count]
        self.read_bytes += rows.nbytes
        part.copy_(rows)


def _stored(lm: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What a checkpoint has of it: parameters, tied ones once, and buffers that are saved."""
    yield from lm.named_parameters()
    saved = set(lm.state_dict())
    yield from ((name, buffer) for name, buffer in lm.named_buffers() if name in saved)
