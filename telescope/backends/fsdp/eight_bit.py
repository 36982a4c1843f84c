"""AdamW whose moments take a byte each: codes of 8 bits, and a float32 scale for every 256 of them.

After Dettmers et al., 8-bit Optimizers via Block-wise Quantization (2021). Owns the codes and the step. Blocks never cross a
row, so that a state that is spread by rows is the same numbers for any number of ranks, and its tensors are ordinary ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from telescope.backends.common.local_parts import local
from telescope.backends.fsdp.sharding import rows_like

BLOCK = 256
SMALLEST = 4096
"""Tensors with fewer entries, and those with one dimension, keep float32 moments: they weigh nothing, and norms are touchy."""
AT_ONCE = 1 << 24
"""Entries whose moments are float32 at the same time."""


@functools.cache
def codebook(signed: bool) -> tuple[float, ...]:
    """The 256 values of a code, rising, in [-1, 1] or [0, 1]: for each power of ten from 1e-6 to 1 twice as many cells between
    0.1 and 1 of it as for the one before, and of each cell its middle; then 0 and 1."""
    found = [0.0, 1.0]
    for power in range(7):
        cells = 2**power if signed else 2 ** (power + 1)
        middles = [0.1 + 0.9 * (cell + 0.5) / cells for cell in range(cells)]
        found += [10.0 ** (power - 6) * middle for middle in middles]
        if signed:
            found += [-(10.0 ** (power - 6)) * middle for middle in middles]
    return tuple(sorted(found))


def encode(values: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """values [R, C] float32 -> codes [R, C] uint8 and scales [R, ceil(C / 256)] float32.

    Each block is divided by its largest size and takes the nearest code. An entry above 0 never gets the code of 0 where there
    are not signs: a second moment of 0 would make its next step a large one.
    """
    blocks = _blocks(values)
    scales = blocks.abs().amax(-1)
    book = torch.tensor(codebook(signed), device=values.device)
    middles = (book[1:] + book[:-1]) / 2
    codes = torch.bucketize(blocks / scales.clamp(min=1e-38)[..., None], middles, out_int32=True)
    if not signed:
        codes = torch.where(blocks > 0, codes.clamp(min=1), codes)
    return codes.to(torch.uint8).flatten(1)[:, : values.shape[1]], scales


def decode(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    """What `encode` stood for, [R, C] float32."""
    book = torch.tensor(codebook(signed), device=codes.device)
    blocks = _blocks(book[codes.int()])
    return (blocks * scales[..., None]).flatten(1)[:, : codes.shape[1]]


def _blocks(values: Tensor) -> Tensor:
    """[R, C] -> [R, ceil(C / 256), 256], zeros behind the last column."""
    padding = -values.shape[1] % BLOCK
    padded = torch.nn.functional.pad(values, (0, padding)) if padding else values
    return padded.view(values.shape[0], -1, BLOCK)


class AdamW8bit(torch.optim.Optimizer):
    """torch.optim.AdamW in float32 arithmetic, whose moments are encoded between steps."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], eps: float = 1e-8) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """See `torch.optim.Optimizer.step`; there is no closure here."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state.update(_fresh(parameter))
        state["step"] += 1
        weight, gradient = _matrix(local(parameter)), _matrix(local(parameter.grad))  # type: ignore[arg-type]
        moments = {name: local(tensor) for name, tensor in state.items() if name != "step"}
        for rows in _pieces(weight):
            here = {name: tensor[rows] for name, tensor in moments.items()}
            _adamw(weight[rows], gradient[rows].float(), here, float(state["step"]), group)


def _fresh(parameter: Tensor) -> dict[str, Tensor]:
    step = torch.zeros((), dtype=torch.float32)
    if not encoded(parameter):
        zeros = {name: torch.zeros_like(parameter, dtype=torch.float32) for name in ("exp_avg", "exp_avg_sq")}
        return {"step": step, **zeros}
    columns = parameter[0].numel() if parameter.shape[0] else 1
    zero = codebook(signed=True).index(0.0)
    first, second = (rows_like(parameter, columns, torch.uint8) for _ in range(2))
    local(first).fill_(zero)
    scales = (rows_like(parameter, -(-columns // BLOCK), torch.float32) for _ in range(2))
    return {
        "step": step,
        "exp_avg_codes": first,
        "exp_avg_scales": next(scales),
        "exp_avg_sq_codes": second,
        "exp_avg_sq_scales": next(scales),
    }


def encoded(parameter: Tensor) -> bool:
    """By the whole shape, whatever of it is here."""
    return parameter.ndim >= 2 and parameter.numel() >= SMALLEST


def _adamw(weight: Tensor, gradient: Tensor, moments: dict[str, Tensor], step: float, group: dict[str, Any]) -> None:
    """One step of some rows, in place. Loshchilov and Hutter, Decoupled Weight Decay Regularization (2019), algorithm 2."""
    beta1, beta2 = group["betas"]
    plain = "exp_avg" in moments
    if plain:
        first, second = (_matrix(moments[name]) for name in ("exp_avg", "exp_avg_sq"))
    else:
        first = decode(moments["exp_avg_codes"], moments["exp_avg_scales"], signed=True)
        second = decode(moments["exp_avg_sq_codes"], moments["exp_avg_sq_scales"], signed=False)
    first.lerp_(gradient, 1 - beta1)
    second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    weight.mul_(1 - group["lr"] * group["weight_decay"])
    size = (second.sqrt() / (1 - beta2**step) ** 0.5).add_(group["eps"])
    weight.addcdiv_(first, size, value=-group["lr"] / (1 - beta1**step))
    if not plain:
        for name, values, signed in (("exp_avg", first, True), ("exp_avg_sq", second, False)):
            codes, scales = encode(values, signed)
            moments[f"{name}_codes"].copy_(codes)
            moments[f"{name}_scales"].copy_(scales)


def _matrix(part: Tensor) -> Tensor:
    """[R, ...] -> [R, C], a view."""
    return part.view(part.shape[0], -1) if part.numel() else part.view(part.shape[0], 0)


def _pieces(matrix: Tensor) -> Iterator[slice]:
    if not matrix.numel():
        return
    rows = max(1, AT_ONCE // matrix.shape[1])
    yield from (slice(start, start + rows) for start in range(0, matrix.shape[0], rows))
