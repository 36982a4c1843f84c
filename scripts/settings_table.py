"""Writes the pages of docs/settings/ from the settings classes; `--check` only says whether they are current."""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from telescope.compose.options import MISSING, PLUGIN_GROUPS, defaults_of
from telescope.config import plugins
from telescope.config.evals import EvalEntry
from telescope.config.run import RunConfig
from telescope.config.sections import EnvironmentEntry
from telescope.config.slurm import SlurmGroup, SlurmSettings
from telescope.config.words import in_words
from telescope.environments.sandboxes.pool import SandboxSettings
from telescope.settings import Settings

FOLDER = ROOT / "docs" / "settings"
MARK = "<!-- by scripts/settings_table.py -->"
SIGNS = {Ge: ("≥", "ge"), Gt: (">", "gt"), Le: ("≤", "le"), Lt: ("<", "lt")}
ABOUT = {
    "run": "Name, folder, length and seed of a run: the settings that belong to no section.",
    "model": "Which model is trained, and whether all of it or a LoRA adapter.",
    "eval": "What all evals share: when, how many prompts and answers, how they are sampled, and what passes.",
    "orchestrator": "How many prompts are in flight, how old a sample may be, and what a batch is made of.",
    "rollout": "How an answer is sampled, how long it may take, and how often a failed one is tried again.",
    "trainer": "The optimiser, its schedule, minibatches and packing.",
    "algorithm": "How rewards become advantages, and what the loss is. `algorithm=NAME` chooses.",
    "backend": "How a step is computed, on which kernels, and what lies in GPU memory. `backend=NAME` chooses.",
    "inference": "The inference servers. `inference=vllm` (the default) or `inference=fake` chooses the engine.",
    "weight_sync": "How new weights travel from the trainer to the servers.",
    "checkpoint": "What is saved, how often, and where.",
    "wire": "How requests get from the environment workers to the servers.",
    "cluster": "How many processes run, and on which hosts. `cluster=NAME` chooses.",
    "logging": "What is kept and shown, and Weights & Biases.",
    "environments": "What is trained on. `env=[NAME, …]` makes an entry `environments.NAME`; `kwargs` are its own settings.",
    "evals": "What one eval has of its own, by its name.",
    "sandbox": "Where programs run that a model wrote: `sandbox` among the settings of an environment that runs some.",
}
"""What each page says first, in the order of the tree."""


def pages() -> dict[str, str]:
    """Each page's text by its file name: one a section, and `README.md`, which lists them."""
    sections = {f"{name}.md": _page(name, tables) for name, tables in _sections().items()}
    return {"README.md": _index(), **sections}


def stale() -> list[str]:
    """Files of the folder that are not what they should be, that are missing, or that belong to no section."""
    wanted = pages()
    there = {file.name: file.read_text(encoding="utf-8") for file in FOLDER.glob("*.md")}
    return sorted(name for name in {*wanted, *there} if wanted.get(name) != there.get(name))


def _page(name: str, tables: list[str]) -> str:
    back = "All sections: [settings](README.md). How to set them: [configuration](../configuration.md)."
    return "\n\n".join([f"# Settings: {name}", ABOUT[name], back, MARK, *tables]) + "\n"


def _index() -> str:
    intro = (
        "Every setting with its default, what it takes, and its meaning. How to set them: [configuration](../configuration.md)."
    )
    rows = [f"| [{name}]({name}.md) | {said} |" for name, said in ABOUT.items()]
    return "\n".join(["# Settings", "", intro, "", MARK, "", "| section | about |", "|---|---|", *rows, ""])


