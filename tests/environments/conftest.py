"""Tokenizers of several real shapes, and a policy that answers from a script."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from telescope.environments.chat import Sampled
from telescope.environments.template import ChatTemplate
from telescope.records import FinishReason

EMBEDDED = Path(__file__).parents[2] / "telescope" / "embedded"

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Old answers lose all up to </think>; the header of the next answer opens a thought, or closes an empty one.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{{ m.content.split('</think>')[-1].lstrip('\n') }}{% else %}{{ m.content }}{% endif %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
TRIMMING = CHATML.replace("{{ m.content }}", "{{ m.content | trim }}")
CORPUS = [
    "use 3 5 8 make 10 the answer is 5+8-3 because five and eight are thirteen",
    "user assistant system think reverse the letters and give the answer only the answer",
    "<think>\nfirst add then take away\n</think>\n\n5+8-3",
] * 20


def special(*words: str) -> list[AddedToken]:
    return [AddedToken(word, special=True, normalized=False) for word in words]


@pytest.fixture(scope="session")
def bpe_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with merges, as Qwen, Llama 3 and SmolLM have it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=alphabet,
        special_tokens=special("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")


@pytest.fixture(scope="session")
def metaspace_tokenizer() -> PreTrainedTokenizerFast:
    """Marks the start of a text with a space, as SentencePiece tokenizers (Llama 2, Mistral) do."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special("<unk>", "<s>", "</s>"), show_progress=False)
    tokenizer.train_from_iterator([*CORPUS, "[INST] x [/INST] y\n"], trainer)
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
        "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>", chat_template=template)


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(EMBEDDED / "tiny")


@pytest.fixture(scope="session")
def tiny(tiny_tokenizer: Any) -> ChatTemplate:
    return ChatTemplate(tiny_tokenizer, [tiny_tokenizer.eos_token_id])


class Script:
    """A policy that answers from a list of (ids, finish reason), and remembers what it was asked.

    The log-prob of token k of turn t is -(t + 1) - k / 100, its version 10 * t + k: each sampled token can be told from all
    others.
    """

    def __init__(self, *answers: tuple[Sequence[int], FinishReason]) -> None:
        self._answers = list(answers)
        self.prompts: list[list[int]] = []

    async def sample(self, ids: np.ndarray, turn: int, max_tokens: int | None) -> Sampled:
        assert turn == len(self.prompts)
        assert ids.dtype == np.int32
        self.prompts.append(ids.tolist())
        answer, reason = self._answers[turn]
        steps = np.arange(len(answer))
        logprobs = (-(turn + 1) - steps / 100).astype(np.float32)
        return Sampled(np.array(answer, np.int32), logprobs, (10 * turn + steps).astype(np.int32), reason)
