"""What counts of an answer, and whether it is the right one: cases found with the test suites of other projects."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from telescope.environments.answer_parsers import Answer, Boxed, ThinkTags, find_opened
from telescope.environments.base import Prompt
from telescope.environments.chat import TokenChat
from telescope.environments.graders.code import extract_code, read_tests
from telescope.environments.graders.letters import find_letter
from telescope.environments.graders.maths import Conventions, compare_exactly, compare_symbolically, extract_answer
from telescope.environments.questions.rows import NoRows
from telescope.environments.tasks.code_generation import CodeGeneration
from telescope.environments.tasks.gsm8k import Gsm8k
from telescope.environments.template import ChatTemplate
from telescope.environments.tools.call_parsers import parse_calls
from tests.environments.conftest import CHATML, Script


@pytest.mark.parametrize(
    ("wanted", "given", "right"),
    [
        ("5/2", "2 1/2", True), ("2.5", "2 1/2", True), ("7/4", r"1\ 3/4", True), ("7/4", "1~3/4", True),
        ("2 1/2", "5/2", True),
        ("21/2", "2 1/2", False), ("13/4", "1 3/4", False), ("123", "12 3", False), ("123", "1 2 3", False),
        ("34", "3 4", False), ("18", "18 thousand", False), ("18000", "18 thousand", True),
        ("1100", "1, 100", False), ("2500", "2, 500", False), ("32349", "32, 349", False), ("111", "0,111", False),
        ("1000", r"1\,000", True), ("1000", "1{,}000", True), ("1000", "1,000", True), ("1000", "1 000", True),
        (r"1.6 \times 10^{-19}", r"9.1 \times 10^{-31}", False), (r"1.6\times10^{-19}", r"1.7\times10^{-19}", False),
        ("0.0000004", "0.0000001", False), ("1.6e-19", r"1.6\times10^{-19}", True), ("0.1", "0.10000001", False),
        ("4210_5", "4210_7", False), ("4210_5", "4210_{5}", True), ("4210_5", "4210", True), ("11", "11_2", False),
        ("ABC", "CBA", False), ("listen", "silent", False), (r"\text{HELLO}", "OHELL", False), ("yes", "5", False),
        ("2024-03-01", "2024-3-01", True), ("2024-03-01", "2020", False), ("3:30 pm", "3:30 p.m.", True),
        ("3:30", "7:30", False), (r"[2,\infty)", r"x \in [2,\infty)", True),
        (r"\emptyset", r"\varnothing", True), (r"0.\overline{3}", r"\frac13", True), (r"\text{5 apples}", "5", True),
        ("18", "18 dollars", True), ("18", r"18~\text{dollars}", True), ("18", "18 people", True), ("5 cm", "5 m", False),
        (r"\$5", "€5", False), (r"\$5", "5 dollars", True), ("(1,2)", "(1, 2)", True), ("(1,2)", "[1,2]", False),
        ("1,2", "x=2 or x=1", True), (r"\pm 3", "3, -3", True), (r"\pm 3", "3", False), ("[1,2)", r"1\le x<2", True),
    ],
)  # fmt: skip
def test_what_an_answer_means_and_not_its_letters_run_together(wanted: str, given: str, right: bool | None) -> None:
    assert compare_exactly(wanted, given) is right


def is_right(wanted: str, given: str) -> bool:
    known = compare_exactly(wanted, given)
    return compare_symbolically(wanted, given) if known is None else known


ALL = r"(-\infty,\infty)"


@pytest.mark.parametrize(
    ("one", "other", "right"),
    [
        # a letter alone is not an interval, and a bound may stand before or behind a space
        (r"\text{(B)}", ALL, False), ("x", ALL, False), ("R", rf"x \in {ALL}", False), ("k", rf"\{{{ALL}\}}", False),
        ("[-2,7]", r"-2 \leq x \leq 7", True), (r"[-\frac12,\frac12]", r"-\frac12 \le x \le \frac12", True),
        ("[0,1]", r"0 \le y \le 1", True), ("[-2,7)", r"-2 \leq x \leq 7", False), ("[-2,7]", r"-2 \leq x \leq 8", False),
        (r"(-\infty,3)", "x<3", True), (r"[2,\infty)", r"x \geq 2", True),
        # equations of two letters end
        ("y=2x+3", "y=x", False), ("x=5", "x=y", False), ("p=q", "q=p", True), ("y=x", "x=y", True), ("y=x", "-x=y", False),
        ("x<5", "x=y", False), ("x^2+y^2=4", "y=x", False), (r"x \neq 3", "y=x", False), ("5", "5=x", True),
        ("6", "5=x", False),
        # letters behind a coefficient are a product unless they are a known unit
        ("6abc", "6", False), ("24xyz", "24", False), (r"\frac{3}{4}abc", r"\frac34", False), ("2mgh", "2", False),
        ("-1abc", "-1", False), ("2xyz", "2zyx", True), ("6abc", "6bac", True), ("2xyz", "3zyx", False), ("5", "5xyz", False),
        ("12ab", "12", False), ("2h", "2", False), ("4 ab", "4", False), ("5cm", "5", True), ("60km/h", "60", True),
        ("18dollars", "18", True), ("5 apples", "5", True), ("2a/b", "2", False), ("1", "e^0", True), ("-1", "i^2", True),
        ("5", "x + y = 5", True), ("1", r"\sin^2 x+\cos^2 x", True), ("3", "3rd", True), ("6x", "6", False),
        # a unit behind an irrational number
        (r"12\pi", r"12\pi\text{ cm}^2", True), (r"12\pi", r"12\pi\text{ cm}^3", True),
        (r"12\pi", r"12\pi\,\mathrm{cm}^2", True),
        (r"12\pi", r"12\pi\text{ in}^2", True), (r"12\pi", r"12\pi\text{ km/h}", True), (r"12\pi", r"12\pi\text{ m}", True),
        (r"15\sqrt3", r"$15\sqrt3$ square centimeters", True), (r"15\sqrt3\text{ cm}^2", r"15\sqrt{3}\text{ cm}^{2}", True),
        (r"12\pi\text{ cm}", r"12\pi\text{ m}", False), (r"12\pi\text{ cm}^2", r"12\pi\text{ cm}", False),
        (r"12\pi", r"13\pi\text{ cm}^2", False), (r"12\pi h", r"12\pi", False), (r"12\pi", r"A = 12\pi\text{ units}", True),
        ("12", r"12\pi\text{ cm}^2", False), (r"12\pi x\text{ cm}", r"12\pi", False),
        # "about" behind a number is a second answer
        (r"3 \approx 4", "4", False), (r"3 \approx 4", "3", False), (r"5 \approx 6", "x=5", False),
        (r"5 \approx 6", "6", False), (r"x \approx 5", "5", True), (r"\approx 17", "17", True),
        # words of number and operation are not units
        ("5", "5 plus six", False), ("5", "5 times two", False), ("5", "5 over two", False), ("5", "5 halves", False),
        ("5", "5 squared", False), ("5", "5 times", True), ("5", "5 overtimes", True),
    ],
)  # fmt: skip
def test_two_answers_are_the_same_or_not_whichever_is_wanted(one: str, other: str, right: bool) -> None:
    assert (is_right(one, other), is_right(other, one)) == (right, right)


@pytest.mark.parametrize(
    ("wanted", "given", "verdicts"),
    [
        (r"10\%", "10", (True, False, True)),
        (r"10\%", "0.1", (True, True, False)),
        ("0.25", r"25\%", (True, True, False)),
        ("50", "50%", (True, False, True)),
        (r"28\%", r"28 \text{ percent}", (True, True, True)),
        (r"10\%", r"1\%", (False, False, False)),
    ],
)
def test_a_setting_says_what_a_percent_sign_is(wanted: str, given: str, verdicts: tuple[bool, ...]) -> None:
    readings = [Conventions(percent) for percent in ("either", "hundredths", "units")]
    assert tuple(compare_exactly(wanted, given, reading) for reading in readings) == verdicts


def test_a_setting_says_how_far_a_rounded_number_may_be_off_and_whole_ones_never_are() -> None:
    near = Conventions(tolerance=1e-3)
    assert [compare_exactly("1/3", "0.3333", reading) for reading in (Conventions(), near)] == [False, True]
    assert compare_exactly("0.0000001", "0.0000002", near) is False
    assert compare_exactly("1000000", "1000001", near) is False


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("So the answer is **18**.", "18"), ("The final answer is:\n\n18", "18"), ("The answer is $18$.", "18"),
        ("#### 18\n\nThis was fun.", "18"), ("The answer is 18, because 9+9=18.", "18"), ("The answer is `18`.", "18"),
        ("Final Answer: The final answer is $3$. I hope it is correct.", "3"), ("The final answer is:\n\n$$18$$", "18"),
        (r"So we get $\frac{1}{2}$.", r"\frac{1}{2}"), ("Therefore $x > 5$ is the solution.", "x > 5"), ("It is .5", ".5"),
        ("The point is (1, 2).", "(1, 2)"), ("The answer is not 42, but 43.", "43"), ("It cannot be 42.", None),
        ("The answer is $18$ (or $19$).", "18 or 19"), ("**5** or **6**", "5 or 6"), ("5. Or 6.", "5 or 6"),
        ("The answer is $18$, but also $19$.", "18 or 19"), ("$18$, but also $19$", "18 or 19"), ("It is 5 or 6. So 7.", "7"),
        (r"The answer is $\frac12$ (or $0.5$).", r"\frac12"), ("The answer is **5**, or 6.", "5 or 6"),
        ("The answer is 5 or 6, or 7.", "5 or 6, or 7"),
        ("I do not think the answer is 18.", None), ("I don't think the answer is 18. It is 20.", "20"),
        ("I think the answer is 18.", "18"),
        ("It costs $18 and $20.", "20"), ("#### 18 dollars", "18 dollars"),
    ],
)  # fmt: skip
def test_an_answer_is_taken_out_of_the_sentence_that_gives_it(text: str, found: str | None) -> None:
    assert extract_answer(text, "any") == found


@pytest.mark.parametrize(
    ("wanted", "given"),
    [
        ("2^{e^2}", "2^exp(2)"), (r"2^{\sqrt{2}}", "2^sqrt(2)"), (r"2^{|x|}", "2^abs(x)"), ("2^{e^2}", r"2^\exp(2)"),
        ("2^{e^{e^2}}", "2^exp(exp(2))"), (r"2^{\sqrt{2}}", "2**sqrt(2)"),
    ],
)  # fmt: skip
def test_a_call_in_an_exponent_keeps_together(wanted: str, given: str) -> None:
    known = compare_exactly(wanted, given)
    assert (compare_symbolically(wanted, given) if known is None else known) is True


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"\boxed 7", "7"), (r"\boxed 7.", "7"), (r"\\boxed{7}", "7"), (r"\fbox{7}", "7"),
        (r"\boxed{5}, as asked in \boxed{}", "5"),
        (r"write it in \boxed form", None), (r"\boxed{5", None), (r"\{\boxed{5}\}", "5"),
    ],
)  # fmt: skip
def test_a_box_is_written_in_several_ways(text: str, found: str | None) -> None:
    assert Boxed().parse(text) == found


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("**D**", "D"), ("(B)", "B"), ("It's not A, therefore I think it's B", "B"), ("The answer is: C", "C"),
        ("**Answer:** C", "C"),
        ("The answer is option C.", "C"), (r"\boxed{Option C}", "C"), ("ANSWER: C", "C"), ("The answer is (C).", "C"),
        ("Answer: C\n\nA and B are wrong.", "C"), ("A and B", None), ("The answer is not B.", None), ("A cat sat.", None),
        (r"\boxed{A. B. C. D.}", None), (r"\boxed{(A)(B)}", None), ("Answer: A+B", None), ("A and/or B", None),
        ("A (or B)", None), ("A B C D", None), ("Either A or B is correct.", None), ("The answer is A and B.", None),
        ("The answer is A, and B is wrong.", "A"), ("The answer is A, B and C are wrong.", "A"), (r"\boxed{A. B cells}", "A"),
        ("The answer is A. B, C and D are not.", "A"), ("A is wrong, and B is correct.", "B"),
        ("The answer is A, and B is right too.", None),
        ("a) is wrong, so C", "C"), ("a. I think it is C", "C"), ("a) 5 b) 6 so b)", "B"), ("a. b. c. d.", None),
        ("d) None of these? No. It is (A).", "A"), ("a. First, eliminate. So it must be D", "D"),
        ("<answer>b) is false; C</answer>", None), ("b. 4", "B"), (r"\boxed{b) 4 m/s}", "B"), ("a) A cat", "A"),
        (r"\boxed{5\text{ and a half}} Answer: C", "C"), (r"\boxed{\text{half of a pie}} Answer: C", "C"),
        (r"\boxed{c}", "C"), (r"\boxed{\text{option c}}", "C"), (r"\boxed{(c)}", "C"),
        ("Answer: Because of that.", None), (r"\boxed{AB}", None), ("(A) is false. So (D) is the answer.", "D"),
    ],
)  # fmt: skip
def test_a_letter_is_found_in_every_usual_form_and_in_no_word(text: str, letter: str | None) -> None:
    assert find_letter(text) == letter


@pytest.mark.parametrize(
    ("answer", "program"),
    [
        ("```python\ndef f(x):\n    return x+1\n```\nPrints:\n```\n6\n```", "def f(x):\n    return x+1\n"),
        ("```\ndef f(x):\n    return x+1\n```\nPrints:\n```\n6\n```", "def f(x):\n    return x+1\n"),
        ('```python title="a.py"\nx = 1\n```', "x = 1\n"),
        ("~~~py\nx = 1\n~~~", "x = 1\n"),
        ("1. So:\n\n   ```python\n   if x:\n       y()\n   ```", "if x:\n    y()\n"),
        ("```python\ndef f(): return 1\n```\nTry:\n```python\nprint(f())\n```", "print(f())\n"),
        ("```python\nx = 1\n```\n```python\n5 5\n```", "x = 1\n"),
        ("```python\nx = 1\n```\n```python\n$ python a.py\n```", "x = 1\n"),
        ("```python\nx = 1\n```\n```python\nfor i in range(3):\n```", "x = 1\n"),
        ("```\nx = 1\n```\n```\n5 5\n```", "x = 1\n"),
        ("```python\nx = 1\n```\n```python\n    return x\n```", "    return x\n"),
        ("```python\nfor i in range(3):\n```", "for i in range(3):\n"),
        ("Use `print(1)` for that.", ""),
        ("```js\nf()\n```", ""),
    ],
)
def test_the_program_is_the_last_python_block(answer: str, program: str) -> None:
    assert extract_code(answer) == program


def test_a_wanted_function_says_which_block_defines_it() -> None:
    two = "```python\ndef f(): return 1\n```\nTry:\n```python\nprint(f())\n```"
    assert extract_code(two, "f") == "def f(): return 1\n"


CUT = "Perhaps it is \\boxed{42}? No, let me check that again: 6*8 is"


async def test_a_thought_that_the_prompt_opened_and_the_answer_never_closed_holds_no_answer() -> None:
    prompt, task = Prompt((), answer="42"), Gsm8k(answer_form="any")
    cut, closed = Answer(CUT, "think"), Answer(CUT + "</think>So \\boxed{42}.", "think")
    assert [(await task.reward(prompt, text)).total for text in (CUT, cut, closed)] == [1.0, 0.0, 1.0]
    assert (await task.reward(prompt, cut)).metrics["has_answer"] == 0.0
    assert find_letter(Answer("The answer is C, or", "think")) is None
    assert extract_code(Answer("```python\nx = 1\n```\nbut", "think")) == ""
    assert ThinkTags().parse(Answer("a</think>b", "think")) == "b"
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert [len(parse_calls(text).calls) for text in (call, Answer(call, "think"))] == [1, 0]


@pytest.mark.parametrize(
    ("prompt", "tag"),
    [("<|assistant|><think>\n", "think"), ("<think></think>\n", ""), ("write <think> first\nassistant:", ""),
        ("a<thinking>", "thinking")],
)  # fmt: skip
def test_a_prompt_says_by_its_end_whether_a_thought_is_open(prompt: str, tag: str) -> None:
    assert find_opened(prompt) == tag


TESTS: list[tuple[Any, str, str]] = [
    ({"inputs": ["1", "2"], "outputs": ["1"]}, "", "2 inputs and 1 outputs: each input needs one output"),
    (["assert f(1) == 1", "assert f(2) ="], "", r"test 2 is not Python, line 1: 'assert f\(2\) ='"),
    ("assert True", "f", r"test 1 calls check\(f\), and defines no check"),
    ({"fn_name": "f", "inputs": [[float("nan")]], "outputs": [1]}, "", "has arguments that can't be written as Python"),
    ({"fn_name": "f", "inputs": [[1]], "outputs": [float("nan")]}, "", "wants 'NaN', which equals nothing"),
    ({"fn_name": "f(x)", "inputs": [[1]], "outputs": [1]}, "", r"calls 'f\(x\)', which is not a name of a function"),
    ({"inputs": ["\ud800"], "outputs": ["1"]}, "", "test 1 holds half a character"),
    ([], "", "there is no test"),
]


@pytest.mark.parametrize(("tests", "entry_point", "said"), TESTS)
def test_tests_that_no_program_can_pass_are_refused(tests: Any, entry_point: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_tests(tests, entry_point)


def test_tests_are_checked_where_rows_are_loaded_and_not_again_for_each_answer() -> None:
    large = {"fn_name": "f", "inputs": [[list(range(100_000))]], "outputs": [list(range(100_000))]}
    assert read_tests(large, check=False) == read_tests(large)
    assert len(read_tests(["assert f(2) ="], check=False)) == 1
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        read_tests(['assert "\\d"'], check=False)
    assert not said


def test_a_row_that_can_never_be_passed_is_refused_with_its_number_and_line(tmp_path: Path) -> None:
    rows = [{"text": "q", "code": code, "test_setup_code": "", "test_list": ["assert 1"]} for code in ("x = 1", "x = ")]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = CodeGeneration(data_dir=str(tmp_path), subsets=(), eval_split="train")
    with pytest.raises(NoRows, match=r"row 1 of .*train\.jsonl, line 2: .*solution_field=code is not Python, line 1: 'x ='"):
        task.prompts("train")
    assert len(task.model_copy(update={"unreadable": "leave_out"}).prompts("train")) == 1


@pytest.mark.parametrize(("header", "total"), [("<think>\n", 0.0), ("", 1.0), ("<think>\n\n</think>\n", 1.0)])
async def test_the_dialogue_tells_the_reward_what_its_template_opened(header: str, total: float, bpe_tokenizer: Any) -> None:
    text = CHATML.replace("assistant\n{% endif %}", f"assistant\n{header}{{% endif %}}")
    template = ChatTemplate(bpe_tokenizer, [bpe_tokenizer.eos_token_id], chat_template=text)
    chat = TokenChat(template, Script((template.encode(CUT).tolist(), "length")), 1000)
    reward = await Gsm8k().play(Prompt(({"role": "user", "content": "6*7?"},), answer="42"), chat)
    assert (reward.total, chat.recording().completion_text) == (total, CUT)
