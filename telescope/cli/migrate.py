"""`telescope migrate FILE.yaml`: an experiment from a file of settings of the older, Ray-based Telescope, of TRL or of verl.

Prints the file, or writes it with `--to`; what it leaves out, and what means something else here, is listed with the reason.
What it writes is valid: a value that a check refuses is left out and listed. Never prints a value of the file but in the
experiment itself, and never a secret. Exit code 0; 1 where the file can't be read or gives no valid run, 2 on wrong usage.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from telescope.cli.migrate_values import CONVERSIONS, Given, NotCarried, Place, pass_at
from telescope.compose.load import UsageError, load_points, places_for
from telescope.compose.options import Places
from telescope.compose.preset_files import GLOBAL, NOT_TEXT
from telescope.config.foreign_names import CALLED, TABLE, TARGET, ForeignName, System, find_entry
from telescope.config.redaction import has_key_shape, is_secret_name
from telescope.config.run import EVAL_NAME, RunConfig
from telescope.config.secrets import find_missing, find_references, parse_reference
from telescope.config.words import ConfigProblem, nearest, typed
from telescope.runlog import temporary

OK, FAILED, USAGE = 0, 1, 2
WIDTH = 118
"""Of the lines that are written."""
SYSTEMS: tuple[System, ...] = ("older", "trl", "verl")
DEFAULTS: Mapping[System, Mapping[str, Any]] = {
    "older": {"model": "Qwen/Qwen2.5-3B", "inference_num_workers": 2, "trainer_num_workers": 2, "use_tis": False}
}
"""Defaults of the others that are not ours and change what is trained, or how fast: a file that leaves them out means them."""
EVAL_EVERY = 10
"""The older Telescope's steps between two evals, where an entry does not say."""
MOST_BYTES, MOST_VALUES, MOST_LETTERS, MOST_INTEGER = 1_000_000, 10_000, 20_000, 10**18
"""Of a file of settings, whoever wrote it; a system prompt is the longest text in one."""
_CHOICES = ("algorithm", "backend")
_ROUNDS = 16
_SETTING = re.compile(r"[a-z_]+(?:\.[a-z_0-9]+)*")
_NODE = re.compile(r"\$\{([A-Za-z_][\w.]*)\}")
_PLAIN = re.compile(r"[A-Za-z0-9_.-]{1,100}")
_IS_SECRET = "a secret is never copied: set it by hand as a reference to an environment variable, ${oc.env:NAME}"
_MUST_BE_GIVEN = "it has no value there: ??? must be given"


class MigrateError(RuntimeError):
    """There is no experiment to be made of the file; the text says why and what to do."""


def main(arguments: Sequence[str]) -> int:
    """0; 1 where no valid experiment can be made or written; 2 on wrong usage."""
    asked = _parser().parse_args(list(arguments))
    try:
        places = places_for(asked.config_dir)
        tree = read(asked.file)
        system = asked.from_ or detect(tree, asked.file)
        migration = Migration(system, places)
        migration.convert(tree)
        migration.leave_out_what_is_refused(os.environ)
        text = migration.render(asked.file.name)
        if asked.to is not None:
            _write(asked.to, text)
    except UsageError as error:
        sys.stderr.write(f"telescope migrate: {error}\n")
        return USAGE
    except MigrateError as error:
        sys.stderr.write(f"telescope migrate: {error}\n")
        return FAILED
    if asked.to is None:
        sys.stdout.write(text)
    following = _next(asked.to, asked.config_dir, places, has_env=bool(migration.chosen))
    report = "\n".join([*migration.report(asked.file), *following])
    (sys.stderr if asked.to is None else sys.stdout).write(f"{report}\n")
    return OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="telescope migrate", description=__doc__, allow_abbrev=False)
    parser.add_argument("file", type=Path, help="a YAML file of settings")
    parser.add_argument(
        "--from", dest="from_", choices=SYSTEMS, help="whose settings they are: older, the Ray-based Telescope (default: seen)"
    )
    parser.add_argument(
        "--to",
        type=_yaml_file,
        metavar="FILE",
        help="write the experiment there, as mine/experiment/NAME.yaml (default: print it)",
    )
    parser.add_argument("-cd", "--config-dir", help="a folder with your own presets and plug-ins, which the file may name")
    return parser


