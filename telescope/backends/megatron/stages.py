"""Which layers each stage of a pipeline has, and what a stage's parameters are called in the whole model.

A model is cut into stretches of consecutive layers: P stages with V stretches each, stretch i on stage i mod P, so that a row
goes round V times. Owns the cut. The slowest stage sets the pace, so stages are cut to be alike in work: the head counts as so
many layers as it has as many numbers, and the embedding as none, as looking rows up costs nothing. Needs neither torch nor
other ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from telescope.maths.memory import ModelShape

EMBEDDING, HEAD, LAYERS = "embedding.word_embeddings.weight", "output_layer.weight", "decoder.layers."


@dataclass(frozen=True)
class Stretch:
    """Layers `first` to `first + layers - 1` of a model, counted from 0."""

    first: int
    layers: int
    begins: bool
    """Whether the embedding is here."""
    ends: bool
    """Whether the last norm and the head are here."""


@dataclass(frozen=True)
class StageLayout:
    """Of a whole model."""

    stages: int
    stretches: tuple[Stretch, ...]
    """In the order in which a row passes them."""
    tied: bool
    """Embedding and head are one matrix, of which the last stage has a copy."""

    def of(self, stage: int) -> tuple[Stretch, ...]:
        return self.stretches[stage :: self.stages]

    def described(self) -> str:
        """Layers of each stage, e.g. `5+4, 5+3` where each has two stretches."""
        return ", ".join("+".join(str(each.layers) for each in self.of(stage)) for stage in range(self.stages))

    def home(self, parameter: str) -> int:
        """The stage of a parameter, by megatron-core's name in a model that is not cut; of a tied embedding the first one."""
        if parameter == EMBEDDING:
            return 0
        if not parameter.startswith(LAYERS):
            return self.stages - 1
        layer = int(parameter.removeprefix(LAYERS).partition(".")[0])
        return next(
            place % self.stages for place, each in enumerate(self.stretches) if each.first <= layer < each.first + each.layers
        )

    def name(self, stretch: Stretch, here: str) -> str:
        """In a model that is not cut, of a parameter that megatron-core calls `here` within a stretch."""
        if here == HEAD and self.tied:
            return EMBEDDING
        if not here.startswith(LAYERS):
            return here
        number, _, rest = here.removeprefix(LAYERS).partition(".")
        return f"{LAYERS}{stretch.first + int(number)}.{rest}"


def cut_shape(shape: ModelShape, stages: int, stretches: int) -> StageLayout:
    """Of a model of this shape, see `cut_layers`."""
    head = shape.embedding_parameters / shape.layer_parameters
    return cut_layers(shape.layers, stages, stretches, head=head, tied=shape.tied)


def cut_layers(layers: int, stages: int, stretches: int, *, head: float, tied: bool) -> StageLayout:
    """`stretches`: of each stage; `head`: how many layers cost as much as it does. Raises ValueError where a stretch would
    have no layer."""
    if layers < stages * stretches:
        raise ValueError(f"{layers} layers can't be cut into {stages * stretches} stretches of at least one")
    whole = _spread(layers, stages, stretches, head)
    by_stage = [_spread(count, stretches, 1, head if stage + 1 == stages else 0.0) for stage, count in enumerate(whole)]
    counts = [by_stage[stage][lap] for lap in range(stretches) for stage in range(stages)]
    found, first = [], 0
    for place, count in enumerate(counts):
        found.append(Stretch(first, count, begins=place == 0, ends=place + 1 == len(counts)))
        first += count
    return StageLayout(stages, tuple(found), tied)


def _spread(layers: int, parts: int, least: int, head: float) -> list[int]:
    """At least so many for each part, the head on the last one, so that the fullest is as empty as it can be. What is left over
    goes to later parts, which hold fewer rows at a time."""
    if parts == 1:
        return [layers]
    others = parts - 1

    def fullest(last: int) -> float:
        return max(-(-(layers - last) // others), last + head)

    last = min(range(least, layers - others * least + 1), key=lambda count: (fullest(count), -count))
    each, more = divmod(layers - last, others)
    return [*[each] * (others - more), *[each + 1] * more, last]
