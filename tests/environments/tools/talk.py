"""A chat with a policy that answers from a list, for environments alone: no tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from telescope.environments.base import ToolSchema, Turn


class Talk:
    """Answers from `answers` (a list, or a function of the turns said last), and remembers what was said to it."""

    def __init__(
        self,
        answers: Sequence[str] | Callable[[Sequence[Turn]], str],
        *,
        shows_tools: bool = True,
        has_tool_role: bool = True,
    ) -> None:
        self._answers = answers
        self.shows_tools = shows_tools
        self.has_tool_role = has_tool_role
        self.said: list[tuple[Turn, ...]] = []
        self.tools: list[ToolSchema] = []
        self.closed = False
        self.tokenizer: Any = None
        self.truncated = False
        self.tokens_left = 10_000

    async def say(self, *turns: Turn, tools: Sequence[ToolSchema] = (), max_tokens: int | None = None) -> str:
        self.said.append(turns)
        self.tools.extend(tools)
        return self._answers(turns) if callable(self._answers) else self._answers[len(self.said) - 1]

    def restart(self, *turns: Turn) -> None:
        raise NotImplementedError

    def dialogue(self) -> Any:
        raise NotImplementedError

    def close(self) -> None:
        self.closed = True

    def results(self, at: int) -> list[str]:
        """Contents of the tool turns of the say number `at`, counted from 0."""
        return [str(turn["content"]) for turn in self.said[at] if turn["role"] == "tool"]
