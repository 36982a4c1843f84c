"""An environment of verifiers to begin with: find a letter in three guesses, told `later` or `earlier`.

Data, score and harness as verifiers has them, and nothing of Telescope. The harness runs its loop in the process that plays: it
asks whatever model verifiers gives it, over HTTP. It is played by `experiment=verifiers`, and by verifiers' own commands.
"""
# mypy: disallow-subclassing-any=False, disallow-untyped-decorators=False

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import verifiers.v1 as vf
from verifiers.v1.runtimes import ProgramResult

ANSWER_S = 3600.0  # an answer waits its turn behind those of other rollouts


class LettersConfig(vf.TasksetConfig):
    split: Literal["train", "test"] = "train"


class LetterData(vf.TaskData):
    letter: str


class LetterTask(vf.Task[LetterData]):
    @vf.reward
    async def found(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.letter)

    @vf.metric
    async def guesses(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class Letters(vf.Taskset[LetterTask, LettersConfig]):
    """One letter of seven in a row is sought: 140 such tasks, every seventh of them kept for `test`."""

    def load(self) -> Iterator[LetterTask]:
        tasks = [(first, first + sought) for first in range(20) for sought in range(7)]
        for at, (first, sought) in enumerate(tasks):
            if (at % 7 == 6) == (self.config.split == "test"):
                prompt = f"{chr(97 + first)}-{chr(97 + first + 6)}"
                yield LetterTask(
                    LetterData(prompt=prompt, letter=chr(97 + sought), name=f"{prompt}:{sought}"), self.config.task
                )


class LoopConfig(vf.HarnessConfig):
    guesses: int = 3


class Loop(vf.Harness[LoopConfig]):
    NEEDS_CONTAINER = False
    EXECUTES_CODE = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: dict[str, str], data: Any
    ) -> ProgramResult:
        messages = [{"role": "user", "content": data.prompt}]
        said = ""
        headers = {"authorization": f"Bearer {secret}"}
        # No proxy of the environment's: the address is this machine's own.
        async with httpx.AsyncClient(timeout=ANSWER_S, headers=headers, trust_env=False) as client:
            for _ in range(self.config.guesses):
                body = {"model": ctx.model, "messages": messages}
                answer = await client.post(f"{endpoint}/chat/completions", json=body)
                if answer.status_code != 200:
                    return ProgramResult(1, "", answer.text)
                said = answer.json()["choices"][0]["message"]["content"]
                if said.strip() == data.letter:
                    break
                # The answer goes back as it came, so that the conversation goes on in its exact tokens.
                messages += [
                    {"role": "assistant", "content": said},
                    {"role": "user", "content": answer_guess(said.strip(), data.letter)},
                ]
        return ProgramResult(0, json.dumps(said), "")


def answer_guess(guess: str, letter: str) -> str:
    if len(guess) != 1 or not "a" <= guess <= "z":
        return "one letter"
    return "later" if guess < letter else "earlier"


__all__ = ["Letters", "Loop"]
