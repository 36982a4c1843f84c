"""From checkpoint tensors to an engine's parameters as a list of plain copies, found by watching the engine's own loader once.

A loader that fuses q, k and v, cuts shards for tensor parallelism or pads a vocabulary does, in the end, `slice.copy_(slice)`.
`record` runs it on tensors without memory and writes down each copy instead of performing it; from then on a version is a fixed
list of slices, copied in one call, in place (CUDA graphs hold the parameters' addresses). Refuses (`NoPlan`) whatever is more
than a copy: quantised weights, computed ones, parameters that no copy covers. Who gets a refusal loads as before. No vLLM here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from torch import Tensor

ROWS_COMPARED = 16
"""Rows of each copy that `differences` looks at, spread evenly from the first to the last."""
SHOWN = 3
UNREADABLE = (
    RuntimeError, NotImplementedError, TypeError, ValueError, LookupError, AttributeError, AssertionError, OverflowError
)  # fmt: skip
"""What a loader runs into that looks for values in a tensor without memory."""

Loader = Callable[[Iterable[tuple[str, Any]]], set[str] | None]
Flat = Callable[[str], "Tensor"]
"""A tensor of the version as one row of elements in the version's own dtype, by its checkpoint name."""


Arrange = Callable[[list["Tensor"]], list["Tensor"]]
"""From tensors as a loader fills them to those that a kernel reads."""


class NoPlan(RuntimeError):
    """The loader does more than copy slices; the sentence says where."""


@dataclass(frozen=True)
class Copy:
    """`target.copy_(flat(source).as_strided(size, stride, offset))`, in elements. `target` is a view of a live parameter."""

    source: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    target: Tensor

    def taken(self, flat: Tensor) -> Tensor:
        """The slice of the source; `flat` has one axis."""
        return flat.as_strided(self.size, self.stride, flat.storage_offset() + self.offset)

    def is_made(self, flat: Flat) -> bool:
        """Whether the target holds what the copy would write, in every element."""
        return torch.equal(self.taken(flat(self.source)).to(self.target.dtype).to(self.target.device), self.target)


class Arranged:
    """Parameters that a kernel reads in an order of its own. A version's copies go to fresh tensors as the loader knows them;
    `arrange` makes the kernel's of these, which are copied into the parameters where they stand.

    `loaded` are stand-ins without memory, to which the copies have been recorded; `arrange` may write to what it is given.
    """

    def __init__(
        self, copies: Sequence[Copy], loaded: Sequence[Tensor], parameters: Sequence[Tensor], arrange: Arrange
    ) -> None:
        self.copies, self.parameters = tuple(copies), tuple(parameters)
        self._loaded, self._arrange = tuple(loaded), arrange
        self._places = {_storage(tensor): place for place, tensor in enumerate(loaded)}
        self._fresh: list[Tensor] = []
        self._missing: frozenset[str] = frozenset()

    @property
    def sources(self) -> frozenset[str]:
        return frozenset(copy.source for copy in self.copies)

    def put(self, taken: Sequence[Tensor]) -> None:
        """`taken`: the slices of all copies, in their order."""
        copy_all(list(self.parameters), self._made(taken))

    def put_some(self, flat: Flat, only: frozenset[str]) -> None:
        """Some tensors of a version: the parameters change with the last of them. Until then fresh memory is held."""
        come = only & self.sources
        if not come <= self._missing:  # the first ones; or what a version that broke off has left is in the way
            self._fresh, self._missing = self._blank(), self.sources
        chosen = [copy for copy in self.copies if copy.source in come]
        copy_all(self._targets(self._fresh, chosen), [copy.taken(flat(copy.source)) for copy in chosen])
        self._missing -= come
        if not self._missing:
            copy_all(list(self.parameters), self._arrange(self._fresh))
            self._fresh = []

    def differing(self, tensor: Flat) -> tuple[str, ...]:
        """The sources, all of them, if the parameters are other than these tensors make them in any element."""
        made = self._made([copy.taken(tensor(copy.source)) for copy in self.copies])
        same = all(_equal(one, other) for one, other in zip(made, self.parameters, strict=True))
        return () if same else tuple(sorted(self.sources))

    def _made(self, taken: Sequence[Tensor]) -> list[Tensor]:
        fresh = self._blank()
        copy_all(self._targets(fresh, self.copies), list(taken))
        return self._arrange(fresh)

    def _blank(self) -> list[Tensor]:
        """Zeros, as what no copy covers is padding."""
        device = self.parameters[0].device
        return [torch.zeros(tensor.shape, dtype=tensor.dtype, device=device) for tensor in self._loaded]

    def _targets(self, fresh: Sequence[Tensor], copies: Sequence[Copy]) -> list[Tensor]:
        views = [copy.target for copy in copies]
        return [fresh[self._places[_storage(v)]].as_strided(v.shape, v.stride(), v.storage_offset()) for v in views]


