"""What an update cost is told with the step that is done next: the trainer's seconds and the servers', by name."""

from __future__ import annotations

from typing import Any

import pytest

from telescope.orchestrator.weight_coordinator import UpdateRules, WeightCoordinator
from telescope.records import WeightManifest
from telescope.wire.codec import RawArrays
from telescope.wire.messages import (
    AbortWeights,
    CommitWeights,
    PrepareWeights,
    PublishWeights,
    SendWeights,
    WeightsPublished,
    WeightsReady,
    WeightsSent,
)
from telescope.wire.peer_events import Delivery

PULL = WeightManifest(version=3, transport="shared_memory", location="x", tensors=(), nbytes=8, checksum="abc")
BROADCAST = WeightManifest(3, "gloo", "tcp://x:1/w", (), 8, "")


class Desk:
    """The coordinator's hub, recorder and violations in one."""

    def __init__(self) -> None:
        self.orders: list[tuple[str, Any]] = []
        self.found: dict[str, float] = {}
        self.updater = WeightCoordinator(self, self, self, ("trainer-0", "trainer-1"), UpdateRules(100.0, 2))  # type: ignore[arg-type]
        for server in ("server-0", "server-1"):
            self.updater.join(server, 2)

    def send(self, peer: str, body: Any) -> int:
        self.orders.append((peer, body))
        return len(self.orders)

    def add_to_next_step(self, metrics: dict[str, float], instead_of: str) -> None:
        assert not self.found
        self.found = metrics

    def record_weights(self, *_: object, **__: object) -> None: ...

    def alert(self, *_: object, **__: object) -> None: ...

    def note(self, peer: str, what: str) -> None:
        raise AssertionError(what)

    def say(self, now: float, peer: str, asked: type, body: Any) -> None:
        """Answer the peer's latest order of a kind."""
        number = max(at for at, (name, order) in enumerate(self.orders, 1) if name == peer and isinstance(order, asked))
        self.updater.hear(Delivery(peer, 0, body, RawArrays.of(()), answers=number), body, now)

    def publish(self, manifest: WeightManifest) -> None:
        self.updater.begin(3, 10.0)
        self.say(10.25, "trainer-1", PublishWeights, WeightsPublished(3, None, 0.125))
        self.say(10.5, "trainer-0", PublishWeights, WeightsPublished(3, manifest, 0.375))

    def prepare(self) -> None:
        self.say(12.0, "server-0", PrepareWeights, WeightsReady(2, 3, "old", 0.0))
        self.say(13.0, "server-1", PrepareWeights, WeightsReady(2, 3, "old", 0.0))

    def commit(self, now: float = 13.0, checksum: str = "abc") -> None:
        self.say(now + 0.125, "server-1", CommitWeights, WeightsReady(3, None, checksum, 0.0625))
        self.say(now + 0.375, "server-0", CommitWeights, WeightsReady(3, None, checksum, 0.03125))


def test_an_update_in_place_by_hand():
    desk = Desk()
    desk.publish(PULL)
    desk.prepare()
    assert not desk.found
    desk.commit()
    assert desk.found == {
        "timing_weight_sync/version": 3.0,
        "timing_weight_sync/total": 3.375,
        "timing_weight_sync/publish": 0.375,
        "timing_weight_sync_trainer_total": 0.375,
        "timing_weight_sync/prepare/median": 2.0,
        "timing_weight_sync/prepare/max": 2.5,
        "timing_weight_sync/commit/median": 0.25,
        "timing_weight_sync/commit/max": 0.375,
        "timing_weight_sync/pause/median": 0.046875,
        "timing_weight_sync/pause/max": 0.0625,
        "timing_weight_sync_inference_total": 2.875,
    }


def test_a_broadcast_also_counts_what_the_slowest_rank_sent():
    desk = Desk()
    desk.publish(BROADCAST)
    desk.prepare()
    desk.say(13.25, "trainer-0", SendWeights, WeightsSent(3, "sum", 2.0))
    desk.say(13.5, "trainer-1", SendWeights, WeightsSent(3, "", 2.5))
    desk.commit(13.5, "sum")
    assert desk.found["timing_weight_sync/send"] == 2.5
    assert desk.found["timing_weight_sync_trainer_total"] == 2.875
    assert desk.found["timing_weight_sync_inference_total"] == 3.375


def test_a_round_that_came_to_nothing_counts_in_the_totals_and_the_last_one_in_the_parts():
    desk = Desk()
    desk.publish(PULL)
    desk.updater.tick(111.0)  # nobody has prepared in the 100 s
    for server in ("server-0", "server-1"):
        desk.say(112.0, server, AbortWeights, WeightsReady(2, None, "old", 0.0))
    for server in ("server-0", "server-1"):
        desk.say(114.0, server, PrepareWeights, WeightsReady(2, 3, "old", 0.0))
    desk.commit(114.0)
    assert desk.found["timing_weight_sync/prepare/max"] == 2.0
    assert desk.found["timing_weight_sync_inference_total"] == pytest.approx(114.375 - 10.5)


def test_a_server_that_comes_late_is_no_steps_update():
    desk = Desk()
    desk.publish(PULL)
    desk.prepare()
    desk.commit()
    desk.found = {}
    desk.updater.join("server-2", 0)
    desk.updater.begin(3, 20.0)
    desk.say(21.0, "server-2", PrepareWeights, WeightsReady(0, 3, "old", 0.0))
    desk.say(21.5, "server-2", CommitWeights, WeightsReady(3, None, "abc", 0.5))
    assert not desk.updater.doing
    assert desk.found == {}
