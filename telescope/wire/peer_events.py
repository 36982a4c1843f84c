"""What the wire tells an application: messages, and peers that come, leave, fall silent or get stuck. Plain values."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from telescope.wire.codec import NO_ARRAYS, RawArrays
from telescope.wire.messages import Body, Hello

if TYPE_CHECKING:
    import numpy as np

HUB = "orchestrator"
"""The hub's process name, and the `peer` of what a link delivers."""


@dataclass(frozen=True, eq=False)
class Delivery:
    """One message for the application. `answers` is the number of the own message that it settles, else 0."""

    peer: str
    seq: int
    body: Body
    frames: RawArrays = NO_ARRAYS
    """The arrays undecoded, to be passed on as they are."""
    answers: int = 0
    incarnation: str = ""

    @cached_property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """Read-only views, in the order of the message's layout."""
        return self.frames.views()


@dataclass(frozen=True)
class PeerJoined:
    peer: str
    hello: Hello


@dataclass(frozen=True)
class PeerLeft:
    """A clean Goodbye. `orders` were still unanswered; nobody will answer them."""

    peer: str
    orders: int


@dataclass(frozen=True)
class PeerLost:
    """Silent, failed by its own word, or replaced by a new process of its name. `cause` is a whole sentence."""

    peer: str
    cause: str


@dataclass(frozen=True)
class PeerStuck:
    """It beats, has orders, and has made no progress for `seconds`. Told once, until it makes progress again."""

    peer: str
    doing: str
    seconds: float


Happening = Delivery | PeerJoined | PeerLeft | PeerLost | PeerStuck
