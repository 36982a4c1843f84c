"""The protocol as data: what a field on the socket means, who may say what, and what answers what.

docs/protocol.md is the prose of this file; golden bytes pin every message. A header is one `Envelope`: delivery facts plus one
tagged body. Arrays travel as raw little-endian frames behind it, in the order of `Envelope.arrays`. Refuses state (channel.py),
frames (codec.py), sockets, clocks and retries (session.py decides those).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import dataclass_transform

import msgspec

from telescope.records import (
    Denominators,
    EnvironmentCard,
    FailureKind,
    FinishReason,
    ModelFacts,
    PromptRef,
    Role,
    RolloutOrder,
    Sampling,
    TrainItem,
    WeightGroup,
    WeightManifest,
)

PROTOCOL = b"telescope/1"


@dataclass_transform(frozen_default=True)
class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Base of all bodies; the tag is the class name."""


class ArraySpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One raw frame: numpy dtype string (bounded list in codec.py) and shape."""

    dtype: str
    shape: tuple[int, ...]


class DirectAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a server takes requests from workers directly: `tcp://10.0.0.7:41874`, and the key (Z85) that it must hold."""

    endpoint: str
    public_key: str


# ---- session: who is there ------------------------------------------------------------------------------------------


class Hello(Message):
    """First message of a link, and again after each reconnect."""

    role: Role
    name: str
    run: str
    attempt: str
    incarnation: str
    """Random per process start: a restarted peer of the same name is a new peer."""
    config_hash: str
    capacity: int
    """Orders this peer takes at once (its credits)."""
    pid: int
    host: str
    environments: tuple[EnvironmentCard, ...] = ()
    version: int = 0
    """Weight version a server serves at its hello."""
    rank: int = 0
    started_ns: int = 0
    """Wall clock at the link's start; set by the link. Of two processes of one name the later one counts."""
    connection: int = 0
    """Counts this incarnation's connections; set by the link. A hello of an earlier one that comes late is passed over."""
    direct_address: DirectAddress | None = None
    """Of a server where `wire.direct=true`."""
    model: ModelFacts | None = None
    """What it has read in the model's folder; None where it reads none."""
    attention_length: float = 0.0
    """Of a trainer: tokens of a sample whose attention costs as much as all the rest of its model. 0: not told."""


class Welcome(Message):
    heartbeat_s: float
    silent_s: float
    connection: int = 0
    """That of the hello it answers."""


class Reject(Message):
    reason: str


class Heartbeat(Message):
    """Sent by the I/O thread. `progress` counts work done; `doing` says what is going on, e.g. `train step 12`."""

    progress: int
    doing: str


class Ack(Message):
    """The named sequence numbers of the other side are safe here (for a rollout: on disk); it may forget them."""

    seqs: tuple[int, ...]


class Stop(Message):
    """Orchestrator to all: finish, say Goodbye, exit 0."""

    reason: str


class Goodbye(Message):
    """A peer leaves on purpose; its silence from now on is not a fault. A non-empty `error` is the reason of a failure."""

    error: str = ""


# ---- environment workers --------------------------------------------------------------------------------------------


class RunRollout(Message):
    order: RolloutOrder


class CancelRollout(Message):
    rollout_id: int
    attempt: int
    reason: str


class PrefetchPrompts(Message):
    """Prompts that are likely to be ordered next, the first one first. A hint: nothing is owed for it, and it may be lost."""

    prompts: tuple[PromptRef, ...]


class RolloutResult(Message):
    """Frames: ids [T] int32, mask [T] uint8, logprobs [T] float32, versions [T] int32, all branches one after another."""

    rollout_id: int
    attempt: int
    reward: float
    metrics: dict[str, float]
    branch_lengths: tuple[int, ...]
    prompt_tokens: int
    completion_tokens: int
    turns: int
    finish_reason: FinishReason
    temperature: float
    """At which each of its tokens was sampled."""
    prompt_text: str
    completion_text: str
    golden_answers: tuple[str, ...]
    started_ns: int
    generated_ns: int
    scored_ns: int
    tags: tuple[str, ...] = ()
    info: str = ""
    """A JSON object; empty for none."""
    turn_rewards: tuple[float, ...] | msgspec.UnsetType = msgspec.UNSET
    """One for each of its `turns`; unset where the environment gave none."""
    branch_turns: tuple[tuple[tuple[int, int], ...], ...] | msgspec.UnsetType = msgspec.UNSET
    """Of each branch its answers in order: (which of `turns`, from 0; sampled tokens). Unset: all tokens are of one turn;
    empty: there is no branch, as of an eval's server that tells no tokens."""


