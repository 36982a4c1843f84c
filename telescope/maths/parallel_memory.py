"""Bytes of a trainer rank whose model is cut by tensor and pipeline parallelism, and its rows by context parallelism: what
memory.py is for ranks that spread whole weights.

Owns which part of a layer each of the ranks holds. Refuses settings, files and cards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from telescope.maths.memory import PIECE_BYTES, Checkpointing, ModelShape, TrainerMemory, layer_activation_bytes


def parallel_memory(
    shape: ModelShape, *, tensor: int, copies: int, spread_sequence: bool, spread_moments: bool, row_tokens: int, chunk: int,
    weight_bytes: int = 4, compute_bytes: int = 2, gradient_bytes: int = 4, checkpointing: Checkpointing = True,
    reference: bool = False, handed_bytes: int = 0, layers: int | None = None, begins: bool = True, ends: bool = True,
    rows_held: float = 1.0, sharing: int = 1, moment_bytes: Sequence[int] | None = None, hosted: float = 0.0,
) -> TrainerMemory:  # fmt: skip
    """One of `tensor` ranks that hold a model together, or a stage of it, with AdamW. There are `copies` ranks with equal parts
    of it. `sharing` ranks share each row of `row_tokens`.

    `layers` of the stage, None: all; `begins`: the embedding is here, `ends`: the last norm and the head are; `rows_held`: rows
    whose activations wait for their way back.

    `spread_sequence`: norms and residuals are cut along the row, too; `spread_moments`: weights that are updated, and moments,
    over the copies; `gradient_bytes`: of one in the buffer that they are added up in; `moment_bytes`: of each of the two
    between updates, None: those of a weight; `hosted`: of what is updated, the share that is in host memory then. The rest as
    in `trainer_memory`.
    docs/internals/planner.md derives each term.
    """
    count = shape.layers if layers is None else layers
    held = rank_parameters(shape, tensor, layers=count, begins=begins, ends=ends)
    updated = -(-held // copies) if spread_moments else held
    apart = compute_bytes != weight_bytes
    away = int(hosted * updated)
    stays = updated - away
    moments = moment_bytes or (weight_bytes, weight_bytes)
    # numbers beside those that stay which one that is stepped has on the card: weight, moments and gradient in one precision
    comes = (2 + apart if away else sum(each != weight_bytes for each in moments)) + (gradient_bytes != weight_bytes)
    largest = shape.embedding_parameters // tensor if begins or ends else 0
    piece = min(updated, max(PIECE_BYTES // weight_bytes, largest))
    head = shape.embedding_parameters // tensor if ends else 0
    cut = tensor if spread_sequence else 1
    row_tokens = -(-row_tokens // sharing)
    chunk = min(chunk, row_tokens)
    everything = parallel_activation_bytes(shape, compute_bytes, tensor, spread_sequence=spread_sequence, sharing=sharing)
    entering = compute_bytes * shape.hidden // cut
    products = _product_bytes(shape, compute_bytes, tensor, entering)
    little = {False: everything, "selective": products}.get(checkpointing, entering)
    widest = 2 * compute_bytes * (shape.intermediate // tensor + shape.hidden)
    # the last norm keeps its share, and the head the whole states and those of the sampled tokens
    tail = (4 + compute_bytes) * shape.hidden // cut + 2 * compute_bytes * shape.hidden if ends else 0
    return TrainerMemory(
        weights=held * compute_bytes + stays * weight_bytes if apart else held * weight_bytes,
        gradients=held * gradient_bytes,
        moments=stays * sum(moments),
        gathered=0,
        waiting=head * compute_bytes,
        layer_waiting=2 * shape.hidden * shape.intermediate // tensor * compute_bytes,
        kept=int(row_tokens * rows_held * count * little) + row_tokens * tail,
        tail=row_tokens * tail,
        at_work=row_tokens * (everything + widest),
        again=row_tokens * (everything + widest - little),
        head_gradient=head * compute_bytes if shape.tied and begins else 0,  # waits for the embedding's
        logits=(4 + compute_bytes) * chunk * shape.vocabulary // tensor + 4 * head if ends else 0,
        reference=held * compute_bytes if reference else 0,
        handed=shape.parameters * handed_bytes,
        visiting=piece * comes * weight_bytes,
        host=away * (sum(moments) + (weight_bytes if apart else 0)),
        gradients_stay=True,
    )


def rank_parameters(shape: ModelShape, tensor: int, *, layers: int, begins: bool = True, ends: bool = True) -> int:
    """Those on one of `tensor` ranks: parts of matrices and biases, and whole norms. A stage that ends a tied model which it
    does not begin has a copy of the embedding."""
    layer_norms = 2 * shape.hidden + (2 * shape.head_dim if shape.qk_norm else 0)
    vocabularies = begins + (ends and not (shape.tied and begins))
    cut = layers * (shape.layer_parameters - layer_norms) + vocabularies * shape.embedding_parameters
    return layers * layer_norms + shape.hidden * ends + -(-cut // tensor)


def parallel_activation_bytes(
    shape: ModelShape, compute_bytes: int, tensor: int, *, spread_sequence: bool, sharing: int = 1
) -> int:  # fmt: skip
    """What one layer keeps for its backward pass on one of `tensor` ranks, for one token that the rank has of a row which
    `sharing` ranks share.

    As `layer_activation_bytes`, without the activated gate: megatron-core computes it again. All but the two norms is cut;
    these, too, where the sequence is. Ranks that share a row keep attention's output as it is computed and as it comes back to
    its tokens, and key heads as often as `sharing` needs them. A test compares it with the tensors that layers save.
    """
    norms = 2 * (4 * (shape.hidden + 1) + 2 * compute_bytes * shape.hidden)
    rest = layer_activation_bytes(shape, compute_bytes) - norms - compute_bytes * shape.intermediate
    if sharing > 1:
        groups = max(1, shape.kv_heads // tensor)
        rest += compute_bytes * (shape.query + 2 * shape.key * (math.lcm(groups, sharing) // groups - 1))
    return norms // (tensor if spread_sequence else 1) + rest // tensor


def _product_bytes(shape: ModelShape, compute_bytes: int, tensor: int, entering: int) -> int:
    """With selective checkpointing: the layer's input, the results of its products and of attention. Those of the two that are
    summed over the ranks are whole on each."""
    cut = 2 * shape.query + 2 * shape.key + 2 * shape.intermediate
    return entering + compute_bytes * 2 * shape.hidden + (compute_bytes * cut + 4 * shape.heads) // tensor
