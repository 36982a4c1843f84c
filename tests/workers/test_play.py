"""One rollout: a score with its tokens, or a failure with its cause. Never a failure that looks like a score."""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from telescope.config.sections import RemoteServer
from telescope.environments.base import Chat, Environment, Prompt, Reward, SingleTurn
from telescope.environments.chat import ChatError, Sampled
from telescope.environments.failures import InfrastructureError, PolicyError
from telescope.environments.tasks.countdown import Countdown
from telescope.environments.template import ChatTemplate
from telescope.records import RolloutOrder, Sampling
from telescope.wire.messages import RolloutError, RolloutResult
from telescope.workers.main import run_through
from telescope.workers.play import Ask, PlayLimits, make_turn_seed, play
from telescope.workers.prompt_cache import PromptCache
from telescope.workers.report import BadReward, check_reward, encode_info
from telescope.workers.reward_threads import RewardThreads
from telescope.workers.text_chat import ChatCompletions
from tests.workers.conftest import LIMITS, loaded, order


def answering(template: ChatTemplate, text: str, asked: list[Any] | None = None) -> Ask:
    """A server that always answers `text`, with log-probs -1, -2, ... by version 7."""
    ids = np.array([*template.continuation(text), 1], np.int32)

    async def ask(order: RolloutOrder, turn: int, prompt: np.ndarray, sampling: Sampling) -> Sampled:
        if asked is not None:
            asked.append((turn, prompt.tolist(), sampling))
        return Sampled(ids, -np.arange(1, len(ids) + 1, dtype=np.float32), np.full(len(ids), 7, np.int32), "stop")

    return ask


class Task(SingleTurn):
    def prompts(self, split: str) -> Sequence[Prompt]:
        return [Prompt(({"role": "user", "content": "ab"},), answer="ba")] * 3

    def reward(self, prompt: Prompt, answer: str) -> Reward:
        return Reward(0.5)


async def test_a_scored_rollout_carries_its_tokens_and_what_was_said(template: ChatTemplate) -> None:
    task = loaded(Countdown())
    solution = task.prompts["train"][2].answer
    asked: list[Any] = []
    before = time.time_ns()
    done, arrays = await play(order(41, 2, seed=11), task, PromptCache(template), LIMITS, answering(template, solution, asked))
    assert isinstance(done, RolloutResult)
    assert (done.rollout_id, done.attempt, done.reward) == (41, 0, 1.0)
    assert done.metrics == {"exact": 1.0, "valid_format": 1.0, "all_numbers": 1.0}
    assert (done.prompt_text, done.completion_text) == ("<|user|>use 5 5 3 make 3<|assistant|>", "5-5+3")
    assert (done.prompt_tokens, done.completion_tokens, done.branch_lengths, done.turns) == (18, 6, (24,), 1)
    assert (done.finish_reason, done.golden_answers) == ("stop", ("5-5+3",))
    assert before <= done.started_ns <= done.generated_ns <= done.scored_ns <= time.time_ns()
    assert [array.dtype.name for array in arrays] == ["int32", "uint8", "float32", "int32"]
    assert arrays[1].tolist() == [0] * 18 + [1] * 6
    assert arrays[2][18:].tolist() == [-1, -2, -3, -4, -5, -6]
    assert arrays[3].tolist() == [-1] * 18 + [7] * 6
    ((turn, prompt, sampling),) = asked
    assert (turn, prompt) == (0, arrays[0][:18].tolist())
    assert sampling == Sampling(temperature=0.7, max_tokens=12, seed=11)


async def test_an_environment_with_its_own_temperature_and_limit_is_sampled_so_and_says_so(template: ChatTemplate) -> None:
    """Its prompts have the tokens that its answers may not have: 200 and 4 of 12."""
    own = replace(loaded(Task()), temperature=1.5, max_tokens=4)
    for place, expected in ((loaded(Task()), Sampling(0.7, 12, 11)), (own, Sampling(1.5, 4, 11))):
        asked: list[Any] = []
        done, _ = await play(order(), place, PromptCache(template), LIMITS, answering(template, "ba", asked))
        assert isinstance(done, RolloutResult)
        assert [sampling for _, _, sampling in asked] == [expected]
        assert done.temperature == expected.temperature
    assert (LIMITS.of(own).max_prompt_tokens, LIMITS.of(loaded(Task())).max_prompt_tokens) == (208, 200)


