"""What environments made of a published data set share: its rows, and the text around a question.

Rows come from a local copy (rows.py), else from the Hugging Face hub by `datasets`. A local copy is a folder as the hub has it
(`hf download --repo-type dataset …`), a folder that `save_to_disk` wrote, or one file; Parquet, JSON lines, JSON arrays, CSV
and Arrow streams are read. Refuses to know what a row means, and to run a data set's own code.
"""

from __future__ import annotations

import importlib.util
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator

from telescope.config.models import hub_errors
from telescope.environments.base import Prompt
from telescope.environments.identity import divide, identify
from telescope.environments.questions.rows import (
    NoRows as NoRows,
)
from telescope.environments.questions.rows import (
    PlacedRow,
    check_columns,
    find_place,
    read_json,
    read_table,
    show,
    write_text,
)

_log = logging.getLogger(__name__)

Row = Mapping[str, Any]
SUFFIXES = (".parquet", ".jsonl", ".json", ".jsonl.gz", ".csv", ".arrow")
_SPLIT_WORDS = ("train", "test", "validation", "dev", "eval")


@dataclass(frozen=True)
class DatasetSource:
    """Where rows come from: `Source("openai/gsm8k", ("main",))`."""

    dataset: str
    subsets: tuple[str, ...] = ()
    revision: str | None = None
    data_dir: str | None = None
    setting: str = "data_dir"
    """What the user calls `data_dir`."""

    def rows(self, split: str | None, columns: Sequence[str], required: Sequence[str] = ()) -> list[Row]:
        """All rows of a split in their own order, the subsets one after another; None: of a local copy all files. `columns`:
        fields, maybe dotted, whose columns the rows have. A row of a JSON file must have those that are `required`, if with
        null. Raises `NoRows`."""
        if self.data_dir is None:
            return _read_hub(self, split or "train", columns)
        return [row for file in self._list_files(split) for row in _read_file(file, columns, required)]

    def check(self, *splits: str | None) -> None:
        """Raise `NoRows` where the rows of these splits could not be read for want of a file or a package. Reads no rows and
        asks no hub."""
        if self.data_dir is None:
            if importlib.util.find_spec("datasets") is None:
                raise NoRows(
                    f"{self.on_the_hub} comes from the Hugging Face hub by a package that is not installed: "
                    f"python -m pip install 'datasets>=4,<6', or set {self.setting} to a local copy"
                )
            return
        for split in dict.fromkeys(filter(None, splits)):
            for file in self._list_files(split):
                _check_readable(file)

    @property
    def on_the_hub(self) -> str:
        """How a message calls a data set of the hub."""
        if self.setting == "data_dir":
            return f"dataset={self.dataset!r}"
        return f"{self.setting}={self.dataset!r} (there is no such file or folder here)"

    def _list_files(self, split: str | None) -> list[Path]:
        """The files of a split of a local copy, in order. Raises `NoRows`."""
        place = Path(self.data_dir or "").expanduser()
        named = f"{self.setting}={str(place)!r}"
        if not place.exists():
            raise NoRows(f"{named} is not there: give the folder or the file that holds the data set")
        if place.is_file() and not place.name.endswith(SUFFIXES):
            raise NoRows(f"{named} is a file of a kind that is not read: give one whose name ends in {', '.join(SUFFIXES)}")
        files = [place] if place.is_file() else sorted(path for path in place.rglob("*") if _is_data(path.relative_to(place)))
        if not files:
            raise NoRows(f"{named} holds no file of {', '.join(SUFFIXES)}")
        chosen = files if split is None else _select_split(files, place, split, named)
        return _select_subsets(chosen, files, place, self.subsets, named)


