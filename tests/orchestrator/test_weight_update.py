"""A weight update is prepared before it is committed, goes on without whoever fails, and always comes to an end."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telescope.orchestrator.weight_update import ABORT_S, GRACE_S, GroupEpochs, UpdatePhase, WeightOrder, WeightUpdate
from telescope.records import WeightManifest
from telescope.wire.messages import (
    AbortWeights,
    CommitWeights,
    PrepareWeights,
    PublishWeights,
    SendWeights,
    WeightsFailed,
    WeightsPublished,
    WeightsReady,
    WeightsSent,
)

PULL = WeightManifest(version=3, transport="shared_memory", location="x", tensors=(), nbytes=8, checksum="abc")
BROADCAST = WeightManifest(3, "gloo", "tcp://x:1/w", (), 8, "")
RANKS, SERVERS = ("trainer-0", "trainer-1"), ("server-0", "server-1")
NO = WeightsFailed(version=3, cause="no room", fatal=False)


class Desk:
    """An update with its orders by peer, as whoever drives it would hold them."""

    def __init__(
        self, servers: tuple[str, ...] = SERVERS, manifest: WeightManifest = PULL, published: bool = False, **changes: Any
    ) -> None:
        self.epochs = GroupEpochs()
        self.now = 0.0
        self.manifest = manifest
        self.orders: dict[str, list[WeightOrder]] = {}
        self.fenced: dict[str, str] = {}
        given = {
            "version": 3, "ranks": RANKS, "servers": servers, "timeout_s": 100.0, "max_retries": 2, "now": 0.0,
            "make_group": lambda names: self.epochs.find_group(("trainer-0", *names)), "break_up": self.epochs.break_up,
            "manifest": manifest if published else None, **changes,
        }  # fmt: skip
        self.update = WeightUpdate(**given)
        self.drain()

    def drain(self) -> None:
        for order in self.update.outbox:
            self.orders.setdefault(order.peer, []).append(order)
        self.fenced |= dict(self.update.fences)
        self.update.outbox.clear()
        self.update.fences.clear()

    def kinds(self, peer: str) -> list[type]:
        return [type(order.body) for order in self.orders.get(peer, [])]

    def say(self, peer: str, body: Any, at: int = -1) -> None:
        self.update.hear(self.orders[peer][at], body, self.now)
        self.drain()

    def tick(self, now: float) -> None:
        self.now = now
        self.update.tick(now)
        self.drain()

    def lose(self, server: str) -> None:
        self.update.lose(server, self.now)
        self.drain()

    def publish(self) -> Desk:
        self.say("trainer-0", WeightsPublished(3, self.manifest, 0.1))
        self.say("trainer-1", WeightsPublished(3, None, 0.1))
        return self

    def prepare(self, *servers: str) -> Desk:
        for server in servers:
            self.say(server, WeightsReady(version=2, prepared=3, checksum="old", pause_s=0.0))
        return self

    def send(self) -> Desk:
        for rank in RANKS:
            self.say(rank, WeightsSent(3, "sum" if rank == "trainer-0" else "", 0.1))
        return self

    def commit(self, *servers: str, checksum: str = "abc") -> Desk:
        for server in servers:
            self.say(server, WeightsReady(version=3, prepared=None, checksum=checksum, pause_s=0.01))
        return self

    def aborted(self, *peers: str) -> Desk:
        for peer in peers:
            self.say(peer, WeightsReady(version=2, prepared=None, checksum="old", pause_s=0.0))
        return self


def test_every_rank_publishes_before_any_server_prepares():
    desk = Desk()
    desk.say("trainer-0", WeightsPublished(3, PULL, 0.1))
    assert (desk.update.phase, desk.update.waiting) == (UpdatePhase.PUBLISH, {"trainer-1"})
    desk.say("trainer-1", WeightsPublished(3, None, 0.1))
    assert (desk.update.phase, desk.update.waiting) == (UpdatePhase.PREPARE, set(SERVERS))
    assert desk.kinds("server-0") == [PrepareWeights]
    assert desk.kinds("trainer-0") == [PublishWeights]


def test_no_server_commits_before_all_have_prepared_and_it_is_done_with_the_last():
    desk = Desk().publish().prepare("server-0", "server-0")
    assert desk.update.phase is UpdatePhase.PREPARE
    desk.prepare("server-1")
    assert desk.kinds("server-0") == [PrepareWeights, CommitWeights]
    desk.commit("server-1", "server-1")
    assert desk.update.phase is UpdatePhase.COMMIT
    desk.commit("server-0")
    assert (desk.update.phase, desk.fenced) == (UpdatePhase.DONE, {})


def test_a_version_that_is_published_already_is_not_published_again():
    desk = Desk(("server-1",), published=True)
    assert desk.kinds("trainer-0") == []
    assert desk.kinds("server-1") == [PrepareWeights]
    assert desk.prepare("server-1").commit("server-1").update.phase is UpdatePhase.DONE


def test_a_server_that_refuses_alone_is_fenced_and_the_others_commit():
    desk = Desk().publish().prepare("server-0")
    desk.say("server-1", NO)
    assert desk.fenced == {"server-1": "server-1 could not take weights of version 3: no room"}
    assert desk.update.phase is UpdatePhase.COMMIT
    assert desk.commit("server-0").update.phase is UpdatePhase.DONE


def test_a_late_server_is_fenced_and_the_others_commit():
    desk = Desk().publish().prepare("server-0")
    desk.tick(100.0)
    assert desk.update.phase is UpdatePhase.PREPARE
    desk.tick(100.1)
    late = "weights of version 3 were not prepared by server-1 within weight_sync.update_timeout_s=100 s"
    assert desk.fenced == {"server-1": late}
    assert desk.update.phase is UpdatePhase.COMMIT


def test_a_server_that_dies_in_prepare_is_not_waited_for():
    desk = Desk().publish().prepare("server-0")
    desk.lose("server-1")
    assert (desk.update.phase, desk.fenced) == (UpdatePhase.COMMIT, {})


def test_where_every_server_refuses_none_is_fenced_and_the_update_is_tried_again():
    desk = Desk().publish()
    for round_number in (1, 2, 3):
        assert desk.update.round == round_number
        desk.say("server-0", NO)
        desk.say("server-1", NO)
        assert desk.update.phase is UpdatePhase.ABORT
        desk.aborted(*SERVERS)
    assert (desk.update.phase, desk.fenced) == (UpdatePhase.FAILED, {})
    assert desk.update.cause == (
        "server-0 could not take weights of version 3: no room; server-1 could not take weights of version 3: no room; "
        "that was retry 2 of weight_sync.max_retries=2"
    )


def test_a_late_server_that_refuses_for_good_is_fenced_where_others_serve_the_version():
    """The run is not ended for the sake of one server that came back."""
    desk = Desk(("server-1",), published=True, served_elsewhere=True)
    for _ in range(3):
        desk.say("server-1", NO)
        desk.say("server-1", WeightsReady(2, None, "old", 0.0))
    assert desk.update.phase is UpdatePhase.DONE
    assert "it could not be brought to version 3, unlike others" in desk.fenced["server-1"]
    assert "no room; that was retry 2 of weight_sync.max_retries=2" in desk.fenced["server-1"]
    assert desk.kinds("server-1") == [PrepareWeights, AbortWeights] * 3


def test_a_second_try_may_succeed():
    desk = Desk().publish()
    desk.say("server-0", NO)
    desk.say("server-1", NO)
    desk.aborted(*SERVERS).prepare(*SERVERS).commit(*SERVERS)
    assert desk.update.phase is UpdatePhase.DONE


def test_a_server_that_answers_nothing_at_all_hangs_and_is_fenced_even_as_the_only_one():
    desk = Desk(("server-0",)).publish()
    desk.tick(100.1)
    assert desk.kinds("server-0") == [PrepareWeights, AbortWeights]
    desk.tick(100.1 + ABORT_S + 0.1)
    assert desk.fenced == {"server-0": "it neither took weights of version 3 nor answered the abort: it hangs"}
    assert desk.update.phase is UpdatePhase.DONE  # nobody is left to bring up; who comes later is behind


def test_a_slow_answer_of_an_earlier_round_counts_for_nothing():
    desk = Desk(("server-0",)).publish()
    desk.tick(100.1)
    desk.aborted("server-0")
    assert (desk.update.round, desk.update.phase) == (2, UpdatePhase.PREPARE)
    desk.say("server-0", WeightsReady(2, 3, "old", 0.0), at=0)
    assert desk.update.phase is UpdatePhase.PREPARE
    desk.prepare("server-0").commit("server-0")
    assert desk.update.phase is UpdatePhase.DONE


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (NO, "it could not commit weights of version 3: no room"),
        (WeightsReady(3, None, "abd", 0.0), "it serves weights with checksum abd, the trainer published abc"),
        (
            WeightsReady(2, 3, "abc", 0.0),
            "it could not commit weights of version 3: it says that it serves version 2 and holds 3",
        ),
    ],
)
def test_a_server_that_fails_to_commit_is_fenced_as_the_others_have_committed(answer: Any, why: str):
    desk = Desk().publish().prepare(*SERVERS).commit("server-0")
    desk.say("server-1", answer)
    assert (desk.update.phase, desk.fenced) == (UpdatePhase.DONE, {"server-1": why})


def test_a_server_that_is_late_to_commit_is_fenced():
    desk = Desk().publish().prepare(*SERVERS).commit("server-0")
    desk.tick(200.0)
    late = "weights of version 3 were not committed by server-1 within weight_sync.update_timeout_s=100 s"
    assert (desk.update.phase, desk.fenced) == (UpdatePhase.DONE, {"server-1": late})


def test_a_rank_that_is_late_or_names_no_place_fails_the_update():
    desk = Desk()
    desk.say("trainer-0", WeightsPublished(3, PULL, 0.1))
    desk.tick(100.1)
    assert desk.update.phase is UpdatePhase.FAILED
    assert "not published by trainer-1 within weight_sync.update_timeout_s=100 s" in desk.update.cause
    nowhere = Desk()
    nowhere.say("trainer-0", WeightsPublished(3, None, 0.1))
    nowhere.say("trainer-1", WeightsPublished(3, None, 0.1))
    assert (nowhere.update.phase, nowhere.update.cause) == (UpdatePhase.FAILED, "no trainer rank named where the weights lie")


def test_without_servers_it_is_done_when_it_is_published():
    assert Desk(()).publish().update.phase is UpdatePhase.DONE


# ---- broadcasts


def broadcast(servers: tuple[str, ...] = SERVERS) -> Desk:
    return Desk(servers, BROADCAST).publish()


def test_a_broadcast_is_ordered_on_both_sides_with_one_group():
    desk = broadcast()
    orders = [desk.orders[peer][-1].body for peer in (*SERVERS, *RANKS)]
    assert {body.group for body in orders} == {orders[0].group}
    assert (orders[0].group.epoch, orders[0].group.members) == (1, ("trainer-0", "server-0", "server-1"))
    assert desk.kinds("trainer-1") == [PublishWeights, SendWeights]
    desk.send()
    assert desk.update.phase is UpdatePhase.PREPARE
    desk.prepare(*SERVERS).commit("server-0", checksum="sum").commit("server-1", checksum="other")
    assert desk.fenced == {"server-1": "it serves weights with checksum other, the trainer published sum"}


def test_a_dead_member_breaks_the_broadcast_and_the_survivors_get_the_next_epoch():
    desk = broadcast()
    desk.lose("server-1")
    desk.say("server-0", NO)  # its communicator lost a member: no fault of its own
    desk.say("trainer-1", WeightsSent(3, "", 0.1))
    assert desk.update.phase is UpdatePhase.PREPARE  # rank 0 is stuck
    desk.tick(GRACE_S + 0.1)
    assert desk.kinds("trainer-0")[-1] is AbortWeights
    desk.aborted("server-0", *RANKS)
    group = desk.orders["server-0"][-1].body.group
    assert (group.epoch, group.members) == (2, ("trainer-0", "server-0"))
    assert (desk.fenced, desk.update.retries) == ({}, 0)
    desk.send().prepare("server-0").commit("server-0", checksum="sum")
    assert desk.update.phase is UpdatePhase.DONE


def test_the_sending_is_broken_off_at_once_when_the_last_server_of_the_group_is_gone():
    desk = broadcast()
    desk.lose("server-1")
    assert desk.update.phase is UpdatePhase.PREPARE
    desk.lose("server-0")
    assert [desk.kinds(rank)[-1] for rank in RANKS] == [AbortWeights, AbortWeights]
    assert desk.update.cause == "server-0 is gone, the last one of the group that weights were sent to"
    desk.aborted(*RANKS)
    assert (desk.update.phase, desk.fenced, desk.now) == (UpdatePhase.DONE, {}, 0.0)


def test_the_last_server_of_a_group_may_go_when_all_is_sent():
    desk = broadcast().send()
    desk.lose("server-1")
    desk.lose("server-0")
    assert (desk.update.phase, desk.kinds("trainer-0")[-1]) == (UpdatePhase.DONE, SendWeights)


def test_a_sender_that_fails_is_told_to_break_off_at_once_and_sends_again():
    desk = broadcast()
    desk.say("trainer-0", NO)
    assert (desk.update.phase, desk.kinds("server-0")[-1]) == (UpdatePhase.ABORT, AbortWeights)
    desk.aborted(*SERVERS, *RANKS)
    assert (desk.update.round, desk.update.retries, desk.fenced) == (2, 1, {})
    assert desk.orders["server-0"][-1].body.group.epoch == 2


def test_a_member_that_hangs_in_a_broadcast_is_known_by_the_abort():
    desk = broadcast()
    desk.tick(100.1)
    desk.aborted("server-0", *RANKS)
    desk.tick(100.1 + ABORT_S + 0.1)
    assert list(desk.fenced) == ["server-1"]
    assert desk.orders["server-0"][-1].body.group.members == ("trainer-0", "server-0")


def test_a_member_that_refuses_when_all_is_sent_is_fenced_without_another_round():
    desk = broadcast().send().prepare("server-0")
    desk.say("server-1", NO)
    assert (list(desk.fenced), desk.update.phase, desk.update.round) == (["server-1"], UpdatePhase.COMMIT, 1)


def test_a_member_that_refuses_again_and_again_is_fenced_as_the_others_only_waited_for_it():
    """Without it a broadcast can't even begin, so that nobody else ever holds the version."""
    desk = Desk(manifest=BROADCAST, published=True)
    for number in range(3):
        desk.say("server-1", NO)
        desk.tick(desk.now + GRACE_S + 0.1)
        desk.aborted(*SERVERS, *RANKS)
        assert desk.fenced.keys() == ({"server-1"} if number == 2 else set())
    assert "retry 2 of weight_sync.max_retries=2" in desk.fenced["server-1"]
    assert desk.orders["server-0"][-1].body.group.members == ("trainer-0", "server-0")
    assert desk.orders["server-0"][-1].body.group.epoch == 4
    desk.prepare("server-0").send()
    assert desk.kinds("server-0")[-1] is CommitWeights


