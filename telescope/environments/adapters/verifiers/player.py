"""Plays environments of the package verifiers (0.4) for a worker, in whatever Python that package is installed for.

    PYTHON -P player.py tasks < {settings}     writes the tasks, and ends
    PYTHON -P player.py play < {settings} …    then a line of JSON for each rollout to be played, and one for each that was

A program of its own: it knows nothing of Telescope, imports nothing of it, and asks the policy at the address it is given. Its
protocol stands in __init__.py beside it. Refuses what would train the wrong tokens: several seats that ask the policy, retries.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import sys
from collections.abc import Coroutine, Iterable
from typing import Any, TextIO

LINE = 256 * 1024 * 1024
SHOWN = 2000
NO_KEY = "TELESCOPE_POLICY_KEY"
"""Never set: the policy's address is the key."""


class UnusableSettings(Exception):
    """The settings name nothing that can be trained; the message says what to change."""


def main(mode: str) -> None:
    # What programs print must not stand among the answers.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    settings = json.loads(sys.stdin.buffer.readline())
    sys.path[:] = [*settings["path"], *sys.path, os.path.join(os.path.dirname(__file__), "examples")]
    try:
        if mode == "tasks":
            say(out, {"tasks": {split: list(list_tasks(part)) for split, part in settings["splits"].items()}})
        else:
            asyncio.run(serve(settings, out))
    except ModuleNotFoundError as error:
        say(out, {"missing": error.name or "", "refused": str(error)})
    except (UnusableSettings, ValueError, TypeError, AttributeError, OSError) as error:  # pydantic's among them
        say(out, {"refused": f"{error}" if isinstance(error, UnusableSettings) else f"{type(error).__name__}: {error}"})


def say(out: TextIO, message: dict[str, Any]) -> None:
    out.write(json.dumps(message) + "\n")
    out.flush()


def load_environment(settings: dict[str, Any]) -> Any:
    import verifiers.v1 as vf

    env = vf.load_environment(vf.resolve_env_config(settings["env"]))
    check_seats(env)
    return env


def check_seats(env: Any) -> None:
    """One seat alone asks the policy, once: a rollout has one reward, which all that was sampled in it gets."""
    from verifiers.v1.configs.agent import agent_config_fields

    seats = {name: seat for name, seat in agent_config_fields(env.config).items() if seat.client is None}
    if len(seats) != 1:
        raise UnusableSettings(
            f"{len(seats)} seats of {type(env).__name__} ask the policy ({', '.join(seats) or 'none'}): exactly one may; give "
            "each of the others a client and a model of its own (env.<seat>.client.base_url, env.<seat>.model)"
        )
    ((name, seat),) = seats.items()
    if seat.model is not None:
        raise UnusableSettings(f"env.{name}.model={seat.model} must be left away: the seat without a client is the policy's")
    for place, retries in (("env.retries", env.config.retries), (f"env.{name}.retries", seat.retries)):
        if retries.max_retries or any(rule.max_retries for rule in retries.rules):
            raise UnusableSettings(
                f"{place} must be left away: what was sampled before a retry would be trained too (rollout.max_attempts tries "
                "again)"
            )


def list_tasks(settings: dict[str, Any]) -> Iterable[dict[str, Any]]:
    """Each task as verifiers' own data, and the messages it opens with."""
    import verifiers.v1 as vf

    env = load_environment(settings)
    tasks = env.taskset.select(vf.SelectConfig.model_validate(settings["select"]))
    if not tasks.bounded:
        raise UnusableSettings(f"the taskset {env.config.taskset.id} has no end: say how many with select={{limit: 1000}}")
    for task in tasks:
        yield {"data": task.data.model_dump(mode="json"), "turns": opening(task.data)}


def opening(data: Any) -> list[dict[str, str]]:
    """What is known of the first prompt: a harness may put more in front of it."""
    from verifiers.v1.types import content_text

    system = [] if data.system_prompt is None else [{"role": "system", "content": data.system_prompt}]
    if data.prompt is None or isinstance(data.prompt, str):
        return [*system, {"role": "user", "content": data.prompt or ""}]
    return [*system, *({"role": message.role, "content": content_text(message.content)} for message in data.prompt)]


