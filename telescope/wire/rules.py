"""Who may say what, what answers what, and what is kept until it is settled. The tables of docs/protocol.md, as data.

Knows kinds of messages and roles; refuses state (channel.py) and frames (codec.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from telescope.records import Role
from telescope.wire.messages import (
    Abort,
    AbortWeights,
    Ack,
    Asleep,
    CancelRollout,
    CheckpointError,
    CheckpointStaged,
    CheckpointWritten,
    CommitWeights,
    Completion,
    EngineLoad,
    ExpectRequest,
    Generate,
    GenerateFailed,
    GenerationEnded,
    Goodbye,
    Grant,
    Heartbeat,
    Hello,
    Message,
    PrefetchPrompts,
    PrepareWeights,
    PublishWeights,
    Reject,
    RequestGrant,
    RevokeGrant,
    RolloutError,
    RolloutResult,
    RunRollout,
    SaveCheckpoint,
    SendWeights,
    Served,
    Sleep,
    StepReport,
    Stop,
    TrainStep,
    WeightsFailed,
    WeightsPublished,
    WeightsReady,
    WeightsSent,
    Welcome,
)

Kind = type[Message]

SESSION_OF_PEER: frozenset[Kind] = frozenset({Hello, Heartbeat, Ack, Goodbye})
SESSION_OF_HUB: frozenset[Kind] = frozenset({Welcome, Reject, Heartbeat, Ack, Goodbye})
"""Handled by the session itself, never delivered to the application."""

FROM_PEER: dict[Role, frozenset[Kind]] = {
    "worker": frozenset({Generate, RequestGrant, Abort, GenerationEnded, RolloutResult, RolloutError}),
    "server": frozenset({Completion, GenerateFailed, Served, EngineLoad, WeightsReady, WeightsFailed, Asleep}),
    "trainer": frozenset(
        {
            *(StepReport, WeightsPublished, WeightsSent, WeightsReady, WeightsFailed),
            *(CheckpointStaged, CheckpointWritten, CheckpointError),
        }
    ),
}
FROM_HUB: dict[Role, frozenset[Kind]] = {
    "worker": frozenset({RunRollout, CancelRollout, PrefetchPrompts, Completion, GenerateFailed, Grant, RevokeGrant, Stop}),
    "server": frozenset({Generate, ExpectRequest, Abort, PrepareWeights, CommitWeights, AbortWeights, Sleep, Stop}),
    "trainer": frozenset({TrainStep, PublishWeights, SendWeights, AbortWeights, SaveCheckpoint, Stop}),
}


@dataclass(frozen=True)
class Port:
    """What may be said at a ROUTER: who comes there, with what, and what they are told."""

    from_peer: Mapping[Role, frozenset[Kind]]
    from_hub: Mapping[Role, frozenset[Kind]]


HUB_PORT = Port(FROM_PEER, FROM_HUB)
DIRECT_PORT = Port({"worker": frozenset({Generate})}, {"worker": frozenset({Completion, GenerateFailed, Stop})})
"""A server's own: workers come with their grants, and nobody else."""
GRANT_LIFETIME_S = 30.0
"""From the order ExpectRequest to the worker's Generate. A worker on its feet needs milliseconds."""

ANSWERED_BY: dict[Kind, frozenset[Kind]] = {
    RunRollout: frozenset({RolloutResult, RolloutError}),
    Generate: frozenset({Completion, GenerateFailed}),
    RequestGrant: frozenset({Grant, GenerateFailed}),
    ExpectRequest: frozenset({Served}),
    TrainStep: frozenset({StepReport}),
    PublishWeights: frozenset({WeightsPublished, WeightsFailed}),
    SendWeights: frozenset({WeightsSent, WeightsFailed}),
    PrepareWeights: frozenset({WeightsReady, WeightsFailed}),
    CommitWeights: frozenset({WeightsReady, WeightsFailed}),
    AbortWeights: frozenset({WeightsReady, WeightsFailed}),
    Sleep: frozenset({Asleep}),
    SaveCheckpoint: frozenset({CheckpointWritten, CheckpointError}),
}
"""Kept until one of these comes back with its number in `answers`."""
ANSWERS: frozenset[Kind] = frozenset().union(*ANSWERED_BY.values())

ACKNOWLEDGED: frozenset[Kind] = ANSWERS | {Stop, RevokeGrant, CheckpointStaged}
"""Kept until an Ack names them."""
SAFE_BY_APPLICATION: frozenset[Kind] = frozenset({RolloutResult})
"""Acknowledged when the application says so (it is on disk); the others when they have arrived."""
KEPT: frozenset[Kind] = ACKNOWLEDGED | frozenset(ANSWERED_BY)

WORK: frozenset[Kind] = frozenset({RunRollout, Generate, ExpectRequest, TrainStep})
"""Orders that cost one of the peer's `capacity` credits."""
WEIGHT_ORDERS: frozenset[Kind] = frozenset({PublishWeights, SendWeights, PrepareWeights, CommitWeights, AbortWeights, Sleep})
"""Orders with a small budget of their own: a server full of generations must still be able to take new weights."""
MAX_WEIGHT_ORDERS = 4

ACK_DELAY_S = 0.1
"""Acks wait this long for company: one message tells many."""
ACK_BATCH = 64

NOTED_OF_A_PEER = 100
"""Violations of one peer that are logged; more are only counted: a peer that says nothing else must not fill the disk."""
