"""Calls in the text of an answer: what is one, what is one gone wrong, and that no text takes long to read."""

from __future__ import annotations

import string
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telescope.environments.answer_parsers import Answer, strip_thought
from telescope.environments.tools.call_parsers import (
    BadLiteral,
    CallFormat,
    MalformedCall,
    ParsedAnswer,
    ParsedCall,
    explain_format,
    parse_calls,
    read_calls,
)

DEEP = '{"a":' * 300 + "1" + "}" * 300
FORMATS: tuple[CallFormat, ...] = ("json", "function", "python", "bare", "harmony")


def reasons(answer: str, form: CallFormat = "json") -> list[str]:
    return [each.reason for each in parse_calls(answer, form).calls if isinstance(each, MalformedCall)]


def test_several_json_calls_in_one_answer_in_their_order():
    parsed = parse_calls(
        'I look.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n<tool_call>{"name": "stop"}</tool_call>'
    )
    assert parsed.calls == (ParsedCall("add", {"a": 1}), ParsedCall("stop", {}))
    assert parsed.text == "I look."


def test_arguments_may_be_called_parameters_or_be_a_json_text():
    for inner in ('"parameters": {"a": 1}', '"arguments": "{\\"a\\": 1}"'):
        assert parse_calls(f'<tool_call>{{"name": "add", {inner}}}</tool_call>').calls == (ParsedCall("add", {"a": 1}),)


def test_an_answer_without_a_call_is_all_text():
    assert parse_calls(" the answer is 3 < 4 ").calls == ()
    assert parse_calls(" the answer is 3 < 4 ").text == "the answer is 3 < 4"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("<tool_call>{oops</tool_call>", "this is not JSON"),
        ('<tool_call>{"name": "add"', "opened and never closed"),
        ("done</tool_call>", "closed but was never opened"),
        ('<tool_call>{"arguments": {}}</tool_call>', 'a call needs "name"'),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', '"arguments" must be a JSON object'),
        ("<tool_call>[1]</tool_call>", "a call is a JSON object"),
        ("<tool_call></tool_call>", "this is not JSON"),
        ('{"name": "add", "arguments": {"a": 1}}', "a call must stand between <tool_call> and </tool_call>"),
        (f'<tool_call>{{"name": "add", "arguments": {DEEP}}}</tool_call>', "are nested more than 64 deep"),
    ],
)
def test_a_call_gone_wrong_is_malformed_and_no_final_answer(answer: str, reason: str):
    (said,) = reasons(answer)
    assert said.startswith(reason) or reason in said


def test_good_calls_beside_a_bad_one_stay():
    parsed = parse_calls('<tool_call>{"name": "a"}</tool_call><tool_call>?</tool_call><tool_call>{"name": "b"}</tool_call>')
    assert [type(each) for each in parsed.calls] == [ParsedCall, MalformedCall, ParsedCall]


def test_the_function_format_with_and_without_outer_tags():
    inner = "<function=move>\n<parameter=to>\nline one\nline two\n</parameter>\n<parameter=n>3</parameter>\n</function>"
    wanted = (ParsedCall("move", {"to": "line one\nline two", "n": "3"}, textual=True),)
    assert parse_calls(f"so <tool_call>\n{inner}\n</tool_call>", "function").calls == wanted
    assert parse_calls(f"so {inner}", "function").calls == wanted
    assert reasons("<function=>x</function>", "function") == ["<function=name> needs a name"]
    assert reasons("<function=a><parameter=x>1</function>", "function")[0].startswith("between <function=name>")
    assert reasons("<tool_call>a()</tool_call>", "function")[0].startswith("a call is <function=name>")