async def test_branches_follow_one_another_in_the_frames(template: ChatTemplate) -> None:
    class TwoTurns(Task):
        async def play(self, prompt: Prompt, chat: Chat) -> Reward:
            await chat.say(*prompt.turns)
            await chat.say({"role": "user", "content": "c"})
            return Reward(1.0)

    forgetful = ChatTemplate(
        template.tokenizer, [1], chat_template="{% for m in messages %}<|user|>{{ m.content[-1:] }}{% endfor %}<|assistant|>"
    )
    done, arrays = await play(order(), loaded(TwoTurns()), PromptCache(forgetful), LIMITS, answering(template, "ba"))
    assert isinstance(done, RolloutResult)
    # <user> b <asst> | b a <eos>          <user> b <user> a <user> c <asst> | b a <eos>
    assert done.branch_lengths == (6, 10)
    assert arrays[1].tolist() == [0, 0, 0, 1, 1, 1] + [0] * 7 + [1, 1, 1]
    assert arrays[0].tolist() == [4, 72, 5, 72, 71, 1, 4, 72, 4, 71, 4, 73, 5, 72, 71, 1]


@pytest.mark.parametrize(("name", "carried"), [("", True), ("math", False)])
async def test_recorded_routing_goes_along_with_what_may_be_trained_and_not_with_an_eval(
    template: ChatTemplate, name: str, carried: bool
) -> None:
    answer = answering(template, "ba")

    async def ask(order: RolloutOrder, turn: int, prompt: np.ndarray, sampling: Sampling) -> Sampled:
        sampled = await answer(order, turn, prompt, sampling)
        return replace(sampled, routed=np.full((len(prompt) + len(sampled.ids), 2, 3), 5, np.uint8))

    played = msgspec.structs.replace(order(), eval=name)
    done, arrays = await play(played, loaded(Task()), PromptCache(template), LIMITS, ask)
    assert isinstance(done, RolloutResult)
    assert [array.shape for array in arrays[4:]] == [(len(arrays[0]), 2, 3)] * carried


async def test_turns_of_a_rollout_draw_from_different_seeds() -> None:
    seeds = [make_turn_seed(11, turn) for turn in range(4)]
    assert seeds[0] == 11
    assert len(set(seeds)) == 4
    assert seeds == [make_turn_seed(11, turn) for turn in range(4)]
    assert all(0 <= seed < 2**31 for seed in seeds)


async def failure(environment: Environment, template: ChatTemplate, limits: PlayLimits = LIMITS, ask: Ask | None = None) -> str:
    body, arrays = await play(
        order(5, attempt=2), loaded(environment), PromptCache(template), limits, ask or answering(template, "ba")
    )
    assert isinstance(body, RolloutError)
    assert (body.rollout_id, body.attempt, arrays) == (5, 2, ())
    return body.cause


async def test_a_reward_function_that_raises_is_a_failure_with_its_line(template: ChatTemplate) -> None:
    class Raising(Task):
        def reward(self, prompt: Prompt, answer: str) -> Reward:
            raise KeyError("target")

    cause = await failure(Raising(), template)
    assert cause.startswith("environments.task: KeyError: 'target' (")
    assert "test_play.py line" in cause


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), None, "1"])
async def test_a_reward_that_is_no_finite_number_is_a_failure(template: ChatTemplate, value: Any) -> None:
    class Odd(Task):
        def reward(self, prompt: Prompt, answer: str) -> Reward:
            return Reward(value)

    assert f"the reward's total is {value!r}, not a finite number" in await failure(Odd(), template)


async def test_a_reward_too_large_for_the_advantage_maths_is_a_failure(template: ChatTemplate) -> None:
    class Huge(Task):
        def reward(self, prompt: Prompt, answer: str) -> Reward:
            return Reward(-1e308)

    assert "the reward's total is -1e+308, beyond ±1e+06" in await failure(Huge(), template)


@pytest.mark.timeout(30)
async def test_a_stop_iteration_fails_the_rollout_instead_of_hanging_it(template: ChatTemplate) -> None:
    class Exhausted(Task):
        def reward(self, prompt: Prompt, answer: str) -> Reward:
            return Reward(next(iter(())))

    assert "Exhausted.reward raised StopIteration" in await failure(Exhausted(), template)


