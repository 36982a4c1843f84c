"""Causal attention inside the segments of a packed row, and nowhere else: by lengths, never by a [T, T] mask.

Owns what each kernel is told of a row; transformers models reach them by the name in `NAMES` through transformers' registry.
Which of them works where is attention_choice.py's. Refuses what it does not compute (soft caps, sinks, biases, chosen keys):
none of it is left out.

    flash3, flash2, varlen   FlashAttention over lengths: two packages, and PyTorch's own. GPU, bfloat16 or float16
    cudnn                    cuDNN's by scaled_dot_product_attention for each long segment, varlen for the others: Hopper, half
    flex                     FlexAttention with a block mask of the segments, compiled: GPU, any dtype
    sdpa                     PyTorch's scaled_dot_product_attention over segments of like length, stacked as a batch: everywhere
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from telescope.backends.common.attention_choice import Kind as Kind
from telescope.backends.common.context import Context
from telescope.backends.common.kernels import Lengths, by_lengths
from telescope.backends.common.masks import Look
from telescope.backends.common.shared_prefixes import SharedKeys

NAMES: dict[Kind, str] = {
    "flash3": "telescope_lengths_3", "cudnn": "telescope_parts", "flash2": "telescope_lengths_2",
    "varlen": "telescope_lengths", "flex": "telescope_blocks", "sdpa": "telescope_stacks",
}  # fmt: skip
"""Not the kernels' own words: transformers takes a name with `flash` in it for one of its packages, and looks for that."""
SMALLEST_BUCKET = 32
"""Segments are stacked with others of at most twice their length; below this many tokens all lengths are alike."""


@dataclass(frozen=True)
class Stacks:
    """Segments of like length as batches, one after another in a padded buffer of P places."""

    shapes: tuple[tuple[int, int], ...]
    """Segments and places a segment, [B, L], of each batch; they add up to P."""
    places: Tensor  # [P] int64, the row's token at each place; any token beyond a segment's end
    real: Tensor  # [P, 1, 1] bool, False beyond a segment's end
    inverse: Tensor  # [T] int64, the place of each token of the row


LONG = 4096
"""Tokens from which on a segment is worth a launch of cuDNN's kernel of its own."""
STEP = 256
"""Long segments are padded to a multiple of this, as cuDNN makes a plan for each length it is told."""


@dataclass(frozen=True)
class AttentionPart:
    """A long segment by itself, or a run of neighbours that are not."""

    tokens: int
    boundaries: Tensor | None = None
    """Of a run: [S + 1] int32 on the device, from 0."""
    longest: int = 0


class Segments:
    """Where the segments of a row of T tokens lie, prepared once a row for every layer.

    No dataclass: of those FSDP looks through every field, several times a layer, and makes a new one each time.
    """

    def __init__(
        self, boundaries: Tensor, longest: int, *, stacks: Stacks | None = None, masks: BlockMasks | None = None,
        parts: tuple[AttentionPart, ...] = (), context: Context | None = None, look: Look | None = None,
        shared: SharedKeys | None = None,
    ) -> None:  # fmt: skip
        """boundaries: [S + 1] int32 on the device. `stacks` of sdpa alone, `masks` of flex, `parts`, which add up to T, of
        cudnn. `context`: the ranks that share the row; None: this rank has all of it. `look`: who wants to know what layers
        ask for. `shared`: where samples begin alike and the model runs what they share once; it alone then says what a token
        sees."""
        self.boundaries = boundaries
        self.longest = longest
        self.stacks = stacks
        self.masks = masks
        self.parts = parts
        self.context = context
        self.look = look
        self.shared = shared


def register(kind: Kind) -> str:
    """Make the kind known to transformers and return its name there, for `attn_implementation`. May be called again."""
    from transformers import AttentionInterface

    if NAMES[kind] in AttentionInterface():
        return NAMES[kind]  # whoever has wrapped it means it to stay so
    AttentionInterface.register(NAMES[kind], over_ranks(plain(kind)))
    return NAMES[kind]


