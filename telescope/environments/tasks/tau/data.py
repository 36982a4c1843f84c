"""Where a domain's database, tasks and policy come from: a folder of the user's, or the data inside an installed package.

Refuses to import that package (it would bring a whole evaluation framework) and to download anything: the files are looked up
beside the package's code. Nothing of the data is in this repository.
"""

from __future__ import annotations

import gzip
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from telescope.environments.tasks.tau.desk import Tables

PACKAGE = "inspect_evals"
INSTALL = "pip install --no-deps inspect-evals==0.28.0"
INSIDE = ("tau2", "data", "domains")


@dataclass(frozen=True)
class Task:
    """One customer: what they want, and what an agent who serves them right will have done and said."""

    task_id: str
    reason: str
    known: str
    unknown: str
    instructions: str
    actions: tuple[tuple[str, Mapping[str, Any]], ...]
    """(tool, arguments) in their order."""
    outputs: tuple[str, ...]
    """Texts that the agent has to say to the user."""
    assertions: tuple[str, ...] = ()
    """What else has to be true of the dialogue, in prose: only a judge can tell."""


def find_folder(domain: str, data: str) -> Path:
    """The folder of a domain's files. Raises `ValueError` with the remedy."""
    if data:
        folder = Path(data).expanduser() / domain
        if not (folder / "tasks.json").is_file():
            raise ValueError(f"data={data} has no {domain}/tasks.json: name the folder that holds the domains' folders")
        return folder
    spec = importlib.util.find_spec(PACKAGE)
    for place in spec.submodule_search_locations or () if spec is not None else ():
        folder = Path(place).joinpath(*INSIDE, domain)
        if (folder / "tasks.json").is_file():
            return folder
    raise ValueError(f"the tau tasks are not here: {INSTALL} brings their data, or kwargs.data names a folder with them")


def load_tasks(folder: Path) -> tuple[str, Mapping[str, Task], Mapping[str, tuple[str, ...]]]:
    """Policy, tasks by id, and splits; everything but the database."""
    tasks = {str(raw["id"]): _task(raw) for raw in _json(folder / "tasks.json")}
    splits = {name: tuple(map(str, ids)) for name, ids in _json(folder / "split_tasks.json").items()}
    return (folder / "policy.txt").read_text(encoding="utf-8"), tasks, splits


def load_tables(folder: Path) -> Tables:
    """The database: {table: {id: record}}. Takes about a second."""
    tables: Tables = _json(folder / "db.json")
    return tables


def _json(path: Path) -> Any:
    packed = path.with_name(path.name + ".gz")
    return orjson.loads(gzip.decompress(packed.read_bytes()) if packed.is_file() else path.read_bytes())


def _task(raw: Mapping[str, Any]) -> Task:
    told = raw["user_scenario"]["instructions"]
    wanted = raw.get("evaluation_criteria") or {}
    return Task(
        task_id=str(raw["id"]),
        reason=told.get("reason_for_call") or "",
        known=told.get("known_info") or "",
        unknown=told.get("unknown_info") or "",
        instructions=told.get("task_instructions") or "",
        actions=tuple((action["name"], action["arguments"]) for action in wanted.get("actions") or ()),
        outputs=tuple(wanted.get("communicate_info") or ()),
        assertions=tuple(wanted.get("nl_assertions") or ()),
    )
