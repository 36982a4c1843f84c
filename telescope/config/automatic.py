"""What `auto` becomes of `trainer.seq_len`, `backend.compile` and `backend.gradient_checkpointing`, and why.

Decided once, where a run is about to start: by then its device, its cards and its model's size are known. On a CPU, and where
one of these is not known, it is what costs least memory. On a card it is the fastest of what fits, by `maths.row_times` and the
backend's own estimate of memory. What a user gave is never changed. Refuses to look at machines: whoever asks has done that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec

from telescope.config.model_shapes import COUNTED, ShapeUnknown, is_counted, shape_of
from telescope.config.run import RunConfig
from telescope.config.sections import ROW_TOKENS
from telescope.maths.memory import ModelShape
from telescope.maths.row_times import time_row
from telescope.maths.short_rows import MEAN_SHARE, PROMPT_TOKENS

GIB = 2**30
AUTO: Literal["auto"] = "auto"
SEQ_LEN, COMPILE, CHECKPOINTING = "trainer.seq_len", "backend.compile", "backend.gradient_checkpointing"
LAYERS = "backend.checkpointed_layers"
ROWS = (4096, 8192, 16_384, 32_768)
"""Tokens, of which one is chosen; with samples that need longer ones, as many as these need."""
ALIKE = 1.01
"""Times as long as the fastest: of choices that near to it the shortest row is taken, which needs least memory."""
COMPILATION_S = 40.0
"""Until layers are compiled, at a first start; 16 s where the run before has left its graphs."""
OLDEST_COMPILED = 8
"""Major compute capability (Ampere) from which on layers are compiled: older GPUs have no bfloat16 of their own."""
AS_ON_CPU = "this is what a CPU would have"
FILLED = 0.95
"""Of a rank's room: rows differ in length from step to step, and what an allocator can't use grows with that."""


class RankCard(msgspec.Struct, frozen=True, kw_only=True):
    """The GPU of a trainer rank, of several the one with least memory."""

    name: str
    room: int
    """Bytes that the rank may take."""
    flops: float
    """Dense half-precision operations a second, peak."""
    bandwidth: float
    """Of its memory, bytes a second, peak."""


class Surroundings(msgspec.Struct, frozen=True, kw_only=True):
    """Where the ranks will run, as far as it is known."""

    device: Literal["cpu", "gpu"]
    card: RankCard | None = None
    """None on a CPU, and where nothing tells which card it is."""
    handed_bytes: int = 0
    """Of a value of a version that waits on the card for the server beside; 0: none does."""
    compiler: bool = True
    """Whether the host has what torch.compile needs."""
    old_cards: bool = False
    """Whether a GPU's compute capability is below OLDEST_COMPILED."""


class Choice(msgspec.Struct, frozen=True):
    """One setting that was `auto`."""

    setting: str
    value: bool | int | str
    reason: str
    """Part of a sentence."""

    @property
    def typed(self) -> str:
        return f"{self.setting}={str(self.value).lower() if isinstance(self.value, bool) else self.value}"


class Decision(msgspec.Struct, frozen=True):
    """The configuration without `auto`, and what was chosen; nothing where nothing was to be said of it."""

    config: RunConfig
    choices: tuple[Choice, ...] = ()
    chosen_for: str = ""
    misfit: str = ""
    """As `find_misfit` has it, of a run that goes on."""

    @property
    def sentence(self) -> str:
        """In one line; empty where there is nothing to say."""
        if not self.choices:
            return ""
        reasons = list(dict.fromkeys(choice.reason for choice in self.choices))
        if len(reasons) == 1:  # the same of all
            return f"Chosen: {', '.join(choice.typed for choice in self.choices)}: {reasons[0]}."
        told = ", ".join(f"{choice.typed} ({choice.reason})" for choice in self.choices)
        return f"Chosen for {self.chosen_for}: {told}."


def find_open(config: RunConfig) -> tuple[str, ...]:
    """The settings that are `auto`, by their paths."""
    given = {
        SEQ_LEN: config.trainer.seq_len,
        COMPILE: getattr(config.backend, "compile", None),
        CHECKPOINTING: getattr(config.backend, "gradient_checkpointing", None),
    }
    return tuple(path for path, value in given.items() if value == AUTO)


