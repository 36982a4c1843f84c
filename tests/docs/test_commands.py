"""Every command of the pages is one that a shell and Telescope take, as printed.

The commands of a page are given to bash, in a folder with the files that the page says to write. What they call is recorded and
judged: options by the command's own parser, settings by composing and checking them. Python and YAML are read, whole files of
the reader's own are loaded. The fast lane has a sample of the pages, the slow one all.
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from pathlib import Path

import pytest
import yaml

from telescope.cli.completion import ACTIONS
from telescope.cli.main import COMMANDS
from telescope.config.models import model_path
from tests.docs.judging import judge, mine_of, unquoted
from tests.docs.shown import Block, Called, blocks, call, command_lines, pages, write_files
from tests.product import ROOT

SAMPLE = ("README.md", "docs/first_hour.md", "docs/configuration.md", "docs/commands.md", "docs/environments.md")
"""What a reader sees first."""
LIVE_TEST_S = 300
REFUSED = "The configuration has"
"""Of a block that shows what is refused: the sentences must be those that are shown."""
OF_THE_READER = "mine/plugins/environments/mine.py"
OWN_ENVIRONMENT = """
from telescope.environments.base import SingleTurn

class Mine(SingleTurn):
    db: str = ""
    password: str | None = None
    headers: dict[str, str] = {}
"""
"""An environment that pages speak of as the reader's own, without showing it."""


def in_both_lanes() -> list[object]:
    return [pytest.param(page, id=mine_of(page), marks=() if mine_of(page) in SAMPLE else pytest.mark.slow) for page in pages()]


@pytest.mark.timeout(LIVE_TEST_S)
@pytest.mark.parametrize("page", in_both_lanes())
def test_the_commands_of_a_page_are_taken(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(page, tmp_path)
    (tmp_path / OF_THE_READER).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / OF_THE_READER).write_text(OWN_ENVIRONMENT)
    called, complaint = call(page, tmp_path, sys.executable)
    monkeypatch.chdir(tmp_path)
    Path("my-model").symlink_to(str(model_path("tiny")))  # what pages export to before they use it
    shown = {str(block): " ".join(block.text.split()) for block in blocks(page)}
    wrong = [
        f"{each}: {said}"
        for each in called
        for said in judge(each, monkeypatch)
        if not (REFUSED in shown[each.at] and " ".join(said.split()) in shown[each.at])
    ]
    assert complaint == "", complaint
    assert wrong == [], "\n".join(wrong)


def test_every_block_of_code_is_of_a_known_kind_and_can_be_read() -> None:
    wrong = [f"{block}: {said}" for page in pages() for block in blocks(page) if (said := read_mistake(block))]
    assert wrong == [], "\n".join(wrong)


def test_no_command_stands_in_a_block_that_is_taken_for_text() -> None:
    wrong = [
        f"{block}: {line}"
        for page in pages()
        for block in blocks(page)
        if block.language == "text"
        for line in block.text.splitlines()
        if line.removeprefix("$ ").startswith(("telescope ", "python ", "pip ", "./scripts/"))
    ]
    assert wrong == []


def read_mistake(block: Block) -> str:
    """Why a block can't be read as what it is; empty where it can."""
    try:
        if block.language == "python":
            body = textwrap.indent(textwrap.dedent(block.text), "    ")  # some are a function's lines
            ast.parse(f"async def shown():\n{body}")
        elif block.language == "yaml":
            yaml.safe_load(block.text)
    except (SyntaxError, yaml.YAMLError) as error:
        return str(error)
    return "" if block.language in ("python", "yaml", "toml", "shell", "text") else f"no test reads {block.language}"


def test_braces_and_brackets_are_quoted() -> None:
    wrong = [
        f"{block}: {word}"
        for page in pages()
        for block in blocks(page)
        if block.language == "shell"
        for line in command_lines(block).splitlines()
        for word in unquoted(line)
    ]
    assert wrong == [], "\n".join(wrong)


def test_a_command_in_a_sentence_names_a_command() -> None:
    """`telescope NAME …` in backticks; a command line within a block is judged whole."""
    known = {*COMMANDS, "COMMAND", "NAME", "SUBCOMMAND", "--help"}
    wrong = [
        f"{mine_of(page)}: {command}"
        for page in pages()
        for command in re.findall(r"`telescope\s+([\w-]+)[^`]*`", page.read_text(encoding="utf-8"))
        if command not in known
    ]
    assert wrong == []


