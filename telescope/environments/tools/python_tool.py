"""A tool with which the policy runs Python it has written, in a sandbox, while it thinks about a question.

    answer ─▶ python(code) ─▶ a fresh sandbox of the pool ─▶ what it printed, or its error ─▶ … ─▶ final answer ─▶ score

Each call is a program of its own: it prints what is to be known, and nothing of it is left for the next one. One that fails or
takes too long is the policy's error; a provider that fails is the infrastructure's. Refuses to know the question: whoever has
one gives its score (`with_score`).
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from pydantic import Field, PrivateAttr, model_validator

from telescope.environments.base import Prompt, Reward
from telescope.environments.sandboxes.base import Ending, Outcome, SandboxError
from telescope.environments.sandboxes.pool import Pool, SandboxSettings, Use
from telescope.environments.tool_environment import ToolEnvironment, ToolState
from telescope.environments.tools.schema import ToolFunction

Score = Callable[[Prompt, str], Awaitable[Reward]]
SHOWN_OF_AN_ERROR = 1500
_FENCED = re.compile(r"\A\s*```[a-zA-Z0-9]*[ \t]*\n(.*?)(?:\n```\s*)?\Z", re.DOTALL)
"""Models put code into Markdown even where a parameter holds nothing else."""


@dataclass
class PythonState(ToolState):
    """`uses`: what the sandboxes of this rollout cost, a call each."""

    uses: list[Use] = field(default_factory=list)


class ProgramFailed(ValueError):
    """The program did; the policy reads the message."""


class PythonTool(ToolEnvironment):
    """Settings of the tool and of the dialogue around it; a part of environments that offer it."""

    python_limit_s: float = Field(default=5.0, gt=0, le=600)
    """Seconds that one program may run; not more than `sandbox.limits.time_s`. Waiting for a sandbox does not count."""
    site_packages: bool = False
    """Whether programs may import what is installed for `sandbox.python`, e.g. sympy; they then take longer to start."""
    sandbox: SandboxSettings = SandboxSettings()
    """Where programs run; `output_kb` of its limits is the most that one may print."""

    _pool: Pool | None = PrivateAttr(default=None)
    _score: Score | None = PrivateAttr(default=None)

    @model_validator(mode="after")
    def _a_command_may_take_that_long(self) -> PythonTool:
        most = self.sandbox.limits.time_s
        if self.python_limit_s > most:
            raise ValueError(
                f"python_limit_s={self.python_limit_s:g} must not be above sandbox.limits.time_s={most:g}, which ends every "
                "command: raise the second, or lower the first"
            )
        return self

    async def python(self, code: str, state: PythonState) -> str:
        """Run a Python 3 program and read what it prints. Nothing is kept from one call to the next.

        Args:
            code: The whole program. Print what you want to know.
        """
        if self._pool is None:
            raise SandboxError("the environment was not set up: its sandboxes are not there")
        async with self._pool.sandbox() as guest:
            state.uses.append(guest.use)
            await guest.upload("main.py", strip_markdown(code).encode("utf-8", "replace"))
            argv = ["python3", "-I", *([] if self.site_packages else ["-S"]), "main.py"]
            return read_outcome(await guest.exec(argv, timeout_s=self.python_limit_s), self.python_limit_s)

    tools: ClassVar[tuple[ToolFunction, ...]] = (python,)

    def with_score(self, score: Score) -> PythonTool:
        """The same settings for the environment whose answers `score` judges."""
        made = self.model_copy()
        made._score, made._pool = score, None
        return made

    def time_limit_of(self, tool: str) -> float | None:
        """The sandbox holds the program's limit; a queue for sandboxes is none of the policy's errors."""
        return None

    def initial_state(self, prompt: Prompt) -> PythonState:
        return PythonState()

    async def set_up(self) -> None:
        await super().set_up()
        self._pool = await Pool.open(self.sandbox)

    async def tear_down(self) -> None:
        if self._pool is not None:
            await self._pool.close()
            self._pool = None

    async def reward(self, prompt: Prompt, state: PythonState) -> Reward:
        """Of the final answer, with what the sandboxes cost beside it."""
        assert self._score is not None, "only what `with_score` gives is played"
        reward = await self._score(prompt, state.final_answer)
        cost, rows = sum_uses(state.uses)
        return replace(reward, metrics={**cost, **reward.metrics}, info={**reward.info, **rows})


def strip_markdown(code: str) -> str:
    """Without the Markdown around it: "```python\\nprint(1)\\n```" is `print(1)`."""
    fenced = _FENCED.match(code)
    return fenced[1] if fenced else code


def read_outcome(outcome: Outcome, limit_s: float) -> str:
    """What the policy reads of a program that went well. Raises `ProgramFailed` for any other."""
    printed, complaint = outcome.text, outcome.stderr.decode("utf-8", "replace").strip()[-SHOWN_OF_AN_ERROR:]
    match outcome.ending:
        case Ending.TIMED_OUT:
            raise ProgramFailed(f"the program took longer than {limit_s:g} s and was ended")
        case Ending.FLOODED:
            raise ProgramFailed(f"the program printed too much and was ended. It began with: {printed[:SHOWN_OF_AN_ERROR]}")
        case Ending.DIED:
            raise ProgramFailed("the program took its sandbox down (out of memory, it may be)")
        case Ending.EXITED if outcome.exit_code != 0:
            before = f" Before that it printed: {printed[-SHOWN_OF_AN_ERROR:]}" if printed else ""
            raise ProgramFailed(f"{complaint or f'the program ended with exit code {outcome.exit_code}'}{before}")
    return printed if printed.strip() else "(the program printed nothing)"


def sum_uses(uses: Sequence[Use]) -> tuple[dict[str, float], dict[str, Any]]:
    """Metrics, which are the sums over all calls, and one row for the reader of the rollout; of no call zeros and no row."""
    parts = [use.metrics() for use in (Use(""), *uses)]
    cost = {name: sum(part[name] for part in parts) for name in parts[0]}
    return cost, {"sandbox": [use.row() for use in uses]} if uses else {}
