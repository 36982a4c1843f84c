"""The shape of every environment whose policy is asked by a program of its own, through an OpenAI-compatible address.

    play ─▶ a base_url of this rollout ─▶ the program, with OPENAI_BASE_URL ─▶ its requests are answered by the policy
         ◀─ score(prompt, how it ended)

Every request is kept with its exact tokens; conversations that go on extend a dialogue, others begin a branch, and all sampled
tokens get the rollout's reward (docs/trajectories.md). Refuses to know a task (subclasses give `prompts` and `argv`) and to
confine the program: it runs with the worker's rights.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from pydantic import Field, PrivateAttr

from telescope.environments.base import Chat, Environment, Prompt, Reward
from telescope.environments.failures import InfrastructureError
from telescope.environments.proxy.program import Outcome, run_program
from telescope.environments.proxy.sessions import Proxy
from telescope.environments.proxy.shapes import MODEL
from telescope.environments.tools.calls import CallFormat
from telescope.environments.written import to_be_given
from telescope.runlog import temporary

SHOWN = 2000
TIMED_OUT, FAILED = "agent_timeout", "agent_failed"


class AgentEnvironment(Environment):
    """Subclasses give `prompts` and `argv`; `stdin` and `score` where theirs differ."""

    reward_min: ClassVar[float | None] = 0.0
    reward_max: ClassVar[float | None] = 1.0

    time_limit_s: float = Field(default=480.0, gt=0)
    """Seconds a program may run, those left out in which the policy owes it an answer; then it is killed and scored as it is.
    Keep it below `rollout.timeout_s`, which counts all."""
    max_requests: int = Field(default=200, ge=1)
    """Requests a program may make of the policy in one rollout."""
    call_format: CallFormat = "json"
    """How the policy writes tool calls, where the program gives tools."""
    variables: Mapping[str, str] = Field(default_factory=dict)
    """Further environment variables of the program."""

    _proxy: Proxy = PrivateAttr(default_factory=Proxy)
    _folder: Path | None = PrivateAttr(default=None)
    """Holds the folders of programs, and is swept after a worker that was killed."""

    async def set_up(self) -> None:
        await self._proxy.start()
        self._folder = temporary.make()

    async def tear_down(self) -> None:
        await self._proxy.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    @to_be_given
    def argv(self, prompt: Prompt) -> Sequence[str]:
        """The program for one task, and its arguments; no shell reads them."""
        raise NotImplementedError

    def stdin(self, prompt: Prompt) -> str:
        """What the program reads."""
        return str(prompt.turns[-1]["content"])

    async def score(self, prompt: Prompt, outcome: Outcome) -> Reward:
        """1 where the last line of output is the answer, else 0; override it for anything else."""
        lines = outcome.stdout.strip().splitlines()
        exact = outcome.exit_code == 0 and bool(lines) and lines[-1].strip() == prompt.answer.strip()
        return Reward(float(exact), {"exact": float(exact)})

    async def play(self, prompt: Prompt, chat: Chat) -> Reward:
        base_url, session = self._proxy.open(chat, call_format=self.call_format, max_requests=self.max_requests)
        secret = base_url.split("/")[-2]
        variables = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": secret, "OPENAI_MODEL": MODEL, **self.variables}
        try:
            outcome = await run_program(
                self.argv(prompt),
                variables=variables,
                stdin=self.stdin(prompt),
                limit_s=self.time_limit_s,
                give_up=session.failed,
                waited_s=session.waited_s,
                below=self._folder,
            )
        finally:
            await self._proxy.shut(session)
        if session.failure is not None:
            raise session.failure
        _blame_the_wait(outcome, session.given_up)
        chat.close()
        reward = await self.scored(self.score, prompt, outcome)
        return _with_outcome(reward, outcome, session.requests)


def _blame_the_wait(outcome: Outcome, given_up: bool) -> None:
    """A program that failed after an answer had not come in its client's time says nothing of the policy: raise."""
    if not given_up or outcome.exit_code == 0:
        return
    how = "was killed at time_limit_s" if outcome.timed_out else f"ended with the exit code {outcome.exit_code}"
    raise InfrastructureError(
        f"the agent program {how}, and had given up a request before the policy's answer was there: give its client a longer "
        f"timeout, or the run more inference. Its stderr ends: {outcome.stderr[-SHOWN:].strip() or '(nothing)'}"
    )


def _with_outcome(reward: Reward, outcome: Outcome, requests: int) -> Reward:
    failed = outcome.exit_code not in (0, None)
    tags = (*reward.tags, *([TIMED_OUT] if outcome.timed_out else []), *([FAILED] if failed else []))
    info = {"exit_code": outcome.exit_code, "stdout": outcome.stdout[-SHOWN:], "stderr": outcome.stderr[-SHOWN:], **reward.info}
    metrics = {"agent_requests": float(requests), **reward.metrics}
    return Reward(reward.total, metrics, reward.golden_answers, tags, info)