def test_the_python_format_in_tags_and_as_a_bare_list():
    body = "add(a=1, b=[-2.5, None, true], c={'k': (1,)}, d=\"it's\\n\")"
    wanted = (ParsedCall("add", {"a": 1, "b": [-2.5, None, True], "c": {"k": [1]}, "d": "it's\n"}),)
    assert parse_calls(f"<tool_call>{body}</tool_call>", "python").calls == wanted
    assert parse_calls(f"[{body}]", "python").calls == wanted
    assert parse_calls("[a(), b(x=1)]", "python").calls == (ParsedCall("a", {}), ParsedCall("b", {"x": 1}))
    assert parse_calls("<tool_call>a()\nb()</tool_call>", "python").calls == (ParsedCall("a", {}), ParsedCall("b", {}))


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ('"C:\\\\\nnew"', "C:\\\nnew"), ('"a\r\nb"', "a\nb"), ('"a\rb"', "a\nb"), ('"a\\\r\nb"', "ab"), ('"a\\\nb"', "ab"),
        ('"""a\r\nb"""', "a\nb"), ('"a\\tb\n"', "a\tb\n"),
    ],
)  # fmt: skip
def test_line_breaks_in_a_text_are_read_beside_escapes(written: str, read: str):
    assert read_calls(f"f(a={written})") == [("f", {"a": read})]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("add(1)", "a name is missing at character 4"),
        ("add(a=1, a=2)", "a is given twice"),
        ("add(a=open)", "a value must be"),
        ("add(a=1+1)", "a comma or \\) is missing"),
        ("add(a=9**9)", "a comma or \\) is missing"),
        ("add(a=" + "[" * 40, "nesting deeper than 32"),
        ("add(a=" + "9" * 100 + ")", "more than 64 characters"),
        ("", "there is no call"),
        ("add", "a \\( is missing"),
        ("[add()", "a comma or ] is missing|a name is missing"),
    ],
)
def test_python_that_is_no_call_is_refused_without_being_run(text: str, reason: str):
    with pytest.raises(BadLiteral, match=reason):
        read_calls(text)


def test_bare_json_as_llama_and_mistral_write_it():
    wanted = (ParsedCall("add", {"a": 1}),)
    assert parse_calls('{"name": "add", "parameters": {"a": 1}}', "bare").calls == wanted
    assert parse_calls('<|python_tag|>{"name": "add", "parameters": {"a": 1}}', "bare").calls == wanted
    assert parse_calls('[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]', "bare").calls == wanted
    assert parse_calls('{"answer": 3}', "bare").calls == ()
    assert reasons("[TOOL_CALLS] nonsense", "bare")[0].startswith("this is not JSON")


ADD, STOP = ParsedCall("add", {"a": 1}), ParsedCall("stop", {})
ONE, TWO = '{"name": "add", "parameters": {"a": 1}}', '{"name": "stop", "parameters": {}}'


@pytest.mark.parametrize("between", [";", "; ", " ; ", ";\n", "\n", ", "])
def test_several_calls_of_llama_3_divided_by_semicolons(between: str):
    assert parse_calls(f"{ONE}{between}{TWO}", "bare") == ParsedAnswer("", (ADD, STOP))
    assert parse_calls(f"<|python_tag|>{ONE}{between}{TWO}", "bare") == ParsedAnswer("", (ADD, STOP))


def test_calls_of_llama_3_among_words_and_other_braces():
    parsed = parse_calls(f"First {ONE}; {TWO} I gave {{a}} and {{'a': 1}}.", "bare")
    assert parsed == ParsedAnswer("First  I gave {a} and {'a': 1}.", (ADD, STOP))
    nested = '{"name": "add", "parameters": {"a": {"b": {"c": "}{ [\\"] "}}}}'
    assert parse_calls(nested, "bare").calls == (ParsedCall("add", {"a": {"b": {"c": '}{ ["] '}}}),)
    assert parse_calls('{"parameters": {}} and {"name": "add"}', "bare").calls == ()


@pytest.mark.parametrize(
    "answer",
    [
        '{"name": "add", "parameters": {a is 1}}',
        '{"name": "add", "parameters": {"a": 1}',
        '{"name": "add", "parameters": {"a": "1}}',
        f'{ONE}; {{"name": "stop", "parameters": {{oops}}}}',
        '<|python_tag|>search.call(query="cats")',
    ],
)
def test_a_call_of_llama_3_gone_wrong_is_told(answer: str):
    assert reasons(answer, "bare")[0].startswith("this is not JSON")


SCHEMA = '{"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}'


