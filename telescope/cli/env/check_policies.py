"""Who answers in a check: a script, the prompts' own right answers, or a model in this process. No server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from telescope.environments.answer_parsers import find_opened
from telescope.environments.base import Environment, Prompt
from telescope.environments.chat import Sampled
from telescope.environments.template import ChatTemplate
from telescope.records import PromptRef, RolloutOrder, Sampling


class ScriptBroken(ValueError):
    """The file of answers can't be used; the message names the line."""


class CheckPolicy(Protocol):
    async def answer(self, order: RolloutOrder, turn: int, ids: np.ndarray, sampling: Sampling) -> Sampled:
        """As a server would (workers/play.py, `Ask`)."""
        ...


class Scripted:
    """Says given texts: rollout r the r-th dialogue (they repeat), turn t its t-th text (the last one repeats)."""

    def __init__(self, template: ChatTemplate, dialogues: Sequence[Sequence[str]]) -> None:
        self._template = template
        self._dialogues = dialogues
        self.unwritable: set[str] = set()
        """Texts that the tokenizer makes others of."""

    async def answer(self, order: RolloutOrder, turn: int, ids: np.ndarray, sampling: Sampling) -> Sampled:
        texts = self._texts(order)
        return self.write(texts[min(turn, len(texts) - 1)], sampling)

    def _texts(self, order: RolloutOrder) -> Sequence[str]:
        return self._dialogues[order.rollout_id % len(self._dialogues)]

    def write(self, text: str, sampling: Sampling) -> Sampled:
        """The text as tokens and an end token, cut off at the limit; log-probs of 0 mean nothing."""
        tokens = self._template.continuation(text).tolist()
        if self._template.decode(tokens) != text:
            self.unwritable.add(text)
        ended = [*tokens, next(iter(self._template.end_texts))]
        kept = np.array(ended[: sampling.max_tokens], np.int32)
        finish = "stop" if len(ended) <= sampling.max_tokens else "length"
        return Sampled(kept, np.zeros(len(kept), np.float32), np.zeros(len(kept), np.int32), finish)  # type: ignore[arg-type]


class GoldenAnswers(Scripted):
    """Says each prompt's right answer in the form that the task wants, at each turn, behind the end of a thought that the
    prompt has opened."""

    def __init__(self, template: ChatTemplate, environment: Environment, prompts: Mapping[str, Sequence[Prompt]]) -> None:
        super().__init__(template, ())
        self._environment, self._prompts = environment, prompts

    async def answer(self, order: RolloutOrder, turn: int, ids: np.ndarray, sampling: Sampling) -> Sampled:
        closing = self._close_thought(self._template.decode(ids.tolist()))
        return self.write(closing + self.find(order.prompt), sampling)

    def _close_thought(self, prompt: str) -> str:
        """What ends the thought that a prompt has opened, as the template writes it; "" where it has opened none."""
        closing, opened = self._template.form.closing, find_opened(prompt)
        if opened and f"</{opened}>" not in closing:
            return f"</{opened}>"
        return closing if self._template.find_opening(prompt) else ""

    def find(self, prompt: PromptRef) -> str:
        """The right answer of a prompt; "" where none can be said."""
        return self._environment.right_answer(self._prompts[prompt.split][prompt.index])


def read_script(path: Path) -> list[list[str]]:
    """One JSON value a line: a text, or a list of the texts of a dialogue. Raises `ScriptBroken`."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ScriptBroken(f"--answers {path} can't be read: {error}") from error
    dialogues = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise ScriptBroken(f"{path} line {number} is not JSON: {error}") from error
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
            raise ScriptBroken(f'{path} line {number} must be a text ("4") or a list of texts (["5", "7"])')
        dialogues.append(texts)
    if not dialogues:
        raise ScriptBroken(f"{path} has no answers: write one JSON text, or list of texts, a line")
    return dialogues


class LocalModel:
    """A small causal model on this machine's CPU, sampled token by token at the asked temperature over the whole vocabulary."""

    def __init__(self, model: Any, end_ids: Sequence[int]) -> None:
        self._model = model
        self._end_ids = frozenset(end_ids)
        self._one_at_a_time = asyncio.Lock()

    async def answer(self, order: RolloutOrder, turn: int, ids: np.ndarray, sampling: Sampling) -> Sampled:
        async with self._one_at_a_time:
            return await asyncio.to_thread(self._sample, ids, sampling)

    def _sample(self, ids: np.ndarray, sampling: Sampling) -> Sampled:
        import torch

        draws = torch.Generator().manual_seed(sampling.seed)
        given, past = torch.tensor(ids.tolist())[None], None
        tokens: list[int] = []
        logprobs: list[float] = []
        with torch.inference_mode():
            while len(tokens) < sampling.max_tokens and not (tokens and tokens[-1] in self._end_ids):
                out = self._model(given, past_key_values=past, use_cache=True)
                past = out.past_key_values
                likely = torch.log_softmax(out.logits[0, -1].float() / sampling.temperature, -1)
                given = torch.multinomial(likely.exp(), 1, generator=draws)[None]
                tokens.append(int(given))
                logprobs.append(float(likely[given]))
        finish = "stop" if tokens[-1] in self._end_ids else "length"
        versions = np.zeros(len(tokens), np.int32)
        return Sampled(np.array(tokens, np.int32), np.array(logprobs, np.float32), versions, finish)  # type: ignore[arg-type]


def load_model(folder: Path, end_ids: Sequence[int]) -> LocalModel:
    """In float32. Raises what transformers raises."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    return LocalModel(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), end_ids)
