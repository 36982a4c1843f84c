"""The FSDP2 backend: Hugging Face models in plain PyTorch, sharded layer by layer over gloo (CPU) or NCCL (GPU).

Owns the backend's settings. Torch is imported in `build()`, so that a configuration is composed without it.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from telescope.backends.base import Backend, BackendSettings, Job


class FSDP(BackendSettings):
    trains_adapters: ClassVar[bool] = True

    mixed_precision_dtype: Literal["bfloat16", "float16", "float32"] | None = "bfloat16"
    """Precision of forward and backward; gradients are reduced, and weights updated, in model.dtype or better.
    null: that of the weights themselves."""
    gradient_checkpointing: bool | Literal["full", "selective"] = True
    """true, full: keep only each layer's input and compute the layer again in the backward pass: least memory, about a third more
    time. selective: keep the results of matrix products and attention too, and compute again what is between them. false: keep
    everything."""
    attention: Literal["auto", "flash", "sdpa", "flex"] = "auto"
    """Kernel of the attention within each packed sample. auto: flash on a GPU in half precision, else sdpa."""
    context_parallel_size: int = Field(default=1, ge=1, le=64)
    """Trainer ranks that share each packed row, an equal part of its tokens each: longer rows in the same memory. Must divide
    the number of ranks, the model's attention heads and trainer.pad_to_multiple_of."""
    reshard_after_forward: bool | int = True
    """Free a layer's gathered weights after forward and gather them again for backward: less memory, more traffic. A number n:
    keep them spread over groups of n ranks, neighbours, e.g. those of a host; n divides the ranks of a replica."""
    replicas: int = Field(default=1, ge=1, le=1_000_000)
    """Whole copies of the model, each spread over cluster.trainer_num_workers / replicas neighbouring ranks (HSDP): weights are
    gathered within a replica, gradients are summed over all. Must divide the ranks."""
    offload: Literal["none", "optimizer", "parameters"] = "none"
    """What lies in host memory while a GPU does not need it. optimizer: the moments; they come for each update, 16 bytes a
    parameter over the bus. parameters: weights, gradients and moments; a layer's weights come when it is at work, and the update
    is the host's."""
    optimizer: Literal["adamw", "adamw_8bit", "muon", "sgd"] = "adamw"
    """adamw_8bit: moments of a byte each. muon: orthogonalised momentum for the layers' matrices, adamw for all else. sgd: the
    plain step, learning_rate times the gradient, without moments (trainer.betas mean nothing to it)."""
    collective_timeout_s: float = Field(default=600.0, gt=0)
    """Until a rank that waits for the others, at the start or in a collective, gives up with an error."""

    @property
    def ranks_a_shard(self) -> int:
        return self.context_parallel_size

    def build(self, job: Job) -> Backend:
        from telescope.backends.fsdp.backend import FSDPBackend

        return FSDPBackend(self, job)