def make_prompts(name: str, split: str | None, rows: Sequence[Row], make: Callable[[Row], Prompt | None]) -> tuple[Prompt, ...]:
    """The prompts of all rows but those of which `make` makes none; the log says how many these are, and where the first is."""
    made = [make(row) for row in rows]
    if left_out := [row for row, prompt in zip(rows, made, strict=True) if prompt is None]:
        _log.warning(
            "%s: %d of %d rows%s have no question or no answer: left out, the first: %s",
            name,
            len(left_out),
            len(rows),
            f" of {split}" if split else "",
            find_place(left_out[0]),
        )
    return tuple(prompt for prompt in made if prompt is not None)


def hold_out(
    prompts: Sequence[Prompt], count: int, *key: str | int, identity: Callable[[Prompt], str] = identify
) -> tuple[list[Prompt], list[Prompt]]:
    """(those to train on, `count` of them kept for evaluation), both in their own order. One that the file has several times is
    on one side. Which ones follows from `key` and the prompts themselves. Raises `NoRows`."""
    rest, held_out = divide(prompts, count, key, identity) if count < len(prompts) else ([], [])
    if not rest:
        raise NoRows(f"held_out={count} of {len(prompts)} questions leaves none to train on: lower it")
    return rest, held_out


def get_field(row: Row, path: str) -> Any:
    """As `get_value`, but of a list of messages the last one's text."""
    value = get_value(row, path)
    return value[-1]["content"] if is_chat(value) and "content" in value[-1] else value


def is_chat(value: Any) -> bool:
    """Whether it is a list whose last item is like a message."""
    return isinstance(value, list) and bool(value) and isinstance(value[-1], Mapping)


def get_value(row: Row, path: str) -> Any:
    """The value in the column of that very name, else at a dotted path, e.g. `reward_model.ground_truth`.

    None where a part of the path is null. Raises `NoRows` where there is no such part.
    """
    if path in row:
        return row[path]
    value: Any = row
    for part in path.split("."):
        if value is None:
            return None
        if not isinstance(value, Mapping) or part not in value:
            have = f"has {', '.join(map(str, value))}" if isinstance(value, Mapping) else f"is {type(value).__name__}"
            raise NoRows(
                f"{find_place(row)}: a row has nothing at {path!r}: what should hold {part!r} {have} ({show(value)}): set the "
                "field's name to what is there"
            )
        value = value[part]
    return value


def get_text(row: Row, path: str) -> str:
    """The value at a dotted path as the file wrote it, "" for null and an empty list; a list of one text is
    that text, a list of numbers JSON.

    Raises `NoRows` for what is not text: an object, or a list of anything else.
    """
    value = get_field(row, path)
    if isinstance(value, list) and (not value or (len(value) == 1 and isinstance(value[0], str))):
        return value[0] if value else ""
    if isinstance(value, Mapping) or (isinstance(value, list) and not all(isinstance(one, int | float) for one in value)):
        kind = "an object" if isinstance(value, Mapping) else "a list"
        within = f"set the field's name to a text within it ({path}.…), or " if isinstance(value, Mapping) else ""
        raise NoRows(
            f"{find_place(row)}: column {path!r} holds {kind}, {show(value)}, where a text or a number is wanted: "
            f"{within}make the column a text"
        )
    try:
        return write_text(value)
    except UnicodeDecodeError as error:
        raise NoRows(
            f"{find_place(row)}: column {path!r} holds bytes that are not UTF-8, {show(value)}: make the column a text"
        ) from error


def _read_hub(source: DatasetSource, split: str, columns: Sequence[str]) -> list[Row]:
    import datasets

    rows: list[Row] = []
    for subset in source.subsets or (None,):
        try:
            table = datasets.load_dataset(source.dataset, subset, split=split, revision=source.revision)
        except (*hub_errors(), RuntimeError, datasets.exceptions.DatasetsError) as error:
            raise NoRows(
                f"{source.on_the_hub} can't be had from the Hugging Face hub: {_first_line(error)}. Where there is no "
                f"network, fetch it elsewhere (hf download --repo-type dataset {source.dataset} --local-dir FOLDER) and set "
                f"{source.setting}=FOLDER; for a data set that asks for consent, give it on its page and set HF_TOKEN"
            ) from error
        found = table.select_columns(check_columns(table.column_names, columns, source.on_the_hub)).to_list()
        place = f"{source.dataset}{f' ({subset})' if subset else ''}, split {split}"
        rows += [PlacedRow(row, f"{place}, row {at}") for at, row in enumerate(found, 1)]
    return rows


