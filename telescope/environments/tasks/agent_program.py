"""Train an agent program that speaks to an OpenAI-compatible address: any program, in any language, as it is.

The program and its tasks are settings; agent_environment.py says how it is run and how what it asks is kept. Refuses other
scores than "the last line is the answer": derive from `AgentEnvironment` for those (letter_agent/ does).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from telescope.environments.agent_environment import AgentEnvironment
from telescope.environments.base import Prompt
from telescope.environments.identity import divide, identify


class AgentProgram(AgentEnvironment):
    """Tasks come from a file; a program's last line of output is its answer.

    A line of the file: `{"task": "What is 6 times 7?", "answer": "42"}`; the program reads the task from its stdin.
    """

    command: tuple[str, ...] = ()
    """The program and its arguments, e.g. `[python, /home/me/agent.py]`; no shell reads them."""
    tasks: str = ""
    """JSON lines of the train split, each with `task` and `answer`."""
    eval_tasks: str = ""
    """Those of the eval split; empty: `held_out` tasks of the train split's file."""
    held_out: int = Field(default=0, ge=0)
    """Tasks kept out of training for evals where `eval_tasks` is empty; by a hash of each, so that none is on both sides."""

    @field_validator("command")
    @classmethod
    def _arguments_are_text(cls, command: tuple[str, ...]) -> tuple[str, ...]:
        if any("\0" in part for part in command):
            raise ValueError("command must not hold a null character")
        return command

    def prompts(self, split: str) -> Sequence[Prompt]:
        if not self.command or not self.tasks:
            raise ValueError("give command=[program, argument, …] and tasks=/path/to/tasks.jsonl")
        if self.eval_tasks:
            return _read_prompts(self.eval_tasks if split == "eval" else self.tasks)
        rest, held_out = divide(_read_prompts(self.tasks), self.held_out, ("agent_program",), identify)
        return {"train": rest, "eval": held_out}[split]

    def argv(self, prompt: Prompt) -> Sequence[str]:
        return self.command


def _read_prompts(place: str) -> list[Prompt]:
    file = Path(place).expanduser()
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the tasks in {file} can't be read: {error}: name a file of JSON lines in UTF-8") from error
    return [_read_prompt(line, f"{file} line {at}") for at, line in enumerate(lines, 1) if line.strip()]


def _read_prompt(line: str, place: str) -> Prompt:
    try:
        read: Any = json.loads(line)
        if read["task"] is None:
            raise ValueError("its task is null")
        return Prompt(({"role": "user", "content": str(read["task"])},), str(read.get("answer", "")), dict(read))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f'{place} is not {{"task": …, "answer": …}}: {error!r}') from error