def _yaml_file(text: str) -> Path:
    if not text.endswith(".yaml"):
        raise argparse.ArgumentTypeError(f"{text!r} does not end in .yaml, as presets do")
    return Path(text)


def read(file: Path) -> dict[str, Any]:
    """The settings of a file by their names, as OmegaConf reads YAML (`1e-6` is a number). Raises `MigrateError`."""
    try:
        if file.is_fifo() or file.is_char_device() or file.is_socket():
            raise MigrateError(f"{file} is not a file: name a file of settings")
        if file.stat().st_size > MOST_BYTES:
            raise MigrateError(f"{file} has more than {MOST_BYTES:,} bytes: it is not a file of settings")
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise MigrateError(f"{file} {NOT_TEXT}") from None
    except OSError as error:
        raise MigrateError(f"{file} can't be read: {error.strerror}") from error
    try:
        content = yaml.safe_load(text)
        if content is None:
            raise MigrateError(f"{file} is empty: it holds no settings to carry over")
        if not isinstance(content, dict):
            kind = "a list" if isinstance(content, list) else "a single value"
            raise MigrateError(f"{file} holds {kind}: a file of settings has each as name: value")
        if strange := find_strange(content):
            raise MigrateError(f"{file}: {strange}")
        tree = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark is not None else ""
        raise MigrateError(f"{file}{line}: is not YAML: {error.problem}") from None
    except yaml.YAMLError:
        raise MigrateError(f"{file} is not YAML: it has characters that YAML does not allow") from None
    except OmegaConfBaseException as error:
        raise MigrateError(f"{file}: {error.full_key or 'a value'} can't be read: mend its ${{…}}, or take it out") from None
    except ValueError as error:  # YAML's numbers and dates
        raise MigrateError(f"{file} has a value that can't be read: {error}") from None
    except RecursionError:
        raise MigrateError(f"{file} is nested too deep, or an alias (*name) stands within what it stands for") from None
    assert isinstance(tree, dict)
    return {str(name): value for name, value in tree.items()}


def find_strange(content: Any) -> str:
    """Where something is that no setting can be, such as binary data, or that a file's aliases stand for more than anyone
    writes; empty where nothing is."""
    waiting, met = [("", content)], 0
    while waiting:
        where, value = waiting.pop()
        met += 1
        if met > MOST_VALUES:
            return f"{where}: with its aliases (*name) the file has more than {MOST_VALUES:,} values"
        if isinstance(value, dict):
            names = [name for name in value if not isinstance(name, str | int | float | bool)]
            if names:
                return f"{where or 'the file'}: {names[0]!r} is the name of a setting: write a word"
            waiting += [(f"{where}.{name}".lstrip("."), below) for name, below in value.items()]
        elif isinstance(value, list):
            waiting += [(f"{where}[{index}]", below) for index, below in enumerate(value)]
        elif isinstance(value, str):
            if len(value) > MOST_LETTERS or not _is_text(value):
                return f"{where}: it is longer than {MOST_LETTERS:,} letters, or has characters that are not text"
        elif isinstance(value, int):
            if abs(value) > MOST_INTEGER:
                return f"{where}: it is too large a number for any setting"
        elif value is not None and not isinstance(value, float | date):
            return f"{where}: it is of the kind {type(value).__name__}, which no setting is: write text or a number"
    return ""


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def detect(tree: Mapping[str, Any], file: Path) -> System:
    """Whose names the file has most of. Raises `MigrateError` where it has none."""
    known = {system: {entry.name for entry in TABLE if entry.system == system} for system in SYSTEMS}
    counts = {system: sum(name in known[system] for name in flatten(system, tree)) for system in SYSTEMS}
    found = max(SYSTEMS, key=lambda system: counts[system])
    if not counts[found]:
        systems = ", ".join(CALLED[system] for system in SYSTEMS)
        raise MigrateError(f"{file} has no name that is known of {systems}: say whose it is with --from")
    return found


