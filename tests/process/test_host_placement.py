"""Strategies over hosts: what they mean, and that a placement is refused only where there is none."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telescope._launch.host_placement import Counts, Demand, place_alone, place_apart, place_on_cores, place_sharing
from telescope._launch.process_plan import Host, LaunchPlan, PlanError, describe_shared_gpus, make_plan
from telescope.config.cluster import Strategy
from telescope.config.run import RunConfig
from telescope.config.sections import ClusterSettings, EnvironmentEntry, InferenceSettings

STRATEGIES: tuple[Strategy, ...] = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")


def keeps(demand: Demand, counts: Sequence[int]) -> bool:
    """A strict strategy kept to the letter."""
    if demand.strategy == "STRICT_PACK":
        return sum(count > 0 for count in counts) <= 1
    return demand.strategy != "STRICT_SPREAD" or max(counts) <= 1


def all_counts(count: int, hosts: int) -> Iterator[Counts]:
    return (counts for counts in itertools.product(range(count + 1), repeat=hosts) if sum(counts) == count)


def possible(first: Demand, second: Demand, room: Sequence[int]) -> bool:
    """By trying everything."""
    return any(
        keeps(first, one)
        and keeps(second, two)
        and all(a * first.size + b * second.size <= places for a, b, places in zip(one, two, room, strict=True))
        for one in all_counts(first.count, len(room))
        for two in all_counts(second.count, len(room))
    )


@pytest.mark.parametrize(
    ("strategy", "room", "counts"),
    [
        ("PACK", (8, 8), (4, 0)),
        ("PACK", (8, 4), (0, 4)),  # the tightest host on which all fit
        ("PACK", (2, 3), (1, 3)),  # else the roomiest first
        ("SPREAD", (8, 8), (2, 2)),
        ("SPREAD", (8, 1), (3, 1)),
        ("SPREAD", (2, 2, 2), (2, 1, 1)),
        ("STRICT_PACK", (3, 8, 4), (0, 0, 4)),
        ("STRICT_PACK", (3, 3), None),
        ("STRICT_SPREAD", (1, 2, 3, 4), (1, 1, 1, 1)),
        ("STRICT_SPREAD", (9, 9, 9), None),
    ],
)
def test_what_each_strategy_makes_of_four_bundles(strategy: Strategy, room: Counts, counts: Counts | None) -> None:
    assert place_alone(Demand(4, 1, strategy), room) == counts


def test_the_strict_one_chooses_first() -> None:
    """Servers spread over both hosts would leave no host for all the ranks."""
    assert place_apart(Demand(4, 1, "SPREAD"), Demand(4, 1, "STRICT_PACK"), (4, 4)) == ((0, 4), (4, 0))


def test_where_the_greedy_choices_fail_the_exact_search_finds_the_one_placement() -> None:
    servers, ranks = Demand(2, 3, "SPREAD"), Demand(3, 1, "STRICT_SPREAD")
    assert possible(servers, ranks, (4, 4, 1))
    assert place_apart(servers, ranks, (4, 4, 1)) == ((1, 1, 0), (1, 1, 1))


@settings(max_examples=400, deadline=None)
@given(
    first=st.builds(Demand, st.integers(1, 4), st.integers(1, 3), st.sampled_from(STRATEGIES)),
    second=st.builds(Demand, st.integers(1, 4), st.just(1), st.sampled_from(STRATEGIES)),
    room=st.lists(st.integers(0, 5), min_size=1, max_size=3),
)
def test_a_placement_is_found_exactly_where_there_is_one(first: Demand, second: Demand, room: list[int]) -> None:
    found = place_apart(first, second, room)
    assert (found is not None) == possible(first, second, room)
    if found is not None:
        assert [sum(counts) for counts in found] == [first.count, second.count]
        assert keeps(first, found[0])
        assert keeps(second, found[1])
        assert all(a * first.size + b <= places for a, b, places in zip(*found, room, strict=True))


def shared(first: Demand, second: Demand, one: Sequence[int], two: Sequence[int], room: Sequence[int]) -> int:
    return sum(max(0, a * first.size + b * second.size - places) for a, b, places in zip(one, two, room, strict=True))


def fewest_shared(first: Demand, second: Demand, room: Sequence[int]) -> int | None:
    """By trying everything; None where one of them does not fit by itself."""
    return min(
        (
            shared(first, second, one, two, room)
            for one in all_counts(first.count, len(room))
            for two in all_counts(second.count, len(room))
            if keeps(first, one) and keeps(second, two)
            if all(max(a * first.size, b * second.size) <= places for a, b, places in zip(one, two, room, strict=True))
        ),
        default=None,
    )


SOFT: tuple[Strategy, ...] = ("PACK", "SPREAD")


@settings(max_examples=150, deadline=None)
@given(
    first=st.builds(Demand, st.integers(1, 4), st.integers(1, 3), st.sampled_from(STRATEGIES)),
    second=st.builds(Demand, st.integers(1, 4), st.just(1), st.sampled_from(STRATEGIES)),
    room=st.lists(st.integers(0, 5), min_size=1, max_size=3),
)
def test_where_gpus_are_shared_no_more_are_than_must_be(first: Demand, second: Demand, room: list[int]) -> None:
    found = place_sharing(first, second, room)
    fewest = fewest_shared(first, second, room)
    assert (found is None) == (fewest is None)
    if found is None or fewest is None:
        return
    assert [sum(counts) for counts in found] == [first.count, second.count]
    assert keeps(first, found[0])
    assert keeps(second, found[1])
    assert all(max(a * first.size, b) <= places for a, b, places in zip(*found, room, strict=True))
    if second.strategy in SOFT and (first.strategy in SOFT or first.size == 1):
        assert shared(first, second, *found, room) == fewest


def test_ranks_go_to_the_cards_that_no_server_has_before_they_share() -> None:
    """Both packed as if alone all ranks would share with servers on the first host, and three cards of the second stay idle."""
    assert place_sharing(Demand(5, 1, "PACK"), Demand(4, 1, "PACK"), (4, 4)) == ((4, 1), (1, 3))
    plan = make_plan(config_with(inference_num_workers=5, trainer_num_workers=4), gpu_hosts(4, 4))
    assert describe_shared_gpus(plan).startswith(
        "server-0 and trainer-0 share GPU 0 of h0: inference.gpu_memory_utilization must"
    )
    assert "idle" not in describe_shared_gpus(plan)
    assert len({(process.node, gpu) for process in plan.processes for gpu in process.gpus}) == 8


def test_cards_that_have_to_stay_idle_are_told() -> None:
    config = config_with(size=2, inference_num_workers=2, trainer_num_workers=3, trainer_placement="STRICT_PACK")
    assert describe_shared_gpus(make_plan(config, gpu_hosts(3, 1))).endswith(
        "; 1 GPU stays idle, for no whole process fits there"
    )


@pytest.mark.parametrize(
    ("strategy", "counts", "left"),
    [
        ("PACK", (2, 1), [0.0, 6.0]),  # 4 cores a bundle: two fill the first host
        ("SPREAD", (1, 2), [4.0, 2.0]),
        ("STRICT_PACK", (0, 3), [8.0, -2.0]),  # cores are a wish
        ("STRICT_SPREAD", None, [8.0, 10.0]),
    ],
)
def test_cores_are_filled_as_far_as_they_go(strategy: Strategy, counts: Counts | None, left: list[float]) -> None:
    room = [8.0, 10.0]
    assert place_on_cores(Demand(3, 1, strategy), 4.0, room) == counts
    assert room == left


def test_where_no_core_is_left_the_host_with_most_gets_the_next() -> None:
    assert place_on_cores(Demand(4, 1, "PACK"), 4.0, [2.0, 3.0]) == (2, 2)


# ---- whole plans


def config_with(size: int = 1, **cluster: object) -> RunConfig:
    return RunConfig(
        environments={"countdown": EnvironmentEntry(name="countdown")},
        algorithm={"name": "grpo"},
        backend={"name": "fsdp"},
        inference=InferenceSettings(tensor_parallel_size=size, gpu_memory_utilization=0.45),
        cluster=ClusterSettings(launcher="bare_metal", **cluster),
    )


def gpu_hosts(*gpus: int) -> tuple[Host, ...]:
    return tuple(
        Host(f"h{node}", 16, tuple(map(str, range(count))), f"10.0.0.{node + 1}", "eth0") for node, count in enumerate(gpus)
    )


def on(plan: LaunchPlan, role: str) -> dict[str, int]:
    return {process.name: process.node for process in plan.processes if process.role == role}


def test_ranks_of_a_host_follow_each_other_and_meet_at_the_first_ones_address() -> None:
    plan = make_plan(config_with(inference_num_workers=2, trainer_num_workers=4, trainer_placement="SPREAD"), gpu_hosts(4, 4))
    ranks = [process for process in plan.processes if process.role == "trainer"]
    assert [(rank.node, rank.environment["LOCAL_RANK"]) for rank in ranks] == [(0, "0"), (0, "1"), (1, "0"), (1, "1")]
    assert {rank.environment["MASTER_ADDR"] for rank in ranks} == {"10.0.0.1"}
    assert {rank.environment["TELESCOPE_ADDRESS"] for rank in ranks} == {"10.0.0.1", "10.0.0.2"}
    assert {rank.environment["GLOO_SOCKET_IFNAME"] for rank in ranks} == {"eth0"}
    assert on(plan, "server") == {"server-0": 0, "server-1": 0}


def test_the_orchestrator_is_on_the_head_and_workers_are_on_all() -> None:
    plan = make_plan(config_with(device="cpu", env_num_workers=4), gpu_hosts(0, 0, 0))
    assert on(plan, "orchestrator") == {"orchestrator": 0}
    assert on(plan, "worker") == {"worker-0": 0, "worker-1": 1, "worker-2": 2, "worker-3": 0}


def test_hosts_of_one_name_are_told_apart() -> None:
    plan = make_plan(config_with(device="cpu"), (Host("gpu", 8), Host("gpu", 8), Host("other", 8)))
    assert [host.name for host in plan.hosts] == ["gpu#0", "gpu#1", "other"]


def test_what_does_not_fit_is_refused_with_the_numbers() -> None:
    config = config_with(inference_num_workers=4, trainer_num_workers=6, trainer_placement="STRICT_PACK")
    with pytest.raises(
        PlanError,
        match=r"4 servers of 1 GPU \(cluster.inference_placement=PACK\) and 6 trainer ranks of 1 GPU "
        r"\(cluster.trainer_placement=STRICT_PACK\) do not fit on 3 hosts \(h0 with 4, h1 with 4, h2 with 2\): ask for fewer",
    ):
        make_plan(config, gpu_hosts(4, 4, 2))
    with pytest.raises(
        PlanError, match=r"3 trainer ranks of 1 GPU \(cluster.trainer_placement=STRICT_SPREAD\) do not fit on 2"
    ):
        make_plan(config_with(trainer_num_workers=3, trainer_placement="STRICT_SPREAD", device="cpu"), gpu_hosts(0, 0))
    with pytest.raises(
        PlanError, match=r"need 12 GPUs, one each, or 8 where a server and a rank share one, but the 2 hosts have 4"
    ):
        make_plan(config_with(inference_num_workers=8, trainer_num_workers=4), gpu_hosts(2, 2))


def test_a_gpu_is_shared_where_there_are_not_enough_and_the_sentence_says_where() -> None:
    plan = make_plan(config_with(inference_num_workers=2, trainer_num_workers=2, trainer_placement="SPREAD"), gpu_hosts(1, 2))
    assert describe_shared_gpus(plan).startswith(
        "server-0 and trainer-0 share GPU 0 of h0: inference.gpu_memory_utilization must"
    )


@settings(max_examples=200, deadline=None)
@given(
    gpus=st.lists(st.integers(0, 8), min_size=1, max_size=6),
    servers=st.integers(1, 8),
    size=st.integers(1, 4),
    ranks=st.integers(1, 8),
    inference=st.sampled_from(STRATEGIES),
    trainer=st.sampled_from(STRATEGIES),
    device=st.sampled_from(("auto", "cpu")),
)
def test_every_plan_places_every_process_once_and_no_gpu_twice_a_kind(
    gpus: list[int], servers: int, size: int, ranks: int, inference: Strategy, trainer: Strategy, device: str
) -> None:
    config = config_with(
        size=size,
        inference_num_workers=servers * size,
        trainer_num_workers=ranks,
        env_num_workers=2,
        inference_placement=inference,
        trainer_placement=trainer,
        device=device,
    )
    try:
        plan = make_plan(config, gpu_hosts(*gpus))
    except PlanError:
        return  # whether rightly, the test above says
    assert make_plan(config, gpu_hosts(*gpus)) == plan
    names = [*(f"server-{i}" for i in range(servers)), *(f"trainer-{i}" for i in range(ranks)), "worker-0", "worker-1"]
    assert plan.names == ("orchestrator", *names)
    for role, strategy, count in (("server", inference, servers), ("trainer", trainer, ranks)):
        nodes = [process.node for process in plan.processes if process.role == role]
        assert keeps(Demand(count, 1, strategy), [nodes.count(node) for node in range(len(gpus))])
        cards = [(process.node, gpu) for process in plan.processes if process.role == role for gpu in process.gpus]
        assert len(set(cards)) == len(cards)
        if plan.device == "gpu":
            assert len(cards) == count * (size if role == "server" else 1)
            assert all(gpu in plan.hosts[node].gpus for node, gpu in cards)
    if sum(gpus) >= servers * size + ranks:
        assert describe_shared_gpus(plan) == ""
