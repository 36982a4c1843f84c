"""The FSDP2 backend: Hugging Face models in plain PyTorch, sharded layer by layer over gloo (CPU) or NCCL (GPU).

Owns the backend's settings. Torch is imported in `build()`, so that a configuration is composed without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, model_validator

from telescope.backends.base import Backend, BackendSettings, Job
from telescope.backends.common import attention_choice
from telescope.config.models import write_divisors
from telescope.maths.memory import BYTES, AdapterShape, adapter_moment_bytes, layers_again, moment_bytes

if TYPE_CHECKING:
    from telescope.config.models import ModelCounts
    from telescope.config.sections import ModelSettings, TrainerSettings
    from telescope.maths.memory import ModelShape, TrainerMemory


class FSDP(BackendSettings):
    trains_adapters: ClassVar[bool] = True
    compiles_layers: ClassVar[bool] = True

    mixed_precision_dtype: Literal["bfloat16", "float16", "float32"] | None = "bfloat16"
    """Precision of forward and backward; gradients are reduced over ranks in float32; they are added up, and
    weights updated, in model.dtype. null: that of the weights themselves."""
    gradient_checkpointing: bool | Literal["auto", "full", "selective"] = "auto"
    """true, full: keep only each layer's input and compute the layer again in the backward pass: least memory, about a third
    more time. selective: keep the results of matrix products and attention too, and compute again what is between them; with
    compile=true those of attention alone. false: keep everything. auto: true, and on a GPU of known memory the fastest that
    fits, in as few layers as it takes; decided once, where the run starts."""
    checkpointed_layers: int | None = Field(default=None, ge=1)
    """So many layers, the first ones, do as gradient_checkpointing says, and the others keep everything: memory for time, layer
    by layer. null: all of them. `python -m telescope plan` names the smallest number that fits."""
    attention: Literal["auto", "flash", "flash3", "cudnn", "flash2", "varlen", "flex", "sdpa"] = "auto"
    """Kernel of the attention within each packed sample. auto: the first of flash3, cudnn, flash2, varlen, flex and sdpa that
    works here; flash: the first of flash3, flash2 and varlen. All but flex and sdpa compute in half precision on a GPU."""
    share_prefixes: bool = False
    """What samples of a row have in common from their first token on, such as the prompt of a group, is computed once, and
    rows are filled by what is computed: fewer tokens for the same gradient. Not with context_parallel_size above 1, nor of
    models with experts."""
    context_parallel_size: int = Field(default=1, ge=1, le=64)
    """Trainer ranks that share each packed row, an equal part of its tokens each: longer rows in the same memory. Must divide
    the number of ranks, the model's attention heads and trainer.pad_to_multiple_of."""
    reshard_after_forward: bool | int = True
    """Free a layer's gathered weights after forward and gather them again for backward: less memory, more traffic. false: they
    stay gathered through all rows of a minibatch. A number n: keep them spread over groups of n ranks, neighbours, e.g. those
    of a host; n divides the ranks of a replica."""
    replicas: int = Field(default=1, ge=1, le=1_000_000)
    """Whole copies of the model, each spread over cluster.trainer_num_workers / replicas neighbouring ranks (HSDP): weights are
    gathered within a replica, gradients are summed over all. Must divide the ranks."""
    offload: Literal["none", "optimizer", "parameters"] = "none"
    """What lies in host memory while a GPU does not need it. optimizer: the moments; they come for each update, 16 bytes a
    parameter over the bus. parameters: weights, gradients and moments; a layer's weights come when it is at work, and the
    update is the host's."""
    optimizer: Literal["adamw", "adamw_8bit", "muon", "sgd"] = "adamw"
    """adamw_8bit: moments of a byte each. muon: orthogonalised momentum for the layers' matrices, adamw for all else. sgd: the
    plain step, learning_rate times the gradient, without moments (trainer.betas mean nothing to it)."""
    compile: bool | Literal["auto"] = "auto"
    """Compile each layer (torch.compile), without its attention: fewer passes over memory, and a minute or so at the first
    start. Needs a C++ compiler on the host. auto: false, and true on a GPU where it is known to be faster."""
    recompute_pointwise: bool = True
    """Of compiled layers that keep everything: compute the outputs of norms, and the MLP's up times its activated gate, again
    in the backward pass. No matrix product is computed twice; 23 % of a Qwen3-0.6B layer's activations less, 27 % of 4B's, at
    the same speed on an H200. Without compile, and where all layers compute again, it changes nothing."""
    collective_timeout_s: float = Field(default=600.0, gt=0)
    """Until a rank that waits for the others, at the start or in a collective, gives up with an error."""

    def pointwise_again(self, layers: int) -> bool:
        """Whether `recompute_pointwise` means something for a model of so many layers: some are compiled and keep everything.
        Where all compute again anyway nothing would be saved, and pointwise operations would run a third time."""
        again = layers_again(layers, self.checkpointing, self.checkpointed_layers)
        return self.recompute_pointwise and self.compiles and again < layers

    def checkpointing_choices(self, layers: int) -> Iterator[Mapping[str, bool | str | int]]:
        """See `BackendSettings.checkpointing_choices`."""
        if self.checkpointed_layers is not None:
            yield {"gradient_checkpointing": "full"}
            return
        yield {"gradient_checkpointing": False}
        for way in ("selective", "full"):
            yield from ({"gradient_checkpointing": way, "checkpointed_layers": number} for number in range(1, layers))
            yield {"gradient_checkpointing": way}

    @property
    def ranks_a_shard(self) -> int:
        return self.context_parallel_size

    @property
    def ranks_a_row(self) -> int:
        return self.context_parallel_size

    def saved_moment_bytes(self, shape: ModelShape, model: ModelSettings) -> int:
        if model.lora is not None:
            trained = AdapterShape(rank=model.lora.rank, modules=model.lora.target_modules).parameters(shape)
            return adapter_moment_bytes(trained, self.optimizer)
        return moment_bytes(shape, self.optimizer, BYTES[model.dtype])

    def rank_memory(
        self, shape: ModelShape, model: ModelSettings, trainer: TrainerSettings, *,
        ranks: int, longest: int, reference: bool = False, handed_bytes: int = 0, seq_len: int | None = None,
    ) -> TrainerMemory | None:  # fmt: skip
        """See `BackendSettings.rank_memory`."""
        from telescope.backends.fsdp import sizing

        return sizing.rank_memory(
            self, shape, model, trainer, ranks=ranks, longest=longest, reference=reference, handed_bytes=handed_bytes,
            seq_len=seq_len,
        )  # fmt: skip

    def alone(self) -> FSDP:
        group = self.reshard_after_forward
        kept = group if isinstance(group, bool) else True
        return self.model_copy(update={"context_parallel_size": 1, "replicas": 1, "reshard_after_forward": kept})

    @model_validator(mode="after")
    def _options_go_together(self) -> FSDP:
        if sentence := next(self._own_errors(), None):
            raise ValueError(sentence)
        return self

    def _own_errors(self) -> Iterator[str]:
        group = self.reshard_after_forward
        if self.checkpointed_layers is not None and self.gradient_checkpointing is False:
            yield (
                f"backend.checkpointed_layers={self.checkpointed_layers} says how many layers compute again, and with "
                "backend.gradient_checkpointing=false none does: set gradient_checkpointing=full, or leave it out"
            )
        if not isinstance(group, bool) and group < 2:
            yield f"backend.reshard_after_forward={group} is not a group of ranks: set true, false, or 2 or more"
        if self.offload == "optimizer" and self.optimizer == "sgd":
            yield "backend.offload=optimizer has nothing to move with backend.optimizer=sgd, which has no moments: leave it out"
        if self.offload == "parameters" and self.optimizer in ("adamw_8bit", "muon"):
            yield (
                f"backend.offload=parameters leaves the update to the host's processors, which are slow at what "
                f"backend.optimizer={self.optimizer} does: set offload=optimizer, or optimizer=adamw"
            )
        if self.share_prefixes and self.context_parallel_size > 1:
            yield (
                f"backend.share_prefixes=true and backend.context_parallel_size={self.context_parallel_size} do not go "
                "together: ranks that share a row cut it by place; set share_prefixes=false"
            )
        if self.compiles and self.attention == "flex":
            yield "backend.compile=true leaves attention out, and attention=flex is compiled itself: set flash or sdpa"

    def run_errors(self, *, ranks: int, adapters: bool, on_cpu: bool) -> Iterator[tuple[tuple[str, ...], str]]:
        """See `BackendSettings.run_errors`."""
        workers, sharing = "cluster.trainer_num_workers", self.context_parallel_size
        if ranks % sharing:
            yield (
                ("backend.context_parallel_size", workers),
                f"backend.context_parallel_size={sharing} must divide {workers}={ranks}: so many ranks share each packed row; "
                f"set {workers}={-(-ranks // sharing) * sharing}, or backend.context_parallel_size=1",
            )
        if ranks % self.replicas:
            yield (
                ("backend.replicas", workers),
                f"backend.replicas={self.replicas} must divide {workers}={ranks}: each replica has as many ranks; set "
                f"{workers}={-(-ranks // self.replicas) * self.replicas}, or other replicas",
            )
            return
        shards, group = ranks // self.replicas, self.reshard_after_forward
        if not isinstance(group, bool) and (shards % group or group == shards):
            yield (
                ("backend.reshard_after_forward", "backend.replicas", workers),
                f"backend.reshard_after_forward={group} must divide the {shards} ranks of a replica and be fewer: set true for "
                "all of them",
            )
        if adapters and self.optimizer == "muon":
            yield (
                ("backend.optimizer", "model.lora"),
                "backend.optimizer=muon would orthogonalise the halves of each adapter, which are not matrices of the model: "
                "set optimizer=adamw, or model.lora=null",
            )
        if on_cpu and self.offload != "none":
            yield (
                ("backend.offload", "cluster.device"),
                f"backend.offload={self.offload} frees the memory of a GPU, and cluster.device=cpu has none: leave it out",
            )

    def model_errors(self, counts: ModelCounts) -> Iterator[tuple[tuple[str, ...], str]]:
        """See `BackendSettings.model_errors`."""
        sharing, heads = self.context_parallel_size, counts.heads
        if heads is not None and heads % sharing:
            yield (
                ("backend.context_parallel_size", "model.name"),
                f"backend.context_parallel_size={sharing} must divide the model's {heads} attention heads: set it to one of "
                f"{write_divisors(heads)}",
            )
        layers = counts.layers
        if self.checkpointed_layers is not None and layers is not None and self.checkpointed_layers > layers:
            yield (
                ("backend.checkpointed_layers", "model.name"),
                f"backend.checkpointed_layers={self.checkpointed_layers} is more than the {layers} layers of the model: "
                "set fewer, or leave it out, so that all of them compute again",
            )

    def find_obstacles(
        self, *, on_gpu: bool, capability: Callable[[], int | None], model_dtype: str, elsewhere: bool
    ) -> Iterator[str]:
        """See `BackendSettings.find_obstacles`."""
        sentence = attention_choice.refusal(
            self.attention,
            dtype=self.mixed_precision_dtype or model_dtype,
            on_gpu=on_gpu,
            capability=capability,
            elsewhere=elsewhere,
        )
        if sentence is not None:
            yield sentence

    def build(self, job: Job) -> Backend:
        from telescope.backends.fsdp.backend import FSDPBackend

        return FSDPBackend(self, job)
