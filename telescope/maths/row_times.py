"""How long a rank takes for a packed row, forward and backward: its host's time to start the kernels, and its card's to run
them. The slower one counts. Pure arithmetic.

Owns the shares of a card's peaks that are reached; benchmarks/results/training.md and megatron.md have the rows they are from.
Refuses to know memory, and what ranks send each other.
"""

from __future__ import annotations

import msgspec

from telescope.maths.memory import Checkpointing, ModelShape, layers_again

COMPILED_LAYER_S, EAGER_AGAIN_S = 4.3e-3, 12.5e-3
"""Of the host for a row, a layer: compiled and kept, and eager and computed again. By rows of 4,096 tokens of 28 layers on an
H200's host: 121 ms and 350 ms."""
FORWARD_AGAIN = 4 / 3
"""What is computed again is a second forward pass beside one forward and one backward pass of twice its work."""
PRODUCT_SHARE = 0.70
"""Of the peak operations, in products of matrices."""
ATTENTION_SHARE = 0.56
"""Of the peak operations, in attention's products within the samples of a row."""
READ_SHARE = 0.9
"""Of the memory's bandwidth, when much is read or written at once."""
LOGIT_BYTES = 31
"""Read and written for each logit, in the passes over a chunk in float32 and its gradient."""
COMPILED_BYTES, EAGER_BYTES = 630, 1900
"""Read and written for each layer, token and number of a hidden state, outside of products and attention: norms, rotations,
activations, casts. Compiled kernels are fused. With the shares above, fifteen measured rows are met within 16 %."""
SUM_BYTES = 14
"""Read and written for each parameter when a row's gradients are added to those before."""


class RowTime(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one row on one rank."""

    host_s: float
    card_s: float

    @property
    def seconds(self) -> float:
        return max(self.host_s, self.card_s)


def time_row(
    shape: ModelShape, *, tokens: float, length: float, flops: float, bandwidth: float, compiled: bool,
    checkpointing: Checkpointing, checkpointed_layers: int | None = None, whole_graphs: bool = True, frozen: bool = False,
) -> RowTime:  # fmt: skip
    """Of a rank's part of a row, `tokens` tokens in samples of `length` tokens on average.

    `flops`: operations a second of the card, `bandwidth`: bytes a second of its memory, peaks both; `checkpointing` and
    `checkpointed_layers` as in `maths.memory.trainer_memory`; `whole_graphs`: what is compiled is whole layers, of which
    selective checkpointing keeps attention's results alone; `frozen`: the model's matrices have no gradients of their own
    (adapters have).
    """
    again = layers_again(shape.layers, checkpointing, checkpointed_layers) / shape.layers
    more = 1 + again * (FORWARD_AGAIN - 1)
    selective = checkpointing == "selective"
    products = 1.0 if selective and not (compiled and whole_graphs) else more
    a_weight = 4.0 if frozen else 6.0
    layers = a_weight * shape.layers * shape.layer_matrices * products
    head = a_weight * shape.embedding_parameters
    attention = 6.0 * shape.layers * shape.query * length * (1.0 if selective else more)
    pointwise = shape.layers * shape.hidden * (COMPILED_BYTES if compiled else EAGER_BYTES) * more
    moved = pointwise + LOGIT_BYTES * shape.vocabulary
    sums = 0.0 if frozen else SUM_BYTES * shape.parameters
    card_s = (
        tokens * ((layers + head) / PRODUCT_SHARE + attention / ATTENTION_SHARE) / flops
        + (tokens * moved + sums) / (bandwidth * READ_SHARE)
    )  # fmt: skip
    once = COMPILED_LAYER_S if compiled else EAGER_AGAIN_S / FORWARD_AGAIN
    return RowTime(host_s=shape.layers * once * more, card_s=card_s)