def missing(*members: str) -> WeightsFailed:
    return WeightsFailed(3, f"{', '.join(members)} did not join", fatal=False, missing=members)


def test_a_member_that_never_joins_is_fenced_by_the_word_of_those_that_did():
    """It answers each abort, so that it does not seem to hang."""
    desk = Desk(manifest=BROADCAST, published=True)
    for number in range(3):
        desk.say("trainer-0", missing("server-1/0"))  # its time is up first
        assert desk.update.phase is UpdatePhase.ABORT
        desk.say("server-0", missing("server-1/0"), at=-2)  # told to break off
        desk.say("server-1", WeightsFailed(3, "broken off", fatal=False), at=-2)
        desk.aborted(*SERVERS, *RANKS)
        assert desk.fenced.keys() == ({"server-1"} if number == 2 else set())
    assert "could not be brought to version 3, unlike others: trainer-0 could not send" in desk.fenced["server-1"]
    assert "server-1/0 did not join; that was retry 2 of weight_sync.max_retries=2" in desk.fenced["server-1"]
    assert desk.orders["server-0"][-1].body.group.members == ("trainer-0", "server-0")
    desk.prepare("server-0").send()
    assert desk.kinds("server-0")[-1] is CommitWeights


def test_a_member_with_one_worker_that_never_joins_is_missed_by_itself_too():
    desk = Desk(manifest=BROADCAST, published=True)
    for _ in range(3):
        desk.say("server-1", missing("server-1/1"))
        desk.say("trainer-0", missing("server-1/1"))
        desk.aborted(*SERVERS, *RANKS)
    assert list(desk.fenced) == ["server-1"]


