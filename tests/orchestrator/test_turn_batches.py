"""Rewards by turn on their way from a worker's result to the trainer's items; figures by hand, with RLOO."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from transformers import AutoTokenizer

from telescope.algorithms.base import AlgorithmRaised
from telescope.algorithms.grpo import GRPO
from telescope.algorithms.rloo import RLOO
from telescope.config.models import EMBEDDED
from telescope.environments.chat import TokenChat
from telescope.environments.template import ChatTemplate
from telescope.flow.commands import TrainOnBatch
from telescope.flow.events import RolloutDone
from telescope.orchestrator.batch import BatchUnusable, Recipe, TrainBatch, make_batch
from telescope.orchestrator.recorder import make_rollout_row, make_token_rows
from telescope.orchestrator.reward_ranges import RewardRanges
from telescope.orchestrator.rollout_store import Rollout, RolloutStore, UnusableRollout
from telescope.records import TrainItem
from telescope.runlog.schema import STREAMS
from tests.environments.conftest import Script
from tests.orchestrator.test_rollout_store import make

TURNS = RLOO(credit="turn")


async def play(
    rollout_id: int, group_id: int, turns: Sequence[float], answers: Sequence[Sequence[int]], *, branches: bool = False
) -> Rollout:
    """A scored rollout of these answers (token ids), out of the chat itself; a branch each, or all in one."""
    policy = Script(*((list(ids), "stop") for ids in answers))
    chat = TokenChat(ChatTemplate(AutoTokenizer.from_pretrained(EMBEDDED / "tiny"), [1]), policy, 100)
    for _ in answers:
        if branches:
            chat.restart()
        await chat.say({"role": "user", "content": "ab"})
    record = chat.recording()
    arrays = tuple(
        np.concatenate([getattr(branch, name) for branch in record.branches])
        for name in ("ids", "mask", "logprobs", "versions")
    )
    rollout = make(rollout_id, group_id, sum(turns))
    rollout.score(
        msgspec.structs.replace(
            rollout.result,
            branch_lengths=tuple(len(branch.ids) for branch in record.branches),
            prompt_tokens=record.prompt_tokens,
            completion_tokens=record.completion_tokens,
            turns=record.turns,
            turn_rewards=tuple(turns),
            branch_turns=record.branch_turns if record.turns > 1 else msgspec.UNSET,
        ),
        arrays,
        newest=100,
    )
    return rollout


async def play_three(*, branches: bool = False) -> list[Rollout]:
    """Returns (1, 0.5), (0, -0.5) and (0): first turns against the others' mean are 1, -0.5, -0.5; second turns 1, -1."""
    return [
        await play(20, 2, (0.5, 0.5), ([71, 72, 1], [73, 1]), branches=branches),
        await play(21, 2, (0.5, -0.5), ([71, 1], [74, 75, 1]), branches=branches),
        await play(22, 2, (0.0,), ([76, 1],)),
    ]


def cut(rollouts: Sequence[Rollout], recipe: Recipe | None = None, *, ranks: int = 1) -> TrainBatch:
    store = RolloutStore()
    for rollout in rollouts:
        store.add(rollout)
    ids = tuple(rollout.order.rollout_id for rollout in rollouts)
    command = TrainOnBatch(60, (2,), (ids,), baseline_group_ids=(), baseline_rollout_ids=())
    return make_batch(command, store, recipe or Recipe(TURNS, group_size=3, max_tokens=10), ranks=ranks)


def list_items(batch: TrainBatch) -> list[TrainItem]:
    return [item for shard in batch.shards for item in shard.step.items]


