"""What a worker sends is checked before it can become training data."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from telescope.flow import events
from telescope.orchestrator.rollout_store import Rollout, RolloutStore, TurnRequest, UnusableRollout
from telescope.records import PromptRef, RolloutOrder
from telescope.wire.messages import RequestGrant, RolloutResult
from telescope.wire.peer_events import Delivery

NAN = float("nan")
NEWEST = 5


def order(rollout_id: int = 7, group_id: int = 2) -> RolloutOrder:
    return RolloutOrder(
        rollout_id=rollout_id, group_id=group_id, sample=0, attempt=0, prompt=PromptRef("countdown", "train", 41), seed=5
    )


def done(rollout_id: int = 7, reward: float = 1.0, branch_lengths: tuple[int, ...] = (4,)) -> RolloutResult:
    return RolloutResult(
        rollout_id=rollout_id,
        attempt=0,
        reward=reward,
        metrics={"exact": reward},
        branch_lengths=branch_lengths,
        prompt_tokens=1,
        completion_tokens=2,
        turns=1,
        finish_reason="stop",
        temperature=0.7,
        prompt_text="use 3 5 make 8",
        completion_text="3+5",
        golden_answers=(),
        started_ns=0,
        generated_ns=1,
        scored_ns=2,
    )


def arrays(
    mask: tuple[int, ...] = (0, 0, 1, 1),
    logprobs: tuple[float, ...] = (NAN, NAN, -0.5, -1.0),
    versions: tuple[int, ...] = (-1, -1, 4, 5),
) -> tuple[np.ndarray, ...]:
    return (
        np.array([10, 11, 12, 1], np.int32),
        np.array(mask, np.uint8),
        np.array(logprobs, np.float32),
        np.array(versions, np.int32),
    )


def make(rollout_id: int = 7, group_id: int = 2, reward: float = 1.0) -> Rollout:
    """One that the core has taken."""
    rollout = Rollout(order(rollout_id, group_id), told=True, taken=True)
    rollout.score(done(rollout_id, reward), arrays(), NEWEST)
    return rollout


def test_a_whole_rollout_keeps_its_tokens_and_versions():
    rollout = make()
    assert rollout.trained_tokens == 2
    assert rollout.tokens == 4
    assert rollout.versions.tolist() == [4, 5]


def test_recorded_routing_is_a_fifth_array():
    rollout = Rollout(order())
    record = np.zeros((len(arrays()[0]), 3, 2), np.uint8)
    rollout.score(done(), (*arrays(), record), NEWEST)
    np.testing.assert_array_equal(np.concatenate([branch.routed for branch in rollout.branches]), record)
    with pytest.raises(UnusableRollout, match="do not have the length of its branches"):
        Rollout(order()).score(done(), (*arrays(), record[1:]), NEWEST)


def test_branches_are_split_where_they_begin():
    rollout = Rollout(order())
    rollout.score(done(branch_lengths=(1, 3)), (*arrays(),), NEWEST)
    assert [len(branch.ids) for branch in rollout.branches] == [1, 3]
    assert rollout.branches[1].ids.tolist() == [11, 12, 1]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (arrays(logprobs=(NAN, NAN, NAN, -1.0)), "no log-prob"),
        (arrays(logprobs=(NAN, NAN, 0.7, -1.0)), "above 0"),
        (arrays(logprobs=(NAN, NAN, -np.inf, -1.0)), "no log-prob"),
        (arrays(versions=(-1, -1, -1, 5)), "names no weight version"),
        (arrays()[:3], "length of its branches"),
        (arrays(versions=(-1, -1, 4, 6)), "names weight version 6, and no server has one above 5"),
        (arrays(mask=(0, 0, 1, 2)), "mask has the value 2"),
        (arrays(mask=(1, 0, 0, 1), logprobs=(-0.5, NAN, NAN, -1.0)), "first token of a branch"),
        (arrays(mask=(0, 0, 0, 1)), "completion_tokens=2, and its mask has 1"),
    ],
)
def test_a_rollout_that_contradicts_itself_is_refused(wrong: tuple[np.ndarray, ...], words: str):
    with pytest.raises(UnusableRollout, match=words) as caught:
        Rollout(order()).score(done(), wrong, NEWEST)
    assert "rollout 7 (environment countdown, prompt 41)" in str(caught.value)


def test_a_reward_that_is_no_number_is_refused_and_not_taken_for_zero():
    with pytest.raises(UnusableRollout, match="reward is nan"):
        Rollout(order()).score(done(reward=NAN), arrays(), NEWEST)


@pytest.mark.parametrize("temperature", [0.0, -1.0, NAN, np.inf])
def test_a_temperature_that_nothing_can_be_divided_by_is_refused(temperature: float):
    with pytest.raises(UnusableRollout, match=f"its temperature is {temperature}"):
        Rollout(order()).score(msgspec.structs.replace(done(), temperature=temperature), arrays(), NEWEST)


@pytest.mark.parametrize(
    ("lengths", "words"),
    [((), "no branch"), ((4, 0), "an empty branch"), ((5, -1), "an empty branch"), ((2, 2), "first token of a branch")],
)
def test_a_rollout_is_made_of_branches_that_begin_with_a_prompt(lengths: tuple[int, ...], words: str):
    with pytest.raises(UnusableRollout, match=words):
        Rollout(order()).score(done(branch_lengths=lengths), arrays(), NEWEST)


def test_the_store_forgets_what_it_is_told_to():
    store = RolloutStore()
    store.add(make(7))
    store.add(make(8))
    store.forget((7, 99))
    assert len(store) == 1
    assert [rollout.order.rollout_id for rollout in store.take((8,))] == [8]


def test_the_attempt_before_is_still_owed_its_answer_and_is_never_taken_for_the_one_that_counts():
    """The core asks again while the worker of the first attempt is silent: both are in flight."""
    store, late, counted = RolloutStore(), Rollout(order(), "worker-0", 4), make(7)
    counted.order = msgspec.structs.replace(counted.order, attempt=1)
    for rollout in (late, counted):
        store.add(rollout)
    answer = Delivery("worker-0", 9, done(), answers=4)
    assert store.find_answered(answer, 7, 0) is late
    assert store.find_answered(answer, 7, 1) is late  # whatever it speaks of
    assert store.find_answered(Delivery("worker-1", 9, done(), answers=4), 7, 0) is None
    assert store.take((7,)) == (counted,)
    store.forget((7,))
    assert list(store) == [late]
    with pytest.raises(KeyError):
        store.take((7,))


def test_the_core_hears_once_of_an_answer_and_not_before_its_servers_have_ended():
    rollout = Rollout(order(), "worker-0", 4)
    asked = Delivery("worker-0", 5, RequestGrant("q", 7, 0, 0, 3))
    request = rollout.requests["q"] = TurnRequest(asked, asked.body, rollout, "server-0", number=2)
    rollout.generation_ended = True
    rollout.fail("no tokens")
    assert rollout.release() == []
    request.server, request.number = None, 0
    assert rollout.release() == [events.GenerationOver(7, 0), events.RolloutFailed(7, 0, "no tokens")]
    assert rollout.release() == []


@pytest.mark.parametrize("value", [NAN, 1.1e12, -1e308])
def test_a_metric_that_no_worker_may_send_is_refused_by_name(value: float) -> None:
    wrong = msgspec.structs.replace(done(), metrics={"perplexity": value})
    with pytest.raises(UnusableRollout, match=r"its metric 'perplexity' is .*, and it must be a number within ±1e\+12"):
        Rollout(order()).score(wrong, arrays(), NEWEST)
