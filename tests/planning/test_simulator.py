"""The simulator against arithmetic that can be done by hand, and against the core's own promises."""

from __future__ import annotations

import gc
from itertools import pairwise
from math import inf

import msgspec
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from telescope.flow.groups import RolloutAttempt
from telescope.flow.settings import FlowSettings
from telescope.flow.staleness import age_bound
from telescope.planning.latencies import EngineTimes, Latencies, constant, empirical, lognormal
from telescope.planning.simulated_server import SimulatedRequest, SimulatedServer
from telescope.planning.simulator import SimulatedCluster, simulate


def flow(**changes: object) -> FlowSettings:
    return FlowSettings(
        **{"number_of_steps": 12, "prompts_batch_size_for_trainer": 4, "group_size": 4, "max_async_rollout": 1,
           "environments": (("task", 1.0),), "rollout_deadline_s": 1e6, **changes}
    )  # fmt: skip


def cluster(**changes: int | bool) -> SimulatedCluster:
    return SimulatedCluster(**{"servers": 2, "ranks": 1, "server_capacity": 128, "worker_capacity": 4096, **changes})


def load(**changes: object) -> Latencies:
    return Latencies(
        **{"prompt_tokens": constant(100), "completion_tokens": constant(50), "engine": EngineTimes(step_s=0.02),
           "train_step_s": 3.0, "train_token_s": 0.001, "sync_s": 0.5, "pause_s": 0.1, **changes}
    )  # fmt: skip


def test_a_synchronous_step_is_the_longest_generation_then_training_then_the_weights() -> None:
    # 16 rollouts of 100 + 50 tokens: 50 steps of 0.02 s, 3 s + 2,400 tokens of 1 ms, 0.5 s of weights
    outcome = simulate(flow(max_async_rollout=0), cluster(), load())
    ends = [step.done_s for step in outcome.steps]
    assert ends[0] == pytest.approx(1.0 + 3.0 + 2.4)
    assert [b - a for a, b in pairwise(ends)] == pytest.approx([0.5 + 1.0 + 5.4] * 11)
    assert outcome.step_s == pytest.approx(6.9)
    assert outcome.tokens_per_s == pytest.approx(2400 / 6.9, rel=0.02)
    assert outcome.counts.age_max == 0


def test_a_synchronous_step_waits_for_the_longest_of_unequal_lengths() -> None:
    spread = empirical([10, 20, 400])
    outcome = simulate(flow(max_async_rollout=0, prompts_batch_size_for_trainer=64), cluster(), load(completion_tokens=spread))
    # among 256 draws the longest is near 400
    assert 0.02 * 380 < outcome.steps[0].begun_s <= 0.02 * 400


def test_max_tokens_cuts_lengths() -> None:
    outcome = simulate(flow(max_async_rollout=0), cluster(max_tokens=25), load())
    assert outcome.steps[0].begun_s == pytest.approx(0.5)


def test_an_asynchronous_run_is_as_slow_as_its_slower_side() -> None:
    bound_by_trainer = simulate(flow(), cluster(), load())
    # the trainer's cycle: 5.4 s of training, 0.5 s until the weights are served
    assert bound_by_trainer.step_s == pytest.approx(5.9)
    assert bound_by_trainer.trainer_waiting == pytest.approx(0.0, abs=1e-9)
    assert bound_by_trainer.trainer_training == pytest.approx(5.4 / 5.9, rel=0.02)
    bound_by_servers = simulate(flow(), cluster(), load(train_step_s=0.1, train_token_s=0, sync_s=0.01, pause_s=0.0))
    assert bound_by_servers.trainer_training < 0.2
    assert bound_by_servers.servers_generating == pytest.approx(1.0, abs=0.05)


def test_with_any_number_of_servers_a_step_takes_no_longer_than_the_lone_rollout() -> None:
    slow = EngineTimes(step_s=0.02, sequence_s=0.01)
    few = simulate(flow(max_async_rollout=0), cluster(servers=1), load(engine=slow))
    many = simulate(flow(max_async_rollout=0, max_concurrent_prompts_per_server=1), cluster(servers=64), load(engine=slow))
    # 16 on one server; a group stays on one server for its prefix, so 4 on each of many
    assert few.steps[0].begun_s == pytest.approx(50 * (0.02 + 16 * 0.01))
    assert many.steps[0].begun_s == pytest.approx(50 * (0.02 + 4 * 0.01))