async def test_a_metric_that_is_not_finite_is_a_failure_and_numpy_numbers_are_not(template: ChatTemplate) -> None:
    class Odd(Task):
        def reward(self, prompt: Prompt, answer: str) -> Reward:
            return Reward(1.0, {"ratio": float("nan")})

    assert "the reward's metric 'ratio' is nan" in await failure(Odd(), template)
    assert check_reward(Reward(np.float32(0.5), {"ok": np.bool_(True).item(), "n": np.int64(3)})).total == 0.5  # type: ignore[arg-type]


async def test_a_reward_function_that_returns_a_number_is_told_what_to_return(template: ChatTemplate) -> None:
    class Bare(Task):
        def reward(self, prompt: Prompt, answer: str) -> Any:
            return 1.0

    assert "Bare.reward returned float, not a Reward" in await failure(Bare(), template)


async def test_an_environment_cannot_turn_a_failed_generation_into_a_score(template: ChatTemplate) -> None:
    class Forgiving(Task):
        async def play(self, prompt: Prompt, chat: Chat) -> Reward:
            try:
                await chat.say(*prompt.turns)
            except Exception:  # noqa: BLE001 - what a user might write
                return Reward(0.0)
            return Reward(1.0)

    async def broken(*_: Any) -> Sampled:
        raise ChatError("generation failed: server-0 is gone")

    assert await failure(Forgiving(), template, ask=broken) == "environments.task: generation failed: server-0 is gone"


async def test_a_prompt_that_does_not_exist_is_a_failure(template: ChatTemplate) -> None:
    body, _ = await play(order(0, 3), loaded(Task()), PromptCache(template), LIMITS, answering(template, "ba"))
    assert isinstance(body, RolloutError)
    assert "IndexError" in body.cause


async def test_a_prompt_too_long_for_the_model_is_a_failure(template: ChatTemplate) -> None:
    limits = PlayLimits(1.0, 12, 3, 5.0)
    assert "has 4 tokens, more than the 3 that" in await failure(Task(), template, limits)


async def test_time_runs_out_while_the_server_is_silent(template: ChatTemplate) -> None:
    async def silent(*_: Any) -> Sampled:
        await asyncio.Event().wait()
        raise AssertionError

    cause = await failure(Task(), template, PlayLimits(1.0, 12, 200, 0.5), silent)
    assert cause == "rollout.timeout_s=0.5 ran out waiting for the policy's answer"


async def test_time_runs_out_while_a_server_of_somebody_elses_is_silent() -> None:
    async def silent(request: httpx.Request) -> httpx.Response:
        await asyncio.Event().wait()
        raise AssertionError

    client = ChatCompletions(RemoteServer(url="http://host/v1", model="m"), 5.0)
    client._client = httpx.AsyncClient(transport=httpx.MockTransport(silent))

    async def unasked(*_: Any) -> Sampled:
        raise AssertionError

    limits = PlayLimits(1.0, 12, 200, 0.2)
    body, _ = await play(order(0, 0), loaded(Task()), PromptCache(None), limits, unasked, remote=client)
    assert isinstance(body, RolloutError)
    assert body.cause == "rollout.timeout_s=0.2 ran out waiting for the policy's answer"


async def test_time_runs_out_in_a_reward_function_without_holding_up_the_others(template: ChatTemplate) -> None:
    release = threading.Event()

    class Slow(Task):
        def reward(self, prompt: Prompt, answer: str) -> Reward:
            release.wait(10)
            return Reward(1.0)

    try:
        slow = asyncio.ensure_future(failure(Slow(), template, PlayLimits(1.0, 12, 200, 0.2)))
        body, _ = await play(order(1), loaded(Task()), PromptCache(template), LIMITS, answering(template, "ba"))
        assert isinstance(body, RolloutResult)
        assert not slow.done()
        assert await slow == "rollout.timeout_s=0.2 ran out in the environment's own code"
    finally:
        release.set()