def reached(batch: TrainBatch) -> dict[int, list[tuple[int, float]]]:
    """By rollout each sampled token with its advantage, in the order of its branches."""
    found: dict[int, list[tuple[int, float]]] = {}
    for shard in batch.shards:
        ids, mask, *_ = shard.arrays
        at = 0
        for item in shard.step.items:
            here = slice(at, at + item.length)
            sampled = ids[here][mask[here] == 1]
            advantages = np.broadcast_to(item.token_advantages, len(sampled))
            found.setdefault(item.rollout_id, []).extend(zip(sampled.tolist(), advantages.tolist(), strict=True))
            at += item.length
    return found


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("branches", [False, True])
async def test_each_turns_advantage_reaches_all_its_tokens_and_no_other(branches: bool, ranks: int):
    batch = cut(await play_three(branches=branches), ranks=ranks)
    assert reached(batch) == {
        20: [(71, 1.0), (72, 1.0), (1, 1.0), (73, 1.0), (1, 1.0)],
        21: [(71, -0.5), (1, -0.5), (74, -1.0), (75, -1.0), (1, -1.0)],
        22: [(76, -0.5), (1, -0.5)],
    }
    assert {item.rollout_id: item.sequence_tokens for item in list_items(batch)} == {20: 5, 21: 5, 22: 2}
    assert batch.advantages.tolist() == pytest.approx([1.0, (2 * -0.5 + 3 * -1.0) / 5, -0.5])


async def test_a_rollout_of_one_turn_travels_as_it_always_did():
    batch = cut([await play(20, 2, (1.0,), ([71, 1],)), await play(21, 2, (0.0,), ([72, 1],))])
    whole = cut(
        [await play(20, 2, (1.0,), ([71, 1],)), await play(21, 2, (0.0,), ([72, 1],))],
        Recipe(RLOO(), group_size=3, max_tokens=10),
    )
    assert [msgspec.msgpack.encode(shard.step) for shard in batch.shards] == [
        msgspec.msgpack.encode(shard.step) for shard in whole.shards
    ]
    assert b"turns" not in msgspec.msgpack.encode(batch.shards[0].step)


async def test_whole_rollouts_are_compared_by_default_whatever_their_turns_earned():
    batch = cut(await play_three(), Recipe(RLOO(), group_size=3, max_tokens=10))
    assert batch.turns is None
    assert {item.turns for item in list_items(batch)} == {msgspec.UNSET}
    assert batch.advantages.tolist() == [1.0, -0.5, -0.5]


async def test_discarded_groups_count_in_the_batch_statistics_of_turns():
    store = RolloutStore()
    kept = await play_three()
    even = [await play(90, 9, (0.0, 1.0), ([71, 1], [72, 1])), await play(91, 9, (0.0, 1.0), ([71, 1], [72, 1]))]
    for rollout in (*kept, *even):
        store.add(rollout)
    command = TrainOnBatch(60, (2,), ((20, 21, 22),), baseline_group_ids=(9,), baseline_rollout_ids=((90, 91),))
    recipe = Recipe(RLOO(credit="turn", advantage_norm="batch"), group_size=3, max_tokens=10)
    batch = make_batch(command, store, recipe, ranks=1)
    nine = np.array([1.0, 1.0, -0.5, -1.0, -0.5, 0.0, 0.0, 0.0, 0.0])
    assert batch.turns is not None
    found = np.concatenate(batch.turns.by_rollout)
    np.testing.assert_allclose(found, ((nine - nine.mean()) / (nine.std(ddof=1) + 1e-4))[:5], rtol=1e-12)
    assert batch.compute_metrics()["advantage/count"] == 5


async def test_what_a_row_cuts_off_is_cut_from_the_turns_too():
    rollouts = await play_three()
    whole = len(rollouts[1].branches[0].ids)
    recipe = Recipe(TURNS, group_size=3, max_tokens=10, seq_len=whole - 2, truncates=True)
    assert reached(cut(rollouts, recipe))[21] == [(71, -0.5), (1, -0.5), (74, -1.0)]


async def test_costs_of_length_and_the_offset_of_a_range_are_the_last_turns():
    rollout = await play(20, 2, (0.5, 0.5), ([71, 72, 1], [73, 1]))
    costly = RLOO(credit="turn", turn_discount=0.5, overlong_buffer_tokens=4, overlong_penalty=1.0)
    recipe = Recipe(costly, 3, max_tokens=6, rewards=RewardRanges({"countdown": (-1.0, 3.0)}, normalize=True))
    recipe.shape_reward(rollout)
    # 5 tokens are 3 of 4 into the buffer: -0.75; (1 + 1) / 4 = 0.5; by turn 0.125, and 0.125 + 0.25 - 0.75 at the end
    assert rollout.reward == pytest.approx(-0.25)
    assert rollout.turn_returns == pytest.approx((0.125 + 0.5 * -0.375, -0.375))
    assert sum(RLOO(credit="turn").turn_returns((0.125, -0.375)) or ()) == pytest.approx(-0.25 - 0.375)