def test_calls_as_openai_s_api_wraps_them_are_read():
    one, two = '{"name": "add", "arguments": {"a": 1}}', '{"name": "stop", "arguments": {}}'
    wrapped = f'{{"type": "function", "id": "c1", "function": {one}}}'
    assert parse_calls(f'{{"tool_calls": [{one}, {two}]}}', "bare") == ParsedAnswer("", (ADD, STOP))
    assert parse_calls(wrapped, "bare") == ParsedAnswer("", (ADD,))
    assert parse_calls(f'{{"tool_calls": [{wrapped}, {two}]}}', "bare") == ParsedAnswer("", (ADD, STOP))
    assert reasons(f'{{"action": {one}}}', "bare") == ['a call has "name" and "arguments", and no \'action\'']
    assert reasons('{"name": "add", "arguments": {"a": 1}, "b": 2}', "bare")[0].endswith("no 'b'")


@pytest.mark.parametrize("quoted", [SCHEMA, f'{{"type": "function", "function": {SCHEMA}}}', f'{{"tools": [{SCHEMA}]}}'])
def test_a_tool_s_description_is_no_call(quoted: str):
    assert parse_calls(f"The tool is {quoted}.", "bare") == ParsedAnswer(f"The tool is {quoted}.")


def test_a_call_behind_a_brace_that_never_closes_is_read():
    assert parse_calls(f"\\left\\{{ x then {ONE}", "bare") == ParsedAnswer("\\left\\{ x then", (ADD,))
    assert parse_calls("\\{ " * 100 + ONE, "bare").calls == (ADD,)
    assert reasons('{ x then {"name": "add", "parameters": {"a": 1}', "bare")[0].endswith("(it never ends)")
    assert reasons('{"why": "so", "name": "add", "parameters": {"a": 1}', "bare")[0].endswith("(it never ends)")


def test_what_is_no_call_in_a_list_of_calls_is_told():
    for answer in (f'[{ONE}, "oops"]', f'[{ONE}, {{"x": 1}}]', f'[{ONE}, "oops", {TWO}]'):
        parsed = parse_calls(answer, "bare")
        assert parsed.text == ""
        assert parsed.calls[0] == ADD
        assert reasons(answer, "bare") == ["a list of calls holds calls alone"]
    assert parse_calls(f"[{ONE}, {TWO}], so I wait", "bare") == ParsedAnswer(", so I wait", (ADD, STOP))


@pytest.mark.parametrize("between", [", ", ";", "\n"])
def test_several_calls_of_mistral_without_a_list(between: str):
    assert parse_calls(f"[TOOL_CALLS] {ONE}{between}{TWO}", "bare") == ParsedAnswer("", (ADD, STOP))
    assert parse_calls(f'[TOOL_CALLS]add[ARGS]{{"a": 1}}{between}stop[ARGS]{{}}', "bare") == ParsedAnswer("", (ADD, STOP))
    parsed = parse_calls(f"[TOOL_CALLS] {ONE}{between}and {TWO}", "bare")
    assert (parsed.text, parsed.calls[0], reasons(f"[TOOL_CALLS] {ONE}{between}{TWO[:-1]}", "bare")) == (
        "", ADD, ["what follows a call looks like one, and can't be read"],
    )  # fmt: skip
    assert parse_calls(f"[TOOL_CALLS] {ONE}{between}so {{x}}", "bare") == ParsedAnswer(f"{between}so {{x}}".strip(), (ADD,))


@pytest.mark.parametrize(
    ("answer", "calls", "text"),
    [
        ('[TOOL_CALLS]add{"a": 1}', (ADD,), ""),
        ('[TOOL_CALLS]add[ARGS]{"a": 1}', (ADD,), ""),
        ('[TOOL_CALLS]add[CALL_ID]c00000000[ARGS]{"a": 1}', (ADD,), ""),
        ('I add.[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]stop[ARGS]{}', (ADD, STOP), "I add."),
        ('[TOOL_CALLS][{"arguments": {"a": 1}, "name": "add"}, {"name": "stop", "arguments": {}}]', (ADD, STOP), ""),
        ('Well[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]\nso', (ADD,), "Well\nso"),
        ('[TOOL_CALLS]say[ARGS]{"text": "[TOOL_CALLS]add{}"}', (ParsedCall("say", {"text": "[TOOL_CALLS]add{}"}),), ""),
    ],
)
def test_both_forms_of_mistral(answer: str, calls: tuple[ParsedCall, ...], text: str):
    assert parse_calls(answer, "bare") == ParsedAnswer(text, calls)


