"""Who talks to the agent: a script that says what the task says, or a language model behind an OpenAI-compatible endpoint.

Owns what a user says next and when they hang up. A model that gives nothing is an `InfrastructureError`: no fault of the agent.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Protocol

from telescope.environments.answer_parsers import strip_thought
from telescope.environments.endpoint import EndpointRefused, RetryingEndpoint
from telescope.environments.failures import InfrastructureError
from telescope.environments.tasks.tau.data import Task

STOP = "###STOP###"
AGREES = "Yes, please go ahead."
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


def rewrite_in_first_person(text: str) -> str:
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
        self._left = [rewrite_in_first_person(line) for line in more if line.strip()]
        return make_opening(self.task)

    async def answer(self, agent: str) -> str:
        if self._left:
            return self._left.pop(0)
        return AGREES if "?" in agent else ""


def make_opening(task: Task) -> str:
    return rewrite_in_first_person(task.reason or task.instructions)


@dataclass
class ModelUser:
    """A language model that plays the customer."""

    task: Task
    model: RetryingEndpoint
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
        try:
            said = await self.model.read(self._said, _read_said)
        except EndpointRefused as error:
            raise InfrastructureError(f"the customer's model does not take the dialogue: {error}") from error
        self._said.append({"role": "assistant", "content": said})
        return "" if STOP in said else said


def _read_said(text: str) -> str:
    """What is said aloud, without a thought before it. Raises `ValueError` for nothing: silence would be hanging up."""
    said = strip_thought(text).strip()
    if not said:
        raise ValueError("its message is empty")
    return said
