"""Weights by broadcast between real processes, over gloo: every byte arrives, and nobody waits for ever for anybody."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.weights.company import Company, Member

TENSORS = 6
LAST = 28_224
"""Where the last small bucket of 4 KiB begins; the bulk comes behind it."""
SOON_S = 20.0
"""What is broken off ends within this, on a busy machine too; the deadlines of the tests are 60 s."""


@pytest.fixture(scope="module")
def company() -> Iterator[Company]:
    """Two trainer ranks and three servers, started once; a test's `set_up` gives them new ends of the transport."""
    with Company(ranks=2, servers=3) as members:
        yield members


def arrived(said: list[dict], checksum: str) -> bool:
    return all(answer.get("same") == answer.get("of") and answer.get("received") == checksum for answer in said)


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("bucket_bytes", [0, 1, 4096, 1 << 20], ids=["per_tensor", "1 byte", "4 KiB", "1 MiB"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_tensor_arrives_bit_by_bit_at_every_server(company, ranks, bucket_bytes, dtype):
    company.set_up(ranks, bucket_bytes=bucket_bytes, dtype=dtype)
    for epoch, servers in enumerate((company.servers[:1], company.servers[:2], company.servers)):
        version = epoch + 1
        sent, received = company.update(version, epoch, servers=servers, server_0={"whole": True})
        assert len(received) == len(servers) == version
        assert sent[0]["sent"].startswith("sample:")
        assert [rank["sent"] for rank in sent[1:]] == [""] * (ranks - 1)
        assert arrived(received, sent[0]["sent"]), received
        assert received[0]["of"] == TENSORS


def test_between_hosts_they_meet_at_a_port(company):
    company.set_up(2, bucket_bytes=4096, between_hosts=True)
    sent, received = company.update(1, 0)
    assert arrived(received, sent[0]["sent"])
    assert json.loads(company.manifest)["location"].startswith("tcp://127.0.0.1:")


def test_on_one_host_they_meet_in_a_folder_of_the_user_alone(company):
    """A port there is open to the host's other users."""
    company.set_up(2, bucket_bytes=4096)
    company.publish(1)
    place = urlsplit(json.loads(company.manifest)["location"])
    assert (place.scheme, place.netloc) == ("file", "127.0.0.1")
    assert stat.S_IMODE(Path(place.path).parent.stat().st_mode) == 0o700
    company.begin(1, 0)
    assert arrived([server.said() for server in company.servers], company.ranks[0].said()["sent"])
    company.ranks[1].said()


def test_the_same_members_keep_their_communicator_from_version_to_version(company):
    company.set_up(2, bucket_bytes=4096)
    assert [arrived(received, sent[0]["sent"]) for sent, received in (company.update(v, 0) for v in (1, 2, 3))] == [True] * 3


def test_a_server_held_for_evals_misses_versions_and_is_brought_up_by_a_group_of_its_own(company):
    """It hears nothing of the others' new group, and keeps its part of the old one until it is asked again."""
    company.set_up(2, bucket_bytes=4096)
    others, held = company.servers[:-1], company.servers[-1:]
    sent, received = company.update(1, 0)
    assert arrived(received, sent[0]["sent"])
    for version in (2, 3):
        sent, received = company.update(version, 1, servers=others)
        assert arrived(received, sent[0]["sent"])
    company.begin(3, 2, servers=held)
    brought = company.ranks[0].said()
    assert arrived([held[0].said()], brought["sent"])
    company.ranks[1].said()
    sent, received = company.update(4, 3)
    assert arrived(received, sent[0]["sent"])


@pytest.mark.parametrize("staging", ["pageable"])
def test_a_version_gathered_to_host_memory_is_sent_without_the_other_ranks(company, staging):
    company.set_up(2, bucket_bytes=4096, staging=staging)
    sent, received = company.update(1, 0)
    assert arrived(received, sent[0]["sent"])
    assert [rank["packed"] for rank in sent] == [0, 0]


def test_a_missing_server_is_named_when_the_time_to_meet_is_up(company):
    company.set_up(2, bucket_bytes=4096, init_timeout_s=5.0)
    company.publish(1)
    present, absent = company.servers[:2], Member.__new__(Member)
    absent.name = "server-7/0"
    group = {"epoch": 0, "members": ["trainer-0", *(server.name for server in present), absent.name]}
    for server in present:
        server.tell(manifest=company.manifest, group=group)
    for rank in company.ranks:
        rank.tell(send=1, group=group)
    sentence = "server-7/0 did not join the group of epoch 0 within weight_sync.init_timeout_s=5 s"
    told = [member.said() for member in (company.ranks[0], *present)]
    assert [each["failed"] for each in told] == [sentence] * 3
    assert [each["missing"] for each in told] == [["server-7/0"]] * 3
    helped = company.ranks[1].said()
    assert (helped["sent"], helped["packed"]) == ("", 3)  # it does not hang in the gather
    company.begin(1, 1)
    assert arrived([server.said() for server in company.servers], company.ranks[0].said()["sent"])
    assert company.ranks[1].said()["sent"] == ""


def test_a_sender_that_waits_for_members_is_broken_off_from_another_thread(company):
    company.set_up(2, bucket_bytes=4096)
    company.publish(1)
    group = {"epoch": 3, "members": ["trainer-0", "server-9/0"]}
    for rank in company.ranks:
        rank.tell(send=1, group=group)
    for rank in company.ranks:
        rank.tell(abort=3)
    failed = company.ranks[0].said(SOON_S)
    assert company.ranks[1].said(SOON_S)["sent"] == ""
    assert failed["failed"] in (
        "the group of epoch 3 was broken off while server-9/0 were awaited",
        "the group of epoch 3 was broken off; the next one has a higher number",
    )
    assert failed["packed"] == 3
    company.begin(1, 4)
    assert arrived([server.said() for server in company.servers], company.ranks[0].said()["sent"])
    company.ranks[1].said()


def test_an_order_to_break_off_counts_before_the_thread_has_begun(company):
    company.set_up(1)
    company.publish(1)
    company.ranks[0].tell(abort=0)
    company.servers[0].tell(cancel=0)
    company.begin(1, 0, servers=company.servers[:1])
    said = "the group of epoch 0 was broken off; the next one has a higher number"
    assert company.ranks[0].said()["failed"] == said
    assert company.servers[0].said()["failed"] == said


def test_a_receiver_without_a_sender_is_cancelled_from_another_thread(company):
    company.set_up(1)
    company.publish(1)
    server = company.servers[0]
    server.tell(manifest=company.manifest, group={"epoch": 1, "members": ["trainer-0", server.name]})
    server.tell(cancel=1)
    assert server.said(SOON_S)["failed"].startswith("the group of epoch 1 was broken off")
    company.begin(1, 2)
    assert arrived([server.said() for server in company.servers], company.ranks[0].said()["sent"])


def test_a_server_killed_in_mid_bucket_fails_the_epoch_and_the_survivors_have_the_next():
    with Company(ranks=2, servers=3) as company:
        company.set_up(2, bucket_bytes=4096, bulk=8192)
        sent, received = company.update(1, 0)
        assert arrived(received, sent[0]["sent"])
        company.publish(2)
        company.begin(2, 0, server_1={"die_at": LAST})  # with the bulk of the version on its way to it
        company.servers[1].process.wait(60)
        for rank in company.ranks:  # what the orchestrator orders once it knows
            rank.tell(abort=0)
        for server in company.living:
            server.tell(cancel=0)
        assert "epoch 0" in company.ranks[0].said(SOON_S)["failed"]
        assert company.ranks[1].said(SOON_S)["sent"] == ""
        assert all("epoch 0" in server.said(SOON_S)["failed"] for server in company.living)
        company.begin(2, 1, servers=company.living)
        assert arrived([server.said() for server in company.living], company.ranks[0].said()["sent"])

        company.ranks[1].said()
        stops_a_frozen_server(company)


def stops_a_frozen_server(company: Company) -> None:
    """The same members, one of which is stopped in mid-version: it says nothing, and nothing closes its sockets."""
    company.publish(3)
    company.begin(3, 1, servers=company.living, server_2={"stop_at": LAST})
    assert company.servers[2].said() == {"stopped": True}
    company.ranks[0].tell(abort=1)
    failed = company.ranks[0].said(SOON_S)
    assert failed["failed"] == "the group of epoch 1 was broken off"
    assert company.ranks[1].said(SOON_S)["sent"] == ""
    company.servers[0].tell(cancel=1)
    company.servers[0].said(SOON_S)
    company.begin(3, 2, servers=company.servers[:1])
    assert arrived([company.servers[0].said()], company.ranks[0].said()["sent"])