@pytest.mark.parametrize(
    "answer", ['[TOOL_CALLS]add[ARGS]{"a": 1', "[TOOL_CALLS]add[ARGS]{a}", "[TOOL_CALLS]", "[TOOL_CALLS]add"]
)
def test_a_call_of_mistral_gone_wrong_is_told(answer: str):
    assert reasons(answer, "bare")[0].startswith("this is not JSON")


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("<|python_start|>[add(a=1), stop()]<|python_end|>", ""),
        ("<|python_start|>[add(a=1), stop()]", ""),
        ("<|tool_call_start|>[add(a=1), stop()]<|tool_call_end|>", ""),
        (
            "So: <|tool_call_start|> [add(a=1)]<|tool_call_end|><|tool_call_start|>[stop()]<|tool_call_end|> I wait.",
            "So:  I wait.",
        ),
        ("<|tool_call_start|>[add(a=1), stop()]<|tool_call_end|>[add(a=1)]<|tool_call_end|>Done.", "Done."),
    ],
)
def test_the_marks_of_llama_4_and_lfm(answer: str, text: str):
    assert parse_calls(answer, "python") == ParsedAnswer(text, (ADD, STOP))


def test_values_that_lfm_writes_and_python_would_not_take():
    written = "<|tool_call_start|>[date.set(month=07, tags={'a', 'b'}, empty={}, run='cat << E\nx\nE')]<|tool_call_end|>"
    wanted = {"month": 7, "tags": ["a", "b"], "empty": {}, "run": "cat << E\nx\nE"}
    assert parse_calls(written, "python").calls == (ParsedCall("date.set", wanted),)


@pytest.mark.parametrize(
    "answer",
    ["<|python_start|>[add(a=1)", "<|python_start|>print(1)<|python_end|>", "<|tool_call_start|>[]<|tool_call_end|>",
     "add(a=1)]<|tool_call_end|><|tool_call_start|>x", "<|python_start|>[add(a=1e999)]<|python_end|>"],
)  # fmt: skip
def test_a_call_between_such_marks_gone_wrong_is_told(answer: str):
    assert reasons(answer, "python")


TO_ADD = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>'


@pytest.mark.parametrize(
    ("answer", "calls", "text"),
    [
        (f"<|channel|>analysis<|message|>I think{{}}<|end|><|start|>assistant{TO_ADD}", (ADD,), ""),
        (' to=functions.add<|channel|>commentary json<|message|>{\n"a": 1\n}', (ADD,), ""),
        (f"<|channel|>commentary<|message|>I add.<|end|><|start|>assistant{TO_ADD}", (ADD,), "I add."),
        (f"{TO_ADD}<|start|>assistant<|channel|>commentary to=functions.stop<|message|><|call|>", (ADD, STOP), ""),
        ("<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>It is 3.", (), "It is 3."),
        ("<|channel|>analysis<|message|>add with to=functions.add?", (), ""),
        ("no channels at all", (), "no channels at all"),
    ],
)
def test_the_channels_of_gpt_oss(answer: str, calls: tuple[ParsedCall, ...], text: str):
    assert parse_calls(answer, "harmony") == ParsedAnswer(text, calls)


def test_a_call_to_a_channel_gone_wrong_is_told():
    assert reasons(TO_ADD.replace("{", ""), "harmony")[0].startswith("the arguments of add are not JSON")
    assert reasons("<|channel|>commentary to=functions.add", "harmony") == [
        "a call to add has no <|message|> with its arguments"
    ]
    assert reasons(TO_ADD.replace('{"a": 1}', "[1]"), "harmony") == ['"arguments" must be a JSON object']


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    "mark", ["<|python_tag|>", "<|python_start|>", "<|tool_call_start|>", "[TOOL_CALLS]", "<|tool_calls_section_begin|>",
             "<｜tool▁calls▁begin｜>", "<|tool_calls|>", "<|START_ACTION|>", "<minimax:tool_call>", "<TOOLCALL>"],
)  # fmt: skip
def test_the_mark_of_another_format_is_no_final_answer(form: CallFormat, mark: str):
    parsed = parse_calls(f"I look. {mark}f(x)", form)
    assert [type(each) for each in parsed.calls] == [MalformedCall]
    assert parse_calls(f"<think>{mark}f</think>It is 3.", form) == ParsedAnswer("It is 3.")