def keep_decided(config: RunConfig, before: Mapping[str, Any]) -> RunConfig:
    """With what a run's config.json (`before`) has for settings that are `auto` here: a run that goes on computes as it began.
    What today's samples, padding or other settings do not go with is decided anew."""
    for path in find_open(config):
        section, name = path.split(".")
        value = (before.get(section) or {}).get(name)
        if value is None or value == AUTO or (path == SEQ_LEN and not _is_row(config, value)):
            continue
        kept = {path: value}
        if path == CHECKPOINTING and value and getattr(config.backend, "checkpointed_layers", 0) is None:
            kept[LAYERS] = (before.get(section) or {}).get("checkpointed_layers")
        config = _with(config, kept) or config
    return config


def _is_row(config: RunConfig, tokens: int) -> bool:
    return tokens >= find_shortest_row(config) and config.trainer.pad(tokens) == tokens


def find_misfit(config: RunConfig, where: Surroundings) -> str:
    """That a rank of a run which goes on needs more than it has here, and what to type; empty where it fits, and where that
    can't be told."""
    if where.card is None or not config.trains:
        return ""
    try:
        shape = shape_of(config.model.name)
    except ShapeUnknown:
        return ""
    search = _Search(config, (), shape, where.card, where)
    needed = search.needed(config) if is_counted(config.model.name) else None
    if needed is None or needed <= where.card.room:
        return ""
    undecided: dict[str, Any] = {SEQ_LEN: AUTO, COMPILE: AUTO, CHECKPOINTING: AUTO, LAYERS: None}
    known = type(config.backend).model_fields
    opened = _with(config, {path: value for path, value in undecided.items() if path == SEQ_LEN or path.split(".")[1] in known})
    anew = None if opened is None else decide(opened, where)
    least = None if anew is None else search.needed(anew.config)
    if anew is None or least is None or least > where.card.room:
        remedy = "give it more ranks (cluster.trainer_num_workers)"
    else:
        remedy = f"resume it with {' '.join(choice.typed for choice in anew.choices)}"
    return (
        f"With the settings that this run goes on with a rank needs about {needed / GIB:.1f} GiB by the estimate of memory, "
        f"and has {where.card.room / GIB:.1f} of {where.card.name}: if it runs out of memory, {remedy}"
    )


def find_shortest_row(config: RunConfig) -> int:
    """Tokens of a row that any sample fits into, or where longer ones are truncated the least that a row may have."""
    trainer = config.trainer
    return trainer.pad(config.inference.max_model_len if trainer.overlong == "refuse" else 8)


def decide(config: RunConfig, where: Surroundings) -> Decision:
    """Every `auto` as a value, each with its reason."""
    still_open = find_open(config)
    if not still_open:
        return Decision(config)
    if where.device == "cpu" or not config.trains:
        return Decision(_take_leanest(config, still_open))
    if where.card is None:
        return _take_known(config, still_open, f"no card of the ranks can be seen from here, and {AS_ON_CPU}")
    try:
        shape = shape_of(config.model.name)
    except ShapeUnknown:
        why = (
            f"the size of model.name={config.model.name} is not known before its ranks start, as that of a folder is, and "
            f"{AS_ON_CPU}"
        )
        return _take_known(config, still_open, why)
    if not is_counted(config.model.name):
        why = f"model.name={config.model.name} is of another kind than {', '.join(COUNTED)}, and {AS_ON_CPU}"
        return _take_known(config, still_open, why)
    search = _Search(config, still_open, shape, where.card, where)
    if search.needed(config) is None:
        why = f"backend={config.backend_name} does not tell what a rank needs, and {AS_ON_CPU}"
        return _take_known(config, still_open, why)
    candidates = list(search.candidates())
    fitting = (one for one in candidates if one.needed <= FILLED * where.card.room)
    found = search.worth_compiling(sorted(fitting, key=lambda one: one.update_s))
    if not found:
        nearest = min(candidates, key=lambda one: (one.needed, one.row))
        memory = f"a rank needs about {nearest.needed / GIB:.0f} of {where.card.room / GIB:.0f} GiB"
        why = f"by the estimate of memory nothing fits on this card ({where.card.name}), and this comes nearest: {memory}"
        return search.explain(nearest, why)
    best = min((one for one in found if one.update_s <= found[0].update_s * ALIKE), key=lambda one: (one.row, one.update_s))
    return search.explain(best)