def _check_readable(file: Path) -> None:
    try:
        with file.open("rb") as opened:
            opened.read(1)
    except OSError as error:
        raise NoRows(f"{file} can't be read: {_first_line(error)}") from error


def _is_data(relative: Path) -> bool:
    """A hidden folder is a downloader's own; `dataset_info.json` and its like tell of the data."""
    hidden = any(part.startswith(".") for part in relative.parts)
    about = relative.name in ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "config.json")
    return relative.name.endswith(SUFFIXES) and not hidden and not about


def _select_subsets(chosen: list[Path], files: list[Path], place: Path, subsets: Sequence[str], named: str) -> list[Path]:
    """Of the files of a split (`chosen` of `files`) those of the subsets, one subset after another and no file twice.

    All of them where no path of the copy names any subset: a copy of one subset alone need not name it. Where some are named,
    a subset without a file is missing, and no other file stands in for it.
    """
    if not any(_find_subset(file, place, subsets) for file in files):
        return chosen
    found = [
        (subset, [file for file in chosen if _find_subset(file, place, subsets) == subset]) for subset in dict.fromkeys(subsets)
    ]
    missing = [subset for subset, its in found if not its]
    if missing:
        there = ", ".join(subset for subset, its in found if its) or "other splits alone"
        raise NoRows(
            f"{named} has files of {there}, but none of {', '.join(missing)} among "
            f"{[file.name for file in chosen[:6]]}: fetch the whole data set, or set subsets to those that are there"
        )
    return [file for _, its in found for file in its]


def _find_subset(file: Path, place: Path, subsets: Sequence[str]) -> str:
    """The longest subset that the path names, "" for none: `intermediate_algebra-train` is not of `algebra`."""
    words, stem = _split_words(file, place), file.name.partition(".")[0]
    named = [each for each in subsets if each in words or re.search(rf"(?:^|[-_]){re.escape(each)}(?:$|[-_])", stem)]
    return max(named, key=len, default="")


def _select_split(files: list[Path], place: Path, split: str, named: str) -> list[Path]:
    """Files whose path names the split; all of them where no path names any split."""
    found = [file for file in files if split in _split_words(file, place)]
    if found or not any(word in _split_words(file, place) for file in files for word in _SPLIT_WORDS):
        return found or files
    raise NoRows(f"{named} has no file of the split {split!r} among {[file.name for file in files[:6]]}")


def _split_words(file: Path, place: Path) -> set[str]:
    """`main/train-00000-of-00001.parquet` says main, train-00000-of-00001, train, 00000, of, 00001."""
    relative = file.relative_to(place) if file != place else Path(file.name)
    parts = [*relative.parts[:-1], relative.name.partition(".")[0]]
    return {*parts, *(word for part in parts for word in re.split(r"[-.]", part)), *re.split(r"[-._]", parts[-1])}


def _read_file(file: Path, columns: Sequence[str], required: Sequence[str]) -> list[PlacedRow]:
    """Raises `NoRows` for what is not of the kind its name says."""
    import pyarrow as pa

    try:
        if file.name.endswith((".json", ".jsonl", ".jsonl.gz")):
            return read_json(file, columns, required)
        return read_table(file, columns)
    except NoRows:
        raise
    except (pa.ArrowException, OSError, EOFError, ValueError) as error:
        raise NoRows(f"{file} can't be read: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _check_instruction(instruction: str) -> str:
    if "{question}" not in instruction:
        raise ValueError(f"instruction={instruction!r} must contain {{question}}")
    return instruction


Instruction = Annotated[str, AfterValidator(_check_instruction)]
