"""A weight update is prepared everywhere before it is committed anywhere, and each wait ends."""

from __future__ import annotations

import pytest

from telescope.orchestrator.updates import Phase, WeightUpdate
from telescope.records import WeightManifest

MANIFEST = WeightManifest(version=3, transport="shared_memory", location="x", tensors=(), nbytes=8, checksum="abc")


@pytest.fixture
def update() -> WeightUpdate:
    return WeightUpdate(3, ("trainer-0", "trainer-1"), ("server-0", "server-1"), timeout_s=10.0, now=0.0)


def published(update: WeightUpdate) -> WeightUpdate:
    update.published("trainer-0", MANIFEST, 1.0)
    update.published("trainer-1", None, 1.0)
    return update


def prepared(update: WeightUpdate) -> WeightUpdate:
    published(update)
    update.prepared("server-0", 2.0)
    update.prepared("server-1", 2.0)
    return update


def test_every_rank_publishes_before_any_server_prepares(update: WeightUpdate):
    update.published("trainer-0", MANIFEST, 1.0)
    assert (update.phase, update.waiting) == (Phase.PUBLISH, {"trainer-1"})
    update.published("trainer-1", None, 1.0)
    assert (update.phase, update.waiting) == (Phase.PREPARE, {"server-0", "server-1"})


def test_no_server_commits_before_all_have_prepared(update: WeightUpdate):
    published(update)
    update.prepared("server-0", 2.0)
    assert update.phase is Phase.PREPARE
    update.committed("server-0", "abc", 2.0)  # out of turn: counts for nothing
    assert update.phase is Phase.PREPARE
    update.prepared("server-1", 2.0)
    assert (update.phase, update.waiting) == (Phase.COMMIT, {"server-0", "server-1"})


def test_it_is_done_when_the_last_server_has_committed(update: WeightUpdate):
    prepared(update)
    update.committed("server-1", "abc", 3.0)
    update.committed("server-1", "abc", 3.0)
    assert update.phase is Phase.COMMIT
    update.committed("server-0", "abc", 3.0)
    assert update.phase is Phase.DONE


def test_a_server_with_other_bytes_fails_the_update(update: WeightUpdate):
    prepared(update)
    update.committed("server-0", "abd", 3.0)
    assert update.phase is Phase.FAILED
    assert update.cause == "server-0 serves weights with checksum abd, the trainer published abc"


def test_a_late_phase_names_who_is_late_and_the_setting(update: WeightUpdate):
    published(update)
    update.prepared("server-0", 2.0)
    update.tick(11.0)
    assert update.phase is Phase.PREPARE  # each phase has its own 10 seconds
    update.tick(11.1)
    assert update.phase is Phase.FAILED
    assert update.cause == "weights of version 3 were not prepared by server-1 within weight_sync.update_timeout_s=10 s"


def test_a_rank_zero_that_names_no_place_fails_the_update(update: WeightUpdate):
    update.published("trainer-0", None, 1.0)
    update.published("trainer-1", None, 1.0)
    assert (update.phase, update.cause) == (Phase.FAILED, "no trainer rank named where the weights lie")


def test_a_failure_after_the_end_changes_nothing(update: WeightUpdate):
    prepared(update)
    update.committed("server-0", "abc", 3.0)
    update.committed("server-1", "abc", 3.0)
    update.fail("too late")
    update.tick(1e9)
    assert (update.phase, update.cause) == (Phase.DONE, "")
