"""Questions of a user's own: every format and scoring, what is refused by file, line and column, and splits that never meet."""

from __future__ import annotations

import csv
import gzip
import json
import logging
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet
from pydantic import ValidationError

from telescope.config.plugins import PluginError
from telescope.environments.base import Prompt, Reward
from telescope.environments.graders.pool import open_graders
from telescope.environments.identity import identify
from telescope.environments.questions.dataset import NoRows
from telescope.environments.tasks.questions import Questions
from tests.environments.judge_server import judging

Rows = Sequence[Mapping[str, Any]]
SUMS = [{"question": f"{n} + 1?", "answer": str(n + 1)} for n in range(20)]


def write(file: Path, rows: Rows) -> Path:
    """In the format that its name says."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif file.suffix == ".json":
        file.write_text(json.dumps(rows))
    elif file.suffix == ".csv":
        with file.open("w", newline="") as opened:
            writer = csv.DictWriter(opened, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        parquet.write_table(pa.Table.from_pylist([dict(row) for row in rows]), file)
    return file


def say_yes(completion: str) -> float:
    return 1.0


def asked(prompts: Sequence[Prompt]) -> list[str]:
    return [prompt.turns[-1]["content"] for prompt in prompts]


async def score(task: Questions, answer: str, at: int = 0) -> Reward:
    reward = task.reward(task.prompts("train")[at], answer)
    return await reward


SCORINGS: tuple[tuple[dict[str, Any], str, str, str], ...] = (
    ({}, "Lima Peru", " Lima \n Peru ", "lima peru"),
    ({"ignore_case": True}, "Lima", "LIMA", "Lima."),
    ({"answer_form": "tag"}, "Lima", "I say <answer>Lima</answer>", "Lima"),
    ({"answer_form": "boxed"}, "Lima", r"So \boxed{Lima}", "Lima"),
    ({"scoring": "number"}, "1,250.50", "That makes 1250.5", "That makes 1250"),
    ({"scoring": "number"}, "so many\n#### 18", "The answer is $18.00", "The answer is 18 or 19"),
    ({"scoring": "number", "number_tolerance": 0.01}, "3.14159", "about it: 3.1416", "3.2"),
    ({"scoring": "math"}, r"\frac{1}{2}", r"\boxed{0.5}", r"\boxed{0.6}"),
    ({"scoring": "regex", "pattern": "={answer}$"}, "1.5", "3/2=1.5", "3/2=125"),
    ({"scoring": "regex"}, r"^[A-C]\d$", "B7", "B77"),
    ({"scoring": "regex", "pattern": "yes", "ignore_case": True, "answer_field": None}, "unused", "Yes!", "no"),
)


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet"])
async def test_every_format_is_scored_in_every_way(suffix: str, tmp_path: Path) -> None:
    async with open_graders(1):
        for number, (settings, golden, right, wrong) in enumerate(SCORINGS):
            file = write(tmp_path / f"{number}.{suffix}", [{"question": "Well?", "answer": golden}])
            task = Questions(path=str(file), held_out=0, **settings)
            task.check_data()
            good, bad = await score(task, right), await score(task, wrong)
            assert (good.total, bad.total, good.metrics["exact"]) == (1.0, 0.0, 1.0), settings
            if said := task.right_answer(task.prompts("train")[0]):
                expected = 0.0 if settings.get("pattern") == "={answer}$" else 1.0  # the answer alone has no "="
                assert (await score(task, said)).total == expected, settings


async def test_what_stands_in_a_thought_is_not_an_answer_and_none_at_all_is_a_0(tmp_path: Path) -> None:
    task = Questions(path=str(write(tmp_path / "q.jsonl", [{"question": "?", "answer": "Lima"}])), held_out=0)
    assert [(await score(task, text)).total for text in ("<think>no</think>Lima", "<think>Lima", "")] == [1.0, 0.0, 0.0]
    assert (await score(task, "<think>Lima")).metrics == {"exact": 0.0, "has_answer": 0.0}


async def test_each_of_several_right_answers_is_right(tmp_path: Path) -> None:
    rows = [{"question": "Capital?", "answer": ["Lima", " City of Kings ", ""]}]
    for suffix in ("jsonl", "parquet"):
        task = Questions(path=str(write(tmp_path / f"q.{suffix}", rows)), held_out=0)
        assert [(await score(task, text)).total for text in ("Lima", "City of Kings", "Cusco")] == [1.0, 1.0, 0.0]
        assert (await score(task, "Lima")).golden_answers == ("Lima", "City of Kings")


async def test_a_pattern_that_runs_for_ever_makes_the_answer_wrong_and_too_heavy(tmp_path: Path) -> None:
    file = write(tmp_path / "q.jsonl", [{"question": "?", "answer": ""}])
    task = Questions(path=str(file), scoring="regex", pattern="^(a+)+$", answer_field=None, held_out=0, grading_limit_s=1.0)
    async with open_graders(1):
        reward = await score(task, "a" * 60 + "b")
        assert (reward.total, reward.tags) == (0.0, ("too_heavy",))
        assert (await score(task, "aaa")).total == 1.0


async def test_a_function_of_a_file_gets_what_it_names_and_its_failures_are_the_graders(tmp_path: Path) -> None:
    code = tmp_path / "mine.py"
    code.write_text(
        "def score(parsed, answer, facts):\n    return len(parsed) / facts['best'] if answer == 'x' else 1 / 0\n"
        "async def other(completion):\n    return 0.25, 'gold'\n"
        "def strange(dog):\n    return 1\n"
    )
    rows = [{"question": "a", "answer": "x", "best": 4}, {"question": "b", "answer": "y", "best": 4}]
    settings: dict[str, Any] = {"path": str(write(tmp_path / "q.jsonl", rows)), "held_out": 0, "scoring": "function"}
    task = Questions(**settings, function=str(code), facts_fields=("best",))
    task.check_data()
    reward = await score(task, "abc")
    assert (reward.total, dict(reward.metrics)) == (0.75, {"score": 0.75, "has_answer": 1.0})
    with pytest.raises(RuntimeError, match="reward function score: ZeroDivisionError"):
        await score(task, "abc", 1)
    second = Questions(**settings, function=f"{code}:other", answer_field=None)
    assert (await score(second, "abc")).golden_answers == ("gold",)
    for named, error, said in (
        (f"{code}:strange", ValueError, "asks for 'dog'; there are prompt, completion"),
        (f"{code}:none", PluginError, r"mine\.py has no function 'none'; it has score, other, strange"),
        (f"{tmp_path}/no.py", PluginError, r"no\.py is not a Python file that is there"),
    ):
        with pytest.raises(error, match=said):
            Questions(**settings, function=named).check_data()
    (tmp_path / "broken.py").write_text("import sys\nsys.exit(3)\n")
    with pytest.raises(PluginError, match=r"broken\.py can't be imported: SystemExit: 3"):
        Questions(**settings, function=str(tmp_path / "broken.py")).check_data()


async def test_a_judge_says_yes_or_no_or_points_and_is_not_asked_about_nothing(tmp_path: Path) -> None:
    file = str(write(tmp_path / "q.jsonl", [{"question": "Who wrote it?", "answer": "Vallejo"}]))
    async with judging(["Verdict: yes", "Verdict: no", "Verdict: 7"]) as server:
        judge = {"base_url": server.base_url, "model": "j"}
        task = Questions(path=file, held_out=0, scoring="judge", judge=judge)
        points = Questions(
            path=file, held_out=0, scoring="judge", judge=judge, judge_question="How kind?", judge_points=10, answer_field=None
        )
        await task.set_up()
        await points.set_up()
        assert [(await score(task, "César Vallejo")).total for _ in range(2)] == [1.0, 0.0]
        rated = await score(points, "<think>rude</think>Thank you")
        assert (rated.total, dict(rated.metrics)) == (0.7, {"judged": 0.7, "has_answer": 1.0})
        assert (await score(points, "<think>endless")).total == 0.0
        texts = [request["messages"][-1]["content"] for request in server.requests]
        assert len(texts) == 3
        assert all(word in texts[0] for word in ("Who wrote it?", "Vallejo", "César Vallejo"))
        assert "rude" not in texts[2]
        assert "<right_answer" not in texts[2]
        await task.tear_down()
        await points.tear_down()


def test_chat_lists_are_prompts_and_their_last_message_may_be_the_answer(tmp_path: Path) -> None:
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1?"},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": "2?"},
    ]
    rows = [
        {"messages": [*chat, {"role": "assistant", "content": "two"}], "sys": None},
        {"messages": [*chat[1:], {"role": "assistant", "content": "zwei"}], "sys": "In German."},
        {"messages": [*chat[3:], {"role": "assistant", "content": "2"}], "sys": ""},
    ]
    for suffix in ("jsonl", "parquet"):
        task = Questions(
            path=str(write(tmp_path / f"q.{suffix}", rows)),
            question_field="messages",
            answer_field="messages",
            system_field="sys",
            system_prompt="Else.",
            instruction="Q: {question}",
            held_out=0,
        )
        prompts = task.prompts("train")
        assert [prompt.answer for prompt in prompts] == ["two", "zwei", "2"]
        assert prompts[0].turns == (*chat[:3], {"role": "user", "content": "Q: 2?"})
        assert [prompt.turns[0]["content"] for prompt in prompts] == ["Be brief.", "In German.", "Else."]


@pytest.mark.parametrize(
    ("name", "content", "settings", "said"),
    [
        (
            "q.jsonl",
            '{"question": "a", "answer": "1"}\n{"qestion": "b", "answer": "2"}\n',
            {},
            r"q\.jsonl, line 2 has no column 'question', .*; it has qestion, answer: mend",
        ),
        ("q.jsonl", '{"question": "a", "answer": "1"}\n\n{oops\n', {}, r"q\.jsonl can't be read: line 3 is not JSON"),
        ("q.jsonl", '{"asked": "a", "answer": "1"}\n', {}, r"q\.jsonl has no column 'question'; it has asked, answer: name "),
        ("q.jsonl", '{"question": null, "answer": "1"}\n', {}, r"q\.jsonl has no row with a question and an answer"),
        ("q.json", '[{"question": {"text": "a"}, "answer": "1"}]', {}, "row 0: column 'question' holds an object"),
        ("q.csv", "question,answer\na,1\nb,2,3\n", {}, r"q\.csv can't be read: .*Expected 2 columns, got 3"),
        (
            "q.csv",
            "question,answer\na,1\nb,two\n",
            {"scoring": "number"},
            r"q\.csv, row 2: column 'answer' holds 'two', which is not a number",
        ),
        (
            "q.jsonl",
            '{"question": "a", "answer": "("}\n',
            {"scoring": "regex"},
            r"line 1: column 'answer' holds '\(', which is not a regular",
        ),
        (
            "q.jsonl",
            '{"question": [{"role": "user"}], "answer": "1"}\n',
            {},
            "line 1: message 1 in column 'question': the message",
        ),
        (
            "q.jsonl",
            '{"question": [{"role": "assistant", "content": "x"}], "answer": "1"}\n',
            {},
            "line 1: the messages in column 'question' end with one of",
        ),
        ("q.txt", "a\n", {}, r"path='.*q\.txt' is a file of a kind that is not read: give one whose name ends in \.parquet"),
        (
            "q.jsonl",
            '{"question": "a", "answer": "1"}\n',
            {"eval_split": "test", "held_out": None},
            "eval_split=test has no use: path=.* is one file",
        ),
        (
            "q.jsonl",
            '{"question": "a", "answer": "1"}\n',
            {"held_out": None},
            "has 1 different questions, too few to hold some out for evals",
        ),
        (
            "q.jsonl",
            '{"question": "a", "answer": "1"}\n',
            {"train_split": "dev"},
            "train_split=dev has no use: path=.* is one file",
        ),
        ("q.jsonl", '{"question": "a", "answer": "1"}\n', {"subsets": ("x",)}, "subsets=.* has no use: .*: one file has none"),
        (
            "q.jsonl",
            '{"question": "a", "answer": "1"}\n',
            {"revision": "v1"},
            "revision=v1 has no use: .* what lies here has none",
        ),
        (
            "q.jsonl",
            '{"question": "a"}\n',
            {"scoring": "function", "function": f"{__file__}:say_yes", "answer_field": "right"},
            "has no column 'right'.*; or set answer_field=null where there are no right answers",
        ),
        (
            "q.jsonl",
            '{"question": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]}\n',
            {"answer_field": "question"},
            "line 1: message 1 .*: it has from and value, as ShareGPT has them; write role and content",
        ),
        ("q.csv", "question;answer\na;1\n", {}, r"q\.csv parts its columns by ';' \('question;answer'\): write it with commas"),
    ],
)
def test_a_bad_file_is_refused_by_file_line_and_column(
    name: str, content: str, settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=said):
        Questions(path=str(tmp_path / name), **{"held_out": 0} | settings).check_data()


def test_rows_without_a_question_or_an_answer_are_left_out_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [*SUMS[:3], {"question": " ", "answer": "1"}, {"question": "a", "answer": None}]
    with caplog.at_level(logging.WARNING):
        assert len(Questions(path=str(write(tmp_path / "q.jsonl", rows)), held_out=0).prompts("train")) == 3
    assert "2 of 5 rows have no question or no answer: left out, the first: " in caplog.text
    assert "q.jsonl, line 4" in caplog.text


def test_what_lies_nowhere_is_said_with_both_places_it_could_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="path is empty: name your file"):
        Questions().check_data()
    with pytest.raises(NoRows, match=r"path='.*/none\.jsonl' is not there"):
        Questions(path="mine/none.jsonl").check_data()
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    Questions(path="nobody/nothing").check_data()  # no network is asked before a run
    with pytest.raises(
        NoRows, match=r"path='nobody/nothing' \(there is no such file or folder here\) can't be had from the Hug"
    ):
        Questions(path="nobody/nothing").prompts("train")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"ignore_case": True, "scoring": "number"}, "ignore_case has no use with scoring=number: it is for exact and regex"),
        ({"function": "a.py"}, "function has no use with scoring=exact: it is for function"),
        ({"scoring": "function"}, "scoring=function needs function"),
        ({"scoring": "judge"}, "scoring=judge needs judge"),
        ({"answer_field": None}, "scoring=exact compares with right answers: answer_field names their column"),
        ({"scoring": "regex", "pattern": "("}, "is not a regular expression"),
        ({"facts_fields": ("right_answers",)}, "the name by which facts have the right answers"),
        ({"held_out": 2, "eval_path": "e.jsonl"}, "held_out=2 has no use with eval_path"),
        ({"held_out": 0, "eval_split": "test"}, "held_out=0 has no use with eval_split"),
    ],
)
def test_settings_that_can_do_nothing_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        Questions(path="q.jsonl", **settings)


def test_paths_are_kept_from_the_root_on_and_ids_of_the_hub_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "folder" / "a.jsonl", SUMS)
    monkeypatch.chdir(tmp_path)
    task = Questions(path="folder", eval_path="new.csv", scoring="function", function="s.py")
    assert (task.path, task.eval_path) == (str(tmp_path / "folder"), str(tmp_path / "new.csv"))
    assert task.function == f"{tmp_path}/s.py:score"
    again = Questions.model_validate_json(task.model_dump_json())
    assert again == task
    assert Questions(path="openai/gsm8k").path == "openai/gsm8k"


def identities(task: Questions, split: str) -> list[str]:
    return [identify(prompt) for prompt in task.prompts(split)]


def test_a_tenth_is_held_out_by_a_hash_and_duplicates_stay_on_one_side(tmp_path: Path) -> None:
    for seed in range(5):
        file = str(write(tmp_path / f"{seed}.jsonl", [*SUMS, *reversed(SUMS)]))
        task = Questions(path=file, seed=seed)
        train, held_out = identities(task, "train"), identities(task, "eval")
        assert (len(train), len(held_out), len(set(held_out))) == (36, 4, 2)
        assert not set(train) & set(held_out)
        turned = Questions(path=str(write(tmp_path / "turned.csv", SUMS[::-1] * 2)), seed=seed)
        assert set(identities(turned, "eval")) == set(held_out)
    assert len({tuple(identities(Questions(path=file, seed=seed), "eval")) for seed in range(5)}) > 1
    assert Questions(path=file, held_out=0).prompts("eval") == ()


def test_what_an_eval_file_or_split_holds_is_not_trained_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train, test = write(tmp_path / "data" / "train.jsonl", SUMS), write(tmp_path / "data" / "test.csv", SUMS[15:])
    for task in (
        Questions(path=str(train), eval_path=str(test)),
        Questions(path=str(tmp_path / "data"), eval_split="test"),
    ):
        caplog.clear()
        assert asked(task.prompts("train")) == [row["question"] for row in SUMS[:15]]
        assert asked(task.prompts("eval")) == [row["question"] for row in SUMS[15:]]
        assert "5 of 20 questions of the train split are in the eval split too, and are not trained on" in caplog.text
    few = Questions(path=str(train), eval_path=str(test), num_train=2, num_eval=1)
    assert (len(few.prompts("train")), len(few.prompts("eval"))) == (2, 1)
    with pytest.raises(NoRows, match="all 20 questions of the train split are in the eval split too"):
        Questions(path=str(train), eval_path=str(train)).check_data()


def test_a_question_is_on_one_side_whatever_system_message_or_white_space_it_has(tmp_path: Path) -> None:
    rows = [{**row, "by": by, "question": by[0] + row["question"]} for row in SUMS for by in (" A", " B")]
    task = Questions(path=str(write(tmp_path / "q.jsonl", rows)), system_field="by", held_out=6)
    train, held_out = set(asked(task.prompts("train"))), set(asked(task.prompts("eval")))
    assert (len(train), len(held_out)) == (17, 3)
    assert not train & held_out
    other = [{"question": [{"role": "user", "content": "1  + 1?\n"}], "answer": "2", "by": "C"}]
    task = Questions(path=task.path, system_field="by", eval_path=str(write(tmp_path / "eval.jsonl", other)))
    assert "1 + 1?" not in asked(task.prompts("train"))


def test_of_an_eval_folder_the_files_of_test_count_where_names_say_splits_else_all(tmp_path: Path) -> None:
    path = str(write(tmp_path / "q.jsonl", SUMS[:10]))
    for name in ("named/train.jsonl", "named/test.jsonl", "plain/a.jsonl", "plain/b.jsonl"):
        write(tmp_path / name, [{"question": name, "answer": "1"}])
    assert asked(Questions(path=path, eval_path=str(tmp_path / "named")).prompts("eval")) == ["named/test.jsonl"]
    assert len(Questions(path=path, eval_path=str(tmp_path / "plain")).prompts("eval")) == 2


@pytest.mark.parametrize(
    ("golden", "right", "wrong"),
    [
        ("5", "5|5e0|x = 5|3 + 2 = 5|That makes 5.|5 apples",
         "1e-05|1e-5|So 1e-05|10^{-5}|So 10^{-5}.|7-5| - 5|x - 5|7 - 5|−5|minus 5"),
        ("50", "Total:50|$50|**50**|50 (fifty)|That is $50.", "12:50|at 12:50|1.250,50|2024-01-50|40-50"),
        ("-5", "-5|- 5|−5|x = -5|x = - 5", "5|7-5"),
        ("1e-05", "1e-05|0.00001|10^{-5}|So 1e-05|The result is 1e-05.|1 × 10^-5", "05|5|1"),
        ("1000000", "1e6|10^6|1 million|1 000 000|so 1,000,000", "1|6|10"),
    ],
)  # fmt: skip
async def test_no_part_of_a_number_is_taken_for_it(golden: str, right: str, wrong: str, tmp_path: Path) -> None:
    file = write(tmp_path / "q.jsonl", [{"question": "?", "answer": golden}])
    task = Questions(path=str(file), held_out=0, scoring="number")
    given = {text: (await score(task, text)).total for text in (*right.split("|"), *wrong.split("|"))}
    assert given == dict.fromkeys(right.split("|"), 1.0) | dict.fromkeys(wrong.split("|"), 0.0)


async def test_one_right_answer_that_takes_too_long_does_not_hide_another(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"held_out": 0, "grading_limit_s": 0.5, "scoring": "regex"}
    file = write(tmp_path / "q.jsonl", [{"question": "?", "answer": ["^(a+)+$", "b$"]}])
    async with open_graders(1):
        reward = await score(Questions(path=str(file), **settings), "a" * 60 + "b")
        assert (reward.total, reward.tags) == (1.0, ())


async def test_patterns_see_the_whole_answer_and_a_quantifier_may_follow_it(tmp_path: Path) -> None:
    file = str(write(tmp_path / "q.jsonl", [{"question": "?", "answer": "b"}]))
    async with open_graders(1):
        whole = Questions(path=file, scoring="regex", pattern="^a", held_out=0)
        assert [(await score(whole, text)).total for text in ("a" + "c" * 30_000, "c" + "a" * 30_000)] == [1.0, 0.0]
        assert (await score(Questions(path=file, scoring="regex", pattern="^{answer}+$", held_out=0), "bbb")).total == 1.0


async def test_an_accent_may_be_a_character_of_its_own(tmp_path: Path) -> None:
    file = write(tmp_path / "q.jsonl", [{"question": "?", "answer": "caf\u00e9"}])
    assert (await score(Questions(path=str(file), held_out=0), "cafe\u0301")).total == 1.0


def test_a_data_set_of_the_hub_is_read_by_its_own_loader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repository of the hub with its card, laid on a disk: `datasets` reads it there without a network."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "hub" / "sums" / "train.jsonl", SUMS)
    write(tmp_path / "hub" / "sums" / "test.jsonl", SUMS[18:])
    load = datasets.load_dataset
    monkeypatch.setattr(datasets, "load_dataset", lambda name, *rest, **more: load(f"hub/{name}", *rest, **more))
    task = Questions(path="sums", eval_split="test")
    assert (len(task.prompts("train")), asked(task.prompts("eval"))) == (18, ["18 + 1?", "19 + 1?"])


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("q.jsonl", rb'{"question": "\ud800 a", "answer": "1"}', r"line 1, column 'question' holds .*half of a character"),
        ("q.jsonl", b'{"question": "a", "answer": "1", "answer": "2"}', r"line 1 has the column 'answer' more than once"),
        ("q.jsonl", b'{"question": "a", "answer": {"x": 1, "x": 2}}', r"in column 'answer' has 'x' more than once"),
        ("q.csv", b"question,answer,answer\na,1,2\n", r"q\.csv has 2 columns called 'answer': rename all but one"),
        ("q.jsonl", '{"question": "a", "answer": "1"}\n'.encode("utf-16"), r"q\.jsonl .* UTF-16.*: write it as UTF-8"),
        ("q.json", '[{"question": "a", "answer": "1"}]'.encode("utf-16-le"), r"q\.json .* UTF-16.*: write it as UTF-8"),
        ("q.csv", "question,answer\na,1\n".encode("utf-16"), r"q\.csv .* UTF-16.*: write it as UTF-8"),
        ("q.jsonl", b'{"question": "a", "answer": "1"}\r{"question": "b", "answer": "2"}\r', "carriage return alone"),
        ("q.jsonl", b'{\n  "question": "a",\n  "answer": "1"\n}\n', r"line 1 is not JSON.*goes over several lines: write one"),
        (
            "q.jsonl.gz",
            gzip.compress(b'{"question": "a", "answer": "1"}\n' * 99)[:-12],
            r"q\.jsonl\.gz can't be read: it is not",
        ),
        ("q.jsonl.gz", gzip.compress(b"x" * 99)[:12] + b"\xff" * 30, r"q\.jsonl\.gz can't be read: it is not whole"),
    ],
)
def test_what_a_spoiled_file_is_is_said_by_its_name(name: str, content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(NoRows, match=said):
        Questions(path=str(tmp_path / name), held_out=0).check_data()


def test_bytes_of_a_table_are_utf8_text_or_refused_by_row_and_column(tmp_path: Path) -> None:
    file = tmp_path / "q.parquet"
    parquet.write_table(pa.table({"question": [b"rev \xc3\xa9"], "answer": pa.array([b"0"], pa.large_binary())}), file)
    [prompt] = Questions(path=str(file), held_out=0).prompts("train")
    assert (prompt.turns[-1]["content"], prompt.answer) == ("rev é", "0")
    parquet.write_table(pa.table({"question": [b"a", b"\xff"], "answer": ["1", "2"]}), file)
    with pytest.raises(NoRows, match=r"q\.parquet, row 2: column 'question' holds bytes that are not UTF-8, b'\\xff'"):
        Questions(path=str(file), held_out=0).check_data()


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
def test_a_column_may_have_a_dot_in_its_name(suffix: str, tmp_path: Path) -> None:
    path = str(write(tmp_path / f"q.{suffix}", [{"question": "a", "right.one": "1", "right": "2"}]))
    [prompt] = Questions(path=path, answer_field="right.one", held_out=0).prompts("train")
    assert prompt.answer == "1"


@pytest.mark.parametrize("pattern", ["a{99999999999999999999}", "(" * 5000 + "a" + ")" * 5000])
def test_a_pattern_that_python_cannot_take_is_refused_in_a_sentence(pattern: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a regular expression"):
        Questions(path="q.jsonl", scoring="regex", pattern=pattern)
    path = str(write(tmp_path / "q.jsonl", [{"question": "a", "answer": pattern}]))
    with pytest.raises(NoRows, match=r"q\.jsonl, line 1: column 'answer' .* not a regular expression"):
        Questions(path=path, scoring="regex", held_out=0).check_data()


def test_a_question_is_on_one_side_however_its_accents_are_written(tmp_path: Path) -> None:
    forms = [{"question": f"{cafe} {n}", "answer": "1"} for n in range(20) for cafe in ("caf\u00e9", "cafe\u0301")]
    task = Questions(path=str(write(tmp_path / "q.jsonl", forms)), held_out=10)
    train, held_out = (
        {unicodedata.normalize("NFC", text) for text in asked(task.prompts(split))} for split in ("train", "eval")
    )
    assert (len(train), len(held_out)) == (15, 5)
    assert len(set(identities(task, "eval"))) == 5


def test_too_few_questions_to_hold_some_out_are_not_blamed_on_a_setting_that_nobody_set(tmp_path: Path) -> None:
    task = Questions(path=str(write(tmp_path / "q.jsonl", [{"question": "a", "answer": "1"}] * 30)))
    with pytest.raises(NoRows, match=r"q\.jsonl has 1 different questions, too few to hold some out for evals"):
        task.check_data()