def flatten(system: System, tree: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """The settings by their full names, `actor_rollout_ref.rollout.n` in a nested file; a mapping that is a setting's own value
    stays one."""
    if system != "verl":
        return dict(tree)
    found: dict[str, Any] = {}
    for key, value in tree.items():
        name = str(key) if key == TARGET else f"{above}{key}"
        entry = find_entry(system, name)
        if isinstance(value, dict) and value and (entry is None or entry.name != name):
            found |= flatten(system, value, f"{name}.")
        else:
            found[name] = value
    return found


@dataclass(frozen=True)
class _Setting:
    value: Any
    origins: tuple[str, ...]
    """The names in the file that it is from."""


@dataclass
class Migration:
    """What becomes of the settings of one file."""

    system: System
    places: Places
    set_here: dict[Place, _Setting] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    """By the name in the file: why it is not carried over."""
    changed: dict[str, str] = field(default_factory=dict)
    """By the name in the file: what is different about it here."""
    written_out: list[str] = field(default_factory=list)
    """Names that the file leaves to a default that is another one here."""
    chosen: dict[str, str] = field(default_factory=dict)
    """The environments by their names in the run: which each is."""
    given: dict[str, Any] = field(default_factory=dict)

    def convert(self, tree: Mapping[str, Any]) -> None:
        """Settings of ours from those of the file, not yet checked."""
        self.given = {name: _follow(value, tree) for name, value in flatten(self.system, tree).items()}
        for name, value in self.given.items():
            try:
                self._convert_one(name, value)
            except NotCarried as error:
                self.left[name] = str(error)
        for name, value in DEFAULTS.get(self.system, {}).items():
            if name not in self.given:
                self._convert_one(name, value)
                self.written_out.append(name)

    def _convert_one(self, name: str, value: Any) -> None:
        entry = find_entry(self.system, name)
        if entry is None:
            raise NotCarried(self._unknown(name))
        if value is None and (self.system != "older" or not entry.here):
            return  # not set there
        if self.system == "older" and name in ("environments", "evals"):
            self._convert_list(name, value)
            return
        if _has_secret(name, value):
            raise NotCarried(_IS_SECRET)
        if value == "???":
            raise NotCarried(_MUST_BE_GIVEN)
        values = self._values(entry, name, value)
        for path, here in values.items():
            self._set(tuple(path.split(".", 2) if path.startswith("cluster.env.") else path.split(".")), here, name)
        if entry.said:
            self.changed[name] = f"{' and '.join(values)} here; {entry.said}"

    def _values(self, entry: ForeignName, name: str, value: Any) -> Mapping[str, Any]:
        """Settings here by their paths. Raises `NotCarried`."""
        if name in CONVERSIONS[self.system]:
            return CONVERSIONS[self.system][name](Given(name, value, self.given))
        if not _SETTING.fullmatch(entry.here):
            raise NotCarried(entry.said)
        if entry.here in _CHOICES and value not in self.places.options(entry.here):
            raise NotCarried(f"there is no such {entry.here} here: choose {', '.join(self.places.options(entry.here))}")
        return {entry.here: value}

    def _unknown(self, name: str) -> str:
        known = [entry.name for entry in TABLE if entry.system == self.system]
        guess = nearest(name, known, alike=0.8)
        return f"{CALLED[self.system]} has no such name in our table{f': did you mean {guess}?' if guess else ''}"

    def _set(self, place: Place, value: Any, origin: str) -> None:
        """Raises `NotCarried` where another name has set it otherwise."""
        if "${" in json.dumps(value, default=str) and not find_references(value):
            raise NotCarried("only its own system can tell what ${…} stands for: write the value out")
        before = self.set_here.get(place)
        if before is not None and before.value != value:
            raise NotCarried(f"{'.'.join(place)} is set by {before.origins[0]}")
        self.set_here[place] = _Setting(value, (*(before.origins if before is not None else ()), origin))

    def _convert_list(self, name: str, value: Any) -> None:
        """The lists `environments` and `evals` of the older Telescope, whose entries have names here."""
        if not isinstance(value, list):
            raise NotCarried("it must be a list, each entry with a name")
        for number, item in enumerate(value):
            label = f"{name}[{number}]"
            entry = {"name": item} if isinstance(item, str) else item
            environment = entry.get("name") if isinstance(entry, Mapping) else None
            if not isinstance(environment, str) or not _PLAIN.fullmatch(environment):
                self.left[label] = "an entry must have a name, that of its environment"
            elif not self.places.offers("env", environment):
                self.left[label] = (
                    f"there is no environment {environment} here: bring its folder over (docs/migration.md), and name it with "
                    "--config-dir"
                )
            elif name == "environments":
                self._add_environment(f"{label}.", environment, entry)
            else:
                self._add_eval(f"{label}.", environment, entry)

    def _add_environment(self, origin: str, environment: str, entry: Mapping[str, Any]) -> None:
        alike = sum(name == environment for name in self.chosen.values())
        key = f"{environment}_{alike + 1}" if alike else environment
        self.chosen[key] = environment
        fields = {"weight": ("weight",), "reward_min": ("reward_min",), "reward_max": ("reward_max",)}
        for name, value in _without(entry, "name", "kwargs"):
            self._set_field(origin + name, ("environments", key, *fields.get(name, ())), value, known=name in fields)
        self._set_kwargs(origin, ("environments", key, "kwargs"), entry)

    def _add_eval(self, origin: str, environment: str, entry: Mapping[str, Any]) -> None:
        kwargs = entry.get("kwargs") or {}
        trained = environment in self.chosen
        own = not trained or (bool(kwargs) and kwargs != self._kwargs_of(environment))
        key = f"{environment}_eval" if trained and own else environment
        if not EVAL_NAME.fullmatch(key) or any(place[:2] == ("evals", key) for place in self.set_here):
            self.left[origin.rstrip(".")] = "an eval's name is that of its environment, once, in letters, digits, '_' and '-'"
            return
        every = entry.get("eval_every", EVAL_EVERY)
        self._set_field(f"{origin}eval_every", ("evals", key, "every"), every)
        if key != environment:
            self._set_field(f"{origin}name", ("evals", key, "environment"), environment)
        if own:
            self._set_kwargs(origin, ("evals", key, "kwargs"), entry)
        for name, value in _without(entry, "name", "kwargs", "eval_every"):
            if name == "num_samples":
                if value != -1:
                    self._set_field(origin + name, ("evals", key, "num_prompts"), value)
            elif name == "pass_k" and value:
                try:
                    for setting, made in pass_at(value).items():
                        self._set_field(origin + name, ("evals", key, setting), made)
                except NotCarried as error:
                    self.left[origin + name] = str(error)
            elif name == "separate_eval_samples":
                known = find_entry(self.system, name)
                self.changed[origin + name] = known.said if known is not None else ""
            elif name != "pass_k":
                self._set_field(origin + name, (), value, known=False)

    def _kwargs_of(self, key: str) -> dict[str, Any]:
        above = ("environments", key, "kwargs")
        return {place[3]: setting.value for place, setting in self.set_here.items() if place[:3] == above}

    def _set_kwargs(self, origin: str, above: Place, entry: Mapping[str, Any]) -> None:
        kwargs = entry.get("kwargs") or {}
        if not isinstance(kwargs, Mapping):
            self.left[f"{origin}kwargs"] = "it must be a mapping of settings"
            return
        for name, value in kwargs.items():
            self._set_field(f"{origin}kwargs.{name}", (*above, str(name)), value)

    def _set_field(self, origin: str, place: Place, value: Any, *, known: bool = True) -> None:
        """A setting of an entry of a list; where it can't be set, it is listed."""
        try:
            if not known:
                raise NotCarried("an entry has no such name")
            if _has_secret(origin, value):
                raise NotCarried(_IS_SECRET)
            self._set(place, value, origin)
        except NotCarried as error:
            self.left[origin] = str(error)

    def leave_out_what_is_refused(self, environ: Mapping[str, str]) -> None:
        """Compose and check as `telescope check` does; settings that are refused are left out and listed. Raises `MigrateError`
        where a run without them is refused all the same."""
        for _ in range(_ROUNDS):
            problems = self._problems(environ)
            if not problems:
                return
            refused = [place for problem in problems if (place := self._refused(problem)) is not None]
            if not refused:
                said = "; ".join(self._hide(problem.sentence) for problem in problems)
                raise MigrateError(f"what is left of the file is not a valid run: {said}")
            for problem in problems:
                place = self._refused(problem)
                if place is not None:
                    self._leave_out(place, problem)
        raise MigrateError(
            "the file has too many settings that are refused here: mend those that are listed by `telescope check`"
        )

    def _problems(self, environ: Mapping[str, str]) -> Sequence[ConfigProblem]:
        """What a check says of the experiment beside the user's own presets and plug-ins."""
        text = self.render("")
        missing = find_missing([setting.value for setting in self.set_here.values()], environ)
        with temporary.open_folder() as folder:
            experiment = folder.joinpath("experiment", "migrated.yaml")
            experiment.parent.mkdir()
            experiment.write_text(text, encoding="utf-8")
            for own in () if self.places.user is None else self.places.user.iterdir():
                if own.name != "experiment":
                    (folder / own.name).symlink_to(own.resolve())
            (point,) = load_points(
                ("experiment=migrated",), places_for(str(folder)), {**environ, **dict.fromkeys(missing, "set later")}
            )
        return point.problems

    def _refused(self, problem: ConfigProblem) -> Place | None:
        """The setting of ours that a problem is about: the one at its path, or below or above it, or that it names."""
        paths = {".".join(place): place for place in self.set_here}
        if problem.path in paths:
            return paths[problem.path]
        above = [path for path in paths if problem.path.startswith(f"{path}.")]
        below = [path for path in paths if problem.path and path.startswith(f"{problem.path}.")]
        named = [path for path in paths if re.search(rf"(?<![\w.]){re.escape(path)}(?![\w])", problem.sentence)]
        found = [*sorted(above, key=len, reverse=True), *named, *below]
        return paths[found[0]] if found else None

    def _leave_out(self, place: Place, problem: ConfigProblem) -> None:
        setting = self.set_here.pop(place, None)
        if setting is None:
            return
        for origin in setting.origins:
            self.left[origin] = self._hide(problem.sentence, place, setting.value)
            self.changed.pop(origin, None)
        self.written_out = [name for name in self.written_out if name not in setting.origins]

    def _hide(self, sentence: str, place: Place = (), value: Any = None) -> str:
        """A check's sentence without the values of the file."""
        path = ".".join(place)
        sentence = sentence.replace(f"{path}={typed(value)}", path) if place else sentence
        for text in sorted(_texts(list(self.given.values())), key=len, reverse=True):
            sentence = sentence.replace(typed(text), "…")
            if len(text) >= 8 and not re.fullmatch(r"[A-Za-z_]+", text):
                sentence = sentence.replace(text, "…")
        return sentence

    def render(self, file: str) -> str:
        """The experiment as YAML."""
        lines = [GLOBAL]
        if file:
            lines.append(f"# From {file}, a file of {CALLED[self.system]}, by `telescope migrate`.")
        if file and self.left:
            lines += textwrap.wrap(
                f"Not carried over: {', '.join(sorted(self.left))}.", WIDTH, initial_indent="# ", subsequent_indent="# "
            )
        values = {place: setting.value for place, setting in self.set_here.items()}
        lines += ["defaults:", *(f"  - override /{group}: {option}" for group, option in self._choices(values)), "  - _self_"]
        for key, name in self.chosen.items():
            if key != name:
                values[("environments", key, "name")] = name
        order = list(RunConfig.model_fields)
        tree: dict[str, Any] = {}
        for place in sorted(values, key=lambda place: order.index(place[0])):
            section = tree
            for part in place[:-1]:
                section = section.setdefault(part, {})
            section[place[-1]] = values[place]
        if tree:
            lines += ["", yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=WIDTH).rstrip("\n")]
        return "\n".join(lines) + "\n"

    def _choices(self, values: dict[Place, Any]) -> Iterator[tuple[str, str]]:
        """The groups to choose from; what they bring is taken out of the values."""
        name = values.get(("model", "name"))
        if name is not None:
            preset = self._preset_of_model(name)
            if preset is not None:
                del values[("model", "name")]
            yield "model", preset or "any"
        names = list(dict.fromkeys(name for key, name in self.chosen.items() if key == name))
        if names:
            yield "env", f"[{', '.join(names)}]"
        for group in _CHOICES:
            if (group,) in values:
                yield group, values.pop((group,))

    def _preset_of_model(self, name: Any) -> str | None:
        """The preset that is this model and nothing else, e.g. `qwen2.5-3b`."""
        for option, files in self.places.presets("model").items():
            content = yaml.safe_load(files[0].read_text(encoding="utf-8"))
            if isinstance(content, dict) and content.get("name") == name:
                return option
        return None

    def report(self, file: Path) -> Iterator[str]:
        """What was done, and what was not, line by line."""
        carried = [name for name in self.given if self._is_carried(name)]
        yield f"{file}, a file of {CALLED[self.system]}: {len(carried)} of {len(self.given)} settings are carried over."
        if self.written_out:
            yield f"Written out, since their default is another here: {', '.join(self.written_out)}."
        if self.system != "older":
            yield f"What the file leaves out has the default here, not that of {CALLED[self.system]}."
        for group, choose in (("env", self.chosen), ("model", ("model", "name") in self.set_here)):
            if not choose:
                yield f"No {group} is carried over: choose one with {group}=NAME, else the run takes the default."
        yield from _listed("Carried over, and different here:", self.changed)
        yield from _listed("Not carried over:", self.left)

    def _is_carried(self, name: str) -> bool:
        if name in self.left:
            return False
        origins = {origin for setting in self.set_here.values() for origin in setting.origins}
        return (
            self.given[name] is None
            or any(origin == name or origin.startswith(f"{name}[") for origin in origins)
            or (name == "environments" and bool(self.chosen))
        )