def plain(kind: Kind) -> Function:
    """The kernel where a rank has whole rows: (module, query [1, Hq, T, D], key, value [1, Hkv, T, D], mask, row=, scaling=,
    sliding_window=) -> ([1, T, Hq, D], None). None takes notice of the module and the mask."""
    simple: dict[Kind, Function] = {"sdpa": _sdpa, "flex": _flex}
    function = simple[kind] if kind in simple else _flash(by_lengths(kind))
    return _by_parts(by_lengths(kind), function) if kind == "cudnn" else function


def segments(
    kind: Kind, boundaries: np.ndarray, device: str, context: Context | None = None, repeated: tuple[int, ...] = ()
) -> Segments:
    """Prepare one row. boundaries [S + 1]: segment s is tokens boundaries[s] to boundaries[s + 1]; empty ones are left out.
    `repeated`: of each segment the leading tokens that the one before it has too, and which the model therefore does not run
    again."""
    if repeated:
        shared = SharedKeys(boundaries, repeated, device)
        return Segments(shared.queries_at, shared.longest, shared=shared)
    kept = np.unique(boundaries)
    lengths = np.diff(kept)
    on_device = torch.from_numpy(kept.astype(np.int32)).to(device, non_blocking=True)
    stacks = _stacks(kept[:-1], lengths, device) if kind == "sdpa" else None
    masks = BlockMasks(lengths, device) if kind == "flex" else None
    parts = _parts(lengths, device) if kind == "cudnn" else ()
    longest = int(lengths.max())
    return Segments(on_device, longest, stacks=stacks, masks=masks, parts=parts, context=context)


def _parts(lengths: np.ndarray, device: str) -> tuple[AttentionPart, ...]:
    parts: list[AttentionPart] = []
    run: list[int] = []
    for length in [*lengths.tolist(), None]:
        if run and (length is None or length >= LONG):
            at = np.cumsum([0, *run], dtype=np.int32)
            parts.append(AttentionPart(sum(run), torch.from_numpy(at).to(device, non_blocking=True), max(run)))
            run = []
        if length is not None and length >= LONG:
            parts.append(AttentionPart(length))
        elif length is not None:
            run.append(length)
    return tuple(parts)


def _stacks(starts: np.ndarray, lengths: np.ndarray, device: str) -> Stacks:
    """Segments by powers of two of their length: padding at most doubles a segment, and launches stay few."""
    bucket = np.ceil(np.log2(np.maximum(lengths, SMALLEST_BUCKET))).astype(np.int64)
    shapes, places, real = [], [], []
    for size in np.unique(bucket):
        these = np.flatnonzero(bucket == size)
        offsets = np.arange(lengths[these].max())
        shapes.append((len(these), len(offsets)))
        inside = offsets[None, :] < lengths[these][:, None]
        real.append(inside.ravel())
        places.append(np.where(inside, starts[these][:, None] + offsets[None, :], 0).ravel())
    place, holds = np.concatenate(places), np.concatenate(real)
    inverse = np.empty(int(lengths.sum()), np.int64)
    inverse[place[holds]] = np.flatnonzero(holds)
    given = (place, holds[:, None, None], inverse)
    return Stacks(tuple(shapes), *(torch.from_numpy(array).to(device, non_blocking=True) for array in given))


class _Stack(torch.autograd.Function):
    """[T, H, D] -> [P, H, D]. Both directions are gathers: places beyond a segment's end never get a gradient."""

    @staticmethod
    def forward(ctx: Any, by_token: Tensor, stacks: Stacks) -> Tensor:
        ctx.stacks = stacks
        return by_token.index_select(0, stacks.places)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].index_select(0, ctx.stacks.inverse), None


class _Unstack(torch.autograd.Function):
    """[P, H, D] -> [T, H, D], and zeros as gradients of the places beyond a segment's end."""

    @staticmethod
    def forward(ctx: Any, by_place: Tensor, stacks: Stacks) -> Tensor:
        ctx.stacks = stacks
        return by_place.index_select(0, stacks.inverse)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].index_select(0, ctx.stacks.places).mul_(ctx.stacks.real), None