def test_all_that_never_join_are_fenced_at_once_where_another_one_did():
    desk = Desk((*SERVERS, "server-2"), BROADCAST, published=True)
    for _ in range(3):
        desk.say("trainer-0", missing("server-0/0", "server-2/0"))
        desk.say("server-1", missing("server-0/0", "server-2/0"), at=-2)
        desk.aborted(*SERVERS, "server-2", *RANKS)
    assert list(desk.fenced) == ["server-0", "server-2"]


def test_where_no_server_joins_none_is_fenced_and_the_update_fails_with_their_names():
    desk = Desk(manifest=BROADCAST, published=True)
    for _ in range(3):
        desk.say("trainer-0", missing("server-0/0", "server-1/0"))
        desk.aborted(*SERVERS, *RANKS)
    assert (desk.update.phase, desk.fenced) == (UpdatePhase.FAILED, {})
    assert "server-0/0, server-1/0 did not join" in desk.update.cause


def test_a_rank_that_never_joins_ends_the_run_by_its_name_and_no_server_is_fenced_for_it():
    desk = Desk(manifest=BROADCAST, published=True)
    for _ in range(3):
        desk.say("server-0", missing("trainer-0", "server-1/0"))  # which is not there yet
        desk.say("server-1", missing("trainer-0"))
        desk.tick(desk.now + GRACE_S + 0.1)
        desk.aborted(*SERVERS, *RANKS)
    assert (desk.update.phase, desk.fenced) == (UpdatePhase.FAILED, {})
    assert desk.update.cause.startswith("trainer-0 did not come to send version 3: server-0 could not take")