async def test_an_async_reward_function_is_awaited(template: ChatTemplate) -> None:
    class Judge(Task):
        async def reward(self, prompt: Prompt, answer: str) -> Reward:  # type: ignore[override]
            await asyncio.sleep(0)
            return Reward(0.25)

    body, _ = await play(order(), loaded(Judge()), PromptCache(template), LIMITS, answering(template, "ba"))
    assert isinstance(body, RolloutResult)
    assert body.reward == 0.25


@pytest.mark.parametrize("error", [StopIteration("next"), SystemExit(3), KeyboardInterrupt()])
async def test_whatever_a_reward_function_raises_in_its_thread_is_a_failure(
    template: ChatTemplate, error: BaseException
) -> None:
    class Raising(Task):
        def reward(self, prompt: Prompt, answer: str) -> Reward:
            raise error

    cause = await failure(Raising(), template)
    assert type(error).__name__ in cause
    assert cause.startswith("environments.task: ")
    assert "test_play.py line" in cause


async def test_stop_iteration_in_a_thread_of_the_plays_own_is_a_failure(template: ChatTemplate) -> None:
    class Own(Task):
        async def play(self, prompt: Prompt, chat: Chat) -> Reward:
            await chat.say(*prompt.turns)
            return Reward(await asyncio.to_thread(next, iter(())))

    asyncio.get_running_loop().set_default_executor(RewardThreads(1))
    assert "it raised StopIteration" in await failure(Own(), template)


async def test_play_that_exits_is_a_failure(template: ChatTemplate) -> None:
    class Exiting(Task):
        async def play(self, prompt: Prompt, chat: Chat) -> Reward:
            sys.exit(4)

    assert (await failure(Exiting(), template)).startswith("environments.task: SystemExit: 4 (")


def test_the_loop_outlives_an_exit_in_a_task_of_the_environments_own(template: ChatTemplate) -> None:
    async def judge() -> float:
        await asyncio.sleep(0)
        sys.exit(5)

    class Judged(Task):
        async def play(self, prompt: Prompt, chat: Chat) -> Reward:
            await chat.say(*prompt.turns)
            return Reward(sum(await asyncio.gather(judge(), judge())))

    async def live() -> int:
        assert (await failure(Judged(), template)).startswith("environments.task: SystemExit: 5 (")
        return 7

    assert run_through(live()) == 7


async def test_rewards_beyond_a_million_are_refused() -> None:
    assert check_reward(Reward(-1e6)).total == -1e6
    for value in (1.1e6, -1e300):
        with pytest.raises(BadReward, match=r"the reward's total is .* beyond ±1e\+06"):
            check_reward(Reward(value))


async def test_a_metric_beyond_its_limit_is_the_failure_of_that_rollout_by_name(template: ChatTemplate) -> None:
    """One perplexity of 1.2e308 once ended a whole run, in the sum of a group's metrics."""

    class Perplexed(Task):
        async def play(self, prompt: Prompt, chat: Chat) -> Reward:
            await chat.say(*prompt.turns)
            return Reward(1.0, metrics={"perplexity": 1.2e308})

    cause = await failure(Perplexed(), template)
    assert cause.startswith(
        "environments.task: BadReward: the reward's metric 'perplexity' is 1.2e+308, beyond ±1e+12: scale it"
    )
    assert check_reward(Reward(1.0, {"n": -1e12})).metrics == {"n": -1e12}
    for value in (1.1e12, 10**13, 10**400):
        with pytest.raises(BadReward, match="the reward's metric 'n' is"):
            check_reward(Reward(1.0, {"n": value}))


def test_a_metrics_name_has_no_slash_which_would_name_a_statistic_of_another() -> None:
    with pytest.raises(BadReward, match="the reward's metric 'tools/count' has a '/' in its name"):
        check_reward(Reward(1.0, {"tools": 3, "tools/count": 5}))


class TwoTurns(Task):
    turns: tuple[float, ...] = (0.25, 0.25)

    async def play(self, prompt: Prompt, chat: Chat) -> Reward:
        await chat.say(*prompt.turns)
        await chat.say({"role": "user", "content": "again"})
        return Reward(0.5, turns=self.turns)


