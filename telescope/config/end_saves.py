"""What a run saves at its end, by `checkpoint.at_end`, and how many bytes a save is.

Owns the meaning of `auto` and the sizes that follow from the model's shape. Refuses to look at a disk: what fits is decided
where the save is made (orchestrator/checkpoints.py), and said before it (launch/save_forecast.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from telescope.config.model_shapes import ShapeUnknown, shape_of
from telescope.maths.memory import BYTES, AdapterShape

if TYPE_CHECKING:
    from telescope.config.run import RunConfig

SaveContent = Literal["nothing", "weights", "state"]
"""state: the weights too, with all else that a run goes on from."""


@dataclass(frozen=True)
class EndSaves:
    """What is saved at the end of a run."""

    done: SaveContent
    """After the last step."""
    stopped: SaveContent
    """When the run is asked to stop before."""
    gives_way: bool = False
    """Where the state does not fit, the weights are saved; without: as asked for, whatever it takes."""

    @property
    def any(self) -> bool:
        return self.done != "nothing"


@dataclass(frozen=True)
class SaveBytes:
    """Of a whole save, all ranks together, without the orchestrator's part, which is small beside it."""

    weights: int
    state: int

    def of(self, content: SaveContent) -> int:
        return {"nothing": 0, "weights": self.weights, "state": self.state}[content]


NOTHING = EndSaves("nothing", "nothing")


def choose_end_saves(config: RunConfig) -> EndSaves:
    checkpoint = config.checkpoint
    asked = checkpoint.at_end
    if asked == "none" or not config.trains:
        return NOTHING
    if asked != "auto":
        return EndSaves(asked, asked)
    usual: SaveContent = "state" if checkpoint.save_training_state else "weights"
    if checkpoint.every:
        return EndSaves(usual, usual)
    unshared = config.cluster.key_file is not None and checkpoint.dir is None  # each host would save its ranks' part for itself
    if unshared or not config.backend.has_model:
        return NOTHING
    return EndSaves("weights", usual, gives_way=True)


def format_bytes(nbytes: float) -> str:
    """`48.2 GB`, `0.9 MB`."""
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.1f} MB"


def count_save_bytes(config: RunConfig) -> SaveBytes | None:
    """None where the model's shape, or what the backend keeps of it, is not known here."""
    model = config.model
    try:
        shape = shape_of(model.name)
    except ShapeUnknown:
        return None
    if (moments := config.backend.saved_moment_bytes(shape, model)) is None:
        return None
    if model.lora is None:
        weights = shape.parameters * BYTES[model.dtype]
    else:
        weights = 4 * AdapterShape(rank=model.lora.rank, modules=model.lora.target_modules).parameters(shape)
    return SaveBytes(weights, weights + moments)
