"""A taskset of verifiers with a harness of its own, for tests: find a letter in three guesses, told `later` or `earlier`.

The harness runs its loop in the player's process and asks the policy over HTTP, as verifiers has it. `trouble` makes things go
wrong that a test wants to see.
"""

import json
import os
from collections.abc import Iterator
from typing import Literal

import httpx
import verifiers.v1 as vf
from verifiers.v1.runtimes import ProgramResult


class LettersTaskConfig(vf.TaskConfig):
    trouble: Literal["", "reward", "setup", "dies", "no_reward", "asks_for_ever"] = ""


class LettersConfig(vf.TasksetConfig):
    task: LettersTaskConfig = LettersTaskConfig()
    letters: str = "abcdefg"
    split: Literal["train", "test"] = "train"


class LetterData(vf.TaskData):
    letter: str


class LetterTask(vf.Task[LetterData, vf.State, LettersTaskConfig]):
    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        print("a task's own words on stdout")
        if self.config.trouble == "setup":
            raise RuntimeError("no board is free")
        if self.config.trouble == "dies":
            os._exit(3)

    @vf.reward
    async def found(self, trace: vf.Trace) -> float:
        if self.config.trouble == "reward":
            raise KeyError("board")
        return float(trace.last_reply == self.data.letter)

    @vf.reward(weight=0.1)
    async def short(self, trace: vf.Trace) -> float:
        return float(all(len(said.content or "") == 1 for said in trace.assistant_messages))

    @vf.metric
    async def guesses(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class Letters(vf.Taskset[LetterTask, LettersConfig]):
    def load(self) -> Iterator[LetterTask]:
        letters = self.config.letters if self.config.split == "train" else self.config.letters[::-1]
        for letter in letters:
            yield LetterTask(LetterData(prompt="a-g", letter=letter, name=letter), self.config.task)


class LoopConfig(vf.HarnessConfig):
    guesses: int = 3


class Loop(vf.Harness[LoopConfig]):
    NEEDS_CONTAINER = False
    EXECUTES_CODE = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data) -> ProgramResult:
        messages = [{"role": "user", "content": data.prompt}]
        async with httpx.AsyncClient(timeout=600, headers={"authorization": f"Bearer {secret}"}) as client:
            for _ in range(self.config.guesses):
                body = {"model": ctx.model, "messages": messages}
                answer = await client.post(f"{endpoint}/chat/completions", json=body)
                if answer.status_code != 200:
                    return ProgramResult(1, "", answer.text)
                said = answer.json()["choices"][0]["message"]
                guess = said["content"].strip()
                if guess == data.letter:
                    break
                told = "later" if guess < data.letter else "earlier"
                messages += [{"role": "assistant", "content": said["content"]}, {"role": "user", "content": told}]
        return ProgramResult(0, json.dumps(guess), "")


__all__ = ["Letters", "Loop"]