def test_a_member_that_came_late_is_not_missed_by_all():
    desk = Desk(manifest=BROADCAST, published=True)
    for _ in range(3):
        desk.say("server-0", missing("server-1/0", "trainer-0"))
        desk.tick(desk.now + GRACE_S + 0.1)
        desk.say("trainer-0", missing("server-2/0"), at=-2)  # by then it was there; and server-2 is not a member
        desk.aborted(*SERVERS, *RANKS)
    assert (desk.update.phase, desk.fenced) == (UpdatePhase.FAILED, {})


def test_who_has_not_joined_yet_when_another_member_fails_is_not_blamed():
    """Its time was not up: all is broken off a few seconds after a refusal."""
    desk = Desk((*SERVERS, "server-2"), BROADCAST, published=True)
    for _ in range(3):
        desk.say("server-1", NO)
        desk.tick(desk.now + GRACE_S + 0.1)
        for peer in ("trainer-0", "server-0"):
            desk.say(peer, missing("server-1/0", "server-2/0"), at=-2)
        desk.aborted(*SERVERS, "server-2", *RANKS)
    assert list(desk.fenced) == ["server-1"]


def test_who_has_not_joined_when_the_whole_time_is_up_is_known_by_what_the_abort_brings():
    desk = Desk(manifest=BROADCAST, published=True)
    for _ in range(3):
        desk.tick(desk.now + 100.1)
        for peer in ("trainer-0", "server-0"):
            desk.say(peer, missing("server-1/0"), at=-2)
        desk.aborted(*SERVERS, *RANKS)
    assert list(desk.fenced) == ["server-1"]