async def test_rewards_by_turn_travel_with_the_tokens_of_each_turn(template: ChatTemplate) -> None:
    done, (_, mask, *_) = await play(order(1, 0), loaded(TwoTurns()), PromptCache(template), LIMITS, answering(template, "ba"))
    assert isinstance(done, RolloutResult)
    assert (done.reward, done.turn_rewards) == (0.5, (0.25, 0.25))
    assert done.branch_turns == (((0, 3), (1, 3)),)
    assert mask.sum() == 6
    done, _ = await play(order(1, 0), loaded(Task()), PromptCache(template), LIMITS, answering(template, "ba"))
    assert isinstance(done, RolloutResult)
    assert not done.turn_rewards
    assert not done.branch_turns


async def test_as_many_rewards_by_turn_as_answers_are_wanted(template: ChatTemplate) -> None:
    wrong = loaded(TwoTurns(turns=(0.25, 0.0, 0.25)))
    done, _ = await play(order(1, 0), wrong, PromptCache(template), LIMITS, answering(template, "ba"))
    assert isinstance(done, RolloutError)
    assert done.kind == "grader"
    assert "the reward has 3 turns, and the policy answered 2 times: give one number for each answer" in done.cause


def test_rewards_by_turn_add_up_to_the_total_but_for_rounding() -> None:
    assert check_reward(Reward(0.3, turns=(0.1, np.float32(0.2)))).turns == (0.1, float(np.float32(0.2)))  # type: ignore[arg-type]
    with pytest.raises(BadReward, match=r"turns add up to 0.5, and its total is 1: they must be the same; give the difference"):
        check_reward(Reward(1.0, turns=(0.25, 0.25)))
    with pytest.raises(BadReward, match=r"the reward's turns\[1\] is nan, not a finite number"):
        check_reward(Reward(1.0, turns=(1.0, math.nan)))
    with pytest.raises(BadReward, match="the reward's turns are of type float, not a tuple of numbers"):
        check_reward(Reward(1.0, turns=1.0))  # type: ignore[arg-type]
    with pytest.raises(BadReward, match="a number of the reward's turns is beyond"):
        check_reward(Reward(0.0, turns=(2e6, -2e6)))


class Turncoat(float):
    """A number that converts to another one."""

    def __float__(self) -> float:
        return math.nan


def test_a_reward_is_checked_in_the_form_in_which_it_is_sent() -> None:
    for reward in (Reward(Turncoat(0.5)), Reward(0.5, {"exact": Turncoat(1.0)})):
        with pytest.raises(BadReward, match="not a finite number"):
            check_reward(reward)
    told = check_reward(Reward(np.float32(0.5), {"n": np.int64(3)}))  # type: ignore[arg-type]
    assert [type(value) for value in (told.total, told.metrics["n"])] == [float, float]


async def failed_body(environment: Environment, template: ChatTemplate, secrets: frozenset[str] = frozenset()) -> RolloutError:
    task = replace(loaded(environment), secrets=secrets)
    body, _ = await play(order(), task, PromptCache(template), LIMITS, answering(template, "ba"))
    assert isinstance(body, RolloutError)
    return body


def raising(error: BaseException, *, in_reward: bool) -> Environment:
    class Raising(Task):
        async def play(self, prompt: Prompt, chat: Chat) -> Reward:
            if in_reward:
                return await super().play(prompt, chat)
            await chat.say(*prompt.turns)
            raise error

        def reward(self, prompt: Prompt, answer: str) -> Reward:
            raise error

    return Raising()


@pytest.mark.parametrize(
    ("error", "in_reward", "kind"),
    [
        (KeyError("gold"), True, "grader"),
        (SystemExit(3), True, "grader"),
        (InfrastructureError("the judge is down"), True, "infrastructure"),
        (KeyError("state"), False, "infrastructure"),
        (InfrastructureError("no sandbox"), False, "infrastructure"),
    ],
)
async def test_a_failure_says_whose_it_is(template: ChatTemplate, error: Exception, in_reward: bool, kind: str) -> None:
    body = await failed_body(raising(error, in_reward=in_reward), template)
    assert body.kind == kind
    assert "test_play.py line" in body.cause


async def test_a_reward_that_is_no_number_is_the_graders_failure(template: ChatTemplate) -> None:
    class Odd(Task):
        def reward(self, prompt: Prompt, answer: str) -> Reward:
            return Reward(float("nan"))

    assert (await failed_body(Odd(), template)).kind == "grader"


