"""Train on environments of the package verifiers (0.4: tasksets, harnesses, envs of `verifiers.v1`).

    worker: play ─▶ a rollout for the player, with an address and a model's name ─▶ player.py runs the episode, whose harness
            asks the policy there ─▶ its rewards ─▶ Reward

The player is a process beside each worker, in a Python environment of its own if need be: verifiers pins packages that others
pin differently, and its import takes seconds. One JSON object a line goes in ({"number", "task", "base_url", "model"}, or
{"number", "cancel"}), one comes out ({"number", "reward", …}, {"number", "failed", "blame"} or {"number", "cancelled"}). What
the policy was asked is kept with its exact tokens as for every agent program (agent_environment.py). Refuses to know any
taskset.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import Field, PrivateAttr, model_validator

from telescope.environments.base import Chat, Environment, Prompt, Reward
from telescope.environments.env_allowlist import pick_variables
from telescope.environments.failures import ContextFull, GraderError, InfrastructureError
from telescope.environments.proxy.sessions import Proxy, Session
from telescope.environments.tools.call_parsers import CallFormat

log = logging.getLogger(__name__)

PLAYER = Path(__file__).with_name("player.py")
REQUIREMENT = "verifiers>=0.4,<0.5"
LINE = 256 * 1024 * 1024
LEAVING_S = 8.0
"""For the player to end what it holds, once its input has ended; then it is killed."""
KEPT_LINES, KEPT_OF_A_LINE = 40, 1000
READ = 64 * 1024
PIPES_S = 1.5
"""For what is left in the pipes of a player that has ended."""
HUNG_S = 30.0
"""For the player to say that it has given up a rollout, once it is told to; one that says nothing hangs, and is killed."""
OUT_OF_TIME = "agent_timeout"


class Verifiers(Environment):
    """One environment of verifiers, as its own `[env]` settings name it; its rewards are the reward."""

    env: Mapping[str, Any] = Field(default_factory=dict)
    """verifiers' own settings of the environment, as under `[env]` in its files: `{taskset: {id: my-tasks}, agent: {harness:
    {id: null}, runtime: {type: subprocess}}}`. The seat without a `client` is the policy's; others name theirs."""
    eval_taskset: Mapping[str, Any] = Field(default_factory=dict)
    """Settings of the taskset that differ for the eval split, e.g. `{split: test}`; empty: both splits have the same tasks, but
    for what `select` and `eval_select` say."""
    select: Mapping[str, Any] = Field(default_factory=dict)
    """Which tasks of the taskset are trained on, as verifiers selects them: `{shuffle: true, skip: 100, limit: 1000}`."""
    eval_select: Mapping[str, Any] = Field(default_factory=dict)
    """The same for the eval split."""
    path: tuple[str, ...] = ()
    """Folders in which the modules of the taskset lie, where it is not installed."""
    python: str = ""
    """Python that verifiers and the taskset are installed for, e.g. `/home/me/verifiers/bin/python` (3.11 to 3.14); empty: the
    worker's own."""
    variables: tuple[str, ...] = ()
    """Names of environment variables that the player gets beside paths and language, e.g. keys of its judges."""
    call_format: CallFormat = "json"
    """How the policy writes tool calls, where the environment has tools."""
    max_requests: int = Field(default=200, ge=1)
    """Requests that may be made of the policy in one rollout."""
    start_timeout_s: float = Field(default=240.0, gt=0)
    """Seconds for the player to import verifiers and load the environment, or to list the tasks."""

    _proxy: Proxy = PrivateAttr(default_factory=Proxy)
    _player: PlayerProcess | None = PrivateAttr(default=None)

    @model_validator(mode="after")
    def _the_taskset_stays(self) -> Verifiers:
        taskset = self.env.get("taskset", {})
        if not isinstance(taskset, Mapping):
            raise ValueError(f"env.taskset={taskset!r} must be a section of settings, e.g. {{taskset: {{id: my-tasks}}}}")
        if "id" in self.eval_taskset:
            raise ValueError("eval_taskset must not name another id: tasks of both splits are played by one environment")
        return self

    def check_data(self) -> None:
        """Listing the tasks takes a process of its own, and perhaps a download: only whether it could be started is told."""
        if shutil.which(self._python) is None:
            raise ValueError(f"python={self._python} can't be started: it is no program here; name a Python that has verifiers")
        if self._python == sys.executable and importlib.util.find_spec("verifiers") is None:
            raise ValueError(f"verifiers is not installed for {self._python}: {self._python} -m pip install '{REQUIREMENT}'")

    def prompts(self, split: str) -> Sequence[Prompt]:
        return self._listed[split]

    async def set_up(self) -> None:
        await self._proxy.start()
        self._player = PlayerProcess(self._python, {"env": self.env, "path": self._path}, self.variables, self.start_timeout_s)
        await self._player.start()

    async def tear_down(self) -> None:
        if self._player is not None:
            await self._player.close()
        await self._proxy.close()

    async def play(self, prompt: Prompt, chat: Chat) -> Reward:
        if self._player is None:
            raise InfrastructureError("the environment was not set up: its player is not there")
        base_url, model, session = self._proxy.open_by_model(chat, call_format=self.call_format, max_requests=self.max_requests)
        try:
            task = {"task": prompt.facts["task"], "base_url": base_url, "model": model}
            outcome = await _wait_unless_failed(self._player.play(task), session)
            gave_up = session.given_up
        finally:
            await self._proxy.shut(session)
        if session.failure is not None:
            raise session.failure
        return _make_reward(outcome, session, gave_up)

    @cached_property
    def _listed(self) -> Mapping[str, Sequence[Prompt]]:
        """The tasks of both splits, from a player that ends with them. Raises `ValueError` with the remedy."""
        held_out = {**self.env, "taskset": {**self.env.get("taskset", {}), **self.eval_taskset}}
        splits = {"train": {"env": self.env, "select": self.select}, "eval": {"env": held_out, "select": self.eval_select}}
        said = list_tasks(
            self._python, {"splits": splits, "path": self._path}, pick_variables(*self.variables), self.start_timeout_s
        )
        return {
            split: [Prompt(tuple(task["turns"]), facts={"task": task["data"]}) for task in tasks]
            for split, tasks in said["tasks"].items()
        }

    @property
    def _python(self) -> str:
        return self.python or sys.executable

    @property
    def _path(self) -> list[str]:
        return [str(Path(folder).expanduser().resolve()) for folder in self.path]


def make_argv(python: str, mode: str) -> list[str]:
    """Without the folder of player.py in front: `verifiers` there is this package."""
    return [python, "-P", str(PLAYER), mode]


def list_tasks(python: str, settings: Mapping[str, Any], environ: Mapping[str, str], limit_s: float) -> dict[str, Any]:
    """What a player says that lists the tasks; all that it has started ends with it. Raises `ValueError` with the remedy."""
    # Into files: what it has started may hold a pipe open when it has ended long ago.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            process = subprocess.Popen(
                make_argv(python, "tasks"), stdin=subprocess.PIPE, stdout=out, stderr=err, env=environ, start_new_session=True
            )
        except OSError as error:
            raise ValueError(f"python={python} can't be started: {error}") from error
        try:
            process.communicate(json.dumps(settings).encode() + b"\n", limit_s)
        except subprocess.TimeoutExpired as error:
            raise ValueError(f"the tasks were not listed within start_timeout_s={limit_s:g}: raise it") from error
        finally:
            _kill_group(process.pid)
            process.wait(LEAVING_S)
        out.seek(0)
        err.seek(-min(err.tell(), KEPT_LINES * KEPT_OF_A_LINE), os.SEEK_END)
        return _parse_answer(out.read().strip().splitlines(), python, err.read().decode("utf-8", "replace"))


def _parse_answer(lines: Sequence[bytes], python: str, stderr: str) -> dict[str, Any]:
    """The player's one line. Raises `ValueError` for a refusal, and where there is none."""
    if not lines:
        raise ValueError(
            f"verifiers under {python} ended without an answer; its last words: {stderr[-KEPT_LINES * 50 :].strip()}"
        )
    said = _parse_object(lines[-1], python)
    if str(said.get("missing", "")).partition(".")[0] == "verifiers":
        raise ValueError(f"verifiers is not installed for {python}: {python} -m pip install '{REQUIREMENT}'")
    if "refused" in said:
        raise ValueError(f"verifiers refuses the environment: {said['refused']}")
    return said


def _parse_object(line: bytes, python: str) -> dict[str, Any]:
    """Raises `ValueError` for anything but a JSON object."""
    try:
        said = json.loads(line)
    except ValueError:
        said = None
    if not isinstance(said, dict):
        shown = line[:KEPT_OF_A_LINE].decode("utf-8", "replace").strip()
        raise ValueError(
            f"verifiers under {python} said what is not an answer: {shown!r}; see what prints to stdout as that Python starts "
            "(sitecustomize, .pth files)"
        )
    return said


async def _wait_unless_failed(playing: Any, session: Session) -> dict[str, Any]:
    """What the player says of the rollout; cancelled where the policy cannot answer any more."""
    task, failed = asyncio.ensure_future(playing), asyncio.create_task(session.failed.wait())
    try:
        await asyncio.wait((task, failed), return_when=asyncio.FIRST_COMPLETED)
        return {} if failed.done() and not task.done() else await task
    finally:
        task.cancel()
        failed.cancel()
        await asyncio.gather(task, failed, return_exceptions=True)


def _make_reward(outcome: Mapping[str, Any], session: Session, gave_up: bool) -> Reward:
    """The score. Raises the failure that the outcome is, with its owner."""
    if "failed" in outcome:
        if session.overlong:
            raise ContextFull("the conversation left no room for an answer, and its harness ended with that")
        raise (GraderError if outcome["blame"] == "grader" else InfrastructureError)(f"verifiers: {outcome['failed']}")
    if gave_up and outcome["stop"] == OUT_OF_TIME:
        raise InfrastructureError(
            "the agent's time ran out while the policy owed it an answer: give its timeouts more room (timeout.rollout of its "
            "seat), or the run more inference"
        )
    metrics = {
        **outcome["rewards"],
        "agent_turns": float(outcome["turns"]),
        "agent_requests": float(session.requests),
        **outcome["metrics"],
    }
    tags = [
        *([outcome["stop"]] if outcome["stop"] != "agent_completed" else []),
        *(["truncated"] if outcome["truncated"] else []),
    ]
    return Reward(float(outcome["reward"]), metrics, tags=tuple(filter(None, tags)))


class PlayerProcess:
    """The process that plays, and the rollouts that wait for it. One that has died is started again by the next rollout."""

    def __init__(
        self,
        python: str,
        settings: Mapping[str, Any],
        variables: Sequence[str],
        start_timeout_s: float,
        hung_s: float = HUNG_S,
    ) -> None:
        self._python, self._settings, self._start_timeout_s, self._hung_s = python, settings, start_timeout_s, hung_s
        self._environ = dict(pick_variables(*variables))
        self._process: asyncio.subprocess.Process | None = None
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._given_up: dict[int, asyncio.TimerHandle] = {}
        self._numbers = 0
        self._said: deque[str] = deque(maxlen=KEPT_LINES)
        self._reading: list[asyncio.Task[None]] = []
        self._starting = asyncio.Lock()
        self._over = True
        """Whether no player listens: none was started, or what it says has ended."""

    async def start(self) -> None:
        """Raises `ValueError` with the remedy where it refuses, `InfrastructureError` where it dies or takes too long."""
        async with self._starting:
            if not self._over:
                return
            await self._end()
            await self._launch()

    async def _launch(self) -> None:
        pipe = asyncio.subprocess.PIPE
        self._process = process = await asyncio.create_subprocess_exec(
            *make_argv(self._python, "play"),
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            env=self._environ,
            start_new_session=True,
            limit=LINE,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self._reading = [asyncio.create_task(self._listen(process.stderr))]
        process.stdin.write(json.dumps(self._settings).encode() + b"\n")
        try:
            async with asyncio.timeout(self._start_timeout_s):
                first = await process.stdout.readline()
        except TimeoutError as error:
            await self._end()
            raise InfrastructureError(f"verifiers was not ready within start_timeout_s={self._start_timeout_s:g}") from error
        except BaseException:
            _kill_group(process.pid)
            raise
        if not first:
            await self._wait_for_last_words()
        _parse_answer(first.strip().splitlines(), self._python, "\n".join(self._said))
        self._over = False
        self._reading.append(asyncio.create_task(self._read(process.stdout)))

    async def play(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """What became of one rollout."""
        await self.start()
        self._numbers += 1
        number = self._numbers
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            await self._send({"number": number, **request})
            return await future
        except asyncio.CancelledError:
            self._give_up_in_player(number)
            raise
        finally:
            self._waiting.pop(number, None)

    def _give_up_in_player(self, number: int) -> None:
        """Without waiting: it may not read any more. One that does not say that it has given up holds all its rollouts up, and
        would for ever: it is killed, and the next rollout starts another."""
        process = self._process
        with contextlib.suppress(InfrastructureError):
            self._write({"number": number, "cancel": True})
            if process is not None:
                hung = asyncio.get_running_loop().call_later(self._hung_s, self._kill_hung, process)
                self._given_up[number] = hung

    def _kill_hung(self, process: asyncio.subprocess.Process) -> None:
        if process is self._process and not self._over:
            self._said.append(f"(it was killed: it did not give up a rollout within {self._hung_s:g} s, so it hangs)")
            log.warning("the process that plays verifiers' environments hangs and is killed")
            _kill_group(process.pid)

    async def close(self) -> None:
        """End the input, and with it the player and all that it has started."""
        async with self._starting:
            await self._end()

    async def _send(self, message: Mapping[str, Any]) -> None:
        try:
            await self._write(message).drain()
        except ConnectionError as error:
            raise InfrastructureError(self._explain_end()) from error

    def _write(self, message: Mapping[str, Any]) -> asyncio.StreamWriter:
        """Raises `InfrastructureError` where there is no player, as while one is being ended."""
        if self._process is None or self._process.stdin is None:
            raise InfrastructureError(self._explain_end())
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        return self._process.stdin

    async def _read(self, stream: asyncio.StreamReader) -> None:
        try:
            while line := await stream.readline():
                said = _parse_object(line, self._python)
                number = int(said.get("number", 0))
                if number in self._given_up:
                    self._given_up.pop(number).cancel()
                future = self._waiting.get(number)
                if future is not None and not future.done():
                    future.set_result(said)
            await self._wait_for_last_words()
        except (ValueError, TypeError) as error:  # a line too long among them
            self._said.append(f"({error})"[:KEPT_OF_A_LINE])
        finally:
            self._over = True
            self._give_up()

    async def _wait_for_last_words(self) -> None:
        """Until they are read and its status is known."""
        ended = asyncio.create_task(self._process.wait()) if self._process is not None else None
        await asyncio.wait((*self._reading[:1], *([ended] if ended is not None else [])), timeout=PIPES_S)
        if ended is not None:
            ended.cancel()

    def _give_up(self) -> None:
        for timer in self._given_up.values():
            timer.cancel()
        self._given_up.clear()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(InfrastructureError(self._explain_end()))

    async def _listen(self, stream: asyncio.StreamReader) -> None:
        """Keep the last lines, the end of each: a program may print without end, and without an end of line."""
        line = b""
        while part := await stream.read(READ):
            *whole, line = (line + part).split(b"\n")
            line = line[-KEPT_OF_A_LINE:]
            for each in whole[-KEPT_LINES:]:
                self._keep(each)
        self._keep(line)

    def _keep(self, line: bytes) -> None:
        if words := line[-KEPT_OF_A_LINE:].decode("utf-8", "replace").rstrip():
            self._said.append(words)
            log.debug("verifiers: %s", words)

    def _explain_end(self) -> str:
        words = " | ".join(self._said)[-2000:] or "(none)"
        code = None if self._process is None else self._process.returncode
        how = "" if code is None else f" with status {code}" if code >= 0 else f", killed by signal {-code}"
        return f"the process that plays verifiers' environments has ended{how}; its last words: {words}"

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(LEAVING_S):
                await process.wait()
        except TimeoutError:
            log.warning("the process that plays verifiers' environments did not end within %g s and is killed", LEAVING_S)
        finally:
            _kill_group(process.pid)
            await self._drain(process)

    async def _drain(self, process: asyncio.subprocess.Process) -> None:
        """Wait for the end of a killed player. What it has put into a group of its own may hold its pipes: that is not waited
        for, and ends with the worker."""
        ended = asyncio.create_task(process.wait())
        await asyncio.wait((*self._reading, ended), timeout=PIPES_S)
        for task in (*self._reading, ended):
            task.cancel()
        await asyncio.gather(*self._reading, ended, return_exceptions=True)


def _kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # none is left
        os.killpg(leader, signal.SIGKILL)