@dataclass(frozen=True)
class CopyPlan:
    """All copies of a version, in the loader's order; then what kernels read in an order of their own."""

    copies: tuple[Copy, ...]
    arranged: tuple[Arranged, ...] = ()

    def apply(self, flat: Flat, only: frozenset[str] | None = None) -> None:
        """Copy all (or those of the tensors `only`) in place, on the current stream."""
        chosen = [copy for copy in self.copies if only is None or copy.source in only]
        copy_all([copy.target for copy in chosen], [copy.taken(flat(copy.source)) for copy in chosen])
        for one in self.arranged:
            if only is None:
                one.put([copy.taken(flat(copy.source)) for copy in one.copies])
            elif only & one.sources:
                one.put_some(flat, only)

    def bound(self, flat: Flat) -> BoundPlan:
        """The plan on sources that stay where they are, such as a staging buffer, so that nothing is looked up any more."""
        arranged = [(one, [copy.taken(flat(copy.source)) for copy in one.copies]) for one in self.arranged]
        targets = [copy.target for copy in self.copies]
        return BoundPlan(targets, [copy.taken(flat(copy.source)) for copy in self.copies], arranged)

    def differing(self, flat: Flat) -> tuple[str, ...]:
        """Names of the tensors that some parameter does not hold, compared in every element."""
        plain = {copy.source for copy in self.copies if not copy.is_made(flat)}
        return tuple(sorted(plain.union(*(one.differing(flat) for one in self.arranged))))

    @property
    def sources(self) -> frozenset[str]:
        return frozenset(copy.source for copy in self.copies).union(*(one.sources for one in self.arranged))

    @property
    def count(self) -> int:
        return len(self.copies) + sum(len(one.copies) for one in self.arranged)

    @property
    def nbytes(self) -> int:
        """Bytes of parameters that one application writes."""
        targets = [copy.target for copy in self.copies] + [tensor for one in self.arranged for tensor in one.parameters]
        return sum(target.numel() * target.element_size() for target in targets)


@dataclass(frozen=True)
class BoundPlan:
    targets: list[Tensor]
    taken: list[Tensor]
    arranged: list[tuple[Arranged, list[Tensor]]] = field(default_factory=list)

    def apply(self) -> None:
        copy_all(self.targets, self.taken)
        for one, taken in self.arranged:
            one.put(taken)


def copy_all(targets: list[Tensor], taken: list[Tensor]) -> None:
    """One call for all: on a GPU few kernels instead of one a tensor."""
    if targets:
        torch._foreach_copy_(targets, taken, non_blocking=True)


def record(
    parameters: Mapping[str, Tensor], load: Loader, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype
) -> CopyPlan:
    """What `load` would copy from tensors of these names and shapes into `parameters`. Nothing is read or written.

    Raises `NoPlan`.
    """
    sources = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}
    watching = _Watching(parameters, sources)
    try:
        with watching:
            load(iter(sources.items()))
    except NoPlan:
        raise
    except UNREADABLE as error:
        raise NoPlan(f"the loader needs more than names and shapes: {type(error).__name__}: {error}") from error
    watching.check_covered()
    return CopyPlan(tuple(watching.copies))


def differences(plan: CopyPlan, tensors: Callable[[str], Tensor]) -> list[str]:
    """Names of the tensors whose loaded values are not those that the plan would copy. Looks at rows spread over each copy, so
    `tensors` may be views of files."""
    found = dict.fromkeys(copy.source for copy in plan.copies if not _same(copy, tensors(copy.source)))
    return list(found)


def _same(copy: Copy, source: Tensor) -> bool:
    taken = copy.taken(source.reshape(-1))
    if copy.target.dim():
        last = copy.target.shape[0] - 1
        rows = torch.tensor(sorted({last * place // (ROWS_COMPARED - 1) for place in range(ROWS_COMPARED)}))
        taken, target = taken[rows], copy.target[rows.to(copy.target.device)]
    else:
        target = copy.target
    return torch.equal(taken.to(target.dtype), target.to(taken.device))


class _Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation of a loader: notes copies from sources to parameters, refuses other writes, lets the rest pass."""

    def __init__(self, parameters: Mapping[str, Tensor], sources: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.copies: list[Copy] = []
        self._parameters = {_storage(tensor): (name, tensor.numel()) for name, tensor in parameters.items()}
        self._sources = {_storage(tensor): (name, tensor) for name, tensor in sources.items()}
        self._covered: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        written = [value for value in _tensors_written(func, args, kwargs or {}) if _storage(value) in self._parameters]
        if not written:
            return func(*args, **(kwargs or {}))
        target = written[0]
        if func is torch.ops.aten.copy_.default:
            self._note(target, args[1])
        elif func not in (torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor, torch.ops.aten.zero_.default):
            raise NoPlan(f"the loader writes {self._name(target)} with {func}, which is not a copy")
        self._covered[_storage(target)] += target.numel()  # padding is filled with what stands there from the first load on
        return target

    def check_covered(self) -> None:
        bare = [name for storage, (name, numel) in self._parameters.items() if self._covered[storage] != numel]
        if bare:
            some = ", ".join(sorted(bare)[:SHOWN])
            raise NoPlan(f"of {len(bare)} parameters the loader does not write each element once: {some}")

    def _note(self, target: Tensor, source: Tensor) -> None:
        found = self._sources.get(_storage(source))
        if found is None:
            raise NoPlan(f"the loader copies computed values into {self._name(target)}")
        if source.shape != target.shape:
            source = source.expand(target.shape)
        kept = target.detach()
        self.copies.append(Copy(found[0], tuple(source.shape), source.stride(), int(source.storage_offset()), kept))

    def _name(self, target: Tensor) -> str:
        return self._parameters[_storage(target)][0]


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.to(other.dtype), other)


def _storage(tensor: Tensor) -> int:
    """The identity of the memory behind views; it holds for tensors without memory too."""
    return int(tensor.untyped_storage()._cdata)


def _tensors_written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors among its arguments that an operation writes to."""
    found: list[Tensor] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            found += [one for one in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(one, torch.Tensor)]
    return found