def test_late_servers_that_the_rank_misses_are_fenced_where_others_serve_the_version():
    desk = Desk(("server-1",), BROADCAST, published=True, served_elsewhere=True)
    for _ in range(3):
        desk.say("trainer-0", missing("server-1/0"))
        desk.aborted("server-1", *RANKS)
    assert (desk.update.phase, list(desk.fenced)) == (UpdatePhase.DONE, ["server-1"])


def test_where_all_members_refuse_a_broadcast_none_is_fenced():
    desk = Desk(manifest=BROADCAST, published=True)
    for _ in range(3):
        for server in SERVERS:
            desk.say(server, NO)
        desk.tick(desk.now + GRACE_S + 0.1)
        desk.aborted(*SERVERS, *RANKS)
    assert (desk.update.phase, desk.fenced) == (UpdatePhase.FAILED, {})


def test_a_sender_that_does_not_break_off_ends_the_run_with_its_name():
    desk = broadcast()
    desk.tick(100.1)
    desk.aborted(*SERVERS, "trainer-1")
    desk.tick(200.0)
    assert desk.update.phase is UpdatePhase.FAILED
    assert desk.update.cause.startswith("trainer-0 did not break off the sending of version 3: weights of version 3 were not")


# ---- ranks that copy their state for a checkpoint