async def serve(settings: dict[str, Any], out: TextIO) -> None:
    """Play what comes until the input ends."""
    env = load_environment(settings)
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=LINE)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer)
    playing: dict[int, asyncio.Task[None]] = {}
    async with env.serving():
        say(out, {"ready": True})
        while line := await reader.readline():
            request = json.loads(line)
            number = request["number"]
            if request.get("cancel"):
                give_up(out, playing.get(number), number)
                continue
            task = playing[number] = asyncio.create_task(answer(out, number, play(env, request)))
            task.add_done_callback(functools.partial(forget, playing, number))
        for task in (left := tuple(playing.values())):
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
    leave()


def leave() -> None:
    """Free what is left and end at once: an interpreter with so much in it takes seconds to end by itself."""
    from verifiers.v1.runtimes.base import cleanup_at_exit

    cleanup_at_exit()
    os._exit(0)


def give_up(out: TextIO, task: asyncio.Task[None] | None, number: int) -> None:
    """Cancel a rollout and say so: whoever gave it up sees that this program still listens."""
    if task is not None:
        task.cancel()
    with contextlib.suppress(BrokenPipeError):
        say(out, {"number": number, "cancelled": True})


def forget(playing: dict[int, asyncio.Task[None]], number: int, _: asyncio.Task[None]) -> None:
    playing.pop(number, None)


async def answer(out: TextIO, number: int, playing: Coroutine[Any, Any, dict[str, Any]]) -> None:
    try:
        outcome = await playing
    except Exception as error:  # noqa: BLE001 the edge of a task: it is this rollout's alone
        outcome = {"failed": f"{type(error).__name__}: {error}", "blame": "infrastructure"}
    with contextlib.suppress(BrokenPipeError):  # the worker has gone; the input ends next
        say(out, {"number": number, **outcome})


async def play(env: Any, request: dict[str, Any]) -> dict[str, Any]:
    from verifiers.v1.clients import ModelContext
    from verifiers.v1.configs.client import EvalClientConfig

    kind = type(env.taskset).task_type()
    task = kind(kind.data_type().model_validate(request["task"]), env.config.taskset.task)
    client = EvalClientConfig(base_url=request["base_url"], api_key_var=NO_KEY)
    (slot,) = env.slots(task)
    episode = await env.run_slot(slot, ModelContext(model=request["model"], client=client))
    return read_outcome(episode, request["model"])


def read_outcome(episode: Any, model: str) -> dict[str, Any]:
    """The score of an episode, or who is to blame that there is none."""
    own = [trace for trace in episode.traces if trace.agent.config.model == model]
    for trace in episode.traces:
        if trace.errors and not trace.ok:
            blame = "grader" if trace.timing.scoring.start else "infrastructure"
            return {"failed": f"{trace.errors[-1].type}: {trace.errors[-1].message}"[-SHOWN:], "blame": blame}
    if episode.errors:
        last = episode.errors[-1]
        blame = "grader" if "finalize()" in last.message else "infrastructure"
        return {"failed": f"{last.type}: {last.message}"[-SHOWN:], "blame": blame}
    if len(own) != 1:
        return {"failed": f"the policy played {len(own)} times in one episode, which has one reward", "blame": "infrastructure"}
    return read_score(own[0])


def read_score(trace: Any) -> dict[str, Any]:
    """What the one trace of the policy earned."""
    if not trace.agent.trainable:
        return {"failed": f"the seat {trace.agent.name} is not to be trained", "blame": "infrastructure"}
    if trace.stop_condition in ("setup_timeout", "finalize_timeout", "scoring_timeout"):
        blame = "grader" if trace.stop_condition == "scoring_timeout" else "infrastructure"
        return {"failed": f"it ended with {trace.stop_condition}", "blame": blame}
    missing = [name for name, reward in trace.rewards.items() if reward is None]
    if missing or not trace.rewards:
        said = f"no value came of {', '.join(missing)}" if missing else "the task has no reward"
        return {"failed": said, "blame": "grader"}
    return {
        "reward": trace.reward,
        "rewards": {name: reward.value for name, reward in trace.rewards.items()},
        "metrics": {name: value for name, value in trace.metrics.items() if value is not None},
        "turns": trace.num_turns,
        "stop": trace.stop_condition or "",
        "truncated": trace.is_truncated,
    }


if __name__ == "__main__":
    main(sys.argv[1])
