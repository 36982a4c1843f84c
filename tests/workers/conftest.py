"""A link without a network, environments made for the occasion, and the tiny model's template."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from telescope.config.models import EMBEDDED
from telescope.environments.base import Environment, Prompt
from telescope.environments.template import ChatTemplate
from telescope.records import PromptRef, RolloutOrder
from telescope.wire.codec import RawArrays, encode
from telescope.workers.loading import LoadedEnvironment, make_card
from telescope.workers.play import PlayLimits

LIMITS = PlayLimits(temperature=0.7, max_tokens=12, max_prompt_tokens=200, timeout_s=60.0)


@pytest.fixture(scope="session")
def template() -> ChatTemplate:
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED / "tiny")
    return ChatTemplate(tokenizer, [tokenizer.eos_token_id])


def loaded(environment: Environment, label: str = "task") -> LoadedEnvironment:
    prompts: dict[str, Sequence[Prompt]] = {split: environment.prompts(split) for split in environment.splits}
    return LoadedEnvironment(label, environment, prompts, make_card(label, environment, prompts))


def order(rollout_id: int = 0, index: int = 0, *, attempt: int = 0, seed: int = 11, split: str = "train") -> RolloutOrder:
    return RolloutOrder(rollout_id, rollout_id // 8, rollout_id % 8, attempt, PromptRef("task", split, index), seed)


@dataclass(frozen=True)
class FakeDelivery:
    body: Any
    arrays: tuple[np.ndarray, ...] = ()


@dataclass
class FakeLink:
    """Delivers what a test puts in, and keeps what the worker sends."""

    inbox: asyncio.Queue[FakeDelivery | Exception] = field(default_factory=asyncio.Queue)
    sent: list[tuple[Any, tuple[np.ndarray, ...], Any]] = field(default_factory=list)
    steps: list[str] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def deliver(self, body: Any, *arrays: np.ndarray) -> FakeDelivery:
        delivery = FakeDelivery(body, arrays)
        self.inbox.put_nowait(delivery)
        return delivery

    async def received(self) -> FakeDelivery:
        found = await self.inbox.get()
        if isinstance(found, Exception):
            raise found
        return found

    def send(self, body: Any, arrays: Sequence[np.ndarray] = (), answers: Any = None) -> int:
        encode(body, raw=RawArrays.of(arrays))  # what can't travel is refused as by a real link
        self.sent.append((body, tuple(arrays), answers))
        self.changed.set()
        return len(self.sent)

    def progress(self, doing: str) -> None:
        self.steps.append(doing)

    async def until_sent(self, kind: type, count: int = 1) -> list[Any]:
        """All bodies of the kind, once there are `count`."""
        async with asyncio.timeout(60):
            while True:
                found = [body for body, _, _ in self.sent if isinstance(body, kind)]
                if len(found) >= count:
                    return found
                self.changed.clear()
                await self.changed.wait()
