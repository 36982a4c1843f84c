"""Which tensor of a Hugging Face model is which part of which Megatron-Core parameter, for each architecture that is trained.

Owns the table, the interleaving and the cuts. megatron-core keeps queries, keys and values of a layer in one matrix, group by
group (a group's query heads, its key head, its value head), and the MLP's gate and up in another; each rank of T has 1/T of the
groups, of the MLP's width and of the vocabulary. So of every Hugging Face tensor a rank has a run of rows or of columns, as
`torch.chunk` cuts them: `split` and `join` go from one to the other without talking to anybody.

In layers of Transformer Engine the norm before a product is part of the product's module, and its weight is named after that.

The experts of a layer are two stacks of matrices, here as in Hugging Face's model, and each rank of E has a run of them. A
model's files, and every server, have three matrices for each expert: `files` says which is what.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

ARCHITECTURES = {
    "llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2 (and 2.5)", "qwen3": "Qwen3 (dense)", "qwen3_moe": "Qwen3-MoE",
}  # fmt: skip
"""By transformers' `model_type`."""

Kind = Literal["whole", "heads", "gated", "vocabulary"]


@dataclass(frozen=True)
class ModelDimensions:
    """What of a configuration decides where its tensors go."""

    layers: int
    heads: int
    groups: int
    """Key-value heads."""
    head_dim: int
    vocabulary: int
    tied: bool
    qkv_bias: bool
    head_norms: bool
    """Of queries and keys."""
    experts: int = 0
    """Of each layer in `expert_layers`."""
    expert_layers: frozenset[int] = frozenset()
    """Numbers, from 0, of the layers with experts in place of one MLP."""
    top_k: int = 0
    """Experts that a token goes to."""
    expert_width: int = 0
    """Of an expert's inner states."""
    normalised: bool = True
    """Whether the weights of a token's experts add up to 1."""


@dataclass(frozen=True)
class Part:
    """A Hugging Face tensor; `dim`: along which ranks have parts of it, None: all have all of it."""

    name: str
    dim: int | None


@dataclass(frozen=True)
class Rule:
    """A parameter of megatron-core's GPTModel, and the tensors it is made of, in order."""

    parameter: str
    kind: Kind
    parts: tuple[Part, ...]
    of_experts: bool = False
    """A stack of one matrix an expert, of which a rank has those of its experts."""

    @property
    def everywhere(self) -> bool:
        """Whether each rank has all of it: it counts once in a norm."""
        return all(part.dim is None for part in self.parts)


def rules(facts: ModelDimensions, *, norm_enters: bool = False) -> Iterator[Rule]:
    """Of all parameters. `norm_enters`: the norm before a product is part of its module, as in Transformer Engine's layers."""
    yield Rule("embedding.word_embeddings.weight", "vocabulary", (Part("model.embed_tokens.weight", 0),))
    for number in range(facts.layers):
        yield from _of_layer(number, facts, norm_enters)
    yield Rule("decoder.final_layernorm.weight", "whole", (Part("model.norm.weight", None),))
    if not facts.tied:
        yield Rule("output_layer.weight", "vocabulary", (Part("lm_head.weight", 0),))


def _of_layer(number: int, facts: ModelDimensions, norm_enters: bool) -> Iterator[Rule]:
    ours, theirs = f"decoder.layers.{number}.", f"model.layers.{number}."
    attention, mlp = f"{theirs}self_attn.", f"{theirs}mlp."

    def of_heads(kind: str) -> Rule:
        parts = tuple(Part(f"{attention}{letter}_proj.{kind}", 0) for letter in "qkv")
        return Rule(f"{ours}self_attention.linear_qkv.{kind}", "heads", parts)

    def of_norm(before: str, product: str, name: str, *, enters: bool) -> Rule:
        ours_is = f"{product}.layer_norm_weight" if enters else f"{before}.weight"
        return Rule(f"{ours}{ours_is}", "whole", (Part(f"{theirs}{name}.weight", None),))

    yield of_norm("input_layernorm", "self_attention.linear_qkv", "input_layernorm", enters=norm_enters)
    yield of_heads("weight")
    if facts.qkv_bias:
        yield of_heads("bias")
    if facts.head_norms:
        for letter in "qk":
            name = f"{ours}self_attention.{letter}_layernorm.weight"
            yield Rule(name, "whole", (Part(f"{attention}{letter}_norm.weight", None),))
    yield Rule(f"{ours}self_attention.linear_proj.weight", "whole", (Part(f"{attention}o_proj.weight", 1),))
    sparse = number in facts.expert_layers
    yield of_norm("pre_mlp_layernorm", "mlp.linear_fc1", "post_attention_layernorm", enters=norm_enters and not sparse)
    if sparse:
        yield Rule(f"{ours}mlp.router.weight", "whole", (Part(f"{mlp}gate.weight", None),))
        yield Rule(f"{ours}mlp.experts.gate_up", "whole", (Part(f"{mlp}experts.gate_up_proj", 0),), of_experts=True)
        yield Rule(f"{ours}mlp.experts.down", "whole", (Part(f"{mlp}experts.down_proj", 0),), of_experts=True)
        return
    gated = (Part(f"{mlp}gate_proj.weight", 0), Part(f"{mlp}up_proj.weight", 0))
    yield Rule(f"{ours}mlp.linear_fc1.weight", "gated", gated)
    yield Rule(f"{ours}mlp.linear_fc2.weight", "whole", (Part(f"{mlp}down_proj.weight", 1),))


@dataclass(frozen=True)
class FileTensor:
    """A tensor of a model's files: one of Hugging Face's model, or rows from `first` on of one expert's matrix in that."""

    tensor: str
    shape: tuple[int, ...]
    expert: int | None = None
    first: int = 0

    def within(self, stack: Tensor, begin: int) -> Tensor:
        """A view of it in this rank's part of the stack, whose first expert is `begin`."""
        assert self.expert is not None
        return stack[self.expert - begin, self.first : self.first + self.shape[0]]