Result = tuple[Tensor, None]
Function = Callable[..., Result]


def over_ranks(function: Function) -> Function:
    """The same where ranks share the row: all tokens are here inside attention, of a share of the heads."""

    def attend(
        module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *,
        row: Segments | None = None, **kwargs: Any,
    ) -> Result:  # fmt: skip
        """query [1, Hq, T / C, D], key and value [1, Hkv, T / C, D] -> [1, T / C, Hq, D]."""
        if row is None:
            raise ValueError(
                "the model's layers do not hand on to their attention what they are given for it, so samples can't be packed: "
                "it can't be trained here"
            )
        if row.look is not None:
            row.look.saw(attention_mask, kwargs)
        context = row.context
        if context is None:
            return function(module, query, key, value, attention_mask, row=row, **kwargs)
        query, key, value = (context.by_heads(tensor) for tensor in (query, context.shared_out(key), context.shared_out(value)))
        out, _ = function(module, query, key, value, attention_mask, row=row, **kwargs)
        return context.by_tokens(out), None

    return attend


def _refuse_unknown(kwargs: dict[str, Any]) -> None:
    for name in ("softcap", "s_aux", "position_bias", "head_mask", "indices", "block_indices"):
        if kwargs.get(name) is not None:
            raise ValueError(
                f"the model's attention uses {name}, which no attention of this backend computes: it can't be trained here"
            )


def _sdpa(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *,
    row: Segments, scaling: float | None = None, sliding_window: int | None = None, **kwargs: Any,
) -> Result:  # fmt: skip
    """query [1, Hq, T, D], key and value [1, Hkv, T, D] -> [1, T, Hq, D]."""
    _refuse_unknown(kwargs)
    if row.shared is not None:
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        return row.shared.attend(q, k, v, scaling, _reaching(sliding_window, row))[None], None
    assert row.stacks is not None, "segments were prepared for another kind of attention"
    q, k, v = (_stacked(tensor, row.stacks) for tensor in (query, key, value))  # [P, H, D]
    pieces, start = [], 0
    for count, length in row.stacks.shapes:
        here = slice(start, start + count * length)
        bq, bk, bv = (t[here].view(count, length, *t.shape[1:]).transpose(1, 2) for t in (q, k, v))  # [B, H, L, D]
        mask = _window_mask(length, sliding_window, query.device)
        gqa = query.shape[1] != key.shape[1]
        out = F.scaled_dot_product_attention(bq, bk, bv, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=gqa)
        pieces.append(out.transpose(1, 2).flatten(0, 1))  # [B * L, H, D]
        start = here.stop
    by_place = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
    return _Unstack.apply(by_place, row.stacks)[None], None  # type: ignore[no-untyped-call]


def _stacked(tensor: Tensor, stacks: Stacks) -> Tensor:
    """[1, H, T, D] -> [P, H, D]."""
    result: Tensor = _Stack.apply(tensor[0].transpose(0, 1), stacks)  # type: ignore[no-untyped-call]
    return result


def _reaching(window: int | None, row: Segments) -> int | None:
    """The window where some segment is longer than it, else None."""
    return window if window is not None and row.longest > window else None


def _window_mask(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """[L, L] True where a token sees another, only for models whose window is shorter than a segment."""
    if window is None or length <= window:
        return None
    places = torch.arange(length, device=device)
    back = places[:, None] - places[None, :]
    return (back >= 0) & (back < window)


def _flash(kernel: Lengths) -> Function:
    def attend(
        module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *,
        row: Segments, scaling: float | None = None, sliding_window: int | None = None, **kwargs: Any,
    ) -> Result:  # fmt: skip
        _refuse_unknown(kwargs)
        q, k, v = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))  # [T, H, D]
        window = -1 if sliding_window is None else sliding_window - 1
        at = keys_at = row.boundaries, row.longest
        if (shared := row.shared) is not None:
            k, v = shared.listed(k), shared.listed(v)
            at, keys_at = (shared.queries_at, shared.longest_asking), (shared.keys_at, shared.longest)
        return kernel(q, k, v, at, keys_at, scaling, window)[None], None

    return attend


