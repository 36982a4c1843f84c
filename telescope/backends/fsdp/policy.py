"""A Hugging Face causal language model as a policy: packed rows in, log-probs and entropies of sampled tokens out.

Owns loading, sharding, names and the check at the start that packed samples do not see each other. Refuses losses,
optimisers and steps.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from telescope.backends.common import attention, lora, names
from telescope.backends.common.attention_choice import Kind
from telescope.backends.common.context import Context, Piece
from telescope.backends.common.logprobs import logprobs
from telescope.backends.common.masks import Look
from telescope.backends.common.models import UnfitModel as UnfitModel
from telescope.backends.common.rotations import samples_up_to
from telescope.backends.common.routing import RowRouting
from telescope.backends.common.rows import sent
from telescope.backends.common.shared_prefixes import take
from telescope.backends.fsdp.gather import BucketPart
from telescope.backends.fsdp.routers import Routers
from telescope.config.models import check_files, check_weights, model_path, model_problem, model_source
from telescope.maths import prefixes
from telescope.maths.support import WHOLE, Support

if TYPE_CHECKING:
    from telescope.backends.base import Job
    from telescope.config.sections import ModelSettings


@dataclass(frozen=True)
class RowInput:
    """One packed row of T tokens, n of them sampled, on the device."""

    ids: Tensor  # [1, T] int64
    position_ids: Tensor  # [1, T] int64
    segments: attention.Segments
    places: Tensor  # [n] int64, the tokens before the sampled ones; one may stand before the sampled ones of several samples
    targets: Tensor  # [n] int64, the sampled tokens
    temperature: float | np.ndarray  # of all of them, or [n] float32; FSDP would round a tensor to its precision
    piece: Piece | None = None
    """What of it is this rank's, where ranks share rows."""
    routing: RowRouting | None = None
    """What routers of experts are told of its tokens."""


