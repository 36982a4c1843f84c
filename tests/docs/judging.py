"""Whether a command of the docs is one that Telescope takes: its options are read by the command's own parser, its settings are
composed and checked as `telescope check` does. Nothing is started."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import itertools
import json
import re
import shutil
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import InvalidRequirement, Requirement

from telescope.cli.completion import ACTIONS
from telescope.cli.main import COMMANDS
from telescope.compose.load import UsageError, load_points, places_for
from telescope.compose.sweeper import has_sweeper
from telescope.config.models import embedded_models, model_path
from telescope.config.secrets import find_references
from telescope.config.words import ConfigError
from tests.docs.shown import Called
from tests.product import ROOT

STANDS_FOR_A_MODEL = ("FOLDER", "/data/my-model")
"""Folders that are the reader's own: an embedded model stands in for them."""
WITH_EXPERTS = "/data/moe"
EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 64, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
"""What the configuration of the model in that folder says besides."""


class Parsed(Exception):
    """What a parser has read, thrown past what the command would do with it."""

    def __init__(self, asked: argparse.Namespace, unknown: Sequence[str]) -> None:
        super().__init__()
        self.asked, self.unknown = asked, tuple(unknown)


def judge(called: Called, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is wrong with it, in the current folder: a sentence each."""
    try:
        return list(_judge(list(called.argv), monkeypatch))
    except (UsageError, ConfigError) as error:
        return [str(error)]


def _judge(argv: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    program, *rest = argv
    if program == "torchrun":
        rest = rest[rest.index("-m") :]
        program = "python"
    if program == "python" and rest[:1] == ["-m"]:
        module, *rest = rest[1:]
        if module == "venv" or module == "telescope":
            program = "telescope" if module == "telescope" else ""
        elif module == "telescope.run":
            program, rest = "telescope", ["run", *rest]
        else:
            yield from () if importlib.util.find_spec(module) is not None else (f"there is no module {module}",)
            return
    if program == "./scripts/run":
        program, rest = "telescope", ["run", *rest]
    if program == "telescope":
        yield from _judge_telescope(rest, monkeypatch)
    elif program == "pip":
        yield from _judge_pip(rest)
    elif program == "curl":
        yield from _judge_curl(rest)
    elif program in ("python", "./scripts/test"):
        for word in rest:
            if word.startswith(("scripts/", "tests/")) and not (ROOT / word).exists():
                yield f"there is no {word}"


def _judge_pip(arguments: Sequence[str]) -> Iterator[str]:
    """Of a checkout: with extras that there are; of an index: a requirement as pip reads it."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    words = [word for word in arguments if not word.startswith("-")]
    if words[:1] != ["install"]:
        yield "pip is shown to install alone"
    for word in words[1:]:
        own = re.fullmatch(r"\.(?:\[([\w,-]+)\])?", word)
        if own:
            yield from (f"there is no extra {name}" for name in (own[1] or "").split(",") if name and name not in extras)
            if "-e" not in arguments:
                yield "a checkout is installed with -e"
            continue
        try:
            if Requirement(word).name == "telescope-rl":
                yield "telescope-rl is on no index: pip install -e '.[…]' from the checkout"
        except InvalidRequirement as error:
            yield str(error)


def _judge_curl(arguments: Sequence[str]) -> Iterator[str]:
    for option, value in itertools.pairwise(arguments):
        if option == "-d":
            body = json.loads(value)
            yield from (f"a request has no {name}" for name in ("model", "messages") if name not in body)


def _judge_telescope(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if not arguments or arguments in (["--help"], ["--version"]):
        return
    name, *rest = arguments
    if name not in COMMANDS:
        yield f"there is no telescope {name}"
        return
    if name == "completion":
        yield from () if rest[:1] and rest[0] in ACTIONS[name] else ("names no shell",)
        return
    asked, unknown = _parse(name, rest, monkeypatch)
    if unknown:
        yield f"unknown: {' '.join(unknown)}"
    elif asked is not None and name == "env" and rest[0] == "check":
        from telescope.cli.env.check import _compose

        _compose(asked)
    elif asked is not None:
        yield from _judge_settings(asked)


def _parse(name: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> tuple[argparse.Namespace | None, Sequence[str]]:
    """What the command's own parser reads; None for a command without one, or for one that prints its help."""
    main: Callable[[list[str]], int] = importlib.import_module(COMMANDS[name].module).main
    known: Any = argparse.ArgumentParser.parse_known_args

    def parse(parser: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> Any:
        raise Parsed(*known(parser, args, namespace))

    intermixed: Any = argparse.ArgumentParser.parse_known_intermixed_args

    def parse_intermixed(parser: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> Any:
        raise Parsed(*intermixed(parser, args, namespace))

    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse)
        patch.setattr(argparse.ArgumentParser, "parse_known_intermixed_args", parse_intermixed)
        try:
            main(list(arguments))
        except Parsed as parsed:
            return parsed.asked, parsed.unknown
        except SystemExit as ended:
            return None, () if not ended.code else (f"exit code {ended.code}",)
    return None, ()


def _judge_settings(asked: argparse.Namespace) -> Iterator[str]:
    """The overrides among what was read, composed and checked."""
    given = [*getattr(asked, "overrides", ()), *(word for word in getattr(asked, "given", ()) if "=" in word)]
    if isinstance(getattr(asked, "run", None), Path):  # runs resume
        given.append(f"run_dir={asked.run}")
    multirun = getattr(asked, "multirun", False)
    if getattr(asked, "help", False) or (multirun and has_sweeper(given)):
        return
    folder = str(model_path(embedded_models()[0]))
    for stand_in in STANDS_FOR_A_MODEL:
        given = [f"model.name={folder}" if word == f"model.name={stand_in}" else word for word in given]
    if f"model.name={WITH_EXPERTS}" in given:
        given = [
            f"model.name={_make_experts(Path(folder))}" if word == f"model.name={WITH_EXPERTS}" else word for word in given
        ]
    environ = dict.fromkeys(find_references(given), "a-value-of-the-readers")
    for point in load_points(given, places_for(getattr(asked, "config_dir", None)), environ, sweep=multirun):
        yield from (problem.sentence for problem in point.problems)


def _make_experts(folder: Path) -> Path:
    """A folder in the current one, like that of a model but for what its configuration says."""
    made = Path("with experts").absolute()
    if not made.exists():
        shutil.copytree(folder, made)
        file = made / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | EXPERTS), encoding="utf-8")
    return made


def unquoted(line: str) -> list[str]:
    """The words of a command line in which a shell would see a brace or a bracket of ours: zsh and fish read them."""
    bare = re.sub(r"\"(?:\\.|[^\"\\])*\"|'[^']*'", "", line)
    return [word for word in bare.split("  #")[0].split() if re.search(r"(?<!\$)[\[\]{}]", word) and "=" in word]


def mine_of(page: Path) -> str:
    """The name of a test of a page."""
    return page.relative_to(ROOT).as_posix()
