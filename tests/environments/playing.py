"""Play an environment against a script of answers, in process: what the worker does, without a server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from telescope.environments.base import Environment, Prompt, Reward
from telescope.environments.chat import Sampled, TokenChat
from telescope.environments.template import ChatTemplate


class Answers:
    """A sampler that says the texts one after another, and keeps the prompts."""

    def __init__(self, template: ChatTemplate, texts: Sequence[str]) -> None:
        self._template = template
        self._texts = list(texts)
        self.prompts: list[str] = []

    async def sample(self, ids: np.ndarray, turn: int, max_tokens: int | None) -> Sampled:
        self.prompts.append(self._template.decode(ids.tolist()))
        answer = np.array([*self._template.continuation(self._texts.pop(0)), 1], np.int32)
        return Sampled(answer, np.full(len(answer), -1, np.float32), np.zeros(len(answer), np.int32), "stop")


async def played(
    template: ChatTemplate, environment: Environment, *texts: str, index: int = 0, max_prompt_tokens: int = 2000
) -> tuple[Reward, Answers, Any]:
    """(reward, what was asked, the recording) of one rollout."""
    answers = Answers(template, texts)
    chat = TokenChat(template, answers, max_prompt_tokens)
    prompt: Prompt = environment.prompts("train")[index]
    reward = await environment.play(prompt, chat)
    return reward, answers, chat.recording()