def test_every_command_has_its_row() -> None:
    """Those of several parts have one for each part."""
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    rows = set(re.findall(r"^\| `telescope ([a-z]+(?: [a-z]+)?)", page, re.MULTILINE))
    parts = {f"{name} {part}" for name in ("runs", "env", "doctor") for part in ACTIONS[name]} | {"eval compare"}
    assert rows == parts | (set(COMMANDS) - {"runs", "env", "doctor"})


def test_no_page_installs_telescope_from_an_index() -> None:
    texts = [*pages(), *(ROOT / "conf").rglob("*.yaml")]
    assert [str(page) for page in texts if "telescope-rl[" in page.read_text(encoding="utf-8")] == []


# the tests' own tests


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A page of a folder of its own, with commands right and wrong."""
    monkeypatch.setattr("tests.docs.shown.ROOT", tmp_path)
    (tmp_path / "conf").mkdir()
    file = tmp_path / "page.md"
    file.write_text(
        "Write `mine/experiment/one.yaml`:\n\n```yaml\n# @package _global_\nseed: 3\n```\n\n"
        "```\ntelescope run --config-dir mine experiment=one 'env=[countdown,wordle]' \\\n    seed=1   # why\n```\n\n"
        "    $ telescope runs list\n    running   3/20\n\n- an item\n\n    telescope not a command\n\n```\nrunning 3/20\n```\n"
    )
    return file


def test_blocks_have_kinds_and_files(page: Path) -> None:
    found = blocks(page)
    assert [(block.language, block.file) for block in found] == [
        ("yaml", "mine/experiment/one.yaml"),
        ("shell", ""),
        ("shell", ""),
        ("text", ""),
    ]
    assert [str(block) for block in found] == ["page.md:4", "page.md:9", "page.md:13", "page.md:21"]


def test_commands_are_what_the_shell_makes_of_them(page: Path, tmp_path: Path) -> None:
    folder = tmp_path / "scratch"
    write_files(page, folder)
    called, complaint = call(page, folder, sys.executable)
    assert complaint == ""
    assert [each.argv for each in called] == [
        ("telescope", "run", "--config-dir", "mine", "experiment=one", "env=[countdown,wordle]", "seed=1"),
        ("telescope", "runs", "list"),
    ]
    assert (folder / "mine" / "experiment" / "one.yaml").read_text() == "# @package _global_\nseed: 3\n"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("telescope", "run", "seed=1.5"), "seed=1.5 must be a whole number"),
        (("telescope", "run", "algorithm=grop"), "there is no such option"),
        (("telescope", "run", "--config-dir", "nowhere"), "there is no such folder"),
        (("telescope", "show", "runs/mine", "--colour"), "unknown: --colour"),
        (("telescope", "runs", "lost"), "exit code 2"),
        (("telescope", "shwo"), "there is no telescope shwo"),
        (("telescope", "env", "check", "countdown", "num_number=3"), "num_number"),
        (("python", "-m", "telescope.nothing"), "there is no module telescope.nothing"),
        (("python", "scripts/nothing.py"), "there is no scripts/nothing.py"),
        (("pip", "install", "telescope-rl[math]"), "telescope-rl is on no index"),
        (("pip", "install", "-e", ".[maths]"), "there is no extra maths"),
        (("pip", "install", "-e", ".[math]"), ""),
        (("telescope", "run", "-m", "seed=1,2"), ""),
        (("torchrun", "--nnodes", "2", "-m", "telescope.run", "seed=x"), "seed='x' must be a whole number"),
    ],
)
def test_a_wrong_command_is_told(
    argv: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = "; ".join(judge(Called("here", argv), monkeypatch))
    assert (said in found) if said else (found == "")


def test_what_is_not_quoted_is_seen() -> None:
    assert unquoted("telescope run +evals.a={} 'env=[a,b]' x=\"{y}\" z=[1] 'w={a: \"b\"}' $HOME/a   # b={}") == [
        "+evals.a={}",
        "z=[1]",
    ]
