"""The shape of every environment whose policy is asked by a program of its own, through an OpenAI-compatible address.

    play ─▶ a base_url of this rollout ─▶ the program, with OPENAI_BASE_URL ─▶ its requests are answered by the policy
         ◀─ score(prompt, how it ended)

Every request is kept with its exact tokens; conversations that go on extend a dialogue, others begin a branch, and all sampled
tokens get the rollout's reward (docs/trajectories.md). The program runs beside the rollout in a process group of its own, with
no shell, a time limit, and output that cannot grow without end; the group is killed when the program ends, whatever it has
started. Refuses to know a task (subclasses give `prompts` and `argv`) and to confine the program: it has the worker's rights.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, PrivateAttr

from telescope.environments.base import Chat, Environment, Prompt, Reward
from telescope.environments.env_allowlist import pick_variables
from telescope.environments.failures import InfrastructureError
from telescope.environments.proxy.chat_completions import MODEL
from telescope.environments.proxy.sessions import Proxy
from telescope.environments.tools.call_parsers import CallFormat
from telescope.environments.validate import must_override
from telescope.runlog import temporary

SHOWN = 2000
TIMED_OUT, FAILED = "agent_timeout", "agent_failed"
MAX_OUTPUT_BYTES = 1024 * 1024
FINEST_S = 0.1
"""A program is killed at most this much behind its limit."""
PIPES_S = 10.0
"""For what is left in the pipes once the whole group is dead."""


@dataclass(frozen=True)
class ProgramOutcome:
    """How a program ended. `exit_code` is None where it was killed at its limit."""

    exit_code: int | None
    stdout: str
    stderr: str
    """Of both the first MAX_OUTPUT_BYTES."""

    @property
    def timed_out(self) -> bool:
        return self.exit_code is None


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

    @must_override
    def argv(self, prompt: Prompt) -> Sequence[str]:
        """The program for one task, and its arguments; no shell reads them."""
        raise NotImplementedError

    def stdin(self, prompt: Prompt) -> str:
        """What the program reads."""
        return str(prompt.turns[-1]["content"])

    async def score(self, prompt: Prompt, outcome: ProgramOutcome) -> Reward:
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
        reward = await self.run_reward(self.score, prompt, outcome)
        return _add_outcome(reward, outcome, session.requests)


def _blame_the_wait(outcome: ProgramOutcome, given_up: bool) -> None:
    """A program that failed after an answer had not come in its client's time says nothing of the policy: raise."""
    if not given_up or outcome.exit_code == 0:
        return
    how = "was killed at time_limit_s" if outcome.timed_out else f"ended with the exit code {outcome.exit_code}"
    raise InfrastructureError(
        f"the agent program {how}, and had given up a request before the policy's answer was there: give its client a longer "
        f"timeout, or the run more inference. Its stderr ends: {outcome.stderr[-SHOWN:].strip() or '(nothing)'}"
    )


def _add_outcome(reward: Reward, outcome: ProgramOutcome, requests: int) -> Reward:
    failed = outcome.exit_code not in (0, None)
    tags = (*reward.tags, *([TIMED_OUT] if outcome.timed_out else []), *([FAILED] if failed else []))
    info = {"exit_code": outcome.exit_code, "stdout": outcome.stdout[-SHOWN:], "stderr": outcome.stderr[-SHOWN:], **reward.info}
    metrics = {"agent_requests": float(requests), **reward.metrics}
    return replace(reward, metrics=metrics, tags=tags, info=info)


async def run_program(
    argv: Sequence[str],
    *,
    variables: Mapping[str, str],
    stdin: str,
    limit_s: float,
    give_up: asyncio.Event,
    waited_s: Callable[[], float] = lambda: 0.0,
    below: Path | None = None,
) -> ProgramOutcome:
    """Run it in an empty folder of its own until it ends, `limit_s` has passed or `give_up` is set.

    `below`: where that folder is made; the system's folder for temporary files by default.
    `waited_s`: how many seconds so far were none of the program's; they do not count against `limit_s`.
    Raises OSError where it can't be started.
    """
    with tempfile.TemporaryDirectory(prefix="agent-", dir=below, ignore_cleanup_errors=True) as folder:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=folder,
            env={**pick_variables(), **variables},
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        out, err = asyncio.create_task(_read_head(process.stdout)), asyncio.create_task(_read_head(process.stderr))
        writing = asyncio.create_task(_feed(process.stdin, stdin.encode("utf-8", "replace")))
        ended, stopped = asyncio.create_task(process.wait()), asyncio.create_task(give_up.wait())
        try:
            await _wait_for_end(limit_s, waited_s, ended, stopped)
            code = ended.result() if ended.done() else None
        finally:
            _kill_group(process.pid)
            writing.cancel()
            stopped.cancel()
            # A child that left the group may hold the pipes open: what it says is not waited for.
            await asyncio.wait((out, err, ended), timeout=PIPES_S)
            out.cancel()
            err.cancel()
            await asyncio.gather(out, err, writing, stopped, return_exceptions=True)
        said = [b"" if task.cancelled() else task.result() for task in (out, err)]
        return ProgramOutcome(code, *(text.decode("utf-8", "replace") for text in said))


async def _wait_for_end(limit_s: float, waited_s: Callable[[], float], *tasks: asyncio.Task[Any]) -> None:
    """Until one of the tasks has ended, or `limit_s` have passed that `waited_s` does not count."""
    started = time.monotonic()
    while (left := limit_s - (time.monotonic() - started - waited_s())) > 0:
        done, _ = await asyncio.wait(tasks, timeout=max(left, FINEST_S), return_when=asyncio.FIRST_COMPLETED)
        if done:
            return


async def _read_head(stream: asyncio.StreamReader) -> bytes:
    """The first MAX_OUTPUT_BYTES; the rest is read and dropped, so that the program does not wait for a reader."""
    kept = bytearray()
    while part := await stream.read(64 * 1024):
        kept += part[: MAX_OUTPUT_BYTES - len(kept)]
    return bytes(kept)


async def _feed(stream: asyncio.StreamWriter, text: bytes) -> None:
    with contextlib.suppress(ConnectionError):  # it has ended, or does not read
        stream.write(text)
        await stream.drain()
    stream.close()


def _kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # none is left
        os.killpg(leader, signal.SIGKILL)