async def test_what_the_policy_does_wrong_is_a_score_with_its_name(template: ChatTemplate) -> None:
    error = PolicyError("no such tool: serch", tag="bad_call", total=-0.5, metrics={"calls": 1.0})
    body, arrays = await play(
        order(), loaded(raising(error, in_reward=False)), PromptCache(template), LIMITS, answering(template, "ba")
    )
    assert isinstance(body, RolloutResult)
    assert (body.reward, body.metrics, body.tags) == (-0.5, {"calls": 1.0}, ("bad_call",))
    assert json.loads(body.info) == {"policy_error": "no such tool: serch"}
    assert arrays[1].sum() == 3


async def test_a_policys_fault_before_it_was_asked_is_no_score(template: ChatTemplate) -> None:
    class Early(Task):
        async def play(self, prompt: Prompt, chat: Chat) -> Reward:
            raise PolicyError("it has not even answered")

    assert "without asking the policy" in (await failed_body(Early(), template)).cause


async def test_tags_and_info_travel_within_limits_and_without_secrets(template: ChatTemplate) -> None:
    class Talkative(Task):
        def reward(self, prompt: Prompt, answer: str) -> Reward:
            info = {
                "judge_api_key": "abc",
                "said": "the key is s3cr3t-value",
                "values": (1, float("nan"), np.float32(0.5)),
                3: {"x"},
            }
            return Reward(1.0, tags=("a", "a", "b" * 300, *(f"t{n}" for n in range(50))), info=info, golden_answers=("1", "2"))

    task = replace(loaded(Talkative()), secrets=frozenset({"s3cr3t-value"}))
    body, _ = await play(order(), task, PromptCache(template), LIMITS, answering(template, "ba"))
    assert isinstance(body, RolloutResult)
    assert json.loads(body.info) == {
        "judge_api_key": "<redacted>", "said": "the key is <redacted>", "values": [1, "nan", 0.5], "3": ["x"],
    }  # fmt: skip
    assert (len(body.tags), body.tags[0], len(body.tags[1]) < 300) == (32, "a", True)
    assert body.golden_answers == ("1", "2")


def inside_itself() -> dict[str, Any]:
    info: dict[str, Any] = {}
    info |= {"one": info, "two": info}
    return info


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise Unspeakable


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"golden_answers": {"1", "2"}}, "golden_answers are of type set, not a tuple"),
        ({"golden_answers": {"1": 2}}, "golden_answers are of type dict, not a tuple"),
        ({"golden_answers": 3}, "golden_answers are of type int, not a tuple"),
        ({"golden_answers": None}, "golden_answers are None, not a tuple"),
        ({"golden_answers": (Unspeakable(),)}, "golden_answers can't be written down: Unspeakable"),
        ({"tags": {"a"}}, "tags are of type set, not a tuple"),
        ({"tags": 3}, "tags are of type int, not a tuple"),
        ({"tags": None}, "tags are None, not a tuple"),
        ({"info": {"a"}}, "info is of type set, not a dict"),
        ({"info": 3}, "info is of type int, not a dict"),
        ({"info": None}, "info is None, not a dict"),
        ({"info": inside_itself()}, "nested more than 64 deep, or contains itself"),
        ({"info": {"deep": nested(10_000)}}, "nested more than 64 deep, or contains itself"),
        ({"info": {"n": 10**5000}}, "info can't be written down: ValueError"),
        ({"metrics": None}, "metrics are None, not a dict"),
        ({"metrics": {"n": 10**400}}, "metric 'n' is a whole number too large for a float"),
    ],
)
async def test_a_badly_typed_part_of_a_reward_is_the_graders_failure(
    template: ChatTemplate, parts: dict[str, Any], said: str
) -> None:
    class Odd(Task):
        def reward(self, prompt: Prompt, answer: str) -> Reward:
            return Reward(1.0, **parts)

    body = await failed_body(Odd(), template)
    assert body.kind == "grader"
    assert said in body.cause


class Leaving(Exception):
    """Raises `how` where it is told."""

    def __init__(self, how: BaseException) -> None:
        self.how = how

    def __str__(self) -> str:
        raise self.how


