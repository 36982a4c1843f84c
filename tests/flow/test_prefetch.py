"""What workers are told to make ready: the prompts sent out next, so many and no more, and nothing hangs on it."""

from __future__ import annotations

from typing import Any

import pytest

from telescope.flow import commands as do
from telescope.flow.curriculum import PassRatePool, PassRateRules
from telescope.flow.replay import replay
from tests.flow.harness import Manners, World, settings
from tests.flow.test_core import Desk

POOLS = PassRateRules((PassRatePool("hard", 0.5, 1.0), PassRatePool("easy", 1.0, 1.0)))


def hinted(commands: list[Any]) -> list[int]:
    return [prompt.index for command in commands if isinstance(command, do.AnnouncePrompts) for prompt in command.prompts]


def sent(commands: list[Any]) -> list[int]:
    return [
        command.order.prompt.index
        for command in commands
        if isinstance(command, do.DispatchRollout) and command.order.sample == 0
    ]


def test_the_next_prompts_are_named_beyond_the_last_one_sent():
    desk = Desk(
        prompt_prefetch_buffer_size=3,
        max_concurrent_prompts_per_server=1,
        prompts_batch_size_for_trainer=2,
        max_async_rollout=1,
    )
    opened = desk.open()
    names = hinted(opened)
    assert (len(sent(opened)), len(names)) == (1, 3)  # groups 1 to 3 are admitted and wait for a lane
    more = desk.done(0, 0.0)  # a lane is free
    assert sent(more) == names[:1]
    assert len(hinted(more)) == 1  # of group 4, which is not admitted yet
    assert hinted(desk.done(1, 1.0)) == []


def test_off_is_off():
    assert hinted(Desk().open()) == []


class Listening(World):
    """Which of the prompts that were sent out had been named before."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.named: set[tuple[str, int]] = set()
        self.first_seen: set[int] = set()
        self.foretold: list[bool] = []
        self.waiting = self.waiting_most = 0

    def _perform(self, command: Any) -> None:
        if isinstance(command, do.AnnouncePrompts):
            self.named |= {(prompt.environment, prompt.index) for prompt in command.prompts}
        if isinstance(command, do.DispatchRollout) and command.order.group_id not in self.first_seen:
            self.first_seen.add(command.order.group_id)
            prompt = command.order.prompt
            self.foretold.append((prompt.environment, prompt.index) in self.named)
            self.named.add((prompt.environment, prompt.index))  # what comes back is known
        super()._perform(command)


TROUBLED = Manners(prompts=10_000, straggler_share=0.1, failure_share=0.1, worker_life_s=20, server_life_s=30)


@pytest.mark.parametrize("seed", range(4))
def test_almost_every_prompt_was_named_before_it_was_sent_whatever_comes_back(seed: int):
    case = settings(
        environments=(("countdown", 1.0), ("math", 0.3)), max_async_rollout=2, number_of_steps=12, prompt_prefetch_buffer_size=8
    )
    world = Listening(case, TROUBLED, seed).run()
    at_start = 12  # admitted and sent before anything could be said
    assert len(world.foretold) > 50
    assert all(world.foretold[at_start:])


def test_hints_change_no_decision():
    def decisions(prefetch: int) -> list[Any]:
        world = World(settings(max_async_rollout=2, prompt_prefetch_buffer_size=prefetch), TROUBLED, 3, journal=True).run()
        assert replay(world.lines).disagreement is None
        return [step.group_ids for step in world.rules.steps]

    assert decisions(0) == decisions(5)


def test_a_prompt_that_pushes_in_is_named_when_it_is_admitted_and_the_rest_is_foretold_anew():
    desk = Desk(
        prompt_prefetch_buffer_size=4, max_async_rollout=1, max_off_policy_steps=1, number_of_steps=9, group_size=1,
        prompts_batch_size_for_trainer=1, min_group_size=1, discard_group_zero_advantage=False,
    )  # fmt: skip
    opened = desk.open()
    first, _ = sent(opened)
    foretold = hinted(opened)
    assert len(foretold) == 4
    desk.done(1, 1.0)  # group 0 lags behind
    committed = desk.step(1)
    assert sent(committed) == [first, foretold[0]]
    assert hinted(committed)[0] == first
    assert len(hinted(committed)) == 2  # and one more at the end: the others moved back by a place and were named before
    assert not set(hinted(committed)) & set(foretold)


def test_draws_that_hang_on_results_are_named_when_they_are_admitted():
    desk = Desk(
        prompt_prefetch_buffer_size=3,
        max_concurrent_prompts_per_server=1,
        prompts_batch_size_for_trainer=2,
        max_async_rollout=1,
        curricula={"countdown": POOLS},
    )
    opened = desk.open()
    assert (len(sent(opened)), len(hinted(opened))) == (1, 3)
    desk.done(0, 0.0)
    assert hinted(desk.done(1, 1.0)) == []  # group 4 is not admitted, and nobody knows its prompt
