"""The Megatron-Core backend: models spread over GPUs by tensor, expert and pipeline parallelism, rows by context parallelism,
and over groups of them by data parallelism.

Owns the backend's settings. Torch and megatron-core are imported in `build()`, so that a configuration is composed without
them.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from telescope.backends.base import Backend, BackendSettings, Job
from telescope.backends.common import attention_choice
from telescope.config.models import write_divisors
from telescope.maths.memory import BYTES

if TYPE_CHECKING:
    from telescope.config.models import ModelCounts
    from telescope.config.sections import ModelSettings, TrainerSettings
    from telescope.maths.memory import ModelShape, TrainerMemory

NO_GPU = "backend=megatron trains on GPUs alone, and there is none for the trainer's ranks: set backend=fsdp"
NOT_INSTALLED = (
    "backend=megatron needs the package megatron-core, which is not installed: run pip install 'megatron-core>=0.16,<0.17' "
    "(the extra `megatron` of telescope-rl), or set backend=fsdp"
)
NO_ENGINE = (
    "backend.{setting} needs Transformer Engine, which is not installed: run pip install --no-build-isolation "
    "'transformer-engine[pytorch]>=2.11,<2.12' where the ranks run, or set {instead}"
)
BROKEN_ENGINE = (
    "Transformer Engine is installed without its binding for torch, and Megatron-Core can't be imported beside that: run pip "
    "install --no-build-isolation 'transformer-engine[pytorch]>=2.11,<2.12', or pip uninstall transformer-engine"
)
FP8_BLOCK = {"blockwise": 128, "tensorwise": 16}
"""Of what a recipe's products want multiples: of a rank's tokens of a row, and of the widths of its matrices."""
HALF = ("bfloat16", "float16")
MOMENTS = ("exp_avg", "exp_avg_sq")
"""Of AdamW, by its own names."""
SCALED_SUMS = (
    "backend.grad_reduce_in_fp32=false keeps gradients in float16 without the scale of the loss, where small ones are zero: "
    "set grad_reduce_in_fp32=true, or mixed_precision_dtype=bfloat16"
)


class Megatron(BackendSettings):
    fills_rows: ClassVar[bool] = True

    tensor_parallel_size: int = Field(default=1, ge=1, le=64)
    """Trainer ranks that hold each matrix together, a part of its rows or columns each: neighbours, best within one host. Must
    divide the number of ranks, and the model's key-value heads."""
    context_parallel_size: int = Field(default=1, ge=1, le=64)
    """Trainer ranks that share each packed row, an equal part of its tokens each: longer rows in the same memory. Times
    tensor_parallel_size it must divide the model's attention heads, and with pipeline_parallel_size the number of ranks."""
    expert_parallel_size: int = Field(default=1, ge=1, le=1024)
    """Trainer ranks that share out the experts of a model or stage, whole ones each, whichever model of tensor_parallel_size
    they belong to: a token is sent to the ranks that have its experts. Must divide the number of ranks of a stage, and of
    experts."""
    pipeline_parallel_size: int = Field(default=1, ge=1, le=64)
    """Stages of a model, each of some of its layers on ranks of its own: stages exchange a row's activations alone, and compute
    different rows at a time. Times tensor_parallel_size and context_parallel_size it must divide the number of ranks. Layers
    are shared out so that all stages have about as much to compute, the head counted as layers."""
    virtual_pipeline_size: int = Field(default=1, ge=1, le=64)
    """Stretches of layers of each stage: a row goes round so often, and stages wait for one another so many times less, at as
    many times the exchanges. Above 1 only with pipeline_parallel_size above 1; the model needs a layer for each stretch."""
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
    optimizer_cpu_offload: bool = False
    """Between updates keep moments in pinned host memory, and where others compute (mixed_precision_dtype) the weights that are
    updated, too. They come to the GPU some 256 MiB at a time and are stepped there: the same update to the bit, for up to 24
    bytes a parameter over the bus."""
    optimizer_offload_fraction: float = Field(default=1.0, ge=0, le=1)
    """With optimizer_cpu_offload, how much of what a rank updates is in host memory: whole parameters, or pieces of them where
    they are spread over ranks, the largest first."""
    use_precision_aware_optimizer: bool = False
    """Keep moments between updates as exp_avg_dtype and exp_avg_sq_dtype say. Steps are computed in float32, and each moment is
    then rounded to the nearest number."""
    exp_avg_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of AdamW's first moment between updates, with use_precision_aware_optimizer."""
    exp_avg_sq_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of AdamW's second moment between updates, with use_precision_aware_optimizer. bfloat16 needs trainer.betas
    whose second number is 0.996 or less."""
    mixed_precision_dtype: Literal["bfloat16", "float16", "float32"] | None = "bfloat16"
    """Precision of forward and backward. Weights that are updated stay in model.dtype beside those that compute. null: that of
    the weights themselves."""
    gradient_checkpointing: bool | Literal["auto", "full", "selective"] = "auto"
    """true, full: keep only each layer's input and compute the layer again in the backward pass: least memory, about a third
    more time. selective: keep the results of matrix products and attention too. false: keep everything. auto: true, and on a
    GPU of known memory the fastest that fits; decided once, where the run starts."""
    attention: Literal["auto", "flash", "flash3", "cudnn", "flash2", "varlen", "flex", "sdpa"] = "auto"
    """Kernel of the attention within each packed sample. auto: the first of flash3, cudnn, flash2, varlen, flex and sdpa that
    works here; flash: the first of flash3, flash2 and varlen. All but flex and sdpa compute in half precision on a GPU."""
    use_transformer_engine: bool | Literal["auto"] = "auto"
    """Norms and matrix products of layers by Transformer Engine, in place of Megatron-Core's own. auto: where it is installed,
    the forward pass is in bfloat16 or float16, and gradient_checkpointing is not selective, which can't keep its products."""
    fp8: bool | Literal["e4m3", "hybrid"] = False
    """Matrix products of layers in FP8, forward and backward, but for those of experts; all else stays in bfloat16, and weights
    are updated in model.dtype. e4m3, true: all of them in that format; hybrid: gradients in e5m2. Needs Transformer Engine and
    a GPU of compute capability 9."""
    fp8_recipe: Literal["blockwise", "tensorwise"] = "blockwise"
    """What shares a scale in FP8. blockwise: 128 numbers of a token, 128 x 128 of a matrix, so that a sample's log-probs do not
    depend on the row it is in. tensorwise: all numbers of a tensor. Scales are those of the numbers at hand: log-probs before
    an update are those that training computes."""
    num_layers_at_start_in_bf16: int = Field(default=0, ge=0)
    """With fp8, layers at the model's start whose products stay in bfloat16."""
    num_layers_at_end_in_bf16: int = Field(default=0, ge=0)
    """With fp8, layers at the model's end whose products stay in bfloat16."""
    gradient_accumulation_fusion: bool = False
    """Let the products of Transformer Engine add to the sums of gradients themselves: fewer passes over memory. Not with
    overlap_grad_reduce."""
    compile: bool | Literal["auto"] = "auto"
    """Compile the rotation of queries and keys, and without Transformer Engine the norms (torch.compile): fewer passes over
    memory, and some seconds at first. Needs a C++ compiler on the host. auto: true on a GPU of known memory, where the host
    has one."""
    collective_timeout_s: float = Field(default=600.0, gt=0)
    """Until a rank that waits for the others, at the start or in a collective, gives up with an error."""

    @property
    def ranks_a_model(self) -> int:
        """Ranks that have other parts of the model than each other, and all of it together."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def ranks_a_shard(self) -> int:
        return self.ranks_a_model * self.context_parallel_size

    @property
    def ranks_a_row(self) -> int:
        return self.context_parallel_size

    def checkpointing_choices(self, layers: int) -> Iterator[Mapping[str, bool | str | int]]:
        """See `BackendSettings.checkpointing_choices`. Layers of Transformer Engine can't keep their products."""
        yield {"gradient_checkpointing": False}
        if not self._wants_engine():
            yield {"gradient_checkpointing": "selective"}
        yield {"gradient_checkpointing": True}

    def spreads_sequence(self) -> bool:
        """`sequence_parallel` with `auto` decided."""
        return self.tensor_parallel_size > 1 if self.sequence_parallel == "auto" else self.sequence_parallel

    def spreads_optimizer(self, ranks: int) -> bool:
        """`use_distributed_optimizer` with `auto` decided, of so many ranks."""
        if self.use_distributed_optimizer == "auto":
            return ranks > self.ranks_a_model
        return self.use_distributed_optimizer

    def saved_moment_bytes(self, shape: ModelShape, model: ModelSettings) -> int:
        return shape.parameters * sum(BYTES[dtype] for dtype in self.moment_dtypes(model.dtype).values())

    @property
    def hosted_share(self) -> float:
        """Of what a rank updates, what is in host memory between updates."""
        return self.optimizer_offload_fraction if self.optimizer_cpu_offload else 0.0

    def moment_dtypes(self, model_dtype: str) -> dict[str, str]:
        """By moment, its precision between updates, where weights are updated in `model_dtype`."""
        if not self.use_precision_aware_optimizer:
            return dict.fromkeys(MOMENTS, model_dtype)
        return dict(zip(MOMENTS, (self.exp_avg_dtype, self.exp_avg_sq_dtype), strict=True))

    @property
    def fp8_format(self) -> Literal["e4m3", "hybrid"] | None:
        """`fp8` with true decided."""
        if isinstance(self.fp8, bool):
            return "e4m3" if self.fp8 else None
        return self.fp8

    def computing(self, model_dtype: str) -> str:
        """Precision of forward and backward."""
        return self.mixed_precision_dtype or model_dtype

    def takes_engine(self, model_dtype: str, *, there: bool) -> bool:
        """`use_transformer_engine` with `auto` decided. `there`: Transformer Engine is installed, and so is a GPU."""
        if self.use_transformer_engine != "auto":
            return self.use_transformer_engine
        keeps_products = self.gradient_checkpointing == "selective"
        fits = there and self.computing(model_dtype) in HALF and not keeps_products
        return fits or bool(self._wants_engine())

    def _wants_engine(self) -> dict[str, str]:
        """Settings that only Transformer Engine can keep, each with what to set without it."""
        found = {}
        if self.use_transformer_engine is True:
            found["use_transformer_engine=true"] = "use_transformer_engine=auto"
        if self.fp8:
            found[f"fp8={str(self.fp8).lower()}"] = "fp8=false"
        if self.gradient_accumulation_fusion:
            found["gradient_accumulation_fusion=true"] = "gradient_accumulation_fusion=false"
        return found

    def rank_memory(
        self, shape: ModelShape, model: ModelSettings, trainer: TrainerSettings, *,
        ranks: int, longest: int, reference: bool = False, handed_bytes: int = 0, seq_len: int | None = None,
    ) -> TrainerMemory | None:  # fmt: skip
        """See `BackendSettings.rank_memory`."""
        from telescope.backends.megatron import sizing

        return sizing.rank_memory(
            self, shape, model, trainer, ranks=ranks, reference=reference, handed_bytes=handed_bytes, seq_len=seq_len
        )

    def alone(self) -> Megatron:
        cuts = "tensor_parallel_size", "context_parallel_size", "expert_parallel_size", "pipeline_parallel_size"
        one = dict.fromkeys((*cuts, "virtual_pipeline_size"), 1)
        auto = dict.fromkeys(("sequence_parallel", "use_distributed_optimizer"), "auto")
        return self.model_copy(update={**one, **auto})

    def run_errors(self, *, ranks: int, adapters: bool, on_cpu: bool) -> Iterator[tuple[tuple[str, ...], str]]:
        """See `BackendSettings.run_errors`."""
        workers, size, model = "cluster.trainer_num_workers", self.tensor_parallel_size, self.ranks_a_model
        if self.virtual_pipeline_size > 1 and self.pipeline_parallel_size == 1:
            yield (
                ("backend.virtual_pipeline_size", "backend.pipeline_parallel_size"),
                f"backend.virtual_pipeline_size={self.virtual_pipeline_size} cuts the layers of each stage into stretches, and "
                "with backend.pipeline_parallel_size=1 there are no stages: set pipeline_parallel_size=2 or more, or leave it "
                "out",
            )
        if ranks % self.ranks_a_shard:
            yield self._indivisible(ranks)
            return
        if (ranks // self.pipeline_parallel_size) % self.expert_parallel_size:
            sizes = {"backend.expert_parallel_size": self.expert_parallel_size}
            if self.pipeline_parallel_size > 1:
                sizes["backend.pipeline_parallel_size"] = self.pipeline_parallel_size
            paths, product = _product(sizes)
            of_all = " of all stages" if self.pipeline_parallel_size > 1 else ""
            yield (
                (*paths, workers),
                f"{product} must divide {workers}={ranks}: so many ranks share out the experts{of_all}; set {workers} to a "
                "multiple of it, or another expert_parallel_size",
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
        yield from self._optimizer_errors()
        if self.mixed_precision_dtype == "float16" and not self.grad_reduce_in_fp32:
            yield ("backend.grad_reduce_in_fp32", "backend.mixed_precision_dtype"), SCALED_SUMS
        yield from self._engine_errors()
        if self.use_distributed_optimizer is True and ranks == model:
            paths, product = _product(self._sizes_of_a_model())
            yield (
                ("backend.use_distributed_optimizer", workers, *paths),
                f"backend.use_distributed_optimizer=true spreads moments over ranks with equal parts of the model, and with "
                f"{workers}={ranks} and {product} there is one: set use_distributed_optimizer=auto, "
                f"or {workers}={2 * model} or more",
            )

    def _optimizer_errors(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """Settings of how the optimiser's state is kept that would do nothing."""
        offload, share = "backend.optimizer_cpu_offload", "backend.optimizer_offload_fraction"
        if self.optimizer_cpu_offload and not self.optimizer_offload_fraction:
            yield (
                (share, offload),
                f"{share}=0 leaves nothing for {offload}=true to do: set a fraction above 0, or leave both out",
            )
        elif self.optimizer_offload_fraction != 1.0 and not self.optimizer_cpu_offload:
            yield (
                (share, offload),
                f"{share}={self.optimizer_offload_fraction:g} says how much {offload}=true keeps in host memory, and that is "
                f"false: set {offload}=true, or leave the fraction out",
            )
        aware = "backend.use_precision_aware_optimizer"
        dtypes = {"backend.exp_avg_dtype": self.exp_avg_dtype, "backend.exp_avg_sq_dtype": self.exp_avg_sq_dtype}
        lower = {name: dtype for name, dtype in dtypes.items() if dtype != "float32"}
        if self.use_precision_aware_optimizer and not lower:
            yield (
                (aware, *dtypes),
                f"{aware}=true keeps moments in the precisions of {' and '.join(dtypes)}, which are float32 both: set one of "
                "them to bfloat16, or leave it out",
            )
        elif lower and not self.use_precision_aware_optimizer:
            said = " and ".join(f"{name}={dtype}" for name, dtype in lower.items())
            yield (aware, *lower), f"{said} does nothing without {aware}=true: set that, or leave it out"

    def _engine_errors(self) -> Iterator[tuple[tuple[str, ...], str]]:
        engine, fusion = "backend.use_transformer_engine", "backend.gradient_accumulation_fusion"
        if self.use_transformer_engine is False:
            for setting, instead in self._wants_engine().items():
                yield (
                    (f"backend.{setting.partition('=')[0]}", engine),
                    f"backend.{setting} needs the layers of Transformer Engine, and {engine}=false has others: set "
                    f"use_transformer_engine=auto, or {instead}",
                )
        if self.gradient_accumulation_fusion and self.overlap_grad_reduce:
            yield (
                (fusion, "backend.overlap_grad_reduce"),
                f"{fusion}=true leaves no gradient to be waited for, and backend.overlap_grad_reduce=true waits for each: set "
                "one of them to false",
            )
        for name in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"):
            if (count := getattr(self, name)) and not self.fp8:
                yield (
                    (f"backend.{name}", "backend.fp8"),
                    f"backend.{name}={count} leaves layers out of FP8, which backend.fp8=false does not compute in: set "
                    f"fp8=true, or {name}=0",
                )

    def _sizes_of_a_model(self) -> dict[str, int]:
        """By setting, those whose product `ranks_a_model` is."""
        sizes = {"backend.tensor_parallel_size": self.tensor_parallel_size}
        if self.pipeline_parallel_size > 1:
            sizes["backend.pipeline_parallel_size"] = self.pipeline_parallel_size
        return sizes

    def _indivisible(self, ranks: int) -> tuple[tuple[str, ...], str]:
        workers, every = "cluster.trainer_num_workers", self.ranks_a_shard
        sizes, doing = self._sizes_of_a_model(), "hold the model together"
        if (sharing := self.context_parallel_size) > 1:
            sizes = {name: size for name, size in sizes.items() if size > 1} | {"backend.context_parallel_size": sharing}
            doing = f"{doing} and share its rows" if self.ranks_a_model > 1 else "share each row"
        paths, product = _product(sizes)
        others = " or ".join(path.removeprefix("backend.") for path in paths)
        return (
            (*paths, workers),
            f"{product} must divide {workers}={ranks}: so many ranks {doing}; set "
            f"{workers}={-(-ranks // every) * every}, or another {others}",
        )

    def model_errors(self, counts: ModelCounts) -> Iterator[tuple[tuple[str, ...], str]]:
        """See `BackendSettings.model_errors`."""
        yield from self._uneven_heads(counts)
        yield from self._expert_errors(counts.experts)
        stages, laps, layers = self.pipeline_parallel_size, self.virtual_pipeline_size, counts.layers
        if layers is None:
            return
        if stages > layers:
            yield (
                ("backend.pipeline_parallel_size", "model.name"),
                f"backend.pipeline_parallel_size={stages} is more than the {layers} layers of the model, and each stage needs "
                f"one: set {layers} or less",
            )
        elif stages * laps > layers:
            yield (
                ("backend.virtual_pipeline_size", "backend.pipeline_parallel_size", "model.name"),
                f"backend.virtual_pipeline_size={laps} times backend.pipeline_parallel_size={stages} is more than the {layers} "
                f"layers of the model, and each stretch needs one: set virtual_pipeline_size={layers // stages} or less",
            )

    def _expert_errors(self, experts: int) -> Iterator[tuple[tuple[str, ...], str]]:
        """`experts` of each layer that has some; 0: the model has none."""
        size = self.expert_parallel_size
        if size > 1 and not experts:
            yield (
                ("backend.expert_parallel_size", "model.name"),
                f"backend.expert_parallel_size={size} deals out experts, and this model has none: set it to 1",
            )
        if experts % size:
            yield (
                ("backend.expert_parallel_size", "model.name"),
                f"backend.expert_parallel_size={size} must divide the model's {experts} experts: set it to one of "
                f"{write_divisors(experts)}",
            )
        if experts and self.tensor_parallel_size > 1 and not self.spreads_sequence():
            yield (
                ("backend.sequence_parallel", "backend.tensor_parallel_size", "model.name"),
                f"backend.sequence_parallel=false gives each of backend.tensor_parallel_size={self.tensor_parallel_size} ranks "
                "all tokens of a row, and each would send all of them to its experts: set sequence_parallel=auto",
            )

    def _uneven_heads(self, counts: ModelCounts) -> Iterator[tuple[tuple[str, ...], str]]:
        size, sharing, heads, groups = self.tensor_parallel_size, self.context_parallel_size, counts.heads, counts.key_heads
        if groups is not None and groups % size:
            yield (
                ("backend.tensor_parallel_size", "model.name"),
                f"backend.tensor_parallel_size={size} must divide the model's {groups} key-value heads, so that each rank has "
                f"whole ones: set it to one of {write_divisors(groups)}",
            )
        elif heads is not None and heads % (size * sharing):
            paths, product = _product({
                name: number
                for name, number in (("backend.tensor_parallel_size", size), ("backend.context_parallel_size", sharing))
                if number > 1
            })  # fmt: skip
            yield (
                (*paths, "model.name"),
                f"{product} must divide the model's {heads} attention heads, of which each of so many ranks computes a share: "
                f"set context_parallel_size to one of {write_divisors(heads // size)}",
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
        yield from self._engine_obstacles(capability, model_dtype, elsewhere=elsewhere)
        sentence = attention_choice.refusal(
            self.attention,
            dtype=self.computing(model_dtype),
            on_gpu=on_gpu,
            capability=capability,
            elsewhere=elsewhere,
        )
        if sentence is not None:
            yield sentence

    def _engine_obstacles(
        self, capability: Callable[[], int | None], model_dtype: str, *, elsewhere: bool
    ) -> Iterator[str]:  # fmt: skip
        wanted, computing = self._wants_engine(), self.computing(model_dtype)
        for setting, instead in wanted.items():
            if not elsewhere and not has_engine():
                yield NO_ENGINE.format(setting=setting, instead=instead)
            elif computing not in HALF:
                yield (
                    f"backend.{setting} needs Transformer Engine, whose products round float32 to TF32, and the forward pass "
                    f"is in {computing}: set backend.mixed_precision_dtype=bfloat16, or {instead}"
                )
        if self.fp8 and computing == "float16":
            yield (
                f"backend.fp8={str(self.fp8).lower()} leaves the rest of a layer in bfloat16, and the forward pass is in "
                "float16: set backend.mixed_precision_dtype=bfloat16"
            )
        if self.fp8 and (known := capability()) is not None and known < attention_choice.HOPPER:
            yield (
                f"backend.fp8={str(self.fp8).lower()} needs a GPU of compute capability {attention_choice.HOPPER} (Hopper), "
                f"and this one has {known}: set backend.fp8=false"
            )

    def build(self, job: Job) -> Backend:
        if not job.world.device.startswith("cuda"):
            raise ValueError(NO_GPU)
        if not is_installed():
            raise ValueError(NOT_INSTALLED)
        for setting, instead in self._wants_engine().items():
            if not has_engine():
                raise ValueError(NO_ENGINE.format(setting=setting, instead=instead))
        with warnings.catch_warnings():  # of Apex, which nothing here uses, and of Transformer Engine that are not there
            warnings.simplefilter("ignore")
            try:
                from telescope.backends.megatron.backend import MegatronBackend
            except FileNotFoundError as error:
                raise ValueError(BROKEN_ENGINE) from error

        return MegatronBackend(self, job)


def _product(sizes: dict[str, int]) -> tuple[tuple[str, ...], str]:
    """The settings, and their product in words."""
    return tuple(sizes), " times ".join(f"{name}={size}" for name, size in sizes.items())


def is_installed() -> bool:
    """Whether this Python finds megatron-core."""
    try:
        return importlib.util.find_spec("megatron.core") is not None
    except ModuleNotFoundError:
        return False


def has_engine() -> bool:
    """Whether this Python finds Transformer Engine."""
    return importlib.util.find_spec("transformer_engine") is not None