class TensorMap:
    """The table of one model for one rank of `size`, and of `expert_size` that share out experts. `shapes`: the tensors of
    Hugging Face's model, in its order.

    Raises ValueError where the table and the model do not have the same tensors.
    """

    def __init__(
        self, facts: ModelDimensions, shapes: Mapping[str, tuple[int, ...]], rank: int, size: int, expert_rank: int = 0,
        expert_size: int = 1, *, norm_enters: bool = False,
    ) -> None:  # fmt: skip
        self.facts, self.shapes = facts, dict(shapes)
        self._size, self.expert_size = size, expert_size
        self._place = {False: (rank, size), True: (expert_rank, expert_size)}
        self.rules = {rule.parameter: rule for rule in rules(facts, norm_enters=norm_enters)}
        self.of = {part.name: (rule, part) for rule in self.rules.values() for part in rule.parts}
        if odd := sorted(set(self.of) ^ set(self.shapes)):
            where = "the model has" if odd[0] in self.shapes else "the model lacks"
            raise ValueError(f"{where} {odd[0]}, which the table of Megatron-Core's parameters does not expect")
        self.files = files(self.shapes, facts, expert_size)
        self._matrices: dict[str, list[str]] = {}
        for own, found in self.files.items():
            if found.expert is not None:
                self._matrices.setdefault(found.tensor, []).append(own)

    def matrices(self, name: str) -> list[str]:
        """Of a stack, the names that those of this rank's experts have in the model's files."""
        _, begin, count = self.here(name)
        return [own for own in self._matrices[name] if begin <= (self.files[own].expert or 0) < begin + count]

    def here(self, name: str) -> tuple[int | None, int, int]:
        """(dim, first, count): what of a tensor this rank has."""
        (rule, part), shape = self.of[name], self.shapes[name]
        if part.dim is None:
            return None, 0, shape[0]
        rank, size = self._place[rule.of_experts]
        each = -(-shape[part.dim] // size)
        first = min(rank * each, shape[part.dim])
        return part.dim, first, min(each, shape[part.dim] - first)

    def part_shape(self, name: str) -> tuple[int, ...]:
        """Of what this rank has."""
        dim, _, count = self.here(name)
        return tuple(count if axis == dim else length for axis, length in enumerate(self.shapes[name]))

    def split(self, rule: Rule, local: Tensor) -> dict[str, Tensor]:
        """The rank's parts of the Hugging Face tensors, from its parameter (or its gradient, or its moment). Views where they
        can be."""
        names = [part.name for part in rule.parts]
        match rule.kind:
            case "whole":
                return {names[0]: local}
            case "vocabulary":
                return {names[0]: local[: self.here(names[0])[2]]}
            case "gated":
                return dict(zip(names, local.chunk(2), strict=True))
            case "heads":
                facts = self.facts
                groups, queries, inner = facts.groups // self._size, facts.heads // facts.groups, local.shape[1:]
                by_group = local.view(groups, queries + 2, facts.head_dim, *inner)
                found = (by_group[:, :queries], by_group[:, queries], by_group[:, queries + 1])
                return {name: part.reshape(-1, *inner) for name, part in zip(names, found, strict=True)}

    def join(self, rule: Rule, parts: Mapping[str, Tensor], into: Tensor) -> None:
        """The other way; rows of a vocabulary that is filled up become 0."""
        found = [parts[part.name] for part in rule.parts]
        match rule.kind:
            case "whole":
                into.copy_(found[0])
            case "vocabulary":
                into[: len(found[0])].copy_(found[0])
                into[len(found[0]) :].zero_()
            case "gated":
                torch.cat(found, out=into)
            case "heads":
                facts = self.facts
                groups, queries, inner = facts.groups // self._size, facts.heads // facts.groups, into.shape[1:]
                by_group = into.view(groups, queries + 2, facts.head_dim, *inner)
                by_group[:, :queries].copy_(found[0].reshape(groups, queries, facts.head_dim, *inner))
                for place, part in enumerate(found[1:]):
                    by_group[:, queries + place].copy_(part.reshape(groups, facts.head_dim, *inner))


EXPERT = ".mlp.experts."
GATE_UP, DOWN = f"{EXPERT}gate_up_proj", f"{EXPERT}down_proj"


def files(shapes: Mapping[str, tuple[int, ...]], facts: ModelDimensions, expert_size: int = 1) -> dict[str, FileTensor]:
    """What a model's files have, by name, in the order of the model's tensors; experts of one stack so that the `expert_size`
    ranks that share them out take turns: then what is gathered at once comes from all of them."""
    found: dict[str, FileTensor] = {}
    each = max(1, facts.experts // expert_size)
    order = sorted(range(facts.experts), key=lambda expert: (expert % each, expert))
    for name, shape in shapes.items():
        if name.endswith(GATE_UP):
            width = shape[1] // 2
            for expert in order:
                for place, which in enumerate(("gate", "up")):
                    own = f"{name.removesuffix('gate_up_proj')}{expert}.{which}_proj.weight"
                    found[own] = FileTensor(name, (width, shape[2]), expert, place * width)
        elif name.endswith(DOWN):
            for expert in order:
                own = f"{name.removesuffix('down_proj')}{expert}.down_proj.weight"
                found[own] = FileTensor(name, shape[1:], expert)
        else:
            found[name] = FileTensor(name, shape)
    return found


def named(architectures: Iterable[str] = ARCHITECTURES.values()) -> str:
    """For a sentence."""
    *first, last = architectures
    return f"{', '.join(first)} and {last}"
