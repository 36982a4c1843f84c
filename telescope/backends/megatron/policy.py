"""A megatron-core model as a policy: packed rows in, log-probs and entropies of sampled tokens out.

Owns the forward pass, whole or a stretch of layers at a time. Its layers are run here one by one rather than by megatron-core's
block, whose own way to compute layers again looks after random states that nothing here needs. Refuses losses, optimisers and
files, and what passes between stages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from megatron.core.fp8_utils import get_fp8_context
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from telescope.backends.common import attention, vocabulary
from telescope.backends.common.attention_choice import Kind
from telescope.backends.common.context import Piece
from telescope.backends.common.recompute import checkpoint_arguments, mode
from telescope.backends.common.routing import ExpertLoad, RowRouting
from telescope.backends.common.rows import DeviceRow, sent
from telescope.backends.megatron import FP8_BLOCK
from telescope.backends.megatron.architecture import Architecture, core_config
from telescope.backends.megatron.experts import ExpertLayer
from telescope.backends.megatron.layers import AttentionRow, layer_spec
from telescope.backends.megatron.modules import LayerModules
from telescope.backends.megatron.parallel import Parallel
from telescope.backends.megatron.stages import StageLayout, Stretch
from telescope.maths.support import WHOLE, Support

if TYPE_CHECKING:
    from telescope.backends.megatron import Megatron


@dataclass(frozen=True)
class ParallelRow:
    """One packed row, filled up where ranks share it out, on the device: the T tokens that this rank has of it, n of them
    before a sampled one."""

    ids: Tensor  # [1, T] int64
    row: AttentionRow
    places: Tensor  # [n] int64, the tokens before the sampled ones
    targets: Tensor  # [n] int64, the sampled tokens
    temperature: float | Tensor  # of all of them, or [n] float32
    routing: RowRouting | None = None
    """Of this rank's tokens, where layers have experts; of a spread sequence of its share of them."""
    piece: Piece | None = None
    """Which of the row they are, where ranks share rows."""
    sampled: int = 0
    """Sampled tokens of the whole row, where ranks share rows."""


