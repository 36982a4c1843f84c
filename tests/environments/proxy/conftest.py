"""A policy that answers by what it is asked, behind the proxy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import openai
import pytest

from telescope.environments.chat import ChatError, Sampled, TokenChat
from telescope.environments.proxy.sessions import Proxy, Session
from telescope.environments.template import ChatTemplate

SHOWING = (
    "{% for t in tools or [] %}<|system|>{{ t.function.name }}{% endfor %}"
    "{% for m in messages %}<|{{ 'user' if m.role == 'tool' else m.role }}|>{{ m.content }}"
    "{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}<|assistant|>"
)


@dataclass
class Policy:
    """The `Sampler`: `answer` makes an answer of the prompt's text; log-prob -1 - turn, version = turn."""

    tokenizer: Any
    answer: Callable[[str], str] = lambda prompt: "ok"
    prompts: list[str] = field(default_factory=list)
    limits: list[int | None] = field(default_factory=list)
    held: dict[str, asyncio.Event] = field(default_factory=dict)
    """Prompts that end with this wait for the event."""
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    broken: bool = False

    async def sample(self, ids: np.ndarray, turn: int, max_tokens: int | None) -> Sampled:
        text = self.tokenizer.decode(ids.tolist())
        self.prompts.append(text)
        self.limits.append(max_tokens)
        self.asked.set()
        if self.broken:
            raise ChatError("the server is gone")
        for ending, event in self.held.items():
            if text.endswith(ending):
                try:
                    await event.wait()
                except asyncio.CancelledError:
                    self.cancelled.set()
                    raise
        answer = self.tokenizer.encode(self.answer(text), add_special_tokens=False)
        cut = max_tokens is not None and max_tokens <= len(answer)
        answer = answer[:max_tokens] if cut else [*answer, 1]
        count = len(answer)
        return Sampled(
            np.array(answer, np.int32),
            np.full(count, -1.0 - turn, np.float32),
            np.full(count, turn, np.int32),
            "length" if cut else "stop",
        )


@dataclass
class Rollout:
    policy: Policy
    chat: TokenChat
    proxy: Proxy
    session: Session
    base_url: str

    def client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.base_url, api_key="any", timeout=100, **options)

    def texts(self) -> list[str]:
        return [self.policy.tokenizer.decode(branch.ids.tolist()) for branch in self.chat.recording().branches]

    def trained(self) -> list[str]:
        return [
            self.policy.tokenizer.decode(branch.ids[branch.mask == 1].tolist()) for branch in self.chat.recording().branches
        ]


@pytest.fixture
async def rollout(tiny_tokenizer: Any) -> AsyncIterator[Rollout]:
    policy = Policy(tiny_tokenizer)
    chat = TokenChat(ChatTemplate(tiny_tokenizer, [1], chat_template=SHOWING), policy, 300, max_tokens=200)
    proxy = Proxy()
    await proxy.start()
    base_url, session = proxy.open(chat, max_requests=20)
    yield Rollout(policy, chat, proxy, session, base_url)
    await proxy.close()
