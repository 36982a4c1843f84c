"""Schemas of tools count among a prompt's tokens: measured before the run begins, and told as the prompt's where played."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

from telescope.environments.base import Prompt, Reward
from telescope.environments.template import ChatTemplate
from telescope.environments.tool_environment import ToolEnvironment, ToolState
from telescope.wire.messages import RolloutError
from telescope.workers.loading import EnvironmentBroken
from telescope.workers.play import PlayLimits, play
from telescope.workers.prompt_cache import PromptCache
from telescope.workers.prompt_lengths import leave_out_too_long
from tests.workers.conftest import loaded, order
from tests.workers.test_play import answering

# the tiny model has a token a letter


def look(key: str) -> str:
    """Look a word up."""
    return key


def drop(key: str) -> str:
    """Forget it."""
    return key


class Tools(ToolEnvironment):
    tools: ClassVar[Any] = (look, drop)
    lengths: tuple[int, ...] = (1, 40)

    def prompts(self, split: str) -> Sequence[Prompt]:
        return [
            Prompt(({"role": "system", "content": "be"}, {"role": "user", "content": "a" * length}), str(length))
            for length in self.lengths
        ]

    def reward(self, prompt: Prompt, state: ToolState) -> Reward:
        return Reward(1.0)


class FromState(Tools):
    def tools_for(self, state: Any) -> Any:
        return super().tools_for(state)


@pytest.fixture
def by_template(template: ChatTemplate) -> ChatTemplate:
    """Writes the names of its tools, 8 letters in all, and what turns say."""
    named = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
    said = "{% for m in messages %}{{ m.content }}{% endfor %}<|assistant|>"
    return ChatTemplate(template.tokenizer, [1], chat_template=named + said)


def limits(longest: int) -> PlayLimits:
    return PlayLimits(temperature=0.7, max_tokens=12, max_prompt_tokens=longest, timeout_s=60.0)


@pytest.mark.parametrize(("longest", "kept"), [(3 + 40 + 8, 2), (3 + 40 + 7, 1), (3 + 1 + 8, 1)])
def test_what_the_template_writes_of_the_tools_is_measured(by_template: ChatTemplate, longest: int, kept: int) -> None:
    left = leave_out_too_long(loaded(Tools()), by_template, longest, 60)
    assert (left.card.split_sizes["train"], left.card.too_long) == (kept, 2 - kept)


def test_a_listing_in_the_system_turn_is_measured(template: ChatTemplate) -> None:
    """The tiny model's own template writes no tools, so they are listed: some hundred letters."""
    bare = leave_out_too_long(loaded(Tools(tool_prompt="none")), template, 60, 60)
    assert bare.card.too_long == 0
    with pytest.raises(EnvironmentBroken, match=r"environments\.task: the schemas of its tools alone have \d{3} tokens, and "):
        leave_out_too_long(loaded(Tools()), template, 60, 60)


def test_an_environment_of_which_nothing_fits_names_the_schemas(by_template: ChatTemplate) -> None:
    words = (
        r"each of its 2 train prompts is longer than the 3 tokens that inference\.max_model_len - rollout\.max_tokens leaves "
    )
    with pytest.raises(EnvironmentBroken, match=words + "beside the 8 tokens of its tools' schemas"):
        leave_out_too_long(loaded(Tools()), by_template, 11, 60)


async def test_what_is_found_when_it_is_played_is_the_prompts_failure_and_says_what_its_tokens_are(
    by_template: ChatTemplate,
) -> None:
    """Tools that follow from the rollout's state are known to nobody before."""
    environment = loaded(FromState())
    assert leave_out_too_long(environment, by_template, 45, 60).card.too_long == 0
    body, _ = await play(order(0, 1), environment, PromptCache(by_template), limits(45), answering(by_template, "x"))
    assert isinstance(body, RolloutError)
    assert body.kind == "prompt"
    assert (
        "the prompt of turn 0 has 51 tokens, more than the 45 that inference.max_model_len - rollout.max_tokens" in body.cause
    )
    assert "(8 are schemas of tools: look, drop, 2 are the system turn, 41 are the rest)" in body.cause


async def test_a_system_turn_alone_is_told_too(template: ChatTemplate) -> None:
    environment = loaded(Tools(tool_prompt="none"))
    body, _ = await play(order(0, 1), environment, PromptCache(template), limits(20), answering(template, "x"))
    assert isinstance(body, RolloutError)
    assert (body.kind, "are the system turn" in body.cause, "schemas" in body.cause) == ("prompt", True, False)