def _by_parts(kernel: Lengths, whole: Function) -> Function:
    """`whole` for layers with a window, and for rows whose samples share their beginnings."""

    def attend(
        module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *,
        row: Segments, scaling: float | None = None, sliding_window: int | None = None, **kwargs: Any,
    ) -> Result:  # fmt: skip
        if row.shared is not None or (sliding_window is not None and row.longest > sliding_window):
            return whole(
                module, query, key, value, None, row=row, scaling=scaling, sliding_window=sliding_window, **kwargs
            )  # fmt: skip
        _refuse_unknown(kwargs)
        sizes = [part.tokens for part in row.parts]
        cut = zip(*(torch.split(tensor, sizes, dim=2) for tensor in (query, key, value)), strict=True)
        found = [_part(kernel, part, q, k, v, scaling) for part, (q, k, v) in zip(row.parts, cut, strict=True)]
        return (torch.cat(found) if len(found) > 1 else found[0])[None], None

    return attend


def _part(kernel: Lengths, part: AttentionPart, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """query [1, Hq, n, D], key and value [1, Hkv, n, D] -> [n, Hq, D]."""
    if part.boundaries is not None:
        q, k, v = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))
        at = part.boundaries, part.longest
        return kernel(q, k, v, at, at, scaling, -1)
    if padding := -part.tokens % STEP:  # behind the last token, where nobody looks
        query, key, value = (F.pad(tensor, (0, 0, 0, padding)) for tensor in (query, key, value))
    gqa = query.shape[1] != key.shape[1]
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=gqa)
    return out[0, :, : part.tokens].transpose(0, 1)


class BlockMasks:
    """The masks of one row for FlexAttention: of layers that see all of a segment, and of those that see a window. Made when
    a layer asks for them first."""

    def __init__(self, lengths: np.ndarray, device: str) -> None:
        self._lengths, self._device = lengths, device
        self._made: dict[int | None, Any] = {}

    def of(self, window: int | None) -> Any:
        """`window`: tokens that a token sees, itself included; None: all before it in its segment."""
        if window not in self._made:
            self._made[window] = self._make(window)
        return self._made[window]

    def _make(self, window: int | None) -> Any:
        from torch.nn.attention.flex_attention import create_block_mask

        segment = torch.from_numpy(np.repeat(np.arange(len(self._lengths)), self._lengths)).to(self._device)

        def inside(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            seen = (q >= k) & (segment[q] == segment[k])
            return seen if window is None else seen & (q - k < window)

        tokens = len(segment)
        return create_block_mask(inside, None, None, tokens, tokens, device=self._device)


@functools.cache
def _flex_attention(compiled: bool) -> Callable[..., Any]:
    """On a CPU it can't be trained, and is not worth compiling."""
    from torch.nn.attention.flex_attention import flex_attention

    attend: Any = flex_attention
    return torch.compile(attend, dynamic=True) if compiled else attend


def _flex(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *,
    row: Segments, scaling: float | None = None, sliding_window: int | None = None, **kwargs: Any,
) -> Result:  # fmt: skip
    _refuse_unknown(kwargs)
    window = _reaching(sliding_window, row)
    if row.shared is not None:
        key, value = (row.shared.listed(tensor[0].transpose(0, 1)).transpose(0, 1)[None] for tensor in (key, value))
        mask = row.shared.block_mask(window)
    else:
        assert row.masks is not None, "segments were prepared for another kind of attention"
        mask = row.masks.of(window)
    gqa = query.shape[1] != key.shape[1]
    attend = _flex_attention(query.is_cuda)
    out = attend(query, key, value, block_mask=mask, scale=scaling, enable_gqa=gqa)
    return out.transpose(1, 2), None
