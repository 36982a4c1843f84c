"""AdamW over the pieces of parameters that this rank updates. The order of an update is common/updates.py's, and how moments
are kept between updates is common/stored_states.py's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from telescope.backends.base import Job
from telescope.backends.common.stored_states import Home, StoredStates
from telescope.backends.common.updates import Updater
from telescope.backends.megatron.masters import Masters, UpdatedPiece

SMALL = 1e-6
"""Beside a norm that is divided by, as in torch.nn.utils.clip_grad_norm_."""


class PieceUpdater(Updater):
    """Of all parameters that this stage has. Weight decay is for matrices alone."""

    def __init__(
        self, job: Job, ddps: Sequence[Any], masters: Masters, everywhere: Mapping[str, bool], *, scaled: bool,
        moment_dtypes: Mapping[str, torch.dtype],
    ) -> None:  # fmt: skip
        """`everywhere`: by parameter, whether all ranks of a stage have all of it. `moment_dtypes`: by kind, of moments between
        updates."""
        super().__init__(job, scaled=scaled)
        self._ddps, self._masters, self._everywhere = ddps, masters, everywhere
        self.steps = 0.0
        """Updates that moved the weights."""
        trainer = job.trainer
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, piece in masters.pieces.items():
            (matrices if masters.parameters[name].ndim >= 2 else others).append(piece.updated)
        given = ((matrices, trainer.weight_decay), (others, 0.0))
        groups = [{"params": found, "weight_decay": decay} for found, decay in given if found]
        nothing = [{"params": [nn.Parameter(torch.zeros(0))], "weight_decay": 0.0}]  # a rank may have padding alone
        self.optimizer = torch.optim.AdamW(groups or nothing, lr=trainer.learning_rate, betas=trainer.betas, fused=bool(groups))
        self.moment_dtypes = moment_dtypes
        away = [masters.pieces[name] for name in masters.hosted]
        hosted = {id(piece.updated) for piece in away}

        def home(parameter: Tensor, kind: str) -> Home:
            return Home(on_host=id(parameter) in hosted, dtype=moment_dtypes[kind])

        weights = [piece.updated for piece in away if piece.apart]
        self._stored = StoredStates(self.optimizer, job.world.device, home, weights)

    def _gradients(self) -> Iterable[Tensor]:
        return self._masters.gradients()

    def _clip(self, largest: float) -> float:
        norm = self._masters.norm(self._everywhere)
        gradients = self._masters.gradients()
        if gradients:
            torch._foreach_mul_(gradients, (largest / (norm + SMALL)).clamp(max=1.0))
        return float(norm)

    def _step(self) -> None:
        self._stored.step_with(self._given(), self._masters.follow)
        self.steps += 1
        self._masters.publish()

    def _given(self) -> list[tuple[nn.Parameter, Tensor]]:
        return [(piece.updated, piece.gradient) for piece in self._masters.pieces.values()]

    def _clear(self) -> None:
        for ddp in self._ddps:
            ddp.zero_grad_buffer()

    @property
    def began(self) -> bool:
        """Whether there are moments, which the first step makes; on all ranks or none."""
        return self.steps > 0

    def moment(self, kind: str, piece: UpdatedPiece) -> Tensor:
        """`exp_avg` or `exp_avg_sq` of a piece, as it is between updates."""
        found: Tensor = self.optimizer.state[piece.updated][kind]
        return found

    def make_state(self, steps: float) -> None:
        """Let the optimiser make its moments, so that they can be read into, and say that it made so many steps: a step with a
        rate and gradients of 0, which leaves the weights as they are."""
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
        self._clear()
        self._stored.step_with(self._given())
        for state in self.optimizer.state.values():
            state["step"].fill_(steps)
        self.steps = steps