class ParallelPolicy(nn.Module):
    """`models` are megatron-core's, one a stretch of layers that this stage has, of this rank's parts of their matrices, their
    parameters without values yet. Each takes itself for a whole model, however many stages there are."""

    def __init__(
        self, architecture: Architecture, settings: Megatron, modules: LayerModules, kind: Kind, computing: torch.dtype,
        parallel: Parallel, layout: StageLayout, device: str,
    ) -> None:  # fmt: skip
        super().__init__()
        facts = architecture.facts
        self._layer_modules, self._compiled = modules, settings.compiles
        self._block = FP8_BLOCK[settings.fp8_recipe] if settings.fp8 else 1
        self.config = core_config(architecture, settings, computing)
        self.kind: Kind = kind
        self._architecture, self._layout, self._stretches = architecture, layout, layout.of(parallel.stage)
        self._parallel, self._device, self._computing = parallel, device, computing
        self._spread = bool(self.config.sequence_parallel)
        self._rotation = architecture.rotation.to(device)
        kept = mode(settings.checkpointing)
        self._again: dict[str, Any] | None = None if kept == "none" else checkpoint_arguments(kept)
        group = parallel.tensor_group if parallel.tensor_size > 1 else None
        self._vocabulary = vocabulary.cut(facts.vocabulary, parallel.tensor_rank, parallel.tensor_size, group)
        self.load: ExpertLoad | None = None
        """Where training counts what its experts get."""
        self.replays = True
        """Whether recorded choices are followed: a model that is only compared with routes by itself."""
        self.models = nn.ModuleList(self._made(stretch) for stretch in self._stretches)

    def _made(self, stretch: Stretch) -> Any:
        architecture, facts = self._architecture, self._architecture.facts
        windows = architecture.windows[stretch.first : stretch.first + stretch.layers]
        width = architecture.config.intermediate_size
        spec = layer_spec(
            self._layer_modules, self.kind, windows, facts.head_dim**-0.5, width, facts, self._parallel.experts,
            first=stretch.first, compiled=self._compiled,
        )  # fmt: skip
        lm: Any = GPTModel(
            config=self.config,
            transformer_layer_spec=spec,
            vocab_size=self._vocabulary.each * self._parallel.tensor_size,
            max_sequence_length=architecture.config.max_position_embeddings,
            pre_process=stretch.begins,
            post_process=stretch.ends,
            position_embedding_type="none",  # attention turns queries and keys itself
            share_embeddings_and_output_weights=facts.tied,
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        )
        if facts.tied and stretch.begins != stretch.ends:  # in a bucket of its own, so that both stages spread it alike
            lm.shared_embedding_or_output_weight().shared_embedding = True
        return lm

    def by_name(self) -> dict[str, nn.Parameter]:
        """This stage's parameters by megatron-core's name in a model that is not cut."""
        return {
            self._layout.name(stretch, name): parameter
            for stretch, lm in zip(self._stretches, self.models, strict=True)
            for name, parameter in lm.named_parameters()
        }

    def prepared(
        self, row: DeviceRow, boundaries: np.ndarray, places: np.ndarray, routing: RowRouting | None = None
    ) -> ParallelRow:  # fmt: skip
        """boundaries [S + 1]: segment s is tokens boundaries[s] to boundaries[s + 1]; places [n]: the tokens before the sampled
        ones, in rising order. A row that is shared out over ranks, or computed in FP8, is filled up with one more segment,
        which nobody looks at."""
        ids, positions, context = row.ids, row.position_ids, self._parallel.context
        if missing := -ids.shape[1] % (self._shares * self._block):
            ids = torch.nn.functional.pad(ids, (0, missing))
            positions = torch.cat([positions, sent(np.arange(missing)[None], self._device)], dim=1)
            boundaries = np.append(boundaries, boundaries[-1] + missing)
            routing = None if routing is None else routing.padded(missing)
        segments = attention.segments(self.kind, boundaries, self._device, context)
        cos, sin = self._rotation(torch.empty(0, dtype=self._computing, device=self._device), positions)
        before, targets, temperature, piece = row.before, row.targets, row.temperature, None
        if context is not None:
            piece = context.piece(ids.shape[1], places)
            ids, cos, sin = ids[:, piece.tokens], cos[:, piece.tokens], sin[:, piece.tokens]
            before, targets = before[piece.sampled] - piece.tokens.start, targets[piece.sampled]
            temperature = temperature[piece.sampled] if isinstance(temperature, np.ndarray) else temperature
            routing = None if routing is None else routing.part(piece.tokens)
        if routing is not None and self._spread:
            share = ids.shape[1] // self._parallel.tensor_size
            routing = routing.part(slice(self._parallel.tensor_rank * share, (self._parallel.tensor_rank + 1) * share))
        return ParallelRow(
            ids,
            AttentionRow(qkv_format="sbhd", segments=segments, cos=cos, sin=sin),
            before,
            targets,
            sent(temperature, self._device) if isinstance(temperature, np.ndarray) else temperature,
            routing,
            piece,
            len(places),
        )

    @property
    def _shares(self) -> int:
        """Ranks that a row's tokens are cut over, between the matrices."""
        context = self._parallel.context
        return (self._parallel.tensor_size if self._spread else 1) * (1 if context is None else context.size)

    def passing_shape(self, tokens: int) -> tuple[int, ...]:
        """Of what passes from a layer to the next on this rank, of a row of so many tokens."""
        return -(-tokens // (self._shares * self._block)) * self._block, 1, int(self.config.hidden_size)

    def forward(self, given: ParallelRow, chunk: int, support: Support = WHOLE) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of all sampled tokens of the row, float32, the same on all ranks of the model, which is on
        one stage. A collective."""
        return self.taken(given, self.passed(0, given, None), chunk, support)

    def ends(self, lap: int) -> bool:
        """Whether this stage's stretch `lap` is the model's last."""
        return self._stretches[lap].ends

    def passed(self, lap: int, given: ParallelRow, entering: Tensor | None) -> Tensor:
        """[T, 1, H], or this rank's share of the tokens: through this stage's stretch `lap`. `entering`: the same before it;
        None where the model begins. A collective of the stage."""
        lm: Any = self.models[lap]
        if entering is None:
            entering = lm.embedding.word_embeddings(given.ids)
            if not self._spread:
                entering = entering.transpose(0, 1).contiguous()
        hidden = entering
        for number, layer in enumerate(lm.decoder.layers, self._stretches[lap].first):
            hidden = self._of_layer(number, layer, hidden, given)
        return lm.decoder.final_layernorm(hidden) if self.ends(lap) else hidden

    def taken(self, given: ParallelRow, hidden: Tensor, chunk: int, support: Support = WHOLE) -> tuple[Tensor, Tensor]:
        """As `forward`, from what leaves the model's last stretch. A collective of the last stage."""
        group = self._parallel.tensor_group
        if self._spread:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True, group=group)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden, group=group)
        head = self.head
        if len(head) > self._vocabulary.count:
            head = head[: self._vocabulary.count]
        taken = hidden[:, 0].index_select(0, given.places).to(head.dtype)
        found = vocabulary.logprobs(taken, head, given.targets, given.temperature, chunk, self._vocabulary, support)
        context, piece = self._parallel.context, given.piece
        if context is None or piece is None:
            return found
        logprob, entropy = (context.joined(own, piece, given.sampled) for own in found)
        return logprob, entropy

    @property
    def head(self) -> Tensor:
        """[rows of this rank, filled up; H], on the last stage."""
        lm: Any = self.models[-1]
        own: Tensor | None = lm.output_layer.weight
        weight: Tensor = lm.embedding.word_embeddings.weight if own is None else own
        return weight

    def _of_layer(self, number: int, layer: Any, hidden: Tensor, given: ParallelRow) -> Tensor:
        """`number`: of the model's layers, from 0."""
        load = self.load if torch.is_grad_enabled() else None  # what is not trained is not counted

        def run(entering: Tensor) -> Tensor:
            nonlocal load
            if isinstance(layer.mlp, ExpertLayer):
                layer.mlp.row, layer.mlp.load = (given.routing if self.replays else None), load
                load = None  # a layer that is computed again counts once
            with get_fp8_context(self.config, number):  # here, so that a layer that is computed again is in FP8 as well
                leaving: Tensor = layer(entering, attention_mask=None, packed_seq_params=given.row)[0]
            return leaving

        if self._again is None or not torch.is_grad_enabled():
            return run(hidden)
        result: Tensor = checkpoint(run, hidden, **self._again)
        return result

    @torch.no_grad()
    def logprobs_only(self, given: ParallelRow, chunk: int, support: Support = WHOLE) -> Tensor:
        """Log-probs alone, without gradient. A collective."""
        logprob: Tensor = self(given, chunk, support=support)[0]
        return logprob
