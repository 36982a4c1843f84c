"""Customer service with real tools over a real database: the retail and airline domains of the tau tasks.

A user calls with a wish; the agent has a policy to follow and tools that read and change the database. The reward is 1 if the
database ends as it does after the task's own actions, and everything was said that had to be said; else 0. The data come from a
package or a folder (data.py). What only a judge can tell (a rightly refused wish) is judged where `judge` names one; else
such tasks count as right when nothing was changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, PrivateAttr

from telescope.environments.answer_parsers import strip_thought
from telescope.environments.base import Chat, Prompt, Reward, Turn
from telescope.environments.endpoint import EndpointSettings, RetryingEndpoint
from telescope.environments.failures import GraderError, InfrastructureError
from telescope.environments.judge import Judge, JudgeSettings
from telescope.environments.tasks.tau.airline import AirlineDesk
from telescope.environments.tasks.tau.data import Task, find_folder, load_tables, load_tasks
from telescope.environments.tasks.tau.desk import Desk, DeskError, Tables
from telescope.environments.tasks.tau.retail import RetailDesk
from telescope.environments.tasks.tau.users import ModelUser, ScriptedUser, User, make_opening
from telescope.environments.threads import run_function
from telescope.environments.tool_environment import ToolEnvironment, ToolState
from telescope.environments.tools.schema import BadArguments, ToolFunction

NAMES = {"user": "user", "tool": "result of a call"}
ASSERTED = (
    "The text is a dialogue between a customer and the agent of a company, with the agent's calls of tools and their results. "
    "Is this true of it: {said}"
)
DESKS: Mapping[str, type[Desk]] = {"retail": RetailDesk, "airline": AirlineDesk}


@dataclass
class TauState(ToolState):
    desk: Desk
    user: User
    greeting: str = ""
    said: list[str] = field(default_factory=list)
    """All that the agent said to the user."""
    lines: list[str] = field(default_factory=list)
    """The dialogue as a judge reads it: calls and their results included, thoughts left out."""


class Tau(ToolEnvironment):
    """See the module; docs/tools.md has an example."""

    reward_min: ClassVar[float | None] = 0.0
    reward_max: ClassVar[float | None] = 1.0
    in_threads: ClassVar[bool] = False  # every tool is a look-up of microseconds

    domain: Literal["retail", "airline"] = "retail"
    """Which desk: 114 retail tasks (74 train, 40 eval) or 50 airline tasks (30 train, 20 eval)."""
    data: str = ""
    """Folder with `retail/` and `airline/`, each with db.json(.gz), tasks.json, split_tasks.json and policy.txt; empty: the
    data inside the installed package inspect-evals."""
    user: EndpointSettings | None = None
    """The model that plays the customer, e.g. `{base_url: …, model: …}`; null: a script made of the task's text does."""
    judge: JudgeSettings | None = None
    """The model that is asked whether a task's assertions in prose hold, e.g. `{base_url: …, model: …}`; null: they are left
    out of the reward."""
    max_turns: int = Field(default=30, ge=1, le=10_000)
    """Answers of the policy in one rollout, at most: each is calls, or a message to the user."""

    _judge: Judge | None = PrivateAttr(default=None)
    _customer: RetryingEndpoint | None = PrivateAttr(default=None)

    @cached_property
    def _folder(self) -> Path:
        return find_folder(self.domain, self.data)

    @cached_property
    def _tasks(self) -> tuple[str, Mapping[str, Task], Mapping[str, tuple[str, ...]]]:
        return load_tasks(self._folder)

    @cached_property
    def _tables(self) -> Tables:
        return load_tables(self._folder)

    async def set_up(self) -> None:
        """Load the database before the first rollout, not in it."""
        await super().set_up()
        await run_function(getattr, self, "_tables")
        self._judge = None if self.judge is None else Judge(self.judge)
        self._customer = None if self.user is None else RetryingEndpoint("the customer's model", self.user)

    async def tear_down(self) -> None:
        for model in (self._judge, self._customer):
            if model is not None:
                await model.close()
        await super().tear_down()

    def right_answer(self, prompt: Prompt) -> str:
        """What the agent has to do cannot be said in one text."""
        return ""

    def prompts(self, split: str) -> Sequence[Prompt]:
        policy, tasks, splits = self._tasks
        return [
            Prompt(
                turns=({"role": "system", "content": policy}, {"role": "user", "content": make_opening(tasks[task_id])}),
                answer="; ".join(name for name, _ in tasks[task_id].actions),
                facts={"task": task_id},
            )
            for task_id in splits[{"train": "train", "eval": "test"}[split]]
        ]

    async def initial_state(self, prompt: Prompt) -> TauState:
        task = self.task(prompt)
        state = TauState(desk=DESKS[self.domain](self._tables), user=self._user(task))
        state.greeting = await state.user.open()
        return state

    def opening(self, prompt: Prompt, state: TauState) -> Sequence[Turn]:
        return (prompt.turns[0], {"role": "user", "content": state.greeting})

    def tools_for(self, state: TauState) -> Sequence[ToolFunction]:
        return state.desk.tools()

    async def say(self, chat: Chat, state: TauState, turns: Sequence[Turn]) -> str:
        answer = await super().say(chat, state, turns)
        heard = [f"[{NAMES[turn['role']]}] {turn['content']}" for turn in turns if turn["role"] in NAMES]
        state.lines += [*heard, f"[agent] {strip_thought(answer)}"]  # what the user can't hear must not move the judge
        return answer

    async def reply_to_text(self, state: TauState, text: str) -> Sequence[Turn]:
        state.said.append(text)
        reply = "" if state.desk.transferred else await state.user.answer(text)
        state.done = not reply
        state.final_answer = text
        return ({"role": "user", "content": reply},)

    async def reward(self, prompt: Prompt, state: TauState) -> Reward:
        task = self.task(prompt)
        wanted, refused = self.play_actions(task)
        right = state.desk.records.digest() == wanted.records.digest()
        said = "\n".join(state.said).lower().replace(",", "")
        outputs = [output.lower().replace(",", "") in said for output in task.outputs]
        metrics = {
            "database_right": float(right),
            "outputs_said": sum(outputs) / len(outputs) if outputs else 1.0,
            "database_untouched": float(state.desk.records.untouched),
            "transferred": float(state.desk.transferred),
        }
        held = await self._judge_assertions(task, state)
        if held:
            metrics["assertions_held"] = sum(held.values()) / len(held)
        info = {"task": task.task_id, "refused_actions_of_the_task": refused, **({"assertions": held} if held else {})}
        return Reward(float(right and all(outputs) and all(held.values())), metrics, info=info)

    async def _judge_assertions(self, task: Task, state: TauState) -> Mapping[str, bool]:
        """Which of the task's assertions are true, by a judge who reads the dialogue; none without a judge."""
        if self.judge is None:
            return {}
        if self._judge is None:
            raise GraderError("the environment was not set up: its judge is not there")
        dialogue = "\n".join(state.lines)
        return {said: await self._judge.yes_or_no(ASSERTED.format(said=said), dialogue=dialogue) for said in task.assertions}

    def task(self, prompt: Prompt) -> Task:
        return self._tasks[1][prompt.facts["task"]]

    def play_actions(self, task: Task) -> tuple[Desk, int]:
        """A desk after the task's own actions, and how many of them it refused (a refusal changes nothing)."""
        desk = DESKS[self.domain](self._tables)
        refused = 0
        for name, arguments in task.actions:
            method = getattr(desk, name)
            tool = self._tool(method)
            try:
                method(**tool.arguments(arguments))
            except (DeskError, BadArguments):
                refused += 1
        return desk, refused

    def _user(self, task: Task) -> User:
        if self.user is None:
            return ScriptedUser(task)
        if self._customer is None:
            raise InfrastructureError("the environment was not set up: its customer's model is not there")
        return ModelUser(task, self._customer)