class Policy(nn.Module):
    """The root that FSDP wraps: the head's weight is used inside its forward pass, so it is whole there, tied or not."""

    def __init__(self, lm: Any, kind: Kind, context: Context | None = None) -> None:
        super().__init__()
        if context is not None:
            _check_heads(lm, context.size)
        self.lm = lm
        self.kind: Kind = kind
        self.context = context
        self.routers: Routers | None = None
        self._rows: dict[str, names.Rows] | None = None
        self._published: dict[str, BucketPart] = {}
        self._homes: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]] = []
        """The modules' own tables, the name in them and the parameter, by which `_published` was made."""
        self._kept: dict[str, Tensor] | None = None
        self.shortest_hidden: int | None = None
        """Tokens of the shortest sample that would fit into a row and of which a layer's mask, which attention here does not
        make, hides something; None: there is none."""

    def forward(self, row: RowInput, chunk: int, whole_logits: bool = False, support: Support = WHOLE) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies [n] of the sampled tokens, float32. `whole_logits`: by the model's own head, for checks, at
        one temperature.

        Where ranks share the row each runs its own tokens, and all get all results.
        """
        context, piece = self.context, row.piece
        if context is None or piece is None:
            return self._run(row, chunk, whole_logits, support)
        each = row.temperature
        own = replace(
            row,
            ids=row.ids[:, piece.tokens],
            position_ids=row.position_ids[:, piece.tokens],
            places=row.places[piece.sampled] - piece.tokens.start,
            targets=row.targets[piece.sampled],
            temperature=each[piece.sampled] if isinstance(each, np.ndarray) else each,
            routing=None if row.routing is None else row.routing.part(piece.tokens),
        )
        logprob, entropy = self._run(own, chunk, whole_logits, support)
        count = len(row.places)
        return context.joined(logprob, piece, count), context.joined(entropy, piece, count)

    def _run(self, row: RowInput, chunk: int, whole_logits: bool, support: Support) -> tuple[Tensor, Tensor]:
        if self.routers is None:
            return self._run_told(row, chunk, whole_logits, support)
        with self.routers.told(row.routing, counts=torch.is_grad_enabled()):
            return self._run_told(row, chunk, whole_logits, support)

    def _run_told(self, row: RowInput, chunk: int, whole_logits: bool, support: Support) -> tuple[Tensor, Tensor]:
        kwargs = {"input_ids": row.ids, "position_ids": row.position_ids, "use_cache": False, "row": row.segments}
        if whole_logits:
            logp = (self.lm(**kwargs).logits[0, row.places].float() / float(row.temperature)).log_softmax(-1)
            return logp.gather(1, row.targets[:, None]).squeeze(1), -(logp.exp() * logp).sum(-1)
        hidden = self.lm.get_decoder()(**kwargs).last_hidden_state[0]  # [T, H]
        head = self.lm.get_output_embeddings().weight
        shared = row.segments.shared is not None
        taken = (take(hidden, row.places) if shared else hidden.index_select(0, row.places)).to(head.dtype)
        each = row.temperature
        temperature = sent(each, str(row.ids.device)) if isinstance(each, np.ndarray) else each
        return logprobs(taken, head, row.targets, temperature, chunk, support)

    @torch.no_grad()
    def logprobs_only(self, row: RowInput, chunk: int, support: Support = WHOLE) -> Tensor:
        """Log-probs [n] alone, without gradient. As any forward pass it is a collective, and leaves weights gathered that the
        next one needs."""
        logprob: Tensor = self(row, chunk, support=support)[0]
        return logprob

    def shard(
        self, mesh: DeviceMesh, precision: MixedPrecisionPolicy, *,
        reshard_layers: bool | int, reshard_rest: bool = False, offload: OffloadPolicy | None = None,
    ) -> None:  # fmt: skip
        """Spread weights over the ranks, a layer at a time. Gradients are summed over ranks, not averaged: the
        denominators of the loss count all ranks already. `offload`: where shards lie while they are not at work."""
        kept: dict[str, Any] = {"mesh": mesh, "mp_policy": precision, "offload_policy": offload or OffloadPolicy()}
        for layer in self.lm.get_decoder().layers:
            fully_shard(layer, reshard_after_forward=reshard_layers, **kept)
        fully_shard(self, reshard_after_forward=reshard_rest, **kept)
        if mesh.size() == 1:
            return  # nothing is averaged, and a factor of 1 would be a pass of its own over each gradient
        for module in self.fsdp_modules():
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)

    def keep_gathered(self, kept: bool) -> None:
        """Whether weights stay gathered after the backward passes from now on. They may until the next update alone, whose
        new weights have to be gathered."""
        for module in self.fsdp_modules():
            module.set_reshard_after_backward(not kept, recurse=False)

    def fsdp_modules(self) -> list[FSDPModule]:
        return [module for module in self.modules() if isinstance(module, FSDPModule)]

    def free_gathered(self) -> None:
        """Free what forward passes without a backward pass have left gathered: in the precision of computing, so that nobody
        may take it for the weights."""
        for module in self.fsdp_modules():
            module.reshard()

    @property
    def adapters(self) -> bool:
        """Whether adapters are trained rather than the weights themselves; a version then consists of them alone."""
        return any(f".{lora.ADAPTER}." in name for name, _ in self.named_parameters())

    @property
    def experts(self) -> bool:
        """Whether layers have experts: stacks of matrices, of which a token meets some."""
        return any(parameter.ndim == 3 for parameter in self.parameters())

    def by_name(self) -> dict[str, Tensor]:
        """What a version consists of, as it lies here, whole or sharded, by its published name, tied ones once."""
        return {name: parameter.detach() for name, parameter in lora.published(self, "lm.", adapters=self.adapters)}

    def published(self, shards: int) -> dict[str, BucketPart]:
        """What a version consists of by the names of the model's own files, spread over `shards` ranks or not.

        The matrices of a layer's experts come from all ranks in turn, so that what is gathered at once is gathered evenly. The
        same mapping as long as the parameters are the same, which is looked up again: FSDP puts others in their place while it
        computes.
        """
        if not self._homes or any(table.get(name) is not parameter for table, name, parameter in self._homes):
            kept = self.kept()
            every = dict(lora.published(self, "lm.", adapters=self.adapters)) | kept
            if self._rows is None:
                where = names.table(self.lm, every) if not self.adapters else names.as_they_are(every)
                self._rows = names.in_turn(where, every, shards)
            self._published = {
                name: BucketPart(every[at.name], at.shape, at.start, at.depth, exact=at.name in kept)
                for name, at in self._rows.items()
            }
            self._homes = [
                (module._parameters, name, parameter)
                for module in self.modules()
                for name, parameter in module._parameters.items()
                if parameter is not None
            ]
        return self._published

    def kept(self) -> dict[str, Tensor]:
        """What the model's files have beside its weights and no step changes, such as what a router adds to its experts' scores
        (`e_score_correction_bias`): to a server it is a weight like any other, and not to be rounded. Nothing of adapters."""
        if self._kept is None:
            saved = set() if self.adapters else set(self.lm.state_dict())
            buffers = ((name, buffer) for name, buffer in self.lm.named_buffers() if name in saved)
            self._kept = {name: buffer for name, buffer in buffers if buffer.is_floating_point()}
        return self._kept

    @torch.no_grad()
    def verify(self, job: Job, tolerance: float, *, shares_prefixes: bool = False) -> None:
        """Raise `UnfitModel` unless a packed sample's log-probs are those of the sample alone by the model's own head,
        and are the same, to the bit, whatever is packed before it; within the tolerance where there are experts, as how many
        tokens of a row an expert gets decides how its products are rounded. And unless its layers' masks show a token of
        the longest samples what attention here shows it; `shortest_hidden` is then known. `shares_prefixes`: nor unless
        samples that begin alike have the same log-probs, within the tolerance, where their beginning is computed once."""
        device, temperature = job.world.device, job.temperature
        vocabulary = self.lm.get_input_embeddings().weight.shape[0]
        tokens = 9 if self.context is None else -(-9 // self.context.size) * self.context.size
        first, second, other = np.random.default_rng(0).integers(0, vocabulary, (3, tokens))
        rows = [self._sample_row([beside, second], device, temperature) for beside in (first, other)]
        try:
            together, beside_other = (self(row, 16)[0][tokens - 1 :] for row in rows)
        except (TypeError, AttributeError, LookupError, NotImplementedError) as error:
            raise UnfitModel(
                f"{type(self.lm).__name__} ends its first pass over a packed row with {type(error).__name__}: {error}; its "
                f"layers do not go with what this backend hands them, or the kernels of attention={self.kind} do not: name "
                "another model.name, or set another backend.attention (sdpa works everywhere)"
            ) from error
        alone = self(self._sample_row([second], device, temperature), 16, whole_logits=True)[0]
        look = self._look(second, device, temperature, job.trainer.row_tokens)
        apart = self._distance_of_shared(first, second, other, device, temperature) if shares_prefixes else 0.0
        self.free_gathered()
        name = type(self.lm).__name__
        if not apart <= tolerance:
            raise UnfitModel(
                f"{name} gives samples log-probs that are {apart:.2g} from their own where the beginning that they share is "
                "computed once (backend.share_prefixes=true): set it to false"
            )
        moved = (together - beside_other).abs().max().item()
        if not moved <= (tolerance if self.experts else 0.0):
            raise UnfitModel(
                f"{name} lets a packed sample see its neighbour: its layers do not use the attention they are given"
            )
        difference = (together - alone).abs().max().item()
        if not difference <= tolerance:  # NaN is no agreement
            raise UnfitModel(
                f"{name} changes its logits after the head or looks across samples: log-probs differ by {difference:.2g} "
                "from those of its own forward pass, so what is trained would not be what is sampled"
            )
        if look.foreign:
            raise UnfitModel(
                f"{name} has {look.foreign}, which no attention of this backend computes: it can't be trained here"
            )
        self.shortest_hidden = look.shortest
        self.refuse_hidden(job.longest)

    def _distance_of_shared(
        self, beginning: np.ndarray, end: np.ndarray, other: np.ndarray, device: str, temperature: float
    ) -> float:
        """Of log-probs of two samples with one beginning, from those without sharing: the largest difference."""
        samples = [np.concatenate([beginning, end]), np.concatenate([beginning, other])]
        rows = [self._sample_row(samples, device, temperature, repeated) for repeated in ((), (0, len(beginning)))]
        apart, shared = (self(row, 16)[0] for row in rows)
        return float((apart - shared).abs().max())

    def refuse_hidden(self, longest: int) -> None:
        """Raise `UnfitModel` where a layer's mask alone would hide something of samples of `longest` tokens."""
        if self.shortest_hidden is not None and longest >= self.shortest_hidden:
            raise UnfitModel(
                f"{type(self.lm).__name__} hides tokens of samples of {self.shortest_hidden} tokens and more by a mask alone "
                "(a window, or chunks), of which attention here is not told, so what is trained would not be what is sampled: "
                f"set {samples_up_to(self.shortest_hidden - 1, longest)}"
            )

    def _look(self, sample: np.ndarray, device: str, temperature: float, seq_len: int) -> Look:
        """A pass of its own, whose results nobody compares: compiled layers would be compiled once more to be given a mask, so
        they run as they are written, and in half precision round otherwise than those that train."""
        row = self._sample_row([sample], device, temperature)
        row.segments.look = look = Look(seq_len)
        with look.at(attention.NAMES[self.kind]), torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "flex_attention called without")  # it is compiled in all other passes
            self(row, 16, whole_logits=True)
        return look

    def _sample_row(
        self, samples: list[np.ndarray], device: str, temperature: float, repeated: tuple[int, ...] = ()
    ) -> RowInput:  # fmt: skip
        """All tokens but each sample's first as sampled ones; padded where ranks share it, so that it can be cut. `repeated`:
        leading tokens of a sample that the one before it has too, and which are not computed again."""
        total = sum(len(sample) for sample in samples)
        padding = 0 if self.context is None else -total % self.context.size
        if padding:
            samples = [*samples, np.zeros(padding, np.int64)]
        lengths = [len(sample) for sample in samples]
        ids = np.concatenate(samples)
        positions = np.concatenate([np.arange(length) for length in lengths])
        places = np.flatnonzero(np.append(positions[1:], 0)[:total] != 0)
        places = places[places < total - 1]
        boundaries = np.cumsum([0, *lengths])
        run, stand_in = prefixes.computed(boundaries, repeated), prefixes.places(boundaries, repeated)
        arrays = (ids[run][None], positions[run][None], stand_in[places], ids[places + 1])
        ids_, positions_, places_, targets_ = (torch.from_numpy(array).to(device) for array in arrays)
        segments = attention.segments(self.kind, boundaries, device, self.context, repeated)
        routing = None if self.routers is None else RowRouting(torch.ones(total + padding, dtype=torch.bool, device=device))
        return RowInput(ids_, positions_, segments, places_, targets_, temperature, self.piece(len(ids), places), routing)

    def piece(self, tokens: int, places: np.ndarray) -> Piece | None:
        """What of a row of `tokens` tokens, with log-probs wanted at `places`, this rank runs; None: all."""
        return None if self.context is None else self.context.piece(tokens, places)


