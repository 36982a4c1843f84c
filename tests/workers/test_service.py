"""Many orders at once on one loop; each is answered exactly once."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from telescope.environments.base import Chat, Prompt, Reward, SingleTurn
from telescope.environments.multi_turn import MultiTurn
from telescope.environments.template import ChatTemplate
from telescope.wire.messages import (
    Abort,
    CancelRollout,
    Completion,
    Generate,
    GenerateFailed,
    GenerationEnded,
    RolloutError,
    RolloutResult,
    RunRollout,
    Stop,
)
from telescope.workers.loading import EnvironmentBroken
from telescope.workers.play import PlayLimits
from telescope.workers.service import WorkerHopeless, WorkerService
from tests.workers.conftest import LIMITS, FakeLink, loaded, order

FREE_LANE = replace(LIMITS, free_lane=True)


class Task(SingleTurn):
    def prompts(self, split: str) -> Sequence[Prompt]:
        return [Prompt(({"role": "user", "content": "ab"},), answer="ba")] * 3

    def reward(self, prompt: Prompt, answer: str) -> Reward:
        return Reward(float(answer == prompt.answer))


@asynccontextmanager
async def serving(
    template: ChatTemplate, task: SingleTurn | None = None, limits: PlayLimits = LIMITS
) -> AsyncIterator[tuple[FakeLink, asyncio.Task[str]]]:
    link = FakeLink()
    service = WorkerService(link, "worker-0", {"task": loaded(task or Task())}, template, limits)
    running = asyncio.create_task(service.run())
    try:
        yield link, running
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def complete(link: FakeLink, request: Generate, ids: Sequence[int] = (72, 71, 1)) -> None:
    count = len(ids)
    link.deliver(
        Completion(request.request_id, "stop", count, 0, 0.0, 0.1),
        np.array(ids, np.int32), np.full(count, -0.5, np.float32), np.full(count, 3, np.int32),
    )  # fmt: skip


async def test_an_order_becomes_a_request_and_the_completion_its_answer(template: ChatTemplate) -> None:
    async with serving(template) as (link, running):
        asked = link.deliver(RunRollout(order(7, attempt=1)))
        (request,) = await link.until_sent(Generate)
        playing = "playing 1 rollouts of environments.task"
        assert link.steps == ["setting up environments.task", "waiting for orders", playing]
        assert (request.request_id, request.rollout_id, request.attempt, request.turn) == ("worker-0/7.1.0", 7, 1, 0)
        assert link.sent[0][1][0].tolist() == [4, 71, 72, 5]
        complete(link, request)
        (done,) = await link.until_sent(RolloutResult)
        assert done.reward == 1.0
        assert link.sent[-1][2] is asked
        assert link.steps[-1] == "playing 0 rollouts of environments.task"
        link.deliver(Stop("all steps are done"))
        assert await running == "all steps are done"


async def test_hundreds_of_rollouts_wait_side_by_side_and_finish_in_any_order(template: ChatTemplate) -> None:
    async with serving(template) as (link, _):
        for rollout_id in range(400):
            link.deliver(RunRollout(order(rollout_id, rollout_id % 3)))
        requests = await link.until_sent(Generate, 400)
        for request in reversed(requests):
            complete(link, request, (72, 71, 1) if request.rollout_id % 2 else (71, 1))
        done = await link.until_sent(RolloutResult, 400)
        assert sorted(body.rollout_id for body in done) == list(range(400))
        assert {body.rollout_id: body.reward for body in done} == {n: float(n % 2) for n in range(400)}


async def test_a_thousand_slow_rewards_are_awaited_at_once(template: ChatTemplate) -> None:
    """None of them returns before all are under way: were one to hold the loop or a place, none would ever be done."""
    all_here = asyncio.Barrier(1000)

    class Together(Task):
        async def reward(self, prompt: Prompt, answer: str) -> Reward:
            await all_here.wait()
            return Reward(float(answer == prompt.answer))

    async with serving(template, Together(), replace(LIMITS, timeout_s=600.0)) as (link, _):
        for rollout_id in range(1000):
            link.deliver(RunRollout(order(rollout_id, rollout_id % 3)))
        for request in await link.until_sent(Generate, 1000):
            complete(link, request)
        done = await link.until_sent(RolloutResult, 1000)
        assert {body.rollout_id: body.reward for body in done} == dict.fromkeys(range(1000), 1.0)


async def test_a_failed_generation_fails_its_rollout_alone(template: ChatTemplate) -> None:
    async with serving(template) as (link, _):
        link.deliver(RunRollout(order(1)))
        link.deliver(RunRollout(order(2)))
        one, two = await link.until_sent(Generate, 2)
        link.deliver(GenerateFailed(one.request_id, "server-0 is gone"))
        complete(link, two)
        (failed,) = await link.until_sent(RolloutError)
        assert (failed.rollout_id, failed.cause) == (1, "environments.task: generation failed: server-0 is gone")
        assert (await link.until_sent(RolloutResult))[0].rollout_id == 2


async def test_a_cancelled_order_is_answered_too_and_its_late_completion_is_ignored(template: ChatTemplate) -> None:
    async with serving(template) as (link, _):
        asked = link.deliver(RunRollout(order(3)))
        (request,) = await link.until_sent(Generate)
        link.deliver(CancelRollout(3, 1, "another attempt"))
        link.deliver(CancelRollout(3, 0, "off_policy"))
        (failed,) = await link.until_sent(RolloutError)
        assert failed.cause == "cancelled: off_policy"
        assert link.sent[-1][2] is asked
        complete(link, request)
        link.deliver(RunRollout(order(4)))
        await link.until_sent(Generate, 2)
        assert not [body for body, _, _ in link.sent if isinstance(body, RolloutResult | Abort)]


async def test_a_request_that_takes_too_long_is_aborted_at_the_server(template: ChatTemplate) -> None:
    async with serving(template, limits=PlayLimits(1.0, 12, 200, 0.5)) as (link, _):
        link.deliver(RunRollout(order(3)))
        (request,) = await link.until_sent(Generate)
        (failed,) = await link.until_sent(RolloutError)
        assert "rollout.timeout_s=0.5 ran out" in failed.cause
        assert [body.request_id for body, _, _ in link.sent if isinstance(body, Abort)] == [request.request_id]


async def test_an_unknown_environment_fails_the_order(template: ChatTemplate) -> None:
    link = FakeLink()
    running = asyncio.create_task(WorkerService(link, "worker-0", {}, template, LIMITS).run())
    link.deliver(RunRollout(order(3)))
    (failed,) = await link.until_sent(RolloutError)
    assert failed.cause == "this worker has no environment 'task'"
    link.deliver(Stop(""))
    await running


async def test_a_lost_link_ends_the_service_and_its_rollouts(template: ChatTemplate) -> None:
    async with serving(template) as (link, running):
        link.deliver(RunRollout(order(3)))
        await link.until_sent(Generate)
        link.inbox.put_nowait(ConnectionError("the orchestrator is silent"))
        with pytest.raises(ConnectionError, match="silent"):
            await asyncio.wait_for(running, 60)
        assert not [body for body, _, _ in link.sent if isinstance(body, RolloutError)]


async def test_a_worker_whose_reward_threads_all_hang_ends_with_that_reason(template: ChatTemplate) -> None:
    release = threading.Event()

    class Hanging(Task):
        def reward(self, prompt: Prompt, answer: str) -> Any:
            release.wait(30)

    try:
        async with serving(template, Hanging(), PlayLimits(1.0, 12, 200, 2.0)) as (link, running), asyncio.timeout(60):
            for rollout_id in range(40):
                link.deliver(RunRollout(order(rollout_id)))
            for request in await link.until_sent(Generate, 40):
                complete(link, request)
            for rollout_id in range(40, 160):  # each, as it ends, looks whether a thread is left
                link.deliver(RunRollout(order(rollout_id)))
                if (await asyncio.wait({running}, timeout=0.5))[0]:
                    break
            with pytest.raises(WorkerHopeless, match="all 32 threads for reward functions hang"):
                await running
    finally:
        release.set()


class Mute(MultiTurn):
    """Its `reply` hangs until the test is over."""

    def __init__(self) -> None:
        super().__init__()
        self._release, self._entered = threading.Event(), threading.Semaphore(0)

    def prompts(self, split: str) -> Sequence[Prompt]:
        return [Prompt(({"role": "user", "content": "ab"},))]

    async def initial_state(self, prompt: Prompt) -> Any:
        return {}  # needs no thread: every rollout has a state to give back

    def reply(self, state: Any, answer: str) -> Any:
        self._entered.release()
        self._release.wait()

    def is_done(self, state: Any) -> bool:
        return True

    def reward(self, prompt: Prompt, state: Any) -> Reward:
        return Reward(0.0)


class MuteThatHolds(Mute):
    def end_state(self, state: Any) -> None:
        state["ended"] = True


@pytest.mark.parametrize("kind", [Mute, MuteThatHolds])
async def test_replies_that_hang_in_all_threads_end_the_worker_with_no_rollout_to_end(
    template: ChatTemplate, kind: type[Mute], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("telescope.workers.service.LEAVE_S", 0.2)
    task, link = kind(), FakeLink()
    limits = PlayLimits(1.0, 12, 200, 1.0)
    running = asyncio.create_task(WorkerService(link, "worker-0", {"task": loaded(task)}, template, limits, threads=4).run())
    answered: set[str] = set()
    entered, rollout_id = 0, 0
    try:
        async with asyncio.timeout(120):
            while entered < 4 and not running.done():  # on a busy machine some run out of time before they hang
                link.deliver(RunRollout(order(rollout_id)))
                rollout_id += 1
                await asyncio.wait({running}, timeout=0.1)
                for body in [body for body, _, _ in link.sent if isinstance(body, Generate)]:
                    if body.request_id not in answered:
                        answered.add(body.request_id)
                        complete(link, body)
                entered += task._entered.acquire(blocking=False)
            with pytest.raises(WorkerHopeless, match="all 4 threads for reward functions hang"):
                await running
    finally:
        task._release.set()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_rollout_that_refuses_to_end_does_not_keep_the_worker(
    template: ChatTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("telescope.workers.service.LEAVE_S", 0.2)
    release = asyncio.Event()

    class Stubborn(Task):
        async def play(self, prompt: Prompt, chat: Chat) -> Reward:
            await chat.say(*prompt.turns)
            while not release.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await release.wait()
            return Reward(1.0)

    async with serving(template, Stubborn(), replace(LIMITS, timeout_s=600.0)) as (link, running):
        link.deliver(RunRollout(order(1)))
        complete(link, (await link.until_sent(Generate))[0])
        link.deliver(Stop("all steps are done"))
        assert await asyncio.wait_for(running, 120) == "all steps are done"
    release.set()


class Playing(Task):
    """Its `play` does what the test says, then scores."""

    def __init__(self, act: Callable[[], Any]) -> None:
        super().__init__()
        self._act = act

    async def play(self, prompt: Prompt, chat: Chat) -> Reward:
        await chat.say(*prompt.turns)
        return self._act() or Reward(1.0)


async def answer_of(template: ChatTemplate, act: Callable[[], Any]) -> Any:
    """What an order is answered with; a second one shows that the worker lives."""
    async with serving(template, Playing(act)) as (link, running):
        for rollout_id in (1, 2):
            link.deliver(RunRollout(order(rollout_id)))
            complete(link, (await link.until_sent(Generate, rollout_id))[-1])
            async with asyncio.timeout(60):
                while not any(isinstance(body, RolloutResult | RolloutError) for body, _, _ in link.sent[-1:]):
                    link.changed.clear()
                    await link.changed.wait()
        assert not running.done()
        answers = [body for body, _, _ in link.sent if isinstance(body, RolloutResult | RolloutError)]
        assert [body.rollout_id for body in answers] == [1, 2]
        return answers[0]


def cancels() -> None:
    raise asyncio.CancelledError


async def test_an_environment_that_cancels_itself_fails_its_rollout(template: ChatTemplate) -> None:
    answer = await answer_of(template, cancels)
    assert answer == RolloutError(1, 0, "environments.task: it raised CancelledError")


async def test_an_environment_that_exits_fails_its_rollout_and_not_the_worker(template: ChatTemplate) -> None:
    answer = await answer_of(template, lambda: sys.exit("enough"))
    assert isinstance(answer, RolloutError)
    assert answer.cause.startswith("environments.task: SystemExit: enough")


async def test_half_a_character_in_a_text_is_replaced(template: ChatTemplate) -> None:
    answer = await answer_of(template, lambda: Reward(1.0, {"a\ud800": 1.0}, golden_answers=("ab\ud800",)))
    assert isinstance(answer, RolloutResult)
    assert (answer.golden_answers, answer.metrics) == (("ab\ufffd",), {"a\ufffd": 1.0})


async def test_a_text_of_20_million_characters_is_cut_and_says_so(template: ChatTemplate) -> None:
    answer = await answer_of(template, lambda: Reward(1.0, golden_answers=("x" * 20_000_000,)))
    assert isinstance(answer, RolloutResult)
    assert answer.golden_answers == ("x" * 200_000 + " […cut: 19800000 more characters]",)


async def test_a_golden_answer_that_is_a_number_travels_as_text(template: ChatTemplate) -> None:
    answer = await answer_of(template, lambda: Reward(1.0, golden_answers=(42,)))  # type: ignore[arg-type]
    assert answer.golden_answers == ("42",)


async def test_a_score_too_large_for_the_wire_fails_with_its_environment(template: ChatTemplate) -> None:
    metrics = {f"{'m' * 190}{n}": 1.0 for n in range(100_000)}
    answer = await answer_of(template, lambda: Reward(1.0, metrics))
    assert isinstance(answer, RolloutError)
    assert answer.cause.startswith("environments.task: its rollout cannot be sent: header size: ")


async def test_an_error_of_any_length_and_letters_can_be_told(template: ChatTemplate) -> None:
    def complain() -> None:
        raise ValueError("\udfff" * 20_000_000)

    answer = await answer_of(template, complain)
    assert answer.cause.startswith("environments.task: ValueError: \ufffd\ufffd")
    assert len(answer.cause) < 5000


class Slow(Task):
    """Its reward waits until it is let go."""

    def prepare(self) -> asyncio.Event:
        go = asyncio.Event()
        object.__setattr__(self, "_go", go)
        return go

    async def reward(self, prompt: Prompt, answer: str) -> Reward:
        await self._go.wait()
        return Reward(1.0)


async def test_the_end_of_generation_is_said_before_a_slow_reward(template: ChatTemplate) -> None:
    task = Slow()
    go = task.prepare()
    async with serving(template, task, FREE_LANE) as (link, _):
        link.deliver(RunRollout(order(7, attempt=1)))
        (request,) = await link.until_sent(Generate)
        complete(link, request)
        assert await link.until_sent(GenerationEnded) == [GenerationEnded(7, 1)]
        assert not [body for body, _, _ in link.sent if isinstance(body, RolloutResult)]
        go.set()
        await link.until_sent(RolloutResult)
        assert sum(isinstance(body, GenerationEnded) for body, _, _ in link.sent) == 1


class Quick(Task):
    reward_in_thread = False


@pytest.mark.parametrize(("task", "limits"), [(Task, LIMITS), (Quick, FREE_LANE)])
async def test_it_is_not_said_where_nobody_asks_or_the_reward_takes_no_time(
    template: ChatTemplate, task: type[SingleTurn], limits: PlayLimits
) -> None:
    async with serving(template, task(), limits) as (link, _):
        link.deliver(RunRollout(order(7)))
        (request,) = await link.until_sent(Generate)
        complete(link, request)
        await link.until_sent(RolloutResult)
        assert not [body for body, _, _ in link.sent if isinstance(body, GenerationEnded)]


class Talkative(Task):
    """Says that it asks no more, and asks."""

    async def play(self, prompt: Prompt, chat: Chat) -> Reward:
        await chat.say(*prompt.turns)
        chat.close()
        chat.close()
        await chat.say({"role": "user", "content": "ab"})
        return Reward(1.0)


async def test_a_turn_after_the_close_fails_its_rollout(template: ChatTemplate) -> None:
    async with serving(template, Talkative(), FREE_LANE) as (link, _):
        link.deliver(RunRollout(order(7)))
        (request,) = await link.until_sent(Generate)
        complete(link, request)
        (failed,) = await link.until_sent(RolloutError)
        assert "RuntimeError: say was called after close: the lane to generate in has been given away" in failed.cause
        assert sum(isinstance(body, GenerationEnded) for body, _, _ in link.sent) == 1


class Staged(Task):
    """Notes its beginning and its end."""

    def notes(self) -> list[str]:
        kept: list[str] = []
        object.__setattr__(self, "_kept", kept)
        return kept

    async def set_up(self) -> None:
        await asyncio.sleep(0)
        self._kept.append("set up")

    def reward(self, prompt: Prompt, answer: str) -> Reward:
        self._kept.append("scored")
        return Reward(1.0)

    async def tear_down(self) -> None:
        self._kept.append("torn down")
        raise ValueError("in vain")  # logged; the worker ends all the same


async def test_an_environment_is_set_up_before_its_first_rollout_and_torn_down_at_the_end(template: ChatTemplate) -> None:
    task = Staged()
    notes = task.notes()
    async with serving(template, task) as (link, running):
        link.deliver(RunRollout(order(1)))
        complete(link, (await link.until_sent(Generate))[0])
        await link.until_sent(RolloutResult)
        link.deliver(Stop("enough"))
        assert await asyncio.wait_for(running, 60) == "enough"
    assert notes == ["set up", "scored", "torn down"]


async def test_a_set_up_that_fails_ends_the_worker_with_its_name(template: ChatTemplate) -> None:
    class Broken(Task):
        async def set_up(self) -> None:
            raise ConnectionError("no index server")

    async with serving(template, Broken()) as (_, running):
        with pytest.raises(EnvironmentBroken, match=r"environments.task: its set_up failed: ConnectionError: no index server"):
            await asyncio.wait_for(running, 60)


async def test_a_set_up_that_never_ends_is_given_up_and_told_with_its_name_setting_and_line(template: ChatTemplate) -> None:
    class Waiting(Task):
        async def set_up(self) -> None:
            await asyncio.Event().wait()

    late = replace(loaded(Waiting()), set_up_timeout_s=0.05)
    link = FakeLink()
    running = asyncio.create_task(WorkerService(link, "worker-0", {"task": late}, template, LIMITS).run())
    said = (
        r"^environments.task: its set_up was not done within environments.task.set_up_timeout_s=0.05; "
        r"it waited in .*test_service.py line \d+: see what for, or give it longer$"
    )
    with pytest.raises(EnvironmentBroken, match=said):
        await asyncio.wait_for(running, 60)


async def test_a_set_up_that_sets_a_setting_is_told_where_else_to_keep_it(template: ChatTemplate) -> None:
    class Setting(Task):
        async def set_up(self) -> None:
            self.index = 1

    said = r"its set_up failed: ValidationError: Setting.index: Instance is frozen: keep what it makes in a private field"
    async with serving(template, Setting()) as (_, running):
        with pytest.raises(EnvironmentBroken, match=said):
            await asyncio.wait_for(running, 60)


async def test_a_time_out_of_its_own_is_a_failed_set_up(template: ChatTemplate) -> None:
    class Late(Task):
        async def set_up(self) -> None:
            raise TimeoutError("the index server is slow")

    async with serving(template, Late()) as (_, running):
        with pytest.raises(EnvironmentBroken, match=r"its set_up failed: TimeoutError: the index server is slow"):
            await asyncio.wait_for(running, 60)


async def test_a_tear_down_that_never_ends_keeps_neither_the_worker_nor_the_other_environments(
    template: ChatTemplate, caplog: pytest.LogCaptureFixture
) -> None:
    class Staying(Task):
        async def tear_down(self) -> None:
            await asyncio.Event().wait()

    task = Staged()
    notes = task.notes()
    both = {"staying": replace(loaded(Staying(), "staying"), tear_down_timeout_s=0.05), "task": loaded(task)}
    link = FakeLink()
    running = asyncio.create_task(WorkerService(link, "worker-0", both, template, LIMITS).run())
    link.deliver(Stop("enough"))
    assert await asyncio.wait_for(running, 60) == "enough"
    assert notes == ["set up", "torn down"]
    late = "environments.staying: its tear_down failed: not done within environments.staying.tear_down_timeout_s=0.05"
    assert late in caplog.messages