def test_a_rank_that_saves_has_its_time_to_answer_an_abort_from_the_end_of_its_stall():
    """A server that came late dies in the broadcast; a rank that has sent its share was given a checkpoint to write next."""
    saving: set[str] = set()
    desk = Desk(("server-0",), BROADCAST, published=True, saving=lambda: saving)
    saving.add("trainer-1")
    desk.lose("server-0")
    desk.aborted("trainer-0")
    for _ in range(60):
        desk.tick(desk.now + ABORT_S)
    assert (desk.update.phase, desk.update.waiting) == (UpdatePhase.ABORT, {"trainer-1"})
    saving.clear()
    desk.tick(desk.now + ABORT_S - 0.1)
    assert desk.update.phase is UpdatePhase.ABORT
    desk.aborted("trainer-1")
    assert desk.update.phase is UpdatePhase.DONE


def test_a_rank_that_does_not_answer_when_its_stall_is_over_ends_the_run():
    saving = {"trainer-1"}
    desk = Desk(("server-0",), BROADCAST, published=True, saving=lambda: ())
    desk.update.saving = lambda: saving
    desk.lose("server-0")
    desk.aborted("trainer-0")
    desk.tick(desk.now + 10 * ABORT_S)
    saving.clear()
    desk.tick(desk.now + ABORT_S + 0.1)
    assert desk.update.phase is UpdatePhase.FAILED
    assert desk.update.cause.startswith("trainer-1 did not break off")


def test_a_rank_that_saves_excuses_no_other_one():
    desk = broadcast()
    desk.update.saving = lambda: {"trainer-1"}
    desk.tick(100.1)
    desk.aborted(*SERVERS, "trainer-1")
    desk.tick(100.1 + ABORT_S + 0.1)
    assert desk.update.cause.startswith("trainer-0 did not break off")


def test_a_broadcast_is_not_begun_while_a_rank_copies_its_state():
    saving = {"trainer-1"}
    desk = Desk(manifest=BROADCAST, published=True, saving=lambda: saving)
    desk.tick(1000.0)
    assert (desk.update.phase, desk.orders, desk.update.round) == (UpdatePhase.HELD, {}, 0)
    desk.lose("server-0")
    saving.clear()
    desk.tick(1000.5)
    assert desk.orders["server-1"][-1].body.group.members == ("trainer-0", "server-1")
    desk.send().prepare("server-1").commit("server-1", checksum="sum")
    assert (desk.update.phase, desk.update.round, desk.fenced) == (UpdatePhase.DONE, 1, {})


def test_the_round_after_an_abort_waits_for_the_copy_that_the_abort_let_begin():
    saving: set[str] = set()
    desk = Desk(manifest=BROADCAST, published=True, saving=lambda: saving)
    desk.say("server-1", NO)
    desk.tick(GRACE_S + 0.1)
    desk.aborted(*SERVERS, "trainer-1")
    saving.add("trainer-0")
    desk.aborted("trainer-0")
    assert (desk.update.phase, desk.update.round) == (UpdatePhase.HELD, 1)
    saving.clear()
    desk.tick(1000.0)
    assert (desk.update.phase, desk.update.round, desk.update.deadline) == (UpdatePhase.PREPARE, 2, 1100.0)


