"""A run begins when all of its parts are there, and workers that load different prompts are noticed."""

from __future__ import annotations

from telescope.config.sections import ClusterSettings
from telescope.orchestrator.peers import Peers, name_few
from telescope.records import EnvironmentCard
from telescope.wire.messages import Hello


def hello(name: str, role: str, digest: str = "d") -> Hello:
    cards = (EnvironmentCard("countdown", {"train": 10}, digest),) if role == "worker" else ()
    return Hello(
        role=role,
        name=name,
        run="r",
        attempt="a",
        incarnation=name,
        config_hash="h",
        capacity=1,
        pid=1,
        host="here",
        environments=cards,
    )


def test_of_many_the_first_three_are_named():
    assert name_few(["server-0", "server-1", "server-2"]) == "server-0, server-1, server-2"
    assert name_few([f"server-{number}" for number in range(300)]) == "server-0, server-1, server-2 and 297 more"


def test_the_missing_are_named():
    peers = Peers.from_config(ClusterSettings(inference_num_workers=1, trainer_num_workers=2, env_num_workers=1))
    assert peers.missing == ("worker-0", "server-0", "trainer-0", "trainer-1")
    assert peers.admit("trainer-0", hello("trainer-0", "trainer")) == ""
    assert not peers.all_ranks_present
    assert peers.admit("trainer-1", hello("trainer-1", "trainer")) == ""
    assert peers.all_ranks_present
    assert peers.missing == ("worker-0", "server-0")


def test_a_stranger_is_refused():
    peers = Peers.from_config(ClusterSettings(inference_num_workers=1, trainer_num_workers=1))
    assert peers.admit("server-9", hello("server-9", "server")).startswith("server-9 is not part of this run's plan")


def test_workers_with_different_prompts_are_refused():
    peers = Peers.from_config(ClusterSettings(inference_num_workers=1, trainer_num_workers=1, env_num_workers=2))
    assert peers.admit("worker-0", hello("worker-0", "worker", "one")) == ""
    refusal = peers.admit("worker-1", hello("worker-1", "worker", "two"))
    assert refusal.startswith("worker-0 and worker-1 load different prompts for environments.countdown")


def test_generation_waits_for_every_worker_and_server_but_not_for_the_trainer():
    peers = Peers.from_config(ClusterSettings(inference_num_workers=2, trainer_num_workers=1))
    for name, role in (("server-0", "server"), ("worker-0", "worker")):
        peers.admit(name, hello(name, role))
        assert not peers.can_generate
    peers.admit("server-1", hello("server-1", "server"))
    assert peers.can_generate
    assert peers.missing == ("trainer-0",)