def load(model: ModelSettings, kind: Kind, dtype: torch.dtype, *, adapters: bool = True) -> Any:
    """The model on the CPU in `dtype`, with this project's attention and without dropout; with `adapters` also with those of
    model.lora, whose presence freezes everything else."""
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    problem = model_problem(model.name)
    if problem is not None:
        raise UnfitModel(problem.sentence)
    folder = model_path(model.name)
    if folder is not None:
        check_files(model.name, folder)
        check_weights(model.name, folder)
    try:
        lm, facts = AutoModelForCausalLM.from_pretrained(
            model_source(model.name),
            dtype=dtype,
            attn_implementation=attention.register(kind),
            trust_remote_code=model.trust_remote_code,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        if isinstance(error, KeyError) and error.args == (attention.NAMES[kind],):
            raise UnfitModel(
                f"model.name={model.name}: its layers choose their attention from a list of their own, which that of this "
                "backend is not in, so samples can't be packed: it can't be trained here"
            ) from error
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UnfitModel(f"model.name={model.name}: it can't be loaded: {said}") from error
    if absent := sorted(facts["missing_keys"]):
        raise UnfitModel(
            f"model.name={model.name}: its files lack {len(absent)} of the model's tensors, {', '.join(absent[:3])} first, "
            "which would be random numbers: complete the folder"
        )
    return fitted(lm, model, adapters=adapters)


def fitted(lm: Any, model: ModelSettings, *, adapters: bool) -> Any:
    """The model as it is trained: without dropout, with its adapters. Raises `UnfitModel`."""
    _check(lm)
    _sees_all(lm, model.name)
    _no_chance(lm)
    if adapters and model.lora is not None:
        try:
            lora.inject(lm, model.lora)
        except lora.NoSuchModule as error:
            raise UnfitModel(str(error)) from error
    return lm.train()


def _check(lm: Any) -> None:
    name = type(lm).__name__
    head = lm.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise UnfitModel(f"{name} has no linear head, so its log-probs can't be computed from its hidden states")
    if head.bias is not None:
        raise UnfitModel(f"{name} has a bias in its head, which the log-probs of this backend leave out")
    if not isinstance(getattr(lm.get_decoder(), "layers", None), nn.ModuleList):
        raise UnfitModel(
            f"{name} keeps its layers elsewhere than in its decoder's `layers`, so they can't be sharded one by one"
        )


def _sees_all(lm: Any, name: str) -> None:
    """Layers that choose keys do it over the whole row, samples packed beside theirs included, and by a mask of their own."""
    for module in lm.modules():
        if type(module).__name__.endswith("Indexer"):
            raise UnfitModel(
                f"model.name={name}: {type(lm).__name__} chooses for each token which of those before it it sees "
                f"({type(module).__name__}), which no attention of this backend computes: name a model whose layers see all"
            )


def _check_heads(lm: Any, size: int) -> None:
    """Each rank of a context computes the attention of as many heads."""
    heads = lm.config.get_text_config().num_attention_heads
    if heads % size:
        fits = [number for number in range(1, heads + 1) if heads % number == 0]
        raise UnfitModel(
            f"backend.context_parallel_size={size} must divide the {heads} attention heads of {type(lm).__name__}: set it to "
            f"one of {', '.join(map(str, fits))}"
        )


NOISES = ("jitter_noise", "input_jitter_noise", "router_jitter_noise", "moe_jitter_eps")
"""What routers of experts call the width of the noise that they train with."""


def _no_chance(lm: Any) -> None:
    """Log-probs must not depend on chance: the ratio to the sampler would be noise. (Attention here never drops.) What a layer
    computes again for its backward pass is then the same without a look at the random generators' states."""
    for module in lm.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and (name in NOISES or "drop" in name):  # of functional.dropout, or of whole layers
                setattr(module, name, 0.0)
    for config in (lm.config, lm.config.get_text_config()):  # some layers look there
        for name, value in list(vars(config).items()):
            if isinstance(value, float) and "drop" in name:
                setattr(config, name, 0.0)
