"""Dialogues of `telescope chat`: a person's turns, the model's answers, and the calls of an environment's tools between them.

What rollouts do is done by what does it there: `TokenChat` keeps the exact tokens, `TextChat` those of a server of somebody
else's, and a `ToolEnvironment` tells of its tools, reads calls and runs them. Only the person takes the place of what an
environment would say next. Refuses to know servers and terminals.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from telescope.cli.chat_stream import SamplingOptions, StreamingClient
from telescope.environments.base import Chat, Prompt, Turn
from telescope.environments.tool_environment import ToolEnvironment
from telescope.environments.tools.redact import declare_secrets
from telescope.workers.loading import LoadedEnvironment

Tell = Callable[[str], None]
SHOWN = 300
"""Characters of a question."""


class ChatSession(Protocol):
    async def answer(self, text: str) -> None:
        """Take a person's turn, and have the model answer; whoever made this shows it as it comes."""
        ...

    async def forget(self) -> None:
        """The next turn begins anew."""
        ...

    async def close(self) -> None:
        """Give back what it holds."""
        ...


class RawConversation:
    """No dialogue: each text is one that the model goes on with."""

    def __init__(self, client: StreamingClient, model: str, options: SamplingOptions) -> None:
        self._client, self._model, self._options = client, model, options

    async def answer(self, text: str) -> None:
        await self._client.read("/completions", {"model": self._model, "prompt": text, **self._options.spell()})

    async def forget(self) -> None:
        """There is nothing to be forgotten."""

    async def close(self) -> None:
        """Nor to be given back."""


@dataclass(frozen=True)
class ChatRole:
    """The environment whose part the model plays, by its first prompt of training: what that begins with, and the tools."""

    loaded: LoadedEnvironment

    @property
    def prompt(self) -> Prompt:
        return self.loaded.prompts["train"][0]

    @property
    def system(self) -> tuple[Turn, ...]:
        return tuple(turn for turn in self.prompt.turns if turn.get("role") == "system")

    @property
    def question(self) -> str:
        """What its prompt asks, in a line for a person to try."""
        asked = next((str(turn.get("content")) for turn in reversed(self.prompt.turns) if turn.get("role") == "user"), "")
        line = " ".join(asked.split())
        return line if len(line) <= SHOWN else f"{line[:SHOWN]}…"

    @property
    def tools(self) -> ToolEnvironment | None:
        environment = self.loaded.environment
        return environment if isinstance(environment, ToolEnvironment) else None


class ChatConversation:
    """Several turns with a history. `open_chat` makes an empty one; `system` goes before the first turn; `tell` gets what is
    not the model's own text; `is_stopped`: whether the answer that came last was cut short by the person."""

    def __init__(
        self,
        open_chat: Callable[[], Chat],
        system: Sequence[Turn],
        role: ChatRole | None,
        tell: Tell,
        is_stopped: Callable[[], bool],
    ) -> None:
        self._open_chat, self._system, self._role, self._tell, self._is_stopped = open_chat, system, role, tell, is_stopped
        self._chat, self._begun = open_chat(), False
        self._state: Any = None
        """Of the tools, once there is one."""
        self._unsaid: Sequence[Turn] = ()
        """Results of calls that the model has not read yet."""

    async def forget(self) -> None:
        await self.close()
        self._chat, self._begun, self._unsaid = self._open_chat(), False, ()

    async def close(self) -> None:
        tools = None if self._role is None else self._role.tools
        state, self._state = self._state, None
        if tools is not None and state is not None:
            await tools.run_end_state(state)

    async def answer(self, text: str) -> None:
        user: Turn = {"role": "user", "content": text}
        turns = (*self._unsaid, user) if self._begun else (*self._system, user)
        if self._role is None or self._role.tools is None:
            await self._chat.say(*turns)
            self._begun = True
            return
        with declare_secrets(self._role.loaded.secrets):
            await self._answer_with_tools(self._role.tools, self._role.prompt, turns)

    async def _answer_with_tools(self, environment: ToolEnvironment, prompt: Prompt, turns: Sequence[Turn]) -> None:
        if not self._begun:  # also where a first answer failed: the tools have to be told again
            await self.close()
            self._state = await environment.run_method(environment.initial_state, prompt)
        state = self._state
        for _ in range(environment.turn_limit):
            said = await environment.say(self._chat, state, turns)
            self._begun, self._unsaid = True, ()
            if self._is_stopped() or not environment.parse(state, said).calls:
                return
            turns = self._unsaid = await environment.reply(state, said)
            self._tell("".join(map(describe_result, turns)))
        self._tell(f"[{environment.turn_limit} answers with calls: the next turn is yours (max_turns)]\n")


def describe_result(turn: Turn) -> str:
    """`[look] bjdc` in a line; empty for an answer that is spelled out as calls."""
    if turn.get("role") == "assistant":
        return ""
    content = turn.get("content")
    return f"[{turn.get('name') or 'result'}] {content if isinstance(content, str) else json.dumps(content)}\n"
