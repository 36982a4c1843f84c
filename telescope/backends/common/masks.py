"""What a model lets a token see, by the mask that it asks transformers for, beside what attention here is told.

Attention here makes no mask: it is told the samples' lengths, and of a layer's window by an argument of the call. A layer that
keeps a window, or chunks, to its mask alone would be trained without it, as would one that makes a mask or a bias itself, and
one that lets a token see what comes after it. Owns the look that finds such layers, windows at all lengths up to a limit and
without a sample that long. Refuses to say what follows from it: that is the policy's.
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
        biases = [name for name, value in told.items() if isinstance(value, Tensor) and value.is_floating_point()]
        if biases:
            self.foreign = f"{biases[0]}, numbers that it hands to its attention"
        if mask is None:
            return
        window, rule = told.get("sliding_window"), _rule_of(mask)
        if rule is None:
            self.foreign = self.foreign or "a mask of its own making"
            return
        key = (id(rule), window)
        if key not in self._known:
            longest = mask.shape[-1] - 1 if _reads_tokens(rule) else self._longest
            self._known[key] = (rule, _first_difference(rule, window, longest, mask.device))
        if self._known[key][1] == 1:
            self.foreign = self.foreign or "a mask that shows a token what comes after it, or hides it from itself"


def _with_rule(
    batch_size: int, q_length: int, kv_length: int, mask_function: Rule, device: torch.device | str = "cpu", **_: Any
) -> Tensor:
    """A mask that shows all, which nobody here reads, of the shape that layers may look for."""
    mask = torch.ones(batch_size, 1, q_length, kv_length, dtype=torch.bool, device=device)
    mask.rule = mask_function  # type: ignore[attr-defined]
    return mask


def _rule_of(mask: Tensor) -> Rule | None:
    """Of a mask, or of a part of it, as some layers take; None where a layer has made it, or another of it."""
    base = mask._base
    found: Rule | None = getattr(mask if base is None else base, "rule", None)
    return found


def _reads_tokens(rule: Rule) -> bool:
    """Whether it looks something up that is known of the row's own tokens [1, T], such as which are of one image: it has no
    answer beyond them, and on a GPU the question would end the process."""
    waiting, known = [rule], set[int]()
    while waiting:
        each: Any = waiting.pop()
        if isinstance(each, Tensor) and each.ndim > 1:
            return True
        if id(each) not in known:
            known.add(id(each))
            waiting += each if isinstance(each, (tuple, list)) else ()
            waiting += [cell.cell_contents for cell in getattr(each, "__closure__", None) or ()]
    return False


def _first_difference(rule: Rule, window: int | None, longest: int, device: torch.device) -> int | None:
    """Windows and chunks hide nothing of short samples, and something of all longer ones: so lengths are doubled, and between
    the last that agrees and the first that does not the place is found by halves."""
    if longest < 1:
        return None
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
    """Whether the last token of a sample of that length, or one with another behind it, sees other ones by the rule than
    itself and those before it within the window."""
    places = torch.arange(length + 1, device=device)
    last = places[-2:-1]
    sees = (places < length) & (places > length - 1 - (length if window is None else window))
    return not torch.equal(rule(0, 0, last, places).broadcast_to(places.shape), sees)
