"""What scripts/measure_house.py counts, on sources of a few lines and on a trace written by hand."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from tests.product import load_script

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def house() -> ModuleType:
    return load("measure_house")


@pytest.fixture(scope="module")
def rollout_trace() -> ModuleType:
    return load("_rollout_trace")


def load(name: str) -> ModuleType:
    return load_script(ROOT / "scripts" / f"{name}.py")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    files = {
        "launch/start.py": "from telescope.core import Core\n\nclass Start: ...\n",
        "telescope/core.py": "import telescope.late\n\nclass Core: ...\nclass _Start: ...\n",
        "telescope/late.py": "def late():\n    from telescope.core import Core\n",
        "telescope/wire/messages.py": "class Done: ...\nclass Ask: ...\n",
        "telescope/flow/events.py": "class Done: ...\n",
        "telescope/flow/late.py": (
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from telescope._launch import start\nimport json\n"
        ),
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "telescope" / "_launch").symlink_to("../launch")
    return tmp_path


def test_lines_of_code_are_neither_blank_nor_comments_nor_strings_by_themselves(house: ModuleType):
    text = (
        '"""A\nmodule."""\n\n# why\nx = (\n    1,  # one\n\n)\n'
        'class A:\n    y: int = 1\n    """Of\n    a field."""\nz = """two\nlines"""\n'
    )
    assert house.code_lines(text) == 7  # three of x, two of the class, two of z


def test_paragraphs_are_running_text(house: ModuleType):
    text = "# Head\none\ntwo\n\n| a | table |\n- three\n  four\n- five\n```\nsix\n\nseven\n```\neight\n"
    assert [part.split() for part in house.paragraphs(text)] == [
        ["one", "two"],
        ["-", "three", "four"],
        ["-", "five"],
        ["eight"],
    ]


def test_knots_are_parts_that_import_each_other_in_a_circle(house: ModuleType):
    graph = {"a": ["b"], "b": ["c"], "c": ["a", "d"], "d": ["e"], "e": ["d"], "f": ["a"], "g": []}
    assert house.knots(graph) == [["a", "b", "c"], ["d", "e"]]
    assert house.knots({"a": ["b"], "b": []}) == []


def test_names_that_two_things_share_are_counted_and_listed(house: ModuleType, checkout: Path):
    classes, both, modules = house.names(house.sources(checkout))
    assert (classes.value, classes.names) == ("2", ["Done 2", "Start 2"])
    assert (both.value, both.names) == ("1", ["Done"])
    assert (modules.value, modules.names) == ("1", ["late 2"])


def test_imports_are_followed_through_links_and_told_apart_by_when_they_happen(house: ModuleType, checkout: Path):
    found = house.imports(checkout, house.sources(checkout))
    assert {path: others for path, others in found.first.items() if others} == {
        "launch/start.py": {"telescope/core.py"},
        "telescope/core.py": {"telescope/late.py"},
    }
    assert found.late["telescope/late.py"] == {"telescope/core.py"}
    assert found.typing["telescope/flow/late.py"] == {"launch/start.py"}


def test_several_checkouts_are_columns_of_one_table(house: ModuleType):
    columns = {"old": [house.Fact("files", "12"), house.Fact("gone", "1", ["x.py"])], "new": [house.Fact("files", "9")]}
    assert house.table(columns, listed=False).splitlines() == ["       old  new", "files  12   9", "gone   1"]
    assert house.table(columns, listed=True).splitlines()[3:] == ["", "old: gone", "    x.py"]


def test_a_rollouts_files_are_those_that_run_between_every_commit_and_the_step_after_it(rollout_trace: ModuleType):
    lines = [
        "0.0\tcall\tfirst.py\tonce\t",
        "1.0\treturn\tfake.py\tFakeBackend.train_step\t",  # of the base model's weights: no commit came before
        *("2.0\treturn\tfake.py\tFakeEngine.commit\t", "2.1\treturn\tfake.py\tFakeEngine.commit\t"),
        *("2.2\tcall\tplay.py\tplay\ta.Order", "2.3\tcall\ttimer.py\ttick\t", "2.4\tcall\tstep.py\tstep\ta.Order,a.Batch"),
        "2.5\treturn\tfake.py\tFakeBackend.train_step\t",
        "2.6\tcall\tweights.py\tpublish\t",
        "3.0\treturn\tfake.py\tFakeEngine.commit\t",
        *("3.1\tcall\tplay.py\tplay\ta.Order", "3.2\tcall\tstep.py\tstep\ta.Order"),
        "3.3\treturn\tfake.py\tFakeBackend.train_step\t",
        "3.4\tcall\tcut o",
    ]
    calls = rollout_trace.read(lines)
    assert rollout_trace.windows(calls) == [(2.1, 2.5), (3.0, 3.3)]
    rollout = rollout_trace.counted(calls)
    assert (rollout.files, rollout.types) == (["play.py", "step.py"], ["a.Order"])


def test_a_trace_without_a_commit_or_a_step_is_refused_with_what_was_looked_for(rollout_trace: ModuleType):
    with pytest.raises(SystemExit, match=r"Engine.*commit.*Backend.*train_step.*new names"):
        rollout_trace.counted(rollout_trace.read(["1.0\tcall\tplay.py\tplay\t"]))


@pytest.mark.slow
def test_a_rollout_of_this_checkout_is_traced_through_its_environment_and_backend(rollout_trace: ModuleType):
    rollout = rollout_trace.trace(ROOT)
    assert {"countdown.py", "reinforce_pp.py", "fake.py"} <= {Path(file).name for file in rollout.files}
    assert rollout.types