@pytest.mark.parametrize(
    ("opening", "closing"),
    [("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"), ("<|think|>", "<|end|>"),
     ("<|START_THINKING|>", "<|END_THINKING|>"), ("<|channel>thought\n", "<channel|>")],
)  # fmt: skip
def test_a_thought_in_the_marks_of_other_models_holds_no_calls(opening: str, closing: str):
    call = '<tool_call>{"name": "stop"}</tool_call>'
    assert parse_calls(f"{opening}maybe {call}{closing}{call}").calls == (STOP,)
    assert parse_calls(f"{opening}maybe {call}").calls == ()
    assert parse_calls(Answer(f"maybe {call}{closing}{call}", "", opening)).calls == (STOP,)
    assert parse_calls(Answer(f"maybe {call}", "", opening)).calls == ()


def test_a_thought_holds_no_calls():
    call = '<tool_call>{"name": "a"}</tool_call>'
    assert parse_calls(f"<think>maybe {call}</think>{call}").calls == (ParsedCall("a", {}),)
    assert parse_calls(f"maybe {call}</think>no").calls == ()
    assert parse_calls(f"<think>{call}").calls == ()
    assert strip_thought("<think>a</think>b") == "b"
    assert strip_thought("a b") == "a b"


def test_what_is_said_in_channels_is_said_without_analysis_and_calls_stay():
    thought = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    assert strip_thought(f"{thought}<|channel|>final<|message|>It is 3.<|return|>") == "It is 3."
    assert strip_thought(f"{thought}{TO_ADD}") == f"assistant{TO_ADD}"
    assert strip_thought("<|channel|>analysis<|message|>It is 3") == ""
    assert strip_thought(Answer("It is 3", "", "<|channel|>analysis<|message|>")) == ""
    assert parse_calls(Answer("hm to=functions.add", "", "<|channel|>analysis<|message|>"), "harmony") == ParsedAnswer("")
    assert parse_calls(f"{thought}<|channel|>final<|message|>It is 3.", "json") == ParsedAnswer("It is 3.")


@pytest.mark.parametrize("form", FORMATS)
def test_the_format_in_words_is_one_that_can_be_read(form: CallFormat):
    (call,) = parse_calls(explain_format(form).removeprefix("write "), form).calls
    assert isinstance(call, ParsedCall)
    assert call.name == "tool_name"
    assert dict(call.arguments) == {"parameter": "value"}


PIECES = [
    "<tool_call>",
    "</tool_call>",
    "<function=",
    "</function>",
    "<parameter=",
    "</parameter>",
    ">",
    "{",
    "[",
    '"',
    "\\",
    "(",
    "=",
]
PIECES += ["[TOOL_CALLS]", "[ARGS]", "<|python_start|>", "<|tool_call_end|>", "<|start|>", "<|message|>", "to=functions."]
PIECES += ["<think>", "</think>", '{"name":', "a(", "b=", "-", "9", "_", ".", "e", "'''", '"""', ",", ")", "]", "}", " ", "\n"]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from([*PIECES, *string.ascii_letters[:4]]), max_size=60), st.sampled_from(FORMATS))
def test_no_text_makes_the_reader_raise(pieces: list[str], form: CallFormat):
    for each in parse_calls("".join(pieces), form).calls:
        assert isinstance(each, ParsedCall | MalformedCall)


def _cpu_s(piece: str, wrap: str, form: CallFormat, times: int) -> float:
    answer = wrap.format(piece * times)
    before = time.process_time()
    parse_calls(answer, form)
    return time.process_time() - before


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
def test_hostile_answers_of_a_hundred_thousand_pieces_are_read_in_linear_time(form: CallFormat):
    # Quadratic reading of 100,000 pieces would take minutes (1e10 steps); linear reading takes tenths of a second.
    for piece in PIECES:
        for wrap in ("{}", "<tool_call>{}</tool_call>", "<tool_call>a(x={})</tool_call>"):
            assert _cpu_s(piece, wrap, form, 100_000) < 20