@hypothesis_settings(deadline=None, max_examples=40)
@given(
    max_async_rollout=st.integers(0, 3),
    off=st.integers(1, 4),
    order=st.sampled_from(["completion", "admission"]),
    groups=st.integers(1, 6),
    sigma=st.floats(0, 2),
    equal=st.floats(0, 0.6),
    turns=st.integers(1, 3),
    shared=st.floats(0, 0.9),
    abort=st.booleans(),
    free_lane_after_generation=st.booleans(),
    adaptive=st.booleans(),
)
def test_ages_stay_in_their_bound_and_shares_add_up_whatever_the_latencies(
    max_async_rollout: int,
    off: int,
    order: str,
    groups: int,
    sigma: float,
    equal: float,
    turns: int,
    shared: float,
    abort: bool,
    free_lane_after_generation: bool,
    adaptive: bool,
) -> None:
    settings = flow(
        max_async_rollout=max_async_rollout,
        max_off_policy_steps=off,
        take_order=order,
        prompts_batch_size_for_trainer=groups,
        discarded_batches_limit=1000,
        free_lane_after_generation=free_lane_after_generation,
        adaptive_concurrency=adaptive,
    )
    outcome = simulate(
        settings,
        cluster(abort_at_update=abort),
        load(
            completion_tokens=lognormal(80, sigma, 4000), equal_share=equal, turns=constant(turns), shared_share=shared,
            environment_s=constant(0.3), reward_s=lognormal(1, 0.5, 9), request_s=0.01, train_step_s=0.5,
            engine=EngineTimes(step_s=0.02, sequence_s=1e-3, kv_token_s=1e-6, prefill_token_s=1e-5, kv_tokens=3000,
                               max_seqs=20),
        ),
    )  # fmt: skip
    assert outcome.ok, outcome.reason
    assert len(outcome.steps) == 12
    assert outcome.counts.age_max <= age_bound(settings)
    assert outcome.trainer_training + outcome.trainer_syncing + outcome.trainer_waiting == pytest.approx(1)
    assert outcome.servers_generating + outcome.servers_paused + outcome.servers_waiting == pytest.approx(1)
    assert min(outcome.trainer_waiting, outcome.servers_waiting, outcome.servers_paused) > -1e-9
    assert all(a.done_s <= b.begun_s + 1e-9 for a, b in pairwise(outcome.steps))


def test_the_same_run_twice_is_the_same_and_another_seed_is_another() -> None:
    varied = load(completion_tokens=lognormal(80, 1, 4000))
    first, again, other = (simulate(flow(seed=seed), cluster(), varied) for seed in (1, 1, 2))
    assert msgspec.json.encode(first) == msgspec.json.encode(again)
    assert first.steps != other.steps


def test_the_collector_rests_while_a_run_is_simulated_and_not_after() -> None:
    during: list[bool] = []
    simulate(flow(number_of_steps=1), cluster(), load(), lambda *_: during.append(gc.isenabled()))
    assert not any(during)
    assert gc.isenabled()


def test_rollouts_that_are_forgotten_leave_nothing_to_the_collector_of_cycles() -> None:
    """Groups and their rollouts name each other, and a simulation does without the collector."""
    case = flow(number_of_steps=12)
    gc.collect()
    gc.disable()
    try:
        simulate(case, cluster(), load())
        left = sum(type(each) is RolloutAttempt for each in gc.get_objects())
    finally:
        gc.enable()
    assert left <= case.slots * case.group_size < 12 * case.prompts_batch_size_for_trainer * case.group_size


def test_a_server_that_loses_speed_while_the_trainer_works_takes_longer() -> None:
    alone = simulate(flow(), cluster(), load(train_step_s=0.2, train_token_s=0, sync_s=0, pause_s=0))
    shared = simulate(flow(), cluster(), load(train_step_s=0.2, train_token_s=0, sync_s=0, pause_s=0, shared_share=0.5))
    assert alone.steps[-1].done_s < shared.steps[-1].done_s < 2 * alone.steps[-1].done_s


def finish(server: SimulatedServer) -> dict[str, float]:
    """When each sequence ends, if nobody comes."""
    ends: dict[str, float] = {}
    for _ in range(1000):
        at = server.next_at
        if at == inf:
            return ends
        server.advance(at)
        ends |= {sequence.key: at for sequence in server.ended()}
    raise AssertionError(f"no end: {ends}")


def test_sequences_share_a_server_and_speed_up_when_one_leaves() -> None:
    server = SimulatedServer(EngineTimes(step_s=0.01, sequence_s=0.01))
    for key, tokens in (("a", 10), ("b", 30)):
        server.add(SimulatedRequest(key, group=0, shared=5, prompt=5, completion=tokens))
    # 10 steps of 0.03 s together, then 20 of 0.02 s alone
    assert finish(server) == pytest.approx({"a": 0.3, "b": 0.7})
    assert server.tokens == pytest.approx(40)
    assert server.generating_s == pytest.approx(0.7)


