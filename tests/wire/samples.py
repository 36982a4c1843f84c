"""One message of each kind, with arrays where it has any, and a fixed number: what the golden bytes are made of."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from telescope.records import (
    Denominators,
    EnvironmentCard,
    ModelFacts,
    PromptRef,
    RolloutOrder,
    Sampling,
    TensorSpec,
    TrainItem,
    WeightGroup,
    WeightManifest,
)
from telescope.wire import messages as m
from telescope.wire.codec import RawArrays, encode

NAN = float("nan")


def trajectory(length: int) -> tuple[np.ndarray, ...]:
    mask = np.arange(length, dtype=np.uint8) % 2
    return (
        np.arange(100, 100 + length, dtype=np.int32),
        mask,
        np.where(mask == 1, -0.5, NAN).astype(np.float32),
        np.where(mask == 1, 3, -1).astype(np.int32),
    )


def completion(length: int) -> tuple[np.ndarray, ...]:
    return (np.arange(length, dtype=np.int32), np.full(length, -0.25, np.float32), np.full(length, 7, np.int32))


@dataclass(frozen=True)
class Sample:
    body: m.Body
    arrays: tuple[np.ndarray, ...] = ()
    seq: int = 0
    answers: int = 0
    variant: str = ""
    """Which form of the message, where its optional fields are sent."""

    @property
    def name(self) -> str:
        return type(self.body).__name__ + (f"-{self.variant}" if self.variant else "")

    def frames(self) -> list[bytes]:
        return encode(self.body, self.seq, self.answers, RawArrays.of(self.arrays))


def hello(name: str = "worker-0", **changes: object) -> m.Hello:
    fields: dict[str, object] = {
        "role": name.rpartition("-")[0],
        "name": name,
        "run": "run-1",
        "attempt": "attempt-1",
        "incarnation": f"{name}-first",
        "config_hash": "c0ffee",
        "capacity": 4,
        "pid": 4321,
        "host": "node-7",
    }
    return m.Hello(**(fields | changes))  # type: ignore[arg-type]


ORDER = RolloutOrder(11, 3, 2, 0, PromptRef("countdown", "train", 41), 99)
SAMPLING = Sampling(0.7, 64, 5)
MANIFEST = WeightManifest(
    5,
    "shared_memory",
    "telescope-5",
    (TensorSpec("w", "float32", (2, 3), 0, 24), TensorSpec("b", "float32", (), 24, 4)),
    28,
    "ab12",
    64,
    True,
)
DIRECT = m.DirectAddress("tcp://10.0.0.7:41874", "Yne@$w-vo<fVvi]a<NY6T1ed:M$fCG*[IaLV{hID")
GROUP = WeightGroup(2, ("trainer-0", "server-0/0", "server-1/0"))
CARD = EnvironmentCard("countdown", {"train": 1000, "eval": 10}, "d1ce")
MODEL = ModelFacts("tiny", "/models/tiny", {"end tokens": "1", "model.safetensors": "936,320 bytes, digest 00c0ffee"})

SAMPLES = (
    Sample(hello(environments=(CARD,), connection=2, direct_address=DIRECT, model=MODEL)),
    Sample(m.Welcome(3.0, 15.0, 2)),
    Sample(m.Reject("worker-0 belongs to run 'x', this is the hub of run 'y'")),
    Sample(m.Heartbeat(17, "train step 12")),
    Sample(m.Ack((1, 2, 300))),
    Sample(m.Stop("number_of_steps reached"), seq=9),
    Sample(m.Goodbye("the model folder is missing")),
    Sample(m.RunRollout(ORDER), seq=1),
    Sample(m.CancelRollout(11, 0, "off_policy")),
    Sample(m.GenerationEnded(11, 0)),
    Sample(m.PrefetchPrompts((PromptRef("countdown", "train", 7), PromptRef("countdown", "train", 3)))),
    Sample(
        m.RolloutResult(
            11, 0, 1.0, {"format": 0.5}, (4, 2), 3, 3, 1, "stop", 0.7, "2+2?", "4", ("4",), 10, 20, 30, ("easy",), "{}"
        ),
        trajectory(6),
        2,
        1,
    ),
    Sample(
        m.RolloutResult(
            11,
            0,
            0.5,
            {},
            (4, 2),
            1,
            3,
            3,
            "stop",
            0.7,
            "2+2?",
            "4",
            ("4",),
            10,
            20,
            30,
            (),
            "",
            (0.75, 0.0, -0.25),
            (((0, 1), (1, 1)), ((2, 1),)),
        ),
        trajectory(6),
        2,
        1,
        "turns",
    ),
    Sample(m.RolloutError(11, 0, "the sandbox did not start", "infrastructure"), (), 3, 1),
    Sample(m.Generate("11.0.1", 11, 0, 1, SAMPLING, -1, "5ec2e7"), (np.array([1, 2, 3], np.int32),), 4),
    Sample(m.Abort("11.0.1")),
    Sample(m.Completion("11.0.1", "length", 5, 2, 0.125, 0.5), completion(5), 6, 4),
    Sample(m.GenerateFailed("11.0.1", "server-0 was lost"), (), 7, 4),
    Sample(m.EngineLoad(0.25, 3, 1, 2)),
    Sample(m.RequestGrant("11.0.1", 11, 0, 1, 3), seq=5),
    Sample(m.Grant("11.0.1", "server-0", DIRECT, "5ec2e7", 30.0), (), 14, 5),
    Sample(m.ExpectRequest("11.0.1", "worker-0", 3, "5ec2e7", 1, 30.0), seq=15),
    Sample(m.Served("11.0.1", "length", 5, 2, 0.125, 0.5), (), 9, 15),
    Sample(m.RevokeGrant("11.0.1", "server-0 was lost"), seq=16),
    Sample(
        m.TrainStep(
            1,
            (TrainItem(11, 3, 0, 4, -0.5, 2, 0.7), TrainItem(12, 4, 1, 3, 0.5, 1, 1.0, 1)),
            (Denominators(2, 1, 1), Denominators(1, 1, 1)),
        ),
        trajectory(7),
        8,
    ),
    Sample(
        m.TrainStep(
            1,
            (TrainItem(11, 3, 0, 4, 0.25, 2, 0.7, turns=((1, 1.0), (1, -0.5))), TrainItem(12, 4, 1, 3, 0.5, 1, 1.0)),
            (Denominators(3, 2, 2),),
        ),
        trajectory(7),
        8,
        variant="turns",
    ),
    Sample(m.StepReport(1, {"loss": 0.25}, {"forward": 1.5}), (), 5, 8),
    Sample(m.RowsLost(12, 3)),
    Sample(m.PublishWeights(1), seq=10),
    Sample(m.WeightsPublished(5, MANIFEST, 0.25), (), 6, 10),
    Sample(m.SendWeights(5, GROUP), seq=14),
    Sample(m.WeightsSent(5, "sample:ab12", 0.125), (), 9, 14),
    Sample(m.PrepareWeights(MANIFEST, GROUP), seq=11),
    Sample(m.CommitWeights(5), seq=12),
    Sample(m.AbortWeights(5, "server-1 failed"), seq=13),
    Sample(m.WeightsReady(4, 5, "ab12", 0.0), (), 7, 11),
    Sample(m.WeightsFailed(5, "server-1/0 did not join", True, ("server-1/0",)), (), 8, 12),
    Sample(m.Sleep(6), seq=18),
    Sample(m.Asleep(6, 0.125), (), 13, 18),
    Sample(m.SaveCheckpoint(10, "/runs/a/checkpoints/step_00000010.partial-ab12", True), seq=17),
    Sample(m.CheckpointStaged(10, 0.25), seq=10),
    Sample(m.CheckpointWritten(10, 1024, 1.5), (), 11, 17),
    Sample(m.CheckpointError(10, "No space left on device"), (), 12, 17),
)