async def test_the_core_hears_what_turns_are_compared_by():
    rollout = await play(20, 2, (0.5, 0.5), ([71, 1], [73, 1]))
    rollout.taken = rollout.told = False
    Recipe(TURNS, 3, max_tokens=10).shape_reward(rollout)
    [heard] = rollout.release()
    assert isinstance(heard, RolloutDone)
    assert (heard.reward, heard.turn_returns) == (1.0, (1.0, 0.5))
    plain = make()
    plain.told = False
    Recipe(RLOO(), 3, max_tokens=10).shape_reward(plain)
    [heard] = plain.release()
    assert b"turn_returns" not in msgspec.json.encode(heard)


async def test_a_checkpoints_rollout_whose_turns_are_not_told_apart_counts_as_one_turn():
    rollouts = await play_three()
    older = rollouts[0]
    older.answer = msgspec.structs.replace(older.result, branch_turns=msgspec.UNSET, turn_rewards=msgspec.UNSET)
    found = reached(cut(rollouts))
    assert {advantage for _, advantage in found[20]} == {1.0}
    assert found[21] == [(71, -0.5), (1, -0.5), (74, 0.0), (75, 0.0), (1, 0.0)]  # alone in its second turn


async def test_rows_have_rewards_and_advantages_by_turn():
    batch = cut(await play_three())
    assert [make_rollout_row(rollout)["turn_rewards"] for rollout in batch.rollouts] == [[0.5, 0.5], [0.5, -0.5], [0.0]]
    assert [row["turns"] for row in make_token_rows(batch, 1)] == [[[3, 1.0], [2, 1.0]], [[2, -0.5], [3, -1.0]], []]
    assert batch.compute_metrics()["advantage/lone_turn_fraction"] == 0.0
    assert make_rollout_row(make())["turn_rewards"] == []
    assert make_rollout_row(make()).keys() <= STREAMS["rollouts"].columns.keys() & STREAMS["eval_samples"].columns.keys() | {
        "length_penalty"
    }


async def test_an_algorithm_that_gives_another_number_of_returns_is_refused():
    class Own(GRPO):
        def turn_returns(self, rewards: Sequence[float]) -> Sequence[float]:
            return rewards[:1]

    said = r"^rollout 20: Own\.turn_returns gave \(0\.5,\): it must give one finite number for each of the rollout's turns, 2"
    with pytest.raises(BatchUnusable, match=said):
        cut(await play_three(), Recipe(Own(), group_size=3, max_tokens=10))
    with pytest.raises(AlgorithmRaised, match=said):
        Recipe(Own(), group_size=3, max_tokens=10).shape_reward((await play_three())[0])


@pytest.mark.parametrize(("returns", "said"), [
    ((1.0, float("inf")), r"^rollout 20: Own\.turn_returns gave \(1\.0, inf\): it must give one finite number"),
    ((1.0, "much"), r"^rollout 20: Own\.turn_returns raised ValueError: could not convert string to float: 'much'"),
    ((1.0, None), r"^rollout 20: Own\.turn_returns raised TypeError: float\(\) argument must be"),
])  # fmt: skip
async def test_returns_of_an_own_algorithm_that_are_not_numbers_are_named(returns: Any, said: str):
    class Own(GRPO):
        def turn_returns(self, rewards: Sequence[float]) -> Sequence[float]:
            return returns

    with pytest.raises(AlgorithmRaised, match=said):
        Recipe(Own(), group_size=3, max_tokens=10).shape_reward((await play_three())[0])


async def test_an_algorithm_that_compares_turns_of_some_rollouts_only_is_refused():
    class Own(GRPO):
        def turn_returns(self, rewards: Sequence[float]) -> Sequence[float] | None:
            return rewards if len(rewards) > 1 else None

    with pytest.raises(BatchUnusable, match=r"Own\.turn_returns gave None for some rollouts and numbers for others"):
        cut(await play_three(), Recipe(Own(), group_size=3, max_tokens=10))