def test_a_late_comer_is_served_beside_the_others() -> None:
    server = SimulatedServer(EngineTimes(step_s=0.01, sequence_s=0.01))
    server.add(SimulatedRequest("a", 0, 5, 5, 30))
    server.advance(0.2)  # 10 tokens
    server.add(SimulatedRequest("b", 1, 5, 5, 10))
    assert finish(server) == pytest.approx({"b": 0.5, "a": 0.7})


def test_a_step_takes_longer_as_the_cache_fills() -> None:
    server = SimulatedServer(EngineTimes(step_s=0.01, kv_token_s=0.001))
    server.add(SimulatedRequest("a", 0, 100, 100, 10))
    # 10 steps of 0.01 + 0.001 (100 + x), x from 0 to 10
    assert finish(server) == pytest.approx({"a": 10 * 0.11 + 0.001 * 10 * 10 / 2})


def test_siblings_pay_for_their_prompt_once() -> None:
    times = EngineTimes(step_s=0.01, prefill_token_s=0.001)
    both = SimulatedServer(times)
    apart = SimulatedServer(times, share_prefixes=False)
    for server in (both, apart):
        server.add(SimulatedRequest("a", 0, 100, 100, 10))
        server.add(SimulatedRequest("b", 0, 100, 100, 10))
    assert finish(both)["a"] == pytest.approx(0.1 + 0.101)  # its last token is computed again
    assert finish(apart)["a"] == pytest.approx(0.1 + 0.2)


def test_a_pause_moves_every_end_and_forgets_prefixes() -> None:
    server = SimulatedServer(EngineTimes(step_s=0.01, prefill_token_s=0.001))
    server.add(SimulatedRequest("a", 0, 100, 100, 10))
    server.pause(2.0, forget_prefixes=True)
    server.add(SimulatedRequest("b", 0, 100, 100, 10))
    assert finish(server)["a"] == pytest.approx(2.0 + 0.1 + 0.2)
    assert server.paused_s == pytest.approx(2.0)


def test_a_full_cache_puts_the_youngest_back() -> None:
    server = SimulatedServer(EngineTimes(step_s=0.01, kv_tokens=1000))
    for key in ("a", "b"):
        server.add(SimulatedRequest(key, ord(key), 200, 200, 500))
    # 400 + 2x = 1,000 after 300 steps; b starts again when a has ended at 5 s, with 500 tokens of prompt and 200 to go
    assert finish(server) == pytest.approx({"a": 5.0, "b": 7.0})
    assert server.preemptions == 1


def test_what_finds_no_place_in_the_batch_waits_in_order() -> None:
    server = SimulatedServer(EngineTimes(step_s=0.01, max_seqs=1))
    for key in ("a", "b", "c"):
        server.add(SimulatedRequest(key, 0, 5, 5, 10))
    server.advance(0.05)
    server.remove(server.waiting[0])
    assert finish(server) == pytest.approx({"a": 0.1, "c": 0.2})


def test_spreads_give_their_quantiles_and_means() -> None:
    spread = empirical([30, 10, 20])
    assert [spread.at(share) for share in (0, 0.25, 0.5, 1)] == [10, 15, 20, 30]
    assert spread.mean == 20
    assert spread.clipped(15).at(1) == 15
    assert lognormal(1000, 0.5, 1e9).mean == pytest.approx(1000, rel=0.02)
    assert lognormal(1000, 0.0, 1e9).at(0.3) == pytest.approx(1000)
    assert [lognormal(mean, 0.8, 1024).mean for mean in (1, 400, 1000, 1024)] == pytest.approx([1, 400, 1000, 1024])
    assert lognormal(1024, 0.8, 1024).at(0) == pytest.approx(1024)  # a mean of the limit is a length of all
    with pytest.raises(ValueError, match="must lie between 1 and 1024"):
        lognormal(1025, 0.8, 1024)
    with pytest.raises(ValueError, match="nothing was seen"):
        empirical([])


def test_times_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match=r"step_s=0.0 and sequence_s=0.0 must be"):
        EngineTimes(step_s=0.0)
    with pytest.raises(ValueError, match=r"pause_s=2.0 is part of sync_s=1.0"):
        load(sync_s=1.0, pause_s=2.0)
    with pytest.raises(ValueError, match=r"shared_share=1.0"):
        load(shared_share=1.0)
