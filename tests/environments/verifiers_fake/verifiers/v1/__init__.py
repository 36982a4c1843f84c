"""As much of verifiers 0.4 as its player calls, in the shapes that the real one has: a stand-in that starts in no time.

Its one environment asks the policy for each of the texts in a task's `says`, and scores as the task says: `does` may be a sleep
(`waits`), a death, or a failure at some point. What it is told to stop it writes to the file in `notes`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import urllib.request
from types import SimpleNamespace as Thing

from verifiers.v1.clients import ModelContext


class Data:
    def __init__(self, **values):
        self.__dict__.update({"prompt": None, "system_prompt": None, "does": "", "says": ["go"], "notes": "", **values})

    model_validate = classmethod(lambda cls, values: cls(**values))

    def model_dump(self, mode):
        return dict(self.__dict__)


class Task:
    data_type = staticmethod(lambda: Data)

    def __init__(self, data, config):
        self.data, self.config = data, config


class Taskset:
    bounded = True
    task_type = staticmethod(lambda: Task)

    def __init__(self, config):
        self.tasks = [Task(Data(**values), None) for values in config.get("tasks", [])]
        self.bounded = not config.get("endless")

    def select(self, chosen):
        self.tasks = self.tasks[: chosen.get("limit")]
        return self

    def __iter__(self):
        return iter(self.tasks)


SelectConfig = Thing(model_validate=dict)
NO_RETRIES = {"max_retries": 0, "rules": []}


class Env:
    def __init__(self, raw):
        seats = raw.get("seats", {"agent": {}})
        self.seats = {
            name: Thing(
                client=None, model=None, **{"retries": Thing(**NO_RETRIES), **{k: v for k, v in seat.items() if k != "retries"}}
            )
            if "client" not in seat
            else Thing(client=seat["client"], model="other", retries=Thing(**NO_RETRIES))
            for name, seat in seats.items()
        }
        self.config = Thing(
            seats=self.seats,
            taskset=Thing(id="fake", task=None),
            retries=Thing(max_retries=raw.get("retries", 0), rules=[]),
        )
        self.taskset = Taskset(raw.get("taskset", {}))

    @contextlib.asynccontextmanager
    async def serving(self):
        yield

    def slots(self, task):
        return (task,)

    async def run_slot(self, task, context: ModelContext):
        trace = Thing(
            agent=Thing(config=Thing(model=context.model), trainable=task.data.does != "frozen", name="agent"),
            ok=True,
            errors=[],
            rewards={},
            metrics={"waited": None},
            stop_condition="agent_completed",
            is_truncated=False,
            num_turns=0,
            timing=Thing(scoring=Thing(start=0.0)),
            reward=0.0,
        )
        episode = Thing(traces=[trace], errors=[])
        try:
            await self._run(task.data, context, trace)
        except asyncio.CancelledError:
            with open(task.data.notes, "a") as notes:
                notes.write("cancelled\n")
            raise
        except Exception as error:  # noqa: BLE001 as the real one: a rollout's failure is data
            trace.ok = False
            trace.errors = [Thing(type=type(error).__name__, message=str(error))]
            return episode
        if task.data.does == "twice":
            episode.traces.append(trace)
        if task.data.does == "judged badly":
            episode.errors.append(Thing(type="EnvError", message="Env.finalize(): KeyError: 'x'"))
        return episode

    async def _run(self, data, context, trace):
        print("what a program prints")
        if data.does == "waits":
            with open(data.notes, "a") as notes:
                notes.write("began\n")
            await asyncio.Event().wait()
        if data.does == "dies":
            os.write(2, b"out of luck\n")
            os._exit(3)
        messages, said = [], ""
        for text in data.says:
            messages.append({"role": "user", "content": text})
            said = await asyncio.to_thread(ask, context, messages)
            messages.append({"role": "assistant", "content": said})
            trace.num_turns += 1
        trace.timing.scoring.start = 1.0
        if data.does == "scores badly":
            raise KeyError("board")
        if data.does in ("setup_timeout", "scoring_timeout", "agent_timeout"):
            trace.stop_condition = data.does
        value = None if data.does == "no value" else float(said == "ok")
        trace.rewards = {} if data.does == "no reward" else {"right": None if value is None else Thing(value=value)}
        trace.reward = value or 0.0


def ask(context, messages):
    body = json.dumps({"model": context.model, "messages": messages}).encode()
    request = urllib.request.Request(f"{context.client.base_url}/chat/completions", body)
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=100) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


def resolve_env_config(raw):
    if raw.get("taskset", {}).get("id") == "unknown":
        raise ModuleNotFoundError("taskset 'unknown' not found", name="unknown")
    return raw


load_environment = Env