def _listed(title: str, sentences: Mapping[str, str]) -> Iterator[str]:
    if sentences:
        yield title
        for name, sentence in sentences.items():
            yield from textwrap.wrap(
                f"{name}: {sentence}",
                WIDTH,
                initial_indent="  - ",
                subsequent_indent="    ",
                break_long_words=False,
                break_on_hyphens=False,
            )


def _without(entry: Mapping[str, Any], *names: str) -> list[tuple[str, Any]]:
    return [(str(name), value) for name, value in entry.items() if name not in names]


def _follow(value: Any, tree: Mapping[str, Any]) -> Any:
    """The value that `${trainer.nnodes}` stands for in its own file; any other value as it is."""
    for _ in range(8):
        node = _NODE.fullmatch(value) if isinstance(value, str) else None
        if node is None:
            break
        found: Any = tree
        for part in node[1].split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        if found is None or isinstance(found, Mapping):
            break
        value = found
    return value


def _has_secret(name: str, value: Any) -> bool:
    """Whether a key, a token or a password stands in it itself, and not a reference to one."""
    if isinstance(value, Mapping):
        return any(_has_secret(str(key), inner) for key, inner in value.items())
    if isinstance(value, list):
        return any(_has_secret(name, inner) for inner in value)
    if not isinstance(value, str) or parse_reference(value) is not None:
        return False
    return is_secret_name(name) or has_key_shape(value)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str) and value:
        yield value
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    for inner in items:
        yield from _texts(inner)


def _write(file: Path, text: str) -> None:
    """Raises `MigrateError` where there is such a file, or it can't be written."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("x", encoding="utf-8") as opened:
            opened.write(text)
    except FileExistsError:
        raise MigrateError(f"{file} is there already: name another file, or delete it") from None
    except OSError as error:
        raise MigrateError(f"{file} can't be written: {error.strerror}") from error


def _next(to: Path | None, config_dir: str | None, places: Places, *, has_env: bool) -> Iterator[str]:
    """The command that checks the experiment. An environment that is chosen with it may need what is not installed: the check
    has the line that installs it."""
    if to is None or to.parent.name != "experiment":
        return
    folder = to.parent.parent
    own = "" if folder.resolve() == places.conf.resolve() else f"--config-dir {config_dir or folder} "
    yield f"Next: telescope check {own}experiment={to.stem}{'' if has_env else ' env=NAME'}"