def test_servers_that_read_for_themselves_wait_for_no_copy():
    desk = Desk(published=True, saving=lambda: {"trainer-0"})
    assert desk.prepare(*SERVERS).commit(*SERVERS).update.phase is UpdatePhase.DONE


def test_nobody_waits_for_a_copy_where_no_server_is_left_to_send_to():
    saving = {"trainer-0"}
    desk = Desk(("server-0",), BROADCAST, published=True, saving=lambda: saving)
    desk.lose("server-0")
    desk.tick(0.1)
    assert desk.update.phase is UpdatePhase.DONE


def test_a_group_keeps_its_epoch_until_a_member_changes_or_is_lost():
    epochs = GroupEpochs()
    members = ("trainer-0", "server-0/0", "server-0/1", "server-1/0")
    assert [epochs.find_group(members).epoch for _ in range(3)] == [1, 1, 1]
    epochs.break_up("server-2")
    assert epochs.find_group(members).epoch == 1
    epochs.break_up("server-1")  # it may be back under its name, but its communicator is not
    assert epochs.find_group(members).epoch == 2
    assert epochs.find_group(members[:-1]).epoch == 3
    epochs.break_up()
    assert epochs.find_group(members[:-1]).epoch == 4


# ---- whatever happens


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_an_update_ends_in_time_and_leaves_no_server_between_versions(data: st.DataObject):
    """Answers, refusals, lies, repetitions, silence, deaths, in any order: it ends within its bound, and each server has then
    committed the version, or is fenced, or is lost, or the update has failed before any was told to commit."""
    count = data.draw(st.integers(0, 4))
    names = tuple(f"server-{index}" for index in range(count))
    manifest = data.draw(st.sampled_from([PULL, BROADCAST]))
    desk, lost, told = Desk(names, manifest, timeout_s=100.0, max_retries=2), set(), set()
    committed: set[str] = set()
    while not desk.update.over:
        told |= {name for name in names if CommitWeights in desk.kinds(name)}
        move = data.draw(st.integers(0, 19))
        waiting = sorted(desk.update.waiting)
        if move == 0 or not waiting:
            desk.tick(desk.now + data.draw(st.sampled_from([1.0, 40.0, 120.0])))
        elif move == 1 and names:
            name = data.draw(st.sampled_from(names))
            lost.add(name)
            desk.lose(name)
        else:
            peer = data.draw(st.sampled_from(waiting if move > 3 else sorted(desk.orders)))
            at = -1 if move > 2 else data.draw(st.integers(0, len(desk.orders[peer]) - 1))
            order = desk.orders[peer][at]
            answer = data.draw(st.sampled_from([good(order, manifest)] * 6 + [NO, WeightsReady(9, 9, "?", 0.0)]))
            current = order.phase is desk.update.phase is UpdatePhase.COMMIT and order.round == desk.update.round
            if current and answer == good(order, manifest):
                committed.add(peer)
            desk.say(peer, answer, at)
        rounds = 2 + 1 + count  # retries, the first one, and one for each server that can be dropped
        assert desk.update.round <= rounds
        assert desk.now <= (2 * rounds + 2) * (
            100.0 + 120.0
        )  # publish, each round's prepare and abort, commit; a tick may be late
    if desk.update.phase is UpdatePhase.DONE:
        assert set(names) - committed <= set(desk.fenced) | lost
    else:
        assert not told
    assert not desk.update.waiting


def good(order: WeightOrder, manifest: WeightManifest) -> Any:
    match order.body:
        case PublishWeights():
            return WeightsPublished(3, manifest if order.peer == "trainer-0" else None, 0.1)
        case SendWeights():
            return WeightsSent(3, "abc" if order.peer == "trainer-0" else "", 0.1)
        case PrepareWeights():
            return WeightsReady(2, 3, "old", 0.0)
        case CommitWeights():
            return WeightsReady(3, None, "abc", 0.0)
        case _:
            return WeightsReady(2, None, "old", 0.0)
