"""The Megatron-Core backend: models spread over GPUs by tensor and expert parallelism, and over groups of them by data
parallelism.

Owns the backend's settings. Torch and megatron-core are imported in `build()`, so that a configuration is composed without
them.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Iterator
from typing import Literal

from pydantic import Field

from telescope.backends.base import Backend, BackendSettings, Job
from telescope.backends.common import attention_choice

NO_GPU = "backend=megatron trains on GPUs alone, and there is none for the trainer's ranks: set backend=fsdp"
NOT_INSTALLED = (
    "backend=megatron needs the package megatron-core, which is not installed: run pip install 'megatron-core>=0.16,<0.17' "
    "(the extra `megatron` of telescope-rl), or set backend=fsdp"
)
SCALED_SUMS = (
    "backend.grad_reduce_in_fp32=false keeps gradients in float16 without the scale of the loss, where small ones are zero: "
    "set grad_reduce_in_fp32=true, or mixed_precision_dtype=bfloat16"
)


class Megatron(BackendSettings):
    tensor_parallel_size: int = Field(default=1, ge=1, le=64)
    """Trainer ranks that hold each matrix together, a part of its rows or columns each: neighbours, best within one host. Must
    divide the number of ranks, and the model's key-value heads."""
    expert_parallel_size: int = Field(default=1, ge=1, le=1024)
    """Trainer ranks that share out the experts of a model, whole ones each, whichever model of tensor_parallel_size they belong
    to: a token is sent to the ranks that have its experts. Must divide the number of ranks, and of experts."""
    sequence_parallel: bool | Literal["auto"] = "auto"
    """Cut what lies between the matrices (norms, residuals) along the row's tokens over the same ranks: less memory at the same
    traffic. auto: where tensor_parallel_size is above 1."""
    use_distributed_optimizer: bool | Literal["auto"] = "auto"
    """Spread float32 weights and moments over the ranks that have equal parts of the model. auto: where there are several."""
    grad_reduce_in_fp32: bool = True
    """Add gradients up, over rows and ranks, in float32; false: in the precision of forward and backward, for half the
    memory. Not with float16."""
    overlap_grad_reduce: bool = False
    """Sum gradients over data-parallel ranks while the last row's backward pass is under way, rather than after it."""
    mixed_precision_dtype: Literal["bfloat16", "float16", "float32"] | None = "bfloat16"
    """Precision of forward and backward. Weights that are updated stay in model.dtype beside those that compute. null: that of
    the weights themselves."""
    gradient_checkpointing: bool | Literal["full", "selective"] = True
    """true, full: keep only each layer's input and compute the layer again in the backward pass: least memory, about a third
    more time. selective: keep the results of matrix products and attention too. false: keep everything."""
    attention: Literal["auto", "flash", "flash3", "cudnn", "flash2", "varlen", "flex", "sdpa"] = "auto"
    """Kernel of the attention within each packed sample. auto: the first of flash3, cudnn, flash2, varlen, flex and sdpa that
    works here; flash: the first of flash3, flash2 and varlen. All but flex and sdpa compute in half precision on a GPU."""
    collective_timeout_s: float = Field(default=600.0, gt=0)
    """Until a rank that waits for the others, at the start or in a collective, gives up with an error."""

    @property
    def ranks_a_shard(self) -> int:
        return self.tensor_parallel_size

    @property
    def cuts_rows(self) -> bool:
        return False

    def spreads_sequence(self) -> bool:
        """`sequence_parallel` with `auto` decided."""
        return self.tensor_parallel_size > 1 if self.sequence_parallel == "auto" else self.sequence_parallel

    def spreads_optimizer(self, ranks: int) -> bool:
        """`use_distributed_optimizer` with `auto` decided, of so many ranks."""
        if self.use_distributed_optimizer == "auto":
            return ranks > self.tensor_parallel_size
        return self.use_distributed_optimizer

    def alone(self) -> Megatron:
        return self.model_copy(
            update={
                "tensor_parallel_size": 1,
                "expert_parallel_size": 1,
                "sequence_parallel": "auto",
                "use_distributed_optimizer": "auto",
            }
        )

    def run_errors(self, *, ranks: int, adapters: bool, on_cpu: bool) -> Iterator[tuple[tuple[str, ...], str]]:
        """See `BackendSettings.run_errors`."""
        workers, size = "cluster.trainer_num_workers", self.tensor_parallel_size
        if ranks % size:
            yield (
                ("backend.tensor_parallel_size", workers),
                f"backend.tensor_parallel_size={size} must divide {workers}={ranks}: so many ranks hold the model together; "
                f"set {workers}={-(-ranks // size) * size}, or another tensor_parallel_size",
            )
            return
        if ranks % self.expert_parallel_size:
            yield (
                ("backend.expert_parallel_size", workers),
                f"backend.expert_parallel_size={self.expert_parallel_size} must divide {workers}={ranks}: so many ranks share "
                f"out the experts; set {workers} to a multiple of it, or another expert_parallel_size",
            )
        if self.sequence_parallel is True and size == 1:
            yield (
                ("backend.sequence_parallel", "backend.tensor_parallel_size"),
                "backend.sequence_parallel=true spreads a row over the ranks of backend.tensor_parallel_size, which is 1: set "
                "sequence_parallel=auto, or tensor_parallel_size=2 or more",
            )
        if self.gradient_checkpointing == "selective" and size > 1 and not self.spreads_sequence():
            yield (
                ("backend.gradient_checkpointing", "backend.sequence_parallel", "backend.tensor_parallel_size"),
                "backend.gradient_checkpointing=selective keeps the results of products, and with "
                "backend.sequence_parallel=false these are summed over ranks in place: set sequence_parallel=auto, or "
                "gradient_checkpointing=full",
            )
        if self.mixed_precision_dtype == "float16" and not self.grad_reduce_in_fp32:
            yield ("backend.grad_reduce_in_fp32", "backend.mixed_precision_dtype"), SCALED_SUMS
        if self.use_distributed_optimizer is True and ranks == size:
            yield (
                ("backend.use_distributed_optimizer", workers, "backend.tensor_parallel_size"),
                f"backend.use_distributed_optimizer=true spreads moments over ranks with equal parts of the model, and with "
                f"{workers}={ranks} and backend.tensor_parallel_size={size} there is one: set use_distributed_optimizer=auto, "
                f"or {workers}={2 * size} or more",
            )

    def find_obstacles(
        self, *, on_gpu: bool, capability: Callable[[], int | None], model_dtype: str, elsewhere: bool
    ) -> Iterator[str]:
        """See `BackendSettings.find_obstacles`."""
        if not on_gpu:
            yield NO_GPU
            return
        if not elsewhere and not is_installed():
            yield NOT_INSTALLED
        if self.mixed_precision_dtype is None and model_dtype == "float16" and not self.grad_reduce_in_fp32:
            yield SCALED_SUMS
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
        if not job.world.device.startswith("cuda"):
            raise ValueError(NO_GPU)
        if not is_installed():
            raise ValueError(NOT_INSTALLED)
        with warnings.catch_warnings():  # of Apex and Transformer Engine, which nothing here uses, are not there
            warnings.simplefilter("ignore")
            from telescope.backends.megatron.backend import MegatronBackend

        return MegatronBackend(self, job)


def is_installed() -> bool:
    """Whether this Python finds megatron-core."""
    try:
        return importlib.util.find_spec("megatron.core") is not None
    except ModuleNotFoundError:
        return False