class RolloutError(Message):
    """No score (environment, grader, server, time limit), never a reward of 0."""

    rollout_id: int
    attempt: int
    cause: str
    kind: FailureKind = "infrastructure"


class GenerationEnded(Message):
    """The rollout will ask for no more tokens; what follows is its reward."""

    rollout_id: int
    attempt: int


# ---- generation: worker -> orchestrator -> server and back, arrays undecoded ----------------------------------------


class Generate(Message):
    """Frame: prompt ids [T] int32."""

    request_id: str
    rollout_id: int
    attempt: int
    turn: int
    sampling: Sampling
    priority: int = 0
    grant: str = ""
    """The grant's secret where the request goes straight to a server's port; empty on the way through the hub."""


class Abort(Message):
    request_id: str


class Completion(Message):
    """Frames: ids [T] int32, logprobs [T] float32 (processed), versions [T] int32; and where the server keeps it routing
    [P + T, L, K] uint8 or int16, of the P prompt tokens too."""

    request_id: str
    finish_reason: FinishReason
    tokens: int
    cached_tokens: int
    queued_s: float
    generated_s: float


class GenerateFailed(Message):
    request_id: str
    cause: str


class EngineLoad(Message):
    """What a server's engine has to do; sent when it has changed, a few times a second at most."""

    kv_used: float
    """Share of its KV cache in use, 0 to 1."""
    running: int
    waiting: int
    preemptions: int
    """Since the engine's start."""


# ---- the direct path (`wire.direct=true`): the core places as ever, the arrays go straight to the server's own port


class RequestGrant(Message):
    """A worker's Generate without its arrays. `prompt_tokens`: how many ids it will bring."""

    request_id: str
    rollout_id: int
    attempt: int
    turn: int
    prompt_tokens: int


class Grant(Message):
    """Where the request is placed. Good for one Generate at that port, for `lifetime_s` from now."""

    request_id: str
    server: str
    address: DirectAddress
    secret: str
    lifetime_s: float


class ExpectRequest(Message):
    """A worker will come with this grant. An order: its credit is taken now and comes back with Served."""

    request_id: str
    worker: str
    prompt_tokens: int
    secret: str
    priority: int
    lifetime_s: float


class Served(Message):
    """What became of an expected request, without its arrays. `cause`: why it failed, empty where there is a Completion."""

    request_id: str
    finish_reason: FinishReason
    tokens: int
    cached_tokens: int
    queued_s: float
    generated_s: float
    cause: str = ""


class RevokeGrant(Message):
    """The grant is worth nothing any more, and what was asked with it will not be answered: its server is lost."""

    request_id: str
    cause: str


# ---- training and weights -------------------------------------------------------------------------------------------


class TrainStep(Message):
    """One rank's shard of a step. Frames, the items' tokens one after another: ids [T] int32, mask [T] uint8,
    logprobs [T] float32, versions [T] int32."""

    step: int
    """1-based; the step produces weight version `step`."""
    items: tuple[TrainItem, ...]
    """In order of their minibatches."""
    denominators: tuple[Denominators, ...]
    """One a minibatch, each over all ranks."""


class StepReport(Message):
    """Metrics of one rank. Rank 0's are already reduced over all ranks; `timings` are this rank's own seconds."""

    step: int
    metrics: dict[str, float]
    timings: dict[str, float]


class RowsLost(Message):
    """Rows of a rank's own that no file has, since it started: those that could not be written, and those that were dropped
    under pressure. Sent when there are more, and once more before the Goodbye."""

    unlogged: int
    dropped: int


class PublishWeights(Message):
    version: int


class WeightsPublished(Message):
    """From every rank; only rank 0 carries the manifest."""

    version: int
    manifest: WeightManifest | None
    seconds: float


class SendWeights(Message):
    """To every trainer rank: rank 0 broadcasts the published version to the group, the others help to gather it."""

    version: int
    group: WeightGroup


