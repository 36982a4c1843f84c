"""Whether a model's rotations of positions are the same in trainer and server, where they follow a length.

Owns that check and the sentence about how long samples may be.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from telescope.backends.common.models import UnfitModel

if TYPE_CHECKING:
    from telescope.backends.base import Job


def samples_up_to(most: int, longest: int) -> str:
    """What to set for samples of at most so many tokens. Rows may be longer: positions begin again at each sample."""
    return f"inference.max_model_len={most} or less (samples have up to {longest} tokens)"


def check_rotations(config: Any, name: str, job: Job) -> None:
    """Raise `UnfitModel` where rotations of positions follow a length, and not the same one in trainer and server. Asks for
    transformers' configuration and the name of the model's class.

    Both kinds are chosen here by the longest sample of a row (or of a rank's part of it). A server chooses neither by a sample:
    `longrope` it takes by `inference.max_model_len`, once, also where longer samples are cut before they are trained."""
    padding = job.trainer.pad_to_multiple_of
    config = config.get_text_config()
    given = getattr(config, "rope_parameters", None) or {}
    for parameters in (given, *(entry for entry in given.values() if isinstance(entry, dict))):
        kind = parameters.get("rope_type")
        if kind not in ("longrope", "dynamic"):
            continue
        own = parameters.get("original_max_position_embeddings") if kind == "longrope" else None
        most = own or config.max_position_embeddings
        served = max(job.longest, job.max_model_len or 0) if kind == "longrope" else job.longest
        if max(served, padding) > most:
            whole = f"trainer.pad_to_multiple_of={most} or less (it is {padding})"
            raise UnfitModel(
                f"{name} rotates positions by other angles ({kind}) as soon as a sample is longer than {most} "
                f"tokens, and a server and the samples packed beside it do so at other times, so what is trained would not be "
                f"what is sampled: set {samples_up_to(most, served) if served > most else whole}"
            )
