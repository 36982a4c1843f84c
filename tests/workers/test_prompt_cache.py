"""Prompts are made and tokenised beside the event loop, ahead of their rollouts where that is foretold."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from telescope.environments.base import Prompt, Reward, SingleTurn
from telescope.environments.template import ChatTemplate
from telescope.records import PromptRef
from telescope.wire.messages import Generate, PrefetchPrompts, RolloutResult, RunRollout
from telescope.workers.prompt_cache import PromptCache
from tests.workers.conftest import loaded, order
from tests.workers.test_service import complete, serving


class Words(SingleTurn):
    def prompts(self, split: str) -> Sequence[Prompt]:
        return [Prompt(({"role": "user", "content": "ab" * (index + 1)},)) for index in range(40)]

    def reward(self, prompt: Prompt, answer: str) -> Reward:
        return Reward(1.0)


class SlowTokenizer:
    """Stands still at every opening until the gate is open, and says in which thread."""

    def __init__(self, inner: Any, gate: threading.Event) -> None:
        self._inner, self._gate, self.threads = inner, gate, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def apply_chat_template(self, *arguments: Any, **options: Any) -> Any:
        self.threads.append(threading.current_thread().name)
        assert self._gate.wait(60)
        return self._inner.apply_chat_template(*arguments, **options)


def slow(template: ChatTemplate, gate: threading.Event) -> tuple[ChatTemplate, SlowTokenizer]:
    tokenizer = SlowTokenizer(template.tokenizer, gate)
    gate.set()  # a template is rendered when it is loaded, before there is a loop
    lazy = ChatTemplate(tokenizer, [1])
    gate.clear()
    tokenizer.threads.clear()
    return lazy, tokenizer


async def loop_goes_on_while(held_up: Callable[[], bool]) -> None:
    """A hundred turns of the event loop while the tokenizer stands still: were the loop behind it, none would come."""
    while not held_up():
        await asyncio.sleep(0.005)
    for _ in range(100):
        await asyncio.sleep(0)
        assert held_up()


def refs(*indices: int) -> tuple[PromptRef, ...]:
    return tuple(PromptRef("task", "train", index) for index in indices)


async def test_a_slow_tokenizer_delays_neither_the_loop_nor_a_prefetched_rollout(template: ChatTemplate) -> None:
    gate = threading.Event()
    lazy, tokenizer = slow(template, gate)
    async with serving(lazy, Words()) as (link, _):
        link.deliver(PrefetchPrompts(refs(0, 1)))
        await loop_goes_on_while(lambda: len(tokenizer.threads) == 1)
        gate.set()
        while len(tokenizer.threads) < 2:
            await asyncio.sleep(0.01)
        link.deliver(RunRollout(order(0, 0)))
        link.deliver(RunRollout(order(1, 1)))
        requests = await link.until_sent(Generate, 2)
        assert [len(arrays[0]) for body, arrays, _ in link.sent if isinstance(body, Generate)] == [4, 6]
        complete(link, requests[0])
        await link.until_sent(RolloutResult)
    assert tokenizer.threads == ["prefetch_0", "prefetch_0"]


async def test_a_prompt_that_was_not_foretold_is_made_beside_the_loop_once_for_its_group(template: ChatTemplate) -> None:
    gate = threading.Event()
    lazy, tokenizer = slow(template, gate)
    async with serving(lazy, Words()) as (link, _):
        for rollout in range(8):
            link.deliver(RunRollout(order(rollout, 5)))
        await loop_goes_on_while(lambda: len(tokenizer.threads) == 1)
        gate.set()
        await link.until_sent(Generate, 8)
    assert tokenizer.threads == ["opening_0"]


async def test_a_rollout_does_not_stand_behind_what_is_prefetched(template: ChatTemplate) -> None:
    gate = threading.Event()
    lazy, tokenizer = slow(template, gate)
    prompts, task = PromptCache(lazy), loaded(Words())
    prompts.prefetch(task, refs(*range(10)))  # the first is held up
    asked = [asyncio.ensure_future(prompts.get_prompt(task, refs(7)[0])) for _ in range(3)]
    while len(tokenizer.threads) < 2:
        await asyncio.sleep(0.005)
    assert sorted(tokenizer.threads) == ["opening_0", "prefetch_0"]
    gate.set()
    assert {prompt.turns[0]["content"] for prompt in await asyncio.gather(*asked)} == {"ab" * 8}
    assert len(tokenizer.threads) <= 11
    prompts.close()


async def test_what_was_made_is_remembered_and_a_bounded_number_of_it(
    template: ChatTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("telescope.workers.prompt_cache.KEPT", 3)
    prompts, task = PromptCache(template), loaded(Words())
    for reference in refs(0, 1, 2, 0, 3):
        await prompts.get_prompt(task, reference)
    assert [prompts.is_ready(reference) for reference in refs(0, 1, 2, 3)] == [True, False, True, True]
    prompts.prefetch(task, refs(*range(10, 30)))
    assert len(prompts._made) == 3
    prompts.close()


async def test_a_prompt_that_cannot_be_made_fails_those_who_ask_and_is_tried_again(template: ChatTemplate) -> None:
    class Broken(Words):
        def prompts(self, split: str) -> Sequence[Prompt]:
            return super().prompts(split)[:2]

    prompts, task = PromptCache(template), loaded(Broken())
    prompts.prefetch(task, refs(9))
    for _ in range(2):
        with pytest.raises(IndexError):
            await prompts.get_prompt(task, refs(9)[0])
    prompts.close()


async def test_cancelling_one_rollout_leaves_its_siblings_prompt_alone(template: ChatTemplate) -> None:
    gate = threading.Event()
    lazy, _ = slow(template, gate)
    prompts, task = PromptCache(lazy), loaded(Words())
    one, two = (asyncio.ensure_future(prompts.get_prompt(task, refs(3)[0])) for _ in range(2))
    await asyncio.sleep(0.02)
    one.cancel()
    gate.set()
    assert (await two).turns[0]["content"] == "ab" * 4
    prompts.close()