def _sections() -> dict[str, list[str]]:
    """The tables of each page."""
    sections = {name: field.annotation for name, field in RunConfig.model_fields.items()}
    parts = {name: part for name, part in sections.items() if isinstance(part, type) and issubclass(part, Settings)}
    found = {"run": [_table("Top level", RunConfig, "", without=(*parts, "environments", "evals"))]}
    for name, part in parts.items():
        if name in PLUGIN_GROUPS:
            found[name] = [*_plugin_tables(name, PLUGIN_GROUPS[name], name)]
        else:
            found[name] = [_table(name, part, f"{name}.")]
    found["cluster"] += [
        _table("cluster.slurm", SlurmSettings, "cluster.slurm."),
        _table("cluster.slurm.inference", SlurmGroup, "cluster.slurm.inference."),
    ]
    entry = _table("environments.&lt;name&gt;", EnvironmentEntry, "environments.<name>.")
    found["environments"] = [entry, *_plugin_tables("env", PLUGIN_GROUPS["env"], "environments.<name>.kwargs")]
    found["evals"] = [_table("evals.&lt;name&gt;", EvalEntry, "evals.<name>.")]
    shared = _table("sandbox", SandboxSettings, "sandbox.")
    found["sandbox"] = [shared, *_plugin_tables("sandbox.provider", plugins.SANDBOXES, "sandbox")]
    return found


def _plugin_tables(group: str, kind: plugins.Kind[Any], prefix: str) -> Iterator[str]:
    """What a kind's plug-ins share in one table, then what each has of its own."""
    found = {name: cls for name, cls in plugins.find(kind).items() if isinstance(cls, type)}
    shared = [row for row in _rows(next(iter(found.values())), f"{prefix}.") if _everywhere(row, found, prefix)]
    if shared and len(found) > 1:
        yield _lines(f"{group}: every option", shared)
    for name, cls in found.items():
        own = [row for row in _rows(cls, f"{prefix}.") if len(found) == 1 or row not in shared]
        if own:
            yield _lines(f"{group}={name}", own)


def _everywhere(row: str, found: dict[str, type[Settings]], prefix: str) -> bool:
    return all(row in _rows(cls, f"{prefix}.") for cls in found.values())


def _table(title: str, settings: type[Settings], prefix: str, without: tuple[str, ...] = ()) -> str:
    return _lines(title, _rows(settings, prefix, without))


def _lines(title: str, rows: list[str]) -> str:
    return "\n".join([f"## {title}", "", "| setting | default | takes | meaning |", "|---|---|---|---|", *rows])


def _rows(settings: type[Settings], prefix: str, without: tuple[str, ...] = ()) -> list[str]:
    defaults, said = defaults_of(settings, without), meanings(settings)
    return [_row(f"{prefix}{name}", defaults[name], settings.model_fields[name], said.get(name, "")) for name in defaults]


def meanings(settings: type[Settings]) -> dict[str, str]:
    """What is written below each field of the class, or of a class it derives from.

    Read from the source here and not by pydantic (`use_attribute_docstrings`), which would cost every process of a run a tenth
    of a second at its start.
    """
    found: dict[str, str] = {}
    for cls in reversed(settings.__mro__):
        if cls is not Settings and issubclass(cls, Settings):
            found |= _docstrings(cls)
    return found


@cache
def _docstrings(cls: type[Settings]) -> dict[str, str]:
    (defined,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(defined, ast.ClassDef)
    return {
        field.target.id: inspect.cleandoc(below.value.value)
        for field, below in itertools.pairwise(defined.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str)
    }


def _row(path: str, default: Any, field: FieldInfo, said: str) -> str:
    shown = "must be given" if default == MISSING else f"`{json.dumps(default, ensure_ascii=False)}`"
    takes = in_words(field.annotation).replace(" | ", " \\| ")
    bounds = [
        f"{sign} {getattr(bound, name)}"
        for bound in field.metadata
        for sign, name in [SIGNS.get(type(bound), ("", ""))]
        if sign
    ]
    meaning = " ".join(said.split()).replace("|", "\\|")
    return f"| `{path}` | {shown} | {', '.join([takes, *bounds])} | {meaning} |"


def main() -> int:
    old = stale()
    if "--check" in sys.argv[1:]:
        print(f"not current: {', '.join(old)}; run python scripts/settings_table.py" if old else "current")
        return int(bool(old))
    wanted = pages()
    for name in old:
        if name in wanted:
            (FOLDER / name).write_text(wanted[name], encoding="utf-8")
        else:
            (FOLDER / name).unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
