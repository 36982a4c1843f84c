"""Recorded routing: which experts a server's routers chose for each token, layer by layer. Numpy only.

An array [T, L, K] beside a trajectory's others: of its T tokens, in each of the L layers with experts, the K that it went to.
Token t's are those that its own place in the row goes through, so the last token of an answer, which a server samples and never
reads, has none; nor has any that the server did not record. Owns the dtype, the mark of what is not recorded, and joining.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import DTypeLike


def dtype_of(experts: int) -> np.dtype:
    """The smallest that travels and has room for the mark: uint8 for up to 255 experts, else int16. Raises ValueError for more
    experts than that has."""
    if experts > np.iinfo(np.int16).max:
        raise ValueError(f"recorded routing knows at most {np.iinfo(np.int16).max:,} experts a layer, not {experts:,}")
    return np.dtype(np.uint8 if experts <= np.iinfo(np.uint8).max else np.int16)


def unrecorded(dtype: DTypeLike) -> int:
    """In place of an expert: the largest number of the dtype."""
    return int(np.iinfo(dtype).max)


def joined(pieces: Sequence[np.ndarray | None], lengths: Sequence[int]) -> np.ndarray | None:
    """One array of pieces [T_i, L, K], one after another; `lengths` are the T_i, and a piece of None has nothing recorded. None
    where none has. Raises ValueError where pieces are of different models."""
    known = [piece for piece in pieces if piece is not None]
    if not known:
        return None
    first = known[0]
    if different := {(piece.shape[1:], piece.dtype) for piece in known} - {(first.shape[1:], first.dtype)}:
        raise ValueError(f"recorded routing of different models can't be joined: {first.shape[1:]} and {different}")
    whole = np.full((sum(lengths), *first.shape[1:]), unrecorded(first.dtype), first.dtype)
    start = 0
    for piece, length in zip(pieces, lengths, strict=True):
        if piece is not None:
            whole[start : start + length] = piece
        start += length
    return whole


def continued(known: np.ndarray | None, later: np.ndarray | None, length: int) -> np.ndarray | None:
    """A dialogue's record [length, L, K] after one more answer: of its tokens before, `known` [T, L, K] with T <= length;
    `later` is that of the whole row, as the answer's server has it.

    A token's first record stays: under it the next one was sampled, and the server may have computed it again under other
    weights since. What had none, as the last token of the answer before, gets the later one. Raises ValueError where the two
    are of different models."""
    start = 0 if known is None else len(known)
    whole = joined([known, None], [start, length - start])
    if whole is None or later is None:
        return later if whole is None else whole
    if (whole.shape, whole.dtype) != (later.shape, later.dtype):
        raise ValueError(
            f"a dialogue's record of {whole.shape} {whole.dtype} can't go on with one of {later.shape} {later.dtype}"
        )
    return np.where(whole[..., :1] == unrecorded(whole.dtype), later, whole)


def find_wrong(routed: np.ndarray, *, layers: int, experts: int, top_k: int) -> str:
    """What of an array does not go with a model; empty where all does."""
    if routed.ndim != 3 or routed.shape[1:] != (layers, top_k):
        return (
            f"recorded routing has the shape {list(routed.shape)}, and the model's is [tokens, {layers}, {top_k}]: {layers} "
            f"layers with experts, of which a token goes to {top_k}"
        )
    if routed.dtype != dtype_of(experts):
        return f"recorded routing is of {routed.dtype}, and that of {experts} experts is of {dtype_of(experts)}"
    known = routed[..., 0] != unrecorded(routed.dtype)
    chosen = routed[known]
    if chosen.size and (chosen.min() < 0 or chosen.max() >= experts):
        return f"recorded routing names expert {max(int(chosen.max()), -int(chosen.min()))}, and the model has {experts}"
    if chosen.size and (np.diff(np.sort(chosen, axis=-1), axis=-1) == 0).any():
        return "recorded routing sends a token to the same expert twice"
    return ""