class WeightsSent(Message):
    """From every rank. `checksum` is rank 0's over what it sent; servers that have the same hold the same bytes."""

    version: int
    checksum: str
    seconds: float


class PrepareWeights(Message):
    """`group`: only for a collective manifest. Its sender sends at the same time."""

    manifest: WeightManifest
    group: WeightGroup | None = None


class CommitWeights(Message):
    version: int


class AbortWeights(Message):
    """To servers: forget the staged version. To both sides of a broadcast: break it off, and be ready for the next epoch."""

    version: int
    reason: str


class WeightsReady(Message):
    """Answer to PrepareWeights, CommitWeights and AbortWeights: what the server holds now. A trainer rank answers AbortWeights
    with it: nothing of the version travels any more."""

    version: int
    """The version served after this answer; for a trainer rank the one that it has trained."""
    prepared: int | None
    """The version staged and not yet served."""
    checksum: str
    pause_s: float


class WeightsFailed(Message):
    """`fatal`: the server no longer serves anything and must be restarted."""

    version: int
    cause: str
    fatal: bool
    missing: tuple[str, ...] = ()
    """Members of the group (`server-1/0`) that had not come to a broadcast when this peer gave up or was told to break off."""


class Sleep(Message):
    """To a server before step `step` is trained (`inference.sleep_while_training`): answer what is running, then give the GPU's
    memory back. It wakes by itself when it commits the next version; requests that come meanwhile wait for that."""

    step: int


class Asleep(Message):
    """Answer to Sleep: the memory is free. A server that can't fall asleep ends."""

    step: int
    seconds: float
    """Until it slept, with the wait for running requests."""


# ---- checkpoints ----------------------------------------------------------------------------------------------------


class SaveCheckpoint(Message):
    """To every trainer rank, after step `step` and before the next: write your part below `folder`, a partial one."""

    step: int
    folder: str
    training_state: bool = True
    """All that a run goes on from; false: the weights alone."""


class CheckpointStaged(Message):
    """The rank's state is copied off and training may go on. `stall_s`: how long it could not."""

    step: int
    stall_s: float


class CheckpointWritten(Message):
    """All of the rank's part is on the disk."""

    step: int
    nbytes: int
    seconds: float
    """Of the writing alone, after the state was copied off."""


class CheckpointError(Message):
    """The rank's part can't be written; the rank goes on training."""

    step: int
    cause: str


Body = (
    Hello | Welcome | Reject | Heartbeat | Ack | Stop | Goodbye
    | RunRollout | CancelRollout | PrefetchPrompts | GenerationEnded | RolloutResult | RolloutError
    | Generate | Abort | Completion | GenerateFailed | EngineLoad
    | RequestGrant | Grant | ExpectRequest | Served | RevokeGrant
    | TrainStep | StepReport | RowsLost | PublishWeights | WeightsPublished | SendWeights | WeightsSent
    | PrepareWeights | CommitWeights | AbortWeights | WeightsReady | WeightsFailed | Sleep | Asleep
    | SaveCheckpoint | CheckpointStaged | CheckpointWritten | CheckpointError
)  # fmt: skip


class Envelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Delivery facts of one message."""

    body: Body
    seq: int = 0
    """Counts a sender's kept messages from 1; 0 = not kept, not resent (heartbeats, acks, cancels)."""
    answers: int = 0
    """`seq` of the other side's message that this one settles; it returns that message's credit."""
    arrays: tuple[ArraySpec, ...] = ()


Kind = type[Message]

SESSION_OF_PEER: frozenset[Kind] = frozenset({Hello, Heartbeat, Ack, Goodbye})
SESSION_OF_HUB: frozenset[Kind] = frozenset({Welcome, Reject, Heartbeat, Ack, Goodbye})
"""Handled by the session itself, never delivered to the application."""

FROM_PEER: dict[Role, frozenset[Kind]] = {
    "worker": frozenset({Generate, RequestGrant, Abort, GenerationEnded, RolloutResult, RolloutError}),
    "server": frozenset({Completion, GenerateFailed, Served, EngineLoad, WeightsReady, WeightsFailed, Asleep}),
    "trainer": frozenset(
        {
            *(StepReport, RowsLost, WeightsPublished, WeightsSent, WeightsReady, WeightsFailed),
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