@pytest.mark.parametrize("how", [Unspeakable(), SystemExit(5), KeyboardInterrupt(), asyncio.CancelledError(), GeneratorExit()])
async def test_an_error_that_cannot_be_told_is_a_failure_all_the_same(template: ChatTemplate, how: BaseException) -> None:
    assert "Leaving" in (await failed_body(raising(Leaving(how), in_reward=False), template)).cause


@pytest.mark.parametrize("raises", [False, True])
async def test_a_child_that_comes_back_out_of_play_ends_there(template: ChatTemplate, raises: bool) -> None:
    """It had gone on as the worker: tried further rollouts, and written the failure of a run that went well."""
    children: list[int] = []

    class Forking(Task):
        async def play(self, prompt: Prompt, chat: Chat) -> Reward:
            if not (child := os.fork()):
                if raises:
                    raise ValueError("a child's")
                return Reward(1.0)
            children.append(child)
            await chat.say(*prompt.turns)
            return Reward(0.5)

    own = os.getpid()
    done, _ = await play(order(), loaded(Forking()), PromptCache(template), LIMITS, answering(template, "ba"))
    if os.getpid() != own:
        os._exit(9)  # it came as far as here
    assert isinstance(done, RolloutResult)
    assert done.reward == 0.5
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0]


async def test_no_secret_is_in_what_was_said_or_in_a_metrics_name(template: ChatTemplate) -> None:
    class Careless(Task):
        def prompts(self, split: str) -> Sequence[Prompt]:
            return [Prompt(({"role": "user", "content": "use hhfjehhfje"},))]

        def reward(self, prompt: Prompt, answer: str) -> Reward:
            return Reward(1.0, {"to hhfjehhfje": 1.0})

    task = replace(loaded(Careless()), secrets=frozenset({"hhfjehhfje"}))
    body, _ = await play(order(), task, PromptCache(template), LIMITS, answering(template, "hhfjehhfje"))
    assert isinstance(body, RolloutResult)
    assert (body.prompt_text, body.completion_text) == ("<|user|>use <redacted><|assistant|>", "<redacted>")
    assert dict(body.metrics) == {"to <redacted>": 1.0}


async def test_an_info_too_long_is_cut_and_stays_json(template: ChatTemplate) -> None:
    class Long(Task):
        def reward(self, prompt: Prompt, answer: str) -> Reward:
            return Reward(1.0, info={"log": "x" * 1_000_000})

    body, _ = await play(order(), loaded(Long()), PromptCache(template), LIMITS, answering(template, "ba"))
    assert isinstance(body, RolloutResult)
    assert len(body.info) < 51_000
    assert json.loads(body.info)["cut"].startswith('{"log": "xxx')


def test_no_more_of_an_info_is_read_than_fits() -> None:
    """A worker's loop had stood still for 8 s over a million numbers. The list of lists would have 2^60 numbers written out."""
    read = 0

    class Counted(list[int]):
        def __iter__(self) -> Iterator[int]:
            nonlocal read
            while read < 10**6:
                yield read
                read += 1

    cut = json.loads(encode_info({"first": "a", "y": Counted()}, ()))["cut"]
    assert read < 51_000
    assert cut.startswith('{"first": "a", "y": [0, 1, 2, ')
    assert cut.endswith(" […cut: more follows]")
    assert len(cut) < 51_000
    doubled: list[Any] = [1]
    for _ in range(60):
        doubled = [doubled, doubled]
    assert len(encode_info({"x": doubled}, ())) < 51_000


def test_an_info_that_just_fits_is_whole_and_what_is_cut_off_hides_no_secret() -> None:
    numbers = [1] * 16_664
    assert len(encode_info({"ns": numbers}, ())) == 50_000
    assert json.loads(encode_info({"ns": numbers}, ())) == {"ns": numbers}
    assert list(json.loads(encode_info({"ns": [*numbers, 1]}, ()))) == ["cut"]
    said = "x" * 49_990 + "s3cr3t-value" + "x" * 100_000
    cut = json.loads(encode_info({"said": said, "more": [1]}, {"s3cr3t-value"}))["cut"]
    assert "s3cr" not in cut


async def test_a_secret_in_an_error_is_not_told(template: ChatTemplate) -> None:
    error = InfrastructureError("401 for key s3cr3t-value")
    body = await failed_body(raising(error, in_reward=False), template, frozenset({"s3cr3t-value"}))
    assert "401 for key <redacted>" in body.cause