async def test_wrong_advantages_of_turns_are_counted_in_turns():
    class Short(GRPO):
        def advantages(self, rewards: np.ndarray, groups: np.ndarray, *, group_size: int) -> np.ndarray:
            return rewards[:3]

    with pytest.raises(BatchUnusable, match="one number for each of the 5 turns"):
        cut(await play_three(), Recipe(Short(credit="turn"), group_size=3, max_tokens=10))
    with pytest.raises(BatchUnusable, match=r"the returns of turns of its batch, from -0\.5 to 1, give advantages"):
        cut(await play_three(), Recipe(Endless(credit="turn"), group_size=3, max_tokens=10))


class Endless(GRPO):
    def advantages(self, rewards: np.ndarray, groups: np.ndarray, *, group_size: int) -> np.ndarray:
        return np.full(len(rewards), np.inf)


async def test_a_lone_turn_of_a_range_has_the_digits_of_the_whole_rollout():
    """0.24 in [-1, 2.4]: the share of the turn and what is missing of the whole are an ulp off when added."""
    rewards = RewardRanges({"countdown": (-1.0, 2.4)}, normalize=True)
    rollout = await play(20, 2, (0.24,), ([71, 72, 1],))
    Recipe(RLOO(credit="turn"), 3, max_tokens=10, rewards=rewards).shape_reward(rollout)
    assert rollout.turn_returns == (rollout.reward,) == (1.24 / 3.4,)


@pytest.mark.parametrize(("changes", "said"), [
    ({"turn_rewards": (1.0,)}, "it has rewards of 1 turns, and turns=2"),
    ({"turn_rewards": (1.0, float("nan"))}, "the rewards of its turns are"),
    ({"turn_rewards": (1e308, 1e308)}, r"the rewards of its turns are .*, and each must be a number within ±1e\+06"),
    ({"turn_rewards": (1e7, 1 - 1e7)}, "each must be a number within"),
    ({"turn_rewards": (0.5, 0.75)}, "the rewards of its turns add up to 1.25, and its reward is 1"),
    ({"branch_turns": msgspec.UNSET}, "it has rewards of 2 turns, and does not say which tokens are whose"),
    ({"branch_turns": (((0, 2), (0, 2)),)}, "its branches do not have each of its 2 turns once"),
    ({"branch_turns": (((0, 2), (2, 2)),)}, "its branches do not have each of its 2 turns once"),
    ({"branch_turns": (((0, 1), (1, 2)),)}, r"its turns have \[\[1, 2\]\] tokens, and its branches \[4\] sampled ones"),
    ({"branch_turns": (((0, 4), (1, 0)),)}, r"its turns have \[\[4, 0\]\] tokens"),
    ({"branch_turns": (((0, 2),), ((1, 2),))}, r"its turns have \[\[2\], \[2\]\] tokens, and its branches \[4\]"),
    ({"turns": 2**62, "turn_rewards": msgspec.UNSET}, f"its branches do not have each of its {2**62} turns once"),
    ({"turns": 0, "turn_rewards": msgspec.UNSET}, "turns=0, and it has tokens"),
])  # fmt: skip
async def test_turns_that_contradict_the_tokens_are_refused(changes: dict[str, object], said: str):
    good = await play(20, 2, (0.5, 0.5), ([71, 1], [73, 1]))
    [branch] = good.branches
    wrong = msgspec.structs.replace(good.result, **changes)
    with pytest.raises(UnusableRollout, match=said):
        Rollout(good.order).score(wrong, branch.arrays, newest=100)


async def test_rewards_by_turn_of_an_answer_without_tokens_are_checked_too():
    """As of an eval through a server that tells no tokens; its rows are read by charts."""
    good = await play(20, 2, (0.5, 0.5), ([71, 1], [73, 1]))
    none = msgspec.structs.replace(good.result, branch_lengths=(), branch_turns=(), completion_tokens=0)
    rollout = Rollout(msgspec.structs.replace(good.order, eval=True))
    rollout.score(none, (), newest=100)
    wrong = msgspec.structs.replace(none, turn_rewards=(0.5, float("inf")))
    with pytest.raises(UnusableRollout, match="the rewards of its turns are"):
        Rollout(rollout.order).score(wrong, (), newest=100)