def _take_leanest(config: RunConfig, still_open: tuple[str, ...]) -> RunConfig:
    leanest: dict[str, bool | int] = {COMPILE: False, CHECKPOINTING: True}
    leanest[SEQ_LEN] = max(config.trainer.pad(ROW_TOKENS), find_shortest_row(config))
    found = _with(config, {path: leanest[path] for path in still_open})
    assert found is not None  # these are refused with nothing
    return found


def _take_known(config: RunConfig, still_open: tuple[str, ...], reason: str) -> Decision:
    found = _take_leanest(config, still_open)
    return Decision(found, tuple(Choice(path, _at(found, path), reason) for path in still_open))


class _Candidate(msgspec.Struct, frozen=True):
    config: RunConfig
    row: int
    needed: int
    """Bytes on the card."""
    update_s: float
    """Of an update's forward and backward passes."""


class _Search:
    """All that may be chosen for one run on one card."""

    def __init__(
        self, config: RunConfig, still_open: tuple[str, ...], shape: ModelShape, card: RankCard, where: Surroundings
    ) -> None:
        self._config, self._open, self._shape, self._card, self._where = config, still_open, shape, card, where

    def candidates(self) -> Iterator[_Candidate]:
        for settings in self._combinations():
            config = _with(self._config, settings)
            if config is None:
                continue
            needed = self.needed(config)
            if needed is not None:
                yield _Candidate(config, config.trainer.row_tokens, needed, self._update_s(config))

    def worth_compiling(self, found: list[_Candidate]) -> list[_Candidate]:
        """Of candidates, the fastest first: those without compilation where that would not pay within the run."""
        weighed = COMPILE in self._open and self._config.backend.compiles_layers
        eager = [one for one in found if not one.config.backend.compiles]
        if not weighed or not eager or not found[0].config.backend.compiles:
            return found
        updates = self._config.number_of_steps * self._config.trainer.updates_per_step
        return found if (eager[0].update_s - found[0].update_s) * updates > COMPILATION_S else eager

    def _combinations(self) -> Iterator[dict[str, Any]]:
        """By path, every combination of values of the settings that are open."""
        shortest, pad = find_shortest_row(self._config), self._config.trainer.pad
        rows = sorted({max(pad(row), shortest) for row in ((ROW_TOKENS,) if self._truncates else ROWS)})
        ways = [
            {f"backend.{name}": value for name, value in way.items()}
            for way in self._config.backend.checkpointing_choices(self._shape.layers)
        ]
        can_compile = self._where.compiler and not self._where.old_cards
        weighed = [True, False] if self._config.backend.compiles_layers else [True]
        compiled = [{COMPILE: value} for value in (weighed if can_compile else [False])]
        for row in [{SEQ_LEN: row} for row in rows] if SEQ_LEN in self._open else [{}]:
            for graphs in compiled if COMPILE in self._open else [{}]:
                for way in ways if CHECKPOINTING in self._open else [{}]:
                    yield row | graphs | way

    def needed(self, config: RunConfig) -> int | None:
        """Bytes of a rank; None where the backend does not tell."""
        rank = config.backend.rank_memory(
            self._shape,
            config.model,
            config.trainer,
            ranks=config.cluster.trainer_num_workers,
            longest=config.inference.max_model_len,
            reference=config.algorithm.needs_reference,
            handed_bytes=self._where.handed_bytes if config.model.lora is None else 0,
        )
        return None if rank is None else rank.needed

    def _update_s(self, config: RunConfig) -> float:
        """Of an update's rows on one rank, for samples of the lengths that are assumed where none are known."""
        ranks, together = config.cluster.trainer_num_workers, config.backend.ranks_a_shard
        longest = float(min(config.trainer.row_tokens, config.inference.max_model_len))
        length = min(longest, MEAN_SHARE * config.rollout.max_tokens + PROMPT_TOKENS)
        rollouts = config.orchestrator.prompts_batch_size_for_trainer * config.rollout.group_size
        tokens = rollouts * length * together / ranks / config.trainer.number_of_minibatches
        rows = math.ceil(tokens / config.trainer.row_tokens)
        took = time_row(
            self._shape,
            tokens=tokens / rows / together,
            length=length,
            flops=self._card.flops,
            bandwidth=self._card.bandwidth,
            compiled=config.backend.compiles,
            checkpointing=config.backend.checkpointing,
            checkpointed_layers=getattr(config.backend, "checkpointed_layers", None),
            whole_graphs=config.backend.compiles_layers,
            frozen=config.model.lora is not None,
        )
        return rows * took.seconds

    @property
    def _truncates(self) -> bool:
        """Then what is trained depends on the row, which is not to depend on the card."""
        return self._config.trainer.overlong == "truncate"

    def explain(self, best: _Candidate, reason: str = "") -> Decision:
        """`reason`: one for all, in place of each setting's own."""
        reasons = {SEQ_LEN: self._of_row, COMPILE: self._of_compile, CHECKPOINTING: self._of_checkpointing}
        choices = [Choice(path, _at(best.config, path), reason or reasons[path](best)) for path in self._open]
        layers: int | None = getattr(best.config.backend, "checkpointed_layers", None)
        given: int | None = getattr(self._config.backend, "checkpointed_layers", None)
        if CHECKPOINTING in self._open and layers is not None and layers != given:
            choices.append(Choice(LAYERS, layers, reason or f"of {self._shape.layers}"))
        return Decision(best.config, tuple(choices), self._card.name)

    def _of_row(self, best: _Candidate) -> str:
        if self._truncates:
            return "with trainer.overlong=truncate samples are cut there, so it is the same on every card"
        if best.row > ROWS[-1]:
            return "as long as a sample may be"
        return "of the rows that fit the shortest that is as fast as any"

    def _of_compile(self, best: _Candidate) -> str:
        if best.config.backend.compiles and not best.config.backend.compiles_layers:
            return "this host has the compilers that it needs"
        if best.config.backend.compiles:
            other = _with(best.config, {COMPILE: False})
            gain = self._update_s(other) / best.update_s if other is not None else 1.0
            return f"a step trains {gain:.1f} times as fast with it, by what was measured on an H200"
        if not self._where.compiler:
            return "it needs a C and a C++ compiler and Python's headers, and this host lacks one of them"
        if self._where.old_cards:
            return f"a GPU here is older than those that layers are compiled for, of compute capability {OLDEST_COMPILED}"
        if best.config.backend.compiles_layers and _with(best.config, {COMPILE: True}) is None:
            return "the backend's other settings do without"
        return f"so short a run would not win back the {COMPILATION_S:.0f} s that it takes"

    def _of_checkpointing(self, best: _Candidate) -> str:
        memory = f"a rank needs about {best.needed / GIB:.0f} of {self._card.room / GIB:.0f} GiB"
        if best.config.backend.checkpointing is False:
            return f"everything fits: {memory}"
        return f"as little as possible is computed again: {memory}"


def _at(config: RunConfig, path: str) -> Any:
    section, name = path.split(".")
    return getattr(getattr(config, section), name)


def _with(config: RunConfig, settings: Mapping[str, Any]) -> RunConfig | None:
    """With these values by path; None where the backend does not take them with its others."""
    parts: dict[str, dict[str, Any]] = {"trainer": {}, "backend": {}}
    for path, value in settings.items():
        section, name = path.split(".")
        parts[section][name] = value
    trainer, backend = config.trainer.model_copy(update=parts["trainer"]), config.backend
    if parts["backend"]:
        try:
            backend = type(backend).model_validate({**backend.model_dump(), **parts["backend"]}, strict=True)
        except ValueError:
            return None
        ranks, adapters = config.cluster.trainer_num_workers, config.model.lora is not None
        if any(True for _ in backend.run_errors(ranks=ranks, adapters=adapters, on_cpu=config.cluster.device == "cpu")):
            return None
    return config.model_copy(update={"trainer": trainer, "backend": backend})
