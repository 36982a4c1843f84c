"""What a model takes: parameters, bytes on a GPU to train it and to serve it. Pure arithmetic; operations are flops.py's.

For decoder-only transformers of the Llama and Qwen kind (grouped attention, gated MLP, RMSNorm), as Hugging Face computes them.
Owns counts; refuses to know files, cards and configurations. Bytes are bytes, not GiB.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Of a number in each precision."""


class ModelShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The numbers of a model's config.json that decide its size."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    """Embedding and head are one matrix."""
    qkv_bias: bool = False
    qk_norm: bool = False
    """Queries and keys of each head pass through a norm (Qwen3)."""

    @property
    def query(self) -> int:
        return self.heads * self.head_dim

    @property
    def key(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def layer_parameters(self) -> int:
        bias = self.query + 2 * self.key if self.qkv_bias else 0
        norms = 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)
        return self.layer_matrices + bias + norms

    @property
    def layer_matrices(self) -> int:
        """Those of a layer's parameters that are in matrices."""
        return 2 * self.hidden * (self.query + self.key) + 3 * self.hidden * self.intermediate

    @property
    def embedding_parameters(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """All of them, tied ones once: 596,049,920 for Qwen3-0.6B."""
        rest = self.embedding_parameters * (1 if self.tied else 2) + self.hidden
        return self.layers * self.layer_parameters + rest

    @property
    def computing_parameters(self) -> int:
        """Those that each token is multiplied with: all but a lookup of the embedding."""
        return self.layers * self.layer_parameters + self.embedding_parameters

    def kv_bytes_per_token(self, bytes_per_value: int) -> int:
        """Keys and values of all layers: 114,688 for Qwen3-0.6B in bfloat16."""
        return 2 * self.layers * self.key * bytes_per_value


QWEN2_TYPES = ("qwen2",)
QK_NORM_TYPES = ("qwen3",)
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""What a config.json calls the number of experts of a layer."""


def shape_from(config: Mapping[str, Any]) -> ModelShape:
    """The shape in a Hugging Face config.json. Raises ValueError where it is not a dense decoder of this kind."""
    try:
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        kind = str(config.get("model_type", ""))
        if any(config.get(name) for name in EXPERTS):
            raise ValueError(f"a model of type {kind} has experts, which this arithmetic does not know")
        return ModelShape(
            layers=int(config["num_hidden_layers"]),
            hidden=hidden,
            intermediate=int(config["intermediate_size"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            vocabulary=int(config["vocab_size"]),
            tied=bool(config.get("tie_word_embeddings", kind not in ("llama",))),
            qkv_bias=bool(config.get("attention_bias", kind in QWEN2_TYPES)) or kind in QWEN2_TYPES,
            qk_norm=kind in QK_NORM_TYPES,
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"config.json lacks or misstates {error}: not a model whose size can be worked out") from error


# ---- training


class AdapterShape(msgspec.Struct, frozen=True, kw_only=True):
    """LoRA: float32 matrices A and B beside those of each layer that are named; the model is frozen."""

    rank: int
    modules: tuple[str, ...]
    """Last names: `q_proj`, `down_proj`, …; others than the usual seven of a layer count nothing."""

    def parameters(self, shape: ModelShape) -> int:
        """Of all layers: 33,030,144 for rank 16 in all seven matrices of Qwen3-4B."""
        into, out = shape.hidden, {"q_proj": shape.query, "k_proj": shape.key, "v_proj": shape.key, "o_proj": shape.query}
        out |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), shape.intermediate)
        return shape.layers * self.rank * sum(into + out[name] for name in self.modules if name in out)

    def kept_bytes(self, compute_bytes: int) -> int:
        """The results of A, which B's gradient needs, for one token and layer."""
        return compute_bytes * self.rank * len(self.modules)


class TrainerMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes on one rank. Not all of them at once: `total` is the worst of the four moments of a step that can be it."""

    weights: int
    gradients: int
    moments: int
    gathered: int
    """Copies in the precision of the forward pass."""
    waiting: int
    """Gradients of the head on their way to their shards; those of a layer are `layer_waiting`."""
    layer_waiting: int
    kept: int
    """Activations that wait for the backward pass when the last layer is done."""
    tail: int
    """Of `kept`, what is gone when the last layer's turn comes: the last norm's, and the hidden states for the head."""
    at_work: int
    """Those of one layer while its gradient is computed."""
    again: int
    """Of `at_work`, what is not in `kept`: all but the layer's gradients is, where layers are not computed again."""
    head_gradient: int
    """In the precision of the forward pass; it stays until the backward pass is over."""
    logits: int
    """A chunk of logits in float32, its gradient in the precision of the forward pass, and the head's gradient, which is summed
    in float32."""
    reference: int = 0
    """A frozen copy of the base model."""
    handed: int = 0
    """A version, in the buffer by which servers on the same card take it."""
    visiting: int = 0
    """Moments that have come from host memory for their step."""
    host: int = 0
    """In the memory of the rank's host; no part of `total`."""
    compiled: bool = False
    accumulates: bool = True
    """A step has several rows on this rank: the gradients of those before stand while the next one is at work."""
    gradients_stay: bool = False
    """They are added up in a buffer that is there between steps as well."""

    @property
    def resident(self) -> int:
        return self.weights + self.moments + self.gathered + self.reference + self.handed

    @property
    def between_steps(self) -> int:
        """What stays when a step is over and all that it needed is given back."""
        gradients = self.gradients if self.gradients_stay else 0
        return self.weights + gradients + self.moments + self.reference + self.handed

    @property
    def at_the_head(self) -> int:
        """The forward pass is over, and the log-probs' gradient is computed."""
        gradients = self.gradients if self.accumulates else 0
        return self.resident + gradients + self.waiting + self.kept + self.logits

    @property
    def at_the_last_layer(self) -> int:
        """It is computed again, where it was not kept, while all others' activations still wait: the peak of long rows."""
        gradients = self.gradients if self.accumulates else 0
        return self.resident + gradients + self.head_gradient + self.layer_waiting + self.kept - self.tail + self.again

    @property
    def at_the_first_layer(self) -> int:
        """The end of the backward pass: all gradients are there."""
        return self.resident + self.gradients + self.layer_waiting + self.at_work

    @property
    def at_the_update(self) -> int:
        return self.weights + self.moments + self.gradients + self.reference + self.handed + self.visiting

    @property
    def total(self) -> int:
        return max(self.at_the_head, self.at_the_last_layer, self.at_the_first_layer, self.at_the_update)

    @property
    def needed(self) -> int:
        """Of a card, with the runtime and what an allocator can't use."""
        return int(self.total * (COMPILED_SLACK if self.compiled else SLACK)) + RUNTIME_BYTES


SLACK, COMPILED_SLACK = 1.05, 1.03
"""Of a rank's tensors. Estimates lie up to 3.3 % below measured peaks; with compiled layers none of 27 lies 1.6 % below."""
Checkpointing = bool | Literal["full", "selective"]
"""true and full: a layer's input is kept; selective: the results of its products and of attention too; false: everything."""
Optimizer = Literal["adamw", "adamw_8bit", "muon", "sgd"]
Offload = Literal["none", "optimizer", "parameters"]


def trainer_memory(
    shape: ModelShape, *, ranks: int, row_tokens: int, chunk: int, weight_bytes: int = 4, compute_bytes: int = 2,
    checkpointing: Checkpointing = True, checkpointed_layers: int | None = None, reshard: bool | int = True,
    optimizer: Optimizer = "adamw", offload: Offload = "none", reference: bool = False, handed_bytes: int = 0,
    rows: int = 2, compiled: bool = False, pointwise_again: bool = False, joined: bool = False,
    adapters: AdapterShape | None = None,
) -> TrainerMemory:  # fmt: skip
    """One of `ranks` that share a model under FSDP2, with rows of `row_tokens` tokens and logits of `chunk` tokens at once.

    `weight_bytes`: of a master weight and its gradient; `compute_bytes`: of a value in the forward pass;
    `checkpointed_layers`: the first so many do as `checkpointing` says, the others keep everything (None: all do); `reshard`:
    gathered layers are freed after the forward pass, or spread over so many ranks; `handed_bytes`: of a value in the buffer for
    servers on the same card, 0 where there is none; `rows`: of one update on a rank; `compiled`: layers are; `pointwise_again`:
    those of them that keep everything leave out `compiled_pointwise_bytes`; `joined`: their attention is computed in parts of a
    row; `adapters`: all that is trained. docs/planning.md derives each term.
    """
    share = -(-shape.parameters // ranks)
    trained = -(-adapters.parameters(shape) // ranks) if adapters else share
    trained_bytes = 4 if adapters else weight_bytes
    away = offload == "parameters"
    cast = compute_bytes != weight_bytes or away or (adapters is not None and compute_bytes != trained_bytes)
    head = shape.embedding_parameters
    # whole, in the precision of the forward pass, and in float32 to be summed over the ranks
    waits = compute_bytes + (4 if ranks > 1 or compute_bytes != 4 else 0) if cast or ranks > 1 else 0
    heads = 0 if adapters else head * (1 if shape.tied else 2)
    layer = adapters.parameters(shape) // shape.layers if adapters else shape.layer_parameters
    chunk = min(chunk, row_tokens)
    weights = share * weight_bytes + (trained * trained_bytes if adapters else 0)
    moments = adapter_moment_bytes(trained, optimizer) if adapters else moment_bytes(shape, optimizer, weight_bytes, ranks)
    frozen = share * compute_bytes if reference else 0
    on_host = {"none": 0, "optimizer": moments, "parameters": weights + trained * trained_bytes + moments + frozen}[offload]
    again = layers_again(shape.layers, checkpointing, checkpointed_layers)
    everything = _layer_own(shape, compute_bytes, compiled, joined, adapters)
    if compiled and pointwise_again:
        everything -= compiled_pointwise_bytes(shape, compute_bytes)  # they are back when it is at work
    little = _layer_kept(shape, compute_bytes, checkpointing, compiled) if again else everything
    own, gradients = _layer_at_work(shape, compute_bytes, compiled, joined, adapters)
    tail = (4 + 3 * compute_bytes) * shape.hidden
    return TrainerMemory(
        weights=0 if away else weights,
        gradients=0 if away else trained * trained_bytes,
        moments=moments if offload == "none" else 0,
        gathered=_gathered(shape, compute_bytes, reshard) if cast or ranks > 1 else 0,
        waiting=heads * waits,
        layer_waiting=layer * waits,
        kept=row_tokens * (again * little + (shape.layers - again) * everything + tail),
        tail=row_tokens * tail,
        at_work=row_tokens * (own + gradients),
        again=row_tokens * (own + gradients - (little if again == shape.layers else everything)),
        head_gradient=heads * compute_bytes,
        logits=(4 + compute_bytes) * chunk * shape.vocabulary + (0 if adapters else head * 4),
        reference=0 if away else frozen,
        handed=shape.parameters * handed_bytes,
        visiting=min(moments, _visiting(shape, weight_bytes, ranks) * moments // max(1, trained * trained_bytes))
        if offload == "optimizer"
        else 0,
        host=on_host,
        compiled=compiled,
        accumulates=rows > 1,
    )


PIECE_BYTES = 256 << 20
"""Of parameters whose moments come from host memory at the same time; a larger one comes alone."""
BLOCK = 256
"""Entries of an 8-bit moment that share a float32 scale."""


def moment_bytes(shape: ModelShape, optimizer: Optimizer, weight_bytes: int, ranks: int = 1) -> int:
    """Of one rank's share: two moments a parameter (AdamW), two bytes and their scales, or one for layers' matrices (Muon)."""
    everything = shape.parameters
    match optimizer:
        case "adamw":
            return 2 * -(-everything // ranks) * weight_bytes
        case "adamw_8bit":
            return -(-everything // ranks) * 2 * (BLOCK + 4) // BLOCK
        case "muon":
            return -(-(2 * everything - shape.layers * shape.layer_matrices) // ranks) * weight_bytes
        case "sgd":
            return 0


def adapter_moment_bytes(trained: int, optimizer: Optimizer) -> int:
    """Of one rank's adapters, which are float32."""
    return {"adamw": 8 * trained, "adamw_8bit": trained * 2 * (BLOCK + 4) // BLOCK, "muon": 4 * trained, "sgd": 0}[optimizer]


def _visiting(shape: ModelShape, weight_bytes: int, ranks: int) -> int:
    """Bytes of the parameters of the largest piece."""
    return max(PIECE_BYTES, -(-shape.embedding_parameters // ranks) * weight_bytes)


def _gathered(shape: ModelShape, compute_bytes: int, reshard: bool | int) -> int:
    """Whole weights: the embedding and head stay through the step, of the layers two (one at work, one on its way) or all; of
    the others a share each, where they stay with a group of ranks."""
    head = shape.embedding_parameters * (1 if shape.tied else 2)
    layers = min(2, shape.layers) if reshard else shape.layers
    others = (shape.layers - layers) * -(-shape.layer_parameters // reshard) if reshard > 1 else 0
    return (head + layers * shape.layer_parameters + others) * compute_bytes


def layer_activation_bytes(shape: ModelShape, compute_bytes: int) -> int:
    """What one layer keeps for its backward pass, for one token.

    Two norms keep their input in float32, its deviation, its normalised value and their output; attention keeps rotated queries
    and keys, values, its output and a float32 log-sum a head; the MLP keeps gate, up, the activated gate and their product.
    Queries and keys that are normalised are kept as in a norm. (sdpa on a CPU copies its output once more.)
    """
    wide = 4
    norms = 2 * (wide * (shape.hidden + 1) + 2 * compute_bytes * shape.hidden)
    attention = compute_bytes * (2 * shape.query + 2 * shape.key) + 4 * shape.heads
    qk_norms = (wide + compute_bytes) * (shape.query + shape.key) + wide * (shape.heads + shape.kv_heads)
    return norms + attention + (qk_norms if shape.qk_norm else 0) + 4 * compute_bytes * shape.intermediate


def layer_product_bytes(shape: ModelShape, compute_bytes: int) -> int:
    """What one layer keeps with selective checkpointing, for one token: its input, the results of its seven products and of
    attention, and that one's float32 log-sum a head."""
    products = 3 * shape.hidden + 2 * shape.query + 2 * shape.key + 2 * shape.intermediate
    return compute_bytes * products + 4 * shape.heads


def compiled_activation_bytes(shape: ModelShape, compute_bytes: int) -> int:
    """What one compiled layer keeps for its backward pass, for one token.

    Its two graphs, before and after attention, are cut by PyTorch's min-cut partitioner: what costs little to compute again
    from what is kept anyway is not kept. There remain of the two norms the input, its deviation and the output, which products
    take; the products' results for queries and keys, and the deviations of their norms; gate, up and the product of both.
    Attention keeps what it always does. Counted, not guessed: a test compares this with the tensors that compiled layers save.
    """
    norms = 2 * (2 * compute_bytes * shape.hidden + 4)
    attention = compute_bytes * (2 * shape.query + 2 * shape.key) + 4 * shape.heads
    qk_norms = compute_bytes * (shape.query + shape.key) + 4 * (shape.heads + shape.kv_heads)
    return norms + attention + (qk_norms if shape.qk_norm else 0) + 3 * compute_bytes * shape.intermediate


def compiled_pointwise_bytes(shape: ModelShape, compute_bytes: int) -> int:
    """Of these, what `pointwise_again` leaves out, for one token: the outputs of the two norms, and the MLP's product of up and
    activated gate."""
    return compute_bytes * (2 * shape.hidden + shape.intermediate)


def compiled_attention_bytes(shape: ModelShape, compute_bytes: int) -> int:
    """What one compiled layer keeps with selective checkpointing, for one token: its input, and attention's result with its
    float32 log-sum a head. The other products are inside its graphs, out of reach."""
    return compute_bytes * (shape.hidden + shape.query) + 4 * shape.heads


def layers_again(layers: int, checkpointing: Checkpointing, checkpointed: int | None) -> int:
    """How many of a model's layers do not keep everything: `layers_again(28, "full", 14)` is 14, with None 28."""
    if not checkpointing:
        return 0
    return layers if checkpointed is None else min(checkpointed, layers)


def _layer_kept(shape: ModelShape, compute_bytes: int, checkpointing: Checkpointing, compiled: bool) -> int:
    """Of one layer that computes again, and token, until its turn in the backward pass."""
    if checkpointing == "selective":
        return (compiled_attention_bytes if compiled else layer_product_bytes)(shape, compute_bytes)
    return compute_bytes * shape.hidden


def _layer_own(shape: ModelShape, compute_bytes: int, compiled: bool, joined: bool, adapters: AdapterShape | None) -> int:
    """All that one layer keeps. Attention in parts keeps their results, and what follows keeps them joined: of compiled layers
    it is counted; the estimate of the others is met within 5 % with and without it."""
    own = (compiled_activation_bytes if compiled else layer_activation_bytes)(shape, compute_bytes)
    own += adapters.kept_bytes(compute_bytes) if adapters else 0
    return own + (compute_bytes * shape.query if compiled and joined else 0)


def _layer_at_work(
    shape: ModelShape, compute_bytes: int, compiled: bool, joined: bool, adapters: AdapterShape | None
) -> tuple[int, int]:
    """What one layer keeps, and its gradients: as large as what its widest part keeps; of a compiled one, which frees and
    fuses, the one that comes in and one as wide as the MLP. Adapters' products lie beside those of the matrices, forward and
    backward: four more of that width, by the one measured peak (4B, rank 16, rows of 65,536; three on a CPU)."""
    own = _layer_own(shape, compute_bytes, compiled, joined, adapters)
    if not compiled:
        return own, 2 * compute_bytes * (shape.intermediate + shape.hidden)
    return own, compute_bytes * (shape.hidden + (5 if adapters else 1) * shape.intermediate)


# ---- serving


class ServerMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes on one server's GPU."""

    budget: int
    """gpu_memory_utilization of the card."""
    weights: int
    staging: int
    """The buffer that new weights arrive in: a version, or two buckets of a broadcast that waits elsewhere."""
    overhead: int
    """Activations of the largest step, CUDA graphs, the runtime."""
    kv: int
    kv_bytes_per_token: int

    @property
    def kv_tokens(self) -> int:
        return max(0, self.kv) // self.kv_bytes_per_token

    def sequences(self, tokens: int) -> int:
        """Sequences of so many tokens that the cache holds at once."""
        return self.kv_tokens // max(tokens, 1)


def server_memory(
    shape: ModelShape,
    *,
    card_bytes: int,
    utilization: float,
    bytes_per_value: int = 2,
    staging: bool = False,
    bucket_bytes: int | None = None,
    batched_tokens: int = 8192,
    sequences: int = 256,
    parallel: int = 1,
) -> ServerMemory:
    """One of the `parallel` cards that share a model (tensor parallelism); `kv` may come out negative where it does not fit.

    `staging`: a whole version waits on the card; else `bucket_bytes`: a broadcast comes in two buckets of so many bytes, or of
    the largest tensor (0: always), and None: nothing comes that way."""
    weights = -(-shape.parameters // parallel) * bytes_per_value
    # the profiling run: the largest step's hidden states and MLP, and logits of all sequences in float32, twice
    step = batched_tokens * (4 * shape.hidden + 3 * shape.intermediate) * bytes_per_value
    overhead = step + 2 * sequences * shape.vocabulary * 4 + RUNTIME_BYTES
    budget = int(card_bytes * utilization)
    embedding = shape.embedding_parameters * bytes_per_value
    in_buckets = 0 if bucket_bytes is None else 2 * max(embedding, min(bucket_bytes, shape.parameters * bytes_per_value))
    spare = shape.parameters * bytes_per_value if staging else in_buckets
    return ServerMemory(
        budget=budget,
        weights=weights,
        staging=spare,
        overhead=overhead,
        kv=budget - weights - spare - overhead,
        kv_bytes_per_token=-(-shape.kv_bytes_per_token(bytes_per_value) // min(parallel, shape.kv_heads)),
    )


RUNTIME_BYTES = 2**30
"""CUDA context, libraries' workspaces and graphs."""
