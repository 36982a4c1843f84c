"""vLLM's real parsers read the policy's calls, and what they can't read is not a final answer."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError
from transformers import AutoTokenizer

from telescope.environments.tools.call_parsers import MalformedCall, ParsedCall
from telescope.environments.tools.schema import make_tool
from telescope.environments.tools.vllm_parsers import load_vllm_parsers
from tests.environments.conftest import EMBEDDED
from tests.environments.real_tokenizers import model
from tests.environments.tools.talk import Talk
from tests.environments.tools.test_tool_environment import QUESTION, Desk, add, call

SCHEMAS = [make_tool(add).schema]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(EMBEDDED / "tiny")


@pytest.mark.slow
def test_hermes_and_pythonic_calls_thoughts_and_calls_gone_wrong(tokenizer: Any) -> None:
    hermes = load_vllm_parsers("hermes")
    parsed = hermes.parse(tokenizer, SCHEMAS, "<think>no</think>so " + call("add", a=1, b=2) + call("add", a=3, b=4))
    assert parsed.calls == (ParsedCall("add", {"a": 1, "b": 2}), ParsedCall("add", {"a": 3, "b": 4}))
    assert parsed.text == "so"
    assert hermes.parse(tokenizer, SCHEMAS, "5").calls == ()
    (wrong,) = hermes.parse(tokenizer, SCHEMAS, "<tool_call>{oops</tool_call>").calls
    assert isinstance(wrong, MalformedCall)
    assert wrong.reason == "<tool_call> begins a call that can't be read"
    pythonic = load_vllm_parsers("pythonic")
    assert pythonic.parse(tokenizer, SCHEMAS, "[add(a=1, b=2)]").calls == (ParsedCall("add", {"a": 1, "b": 2}),)


@pytest.mark.slow
@pytest.mark.parametrize(("reasoning", "thought"), [("qwen3", "hm"), ("deepseek_r1", "perhaps " + call("add", a=9, b=9))])
def test_a_reasoning_parser_takes_the_thought_off_before_calls_are_looked_for(reasoning: str, thought: str) -> None:
    """To vLLM's parser of Qwen 3 a call ends a thought; to the other one calls in a thought are none."""
    both, tokenizer = load_vllm_parsers("hermes", reasoning), model("qwen3").tokenizer
    parsed = both.parse(tokenizer, SCHEMAS, f"<think>\n{thought}\n</think>\n\nso {call('add', a=1, b=2)}")
    assert (parsed.text, parsed.calls) == ("so", (ParsedCall("add", {"a": 1, "b": 2}),))
    parsed = both.parse(tokenizer, SCHEMAS, f"<think>\n{thought}\n</think>\n\n5")
    assert (parsed.text, parsed.calls) == ("5", ())


@pytest.mark.slow
def test_an_unknown_parser_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"vllm_tool_parser=hermess is not a parser of this vLLM, which has .*hermes"):
        load_vllm_parsers("hermess")
    with pytest.raises(ValueError, match=r"vllm_reasoning_parser=x is not a parser of this vLLM, which has .*qwen3"):
        load_vllm_parsers("hermes", "x")


@pytest.mark.slow
async def test_a_dialogue_is_played_with_them(tokenizer: Any) -> None:
    desk = Desk(vllm_tool_parser="hermes")
    await desk.set_up()
    talk = Talk([call("add", a=2, b=3), "5"])
    talk.tokenizer = tokenizer
    reward = await desk.play(QUESTION, talk)
    assert (reward.total, talk.results(1)) == (1, ["5"])


def test_a_reasoning_parser_alone_is_refused() -> None:
    with pytest.raises(ValidationError, match="vllm_reasoning_parser=qwen3 is used beside a vllm_tool_parser only"):
        Desk(vllm_reasoning_parser="qwen3")
