"""Who talks to the agent: a script that says what the task says, or a language model behind an OpenAI-compatible endpoint.

Owns what a user says next and when they hang up. An endpoint that fails is an `InfrastructureError`: no fault of the agent.
"""

from __future__ import annotations

import http.client
import re
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson

from telescope.environments.failures import InfrastructureError
from telescope.environments.off_loop import called
from telescope.environments.tau.data import Task

STOP = "###STOP###"
AGREES = "Yes, please go ahead."
MAX_REPLY_BYTES = 1 << 20
_WORDS = {
    "you are": "I am",
    "you're": "I'm",
    "you were": "I was",
    "you've": "I've",
    "you'd": "I'd",
    "you'll": "I'll",
    "yourself": "myself",
    "yours": "mine",
    "your": "my",
    "you": "I",
}
_OBJECT = re.compile(r"\b(to|for|of|with|from|by|at|gives?|tells?|told|offers?|asks?|sends?|helps?|lets?|allows?) you\b", re.I)
_SECOND = re.compile(r"\b(" + "|".join(re.escape(word) for word in _WORDS) + r")\b", re.I)


class User(Protocol):
    async def open(self) -> str:
        """The first message."""
        ...

    async def answer(self, agent: str) -> str:
        """What the user says to the agent's message; "" if there is no more to say."""
        ...


def first_person(text: str) -> str:
    """The task's "You received your order" as the user says it: "I received my order"."""
    said = _OBJECT.sub(r"\1 me", text)
    return _SECOND.sub(lambda match: _WORDS[match[1].lower()], said)


@dataclass
class ScriptedUser:
    """Says why they call, then what they know, then what else they were told; then agrees to whatever is asked.

    Hangs up when all is said and the agent's message asks nothing. The same task gives the same words in every rollout.
    """

    task: Task
    _left: list[str] = field(default_factory=list)

    async def open(self) -> str:
        more = [" ".join(filter(None, (self.task.known, self.task.unknown))), self.task.instructions]
        self._left = [first_person(line) for line in more if line.strip()]
        return opening_of(self.task)

    async def answer(self, agent: str) -> str:
        if self._left:
            return self._left.pop(0)
        return AGREES if "?" in agent else ""


def opening_of(task: Task) -> str:
    return first_person(task.reason or task.instructions)


@dataclass(frozen=True)
class Endpoint:
    """`POST {base_url}/chat/completions`, e.g. `Endpoint("http://localhost:8000/v1", "qwen", "", 60.0)`."""

    base_url: str
    model: str
    api_key: str
    timeout_s: float

    def complete(self, messages: list[dict[str, str]]) -> str:
        """The model's next message. Blocks; raises `InfrastructureError`."""
        body = orjson.dumps({"model": self.model, "messages": messages, "temperature": 0.0})
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.api_key}"} if self.api_key else {})
        url = f"{self.base_url.rstrip('/')}/chat/completions"
        if not url.startswith(("http://", "https://")):
            raise InfrastructureError(f"user_base_url={self.base_url} must begin with http:// or https://")
        request = urllib.request.Request(url, body, headers)
        try:
            with urllib.request.urlopen(request, timeout=self.timeout_s) as reply:
                said = orjson.loads(reply.read(MAX_REPLY_BYTES))["choices"][0]["message"]["content"]
        except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
            raise InfrastructureError(f"the user's endpoint {url} failed: {error}") from error
        except (orjson.JSONDecodeError, LookupError, TypeError) as error:
            raise InfrastructureError(f"the user's endpoint {url} gave no chat completion: {error}") from error
        if not isinstance(said, str):
            raise InfrastructureError(f"the user's endpoint {url} gave a message without a text")
        return said


@dataclass
class ModelUser:
    """A language model that plays the customer."""

    task: Task
    complete: Callable[[list[dict[str, str]]], Any]
    _said: list[dict[str, str]] = field(default_factory=list)

    async def open(self) -> str:
        task = self.task
        scenario = "\n".join(filter(None, (task.reason, task.known, task.unknown, task.instructions)))
        rules = (
            "You play a customer who talks to a company's agent. Write one short message at a time, as the customer would. "
            "Say only what the scenario holds, and not all of it at once; make nothing up. Agree when the agent proposes what "
            f"the scenario wants. When everything is settled, or you are transferred, write {STOP}.\n\nScenario:\n{scenario}"
        )
        self._said = [{"role": "system", "content": rules}]
        return await self.answer("Hello, how can I help you today?")

    async def answer(self, agent: str) -> str:
        self._said.append({"role": "user", "content": agent})
        said: str = await called(self.complete, list(self._said))
        self._said.append({"role": "assistant", "content": said})
        return "" if STOP in said else said
