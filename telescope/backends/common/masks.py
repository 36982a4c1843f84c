"""What a model lets a token see, by the mask that it asks transformers for, beside what attention here is told.

Attention here makes no mask: it is told the samples' lengths, and of a layer's window by an argument of the call. A layer that
keeps a window, or chunks, to its mask alone would be trained without it, and so would one that makes a mask or a bias itself.
Owns the look that finds such layers, windows at all lengths up to a limit and without a sample that long. Refuses to say what
follows from it: that is the policy's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

Rule = Callable[[int, int, Tensor, Tensor], Tensor]
"""transformers' word for a mask: batch, head, the place of a token, those it may see -> which of them it sees."""


class Look:
    """Notes what the layers ask for during one forward pass. `shortest`: the length of the shortest sample, up to `longest`, of
    which attention would show some token more or less than a layer's mask; None: there is none. `foreign`: what layers add to
    their scores that attention here leaves out, in words; empty: nothing."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self.foreign = ""
        self._known: dict[tuple[int, int | None], tuple[Any, int | None]] = {}

    @property
    def shortest(self) -> int | None:
        return min((length for _, length in self._known.values() if length is not None), default=None)

    @contextmanager
    def at(self, name: str) -> Iterator[None]:
        """Masks of the attention that transformers knows by `name` carry their rule while this lasts."""
        from transformers import AttentionMaskInterface

        known = AttentionMaskInterface._global_mapping
        assert name not in known, "two looks at once"
        AttentionMaskInterface.register(name, _with_rule)
        try:
            yield
        finally:
            del known[name]

    def saw(self, mask: Tensor | None, told: Mapping[str, Any]) -> None:
        """One layer's attention has been called with this mask, and been told this besides."""
        window, rule = told.get("sliding_window"), getattr(mask, "rule", None)
        biases = [name for name, value in told.items() if isinstance(value, Tensor) and value.is_floating_point()]
        if biases:
            self.foreign = f"{biases[0]}, numbers that it hands to its attention"
        elif mask is not None and rule is None and not (mask.dtype == torch.bool and bool(mask.all())):  # a part of it is well
            self.foreign = "a mask of its own making"
        if rule is None:
            return
        key = (id(rule), window)
        if key not in self._known:
            assert mask is not None
            self._known[key] = (rule, _first_difference(rule, window, self._longest, mask.device))


def _with_rule(
    batch_size: int, q_length: int, kv_length: int, mask_function: Rule, device: torch.device | str = "cpu", **_: Any
) -> Tensor:
    """A mask that shows all, which nobody here reads, of the shape that layers may look for."""
    mask = torch.ones(batch_size, 1, q_length, kv_length, dtype=torch.bool, device=device)
    mask.rule = mask_function  # type: ignore[attr-defined]
    return mask


def _first_difference(rule: Rule, window: int | None, longest: int, device: torch.device) -> int | None:
    """Windows and chunks hide nothing of short samples, and something of all longer ones: so lengths are doubled, and between
    the last that agrees and the first that does not the place is found by halves."""
    agrees, length = 0, 1
    while not _differs(rule, window, length, device):
        if length >= longest:
            return None
        agrees, length = length, min(2 * length, longest)
    while length - agrees > 1:
        middle = (agrees + length) // 2
        if _differs(rule, window, middle, device):
            length = middle
        else:
            agrees = middle
    return length


def _differs(rule: Rule, window: int | None, length: int, device: torch.device) -> bool:
    """Whether the last token of a sample of that length sees other ones by the rule than within the window."""
    places = torch.arange(length, device=device)
    last = places[-1:]
    sees = places > length - 1 - (length if window is None else window)
    return not torch.equal(rule(0, 0, last, places).broadcast_to(places.shape), sees)
