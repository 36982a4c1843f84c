"""Overrides → RunConfig: Hydra composes, pydantic judges, and all that is wrong is said at once, in sentences.

Every value override is forced in (`++`), so that an unknown setting meets the judge, who knows the nearest name, and not
Hydra's grammar. Nothing is started or written here.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from telescope.compose.options import GROUPS, HIDDEN_GROUPS, NOT_COMPOSED, Places
from telescope.compose.preset_files import ENVIRONMENT, SEVERAL, preset_problems
from telescope.compose.presets import search_path
from telescope.compose.problems import explain_failure
from telescope.compose.resolve import resolve
from telescope.compose.run_help import INSTEAD, OTHER_SETTINGS
from telescope.config import conflicts
from telescope.config.models import embedded_models, model_path, model_problem
from telescope.config.plugins import SANDBOXES, TRANSPORTS, PluginError, files
from telescope.config.redacted_output import hide_variables
from telescope.config.run import RunConfig
from telescope.config.validate import validate
from telescope.config.words import ConfigProblem, did_you_mean, nearest, typed

_DEFAULTS_SINCE = (1, 4)
"""From this version on Hydra warns where it is told whose defaults to take; before, where it is not."""


class UsageError(ValueError):
    """The command line itself can't be read. The text is a whole sentence."""


@dataclass(frozen=True)
class Point:
    """One configuration of a command line; a sweep has several. `config` is None exactly where there are problems."""

    overrides: tuple[str, ...]
    config: RunConfig | None
    problems: tuple[ConfigProblem, ...]
    warnings: tuple[str, ...]
    composed: DictConfig
    given: tuple[str, ...] = ()
    """The overrides as Hydra got them."""
    swept: tuple[str, ...] = ()
    """Those in which it differs from the other points of a sweep."""


def load_points(overrides: Sequence[str], places: Places, environ: Mapping[str, str], sweep: bool = False) -> list[Point]:
    """Every point of the command line, judged. Raises `UsageError` where Hydra's grammar does not take the overrides."""
    _refuse_no_place()
    parsed = parse(overrides)
    refuse_hydra_settings(parsed)
    swept = [override.key_or_group for override in parsed if override.is_sweep_override()]
    if swept and not sweep:
        raise UsageError(
            f"{swept[0]} has several values: add -m (--multirun) to run one after another, or quote a list, [a,b], or a text "
            f"with a comma, '{swept[0]}=\"a,b\"'"
        )
    with composing(places):
        points = [compose_point(point, places, environ) for point in _product(parsed)]
    return [replace(point, swept=pick_swept(point.overrides, parsed)) for point in points]


def pick_swept(overrides: Sequence[str], parsed: Sequence[Override]) -> tuple[str, ...]:
    """Of a point's overrides those to which the command line gives no single value."""
    fixed = {_name(override.get_key_element()): not override.is_sweep_override() for override in parsed}
    return tuple(override for override in overrides if not fixed.get(_name(override), False))


def _name(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")


def parse(overrides: Sequence[str]) -> list[Override]:
    """One parsed override each. Raises `UsageError` with the one that can't be read."""
    parser = OverridesParser.create()
    if nameless := [override for override in overrides if override.lstrip("+~").startswith("=")]:
        raise UsageError(f"can't read '{nameless[0]}': it names no setting; an override reads name=value")
    return [_parse_one(parser, override) for override in overrides]


def _parse_one(parser: OverridesParser, override: str) -> Override:
    try:
        return parser.parse_override(override)
    except HydraException as error:
        reason = str(error).strip().partition("\n")[0]
        hint = _hint_at_quotes(parser, override)
        raise UsageError(f"can't read '{override}': {reason}; an override reads name=value{hint}") from error


def _hint_at_quotes(parser: OverridesParser, override: str) -> str:
    """How to write a value that Hydra's grammar takes only in quotes; empty where quotes would not help."""
    name, equals, value = override.partition("=")
    if not equals or not value or name in GROUPS:
        return ""
    if value[0] == "[" and value[-1] == "]":
        return _hint_at_quoted_items(parser, name, value[1:-1].split(","))
    if value[0] in "[{(\"'":
        return ""
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    try:
        parser.parse_override(f'{name}="{escaped}"')
    except HydraException:
        return ""
    return f", and a value with special characters is quoted twice: '{name}=\"{escaped}\"'"


def _hint_at_quoted_items(parser: OverridesParser, name: str, items: Sequence[str]) -> str:
    """The same for a list of texts, e.g. of options with an equals sign."""
    if any(character in item for item in items for character in "\"'[{\\"):
        return ""
    listed = ",".join('"' + item.strip() + '"' for item in items)
    quoted = f"{name}=[{listed}]"
    try:
        parser.parse_override(quoted)
    except HydraException:
        return ""
    return f", and in a list what has special characters is quoted twice: '{quoted}'"


def _refuse_no_place() -> None:
    try:
        Path.cwd()
    except FileNotFoundError as error:
        raise UsageError("the folder in which this command was given is not there any more: change into another") from error


def refuse_hydra_settings(parsed: Sequence[Override]) -> None:
    """Raises `UsageError` for a setting of Hydra's own, with what to type instead."""
    for override in parsed:
        key = override.key_or_group.replace("/", ".")
        if key == "hydra" or key.startswith("hydra."):
            known = [said for name, said in INSTEAD.items() if f"{key}.".startswith(f"{name}.")]
            instead = known[0] if known else OTHER_SETTINGS
            raise UsageError(f"{override.input_line}: {instead}")


_AS_TYPED = {"True": "true", "False": "false"}
"""Hydra gives Python's words for what was typed; a text that reads so comes in quotes."""


def _product(parsed: Sequence[Override]) -> Iterator[tuple[str, ...]]:
    """The points of a sweep, the last swept override turning fastest."""
    values = [
        [f"{override.get_key_element()}={_AS_TYPED.get(value, value)}" for value in override.sweep_string_iterator()]
        if override.is_sweep_override()
        else [str(override.input_line)]
        for override in parsed
    ]
    yield from itertools.product(*values)


@contextmanager
def composing(places: Places) -> Iterator[None]:
    """Within, Hydra composes our configuration; not to be nested."""
    GlobalHydra.instance().clear()
    try:
        with _quietly(), initialize_config_dir(str(places.conf), **version_base_for(hydra.__version__)):
            yield
    finally:
        GlobalHydra.instance().clear()


def version_base_for(version: str) -> dict[str, str]:
    """What a Hydra of this version has to be told of the defaults it takes: `1.3.8` to take its own, `1.4.0rc3` nothing."""
    release = tuple(int(part) for part in version.split(".")[:2])
    return {} if release >= _DEFAULTS_SINCE else {"version_base": "1.3"}


@contextmanager
def _quietly() -> Iterator[None]:
    """Hydra 1.3 beside an omegaconf that is newer than it asks for works, and warns of what it does itself."""
    with warnings.catch_warnings():
        for own in (r"register_new_resolver\(\) is deprecated", r"Implicit conversion from Version to str at 'hydra\."):
            warnings.filterwarnings("ignore", own)
        yield


def force_sweep(parsed: Sequence[Override], places: Places) -> list[str]:
    """The overrides of a whole sweep as Hydra gets them, those with several values as they are: what they choose is judged
    point by point."""
    single, _ = _force([override for override in parsed if not override.is_sweep_override()], places)
    return [*single, *(str(override.input_line) for override in parsed if override.is_sweep_override())]


def compose_point(overrides: Sequence[str], places: Places, environ: Mapping[str, str]) -> Point:
    """One point of a command line, composed and judged. Call it within `composing`."""
    overrides = tuple(overrides)
    problems = list(_find_hidden_presets(places))
    parsed = parse(overrides)
    forced, choices = _force(parsed, places)
    problems += choices
    given = (search_path(places), *forced)
    try:
        composed = compose("run", list(given))
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
        said = [*problems, *explain_failure(error, parsed, places)]
        return Point(overrides, None, tuple(dict.fromkeys(said)), (), OmegaConf.create(), given)
    container, unresolved = resolve(composed, environ, places.plugin_path)
    container["plugin_path"] = list(places.plugin_path)
    config, judged = validate(_with_model_folder(container), environ)
    problems += [*unresolved, *_drop_repeated([*judged, *_model_problems(container)], [*choices, *unresolved])]
    if problems or config is None:
        return Point(overrides, None, tuple(problems), (), composed, given)
    return Point(overrides, config, (), tuple(conflicts.warnings(config)), composed, given)


def _force(parsed: Sequence[Override], places: Places) -> tuple[list[str], list[ConfigProblem]]:
    """Overrides as Hydra gets them: values forced, options that don't exist replaced by the nearest, with a problem each."""
    forced: list[str] = []
    problems: list[ConfigProblem] = []
    for override in parsed:
        group, line = override.key_or_group, str(override.input_line)
        if group in GROUPS or group in HIDDEN_GROUPS:
            chosen, wrong = _choose(override, places)
            problems += wrong
            forced += chosen
        elif group == "environments" and not override.is_delete() and not override.value():
            problems.append(
                ConfigProblem(group, f"{line} takes nothing away: choose with env=[…], or drop one with ~environments.<name>")
            )
        elif group.partition(".")[0] in NOT_COMPOSED:
            problems.append(ConfigProblem(group, f"{group} follows from --config-dir: put plug-ins into <config-dir>/plugins"))
        else:
            forced.append(f"++{line}" if override.type == OverrideType.CHANGE else _force_line(line))
    return forced, problems


def _force_line(line: str) -> str:
    return f"+{line}" if line.startswith("+") and not line.startswith("++") else line


def _choose(override: Override, places: Places) -> tuple[list[str], list[ConfigProblem]]:
    group, value = override.key_or_group, override.value()
    options = places.options(group)
    if override.is_delete():
        return [], [ConfigProblem(group, f"{override.input_line}: a group can't be taken away; choose {' | '.join(options)}")]
    if value is None:
        if group == "experiment":  # as if it had not been given
            return [], []
        return [], [ConfigProblem(group, f"{group} needs a choice: {' | '.join(options)}")]
    if wrong_form := _wrong_form(override, value):
        return [], [ConfigProblem(group, wrong_form)]
    names = value if isinstance(value, list) else [value]
    if not names:
        return [], [
            ConfigProblem(group, f"{override.input_line} chooses nothing: choose one at least of {' | '.join(options)}")
        ]
    twice = [str(name) for name in dict.fromkeys(names) if names.count(name) > 1]
    if twice:
        return [], [ConfigProblem(group, f"{override.input_line} has {', '.join(twice)} more than once: name each once")]
    unusable = [problem for name in names for problem in preset_problems(group, str(name), places)]
    unusable += [
        ConfigProblem(
            group, f"{group}={name} is read as {typed(name)}, which is not a name: rename {places.presets(group)[found][0]}"
        )
        for name in names
        if not isinstance(name, str) and (found := _preset_that_reads_as(name, places.presets(group)))
    ]
    if unusable:
        return [], unusable
    wrong = [str(name) for name in names if not places.offers(group, str(name).removeprefix("_"))]
    if not wrong:
        return [str(override.input_line)], []
    guesses = [nearest(str(name), options) if str(name) in wrong else str(name) for name in names]
    unguessed = None in guesses  # then what is said below the group's section makes no sense either
    more = " For a model that has no preset: model=any model.name=<id or folder>." if group == "model" else ""
    more += (
        " One of your own needs --config-dir FOLDER."
        if places.user is None
        else f" Your own are looked for in {places.user / group} and {places.user / 'plugins'}."
    )
    problems = [
        ConfigProblem(
            group if unguessed else "", f"{group}={name}: there is no such option.{did_you_mean(name, options)}{more}"
        )
        for name in wrong
    ]
    if unguessed:
        return [], problems
    stand_in = f"[{','.join(map(str, guesses))}]" if isinstance(value, list) else guesses[0]
    return [f"{override.get_key_element()}={stand_in}"], problems


def _preset_that_reads_as(name: Any, presets: Mapping[str, Any]) -> str:
    """The file name that YAML takes for a number, a yes or a no; empty where no preset has it."""
    return next((found for found in presets if found.lower() == str(name).lower()), "")


def _wrong_form(override: Override, value: Any) -> str:
    """Why an override is not a choice of its group, or is more than the group takes: Hydra would put one over the other, so
    that only the last of two algorithms would act. Empty where it is a choice."""
    group, line = override.key_or_group, override.input_line
    if override.package is not None and group != "env":
        return f"{line}: the settings of {group} have their place: leave out @{override.package}"
    if override.package is not None and not ENVIRONMENT.fullmatch(override.package):
        return f"{line}: an environment stands at environments.<name>: type +env@environments.<name>={value}"
    added = "" if override.package is not None else str(line)[: str(line).index(group)]
    if added == "++" or (added and group != "env"):
        return f"{line}: {group} is in the defaults list already, so leave out the {added}"
    if isinstance(value, list) and group not in SEVERAL:
        points = f"; one run for each is -m {group}={','.join(map(str, value))}" if len(value) > 1 else ""
        return f"{line} is a list, and {group} takes one choice, e.g. {group}={value[0] if value else 'NAME'}{points}"
    names = value if isinstance(value, list) else [value]
    if any(isinstance(name, list | dict) for name in names):
        return f"{line} names no option: give a name, e.g. {group}=NAME{', or a list of names' if group in SEVERAL else ''}"
    return ""


def _drop_repeated(judged: Sequence[ConfigProblem], said: Sequence[ConfigProblem]) -> list[ConfigProblem]:
    """The judge's problems, less those that follow from a value that was left out or from a wrong choice."""
    paths = {problem.path for problem in said}
    return [problem for problem in judged if problem.path not in paths and problem.path.partition(".")[0] not in paths]


def _find_hidden_presets(places: Places) -> Iterator[ConfigProblem]:
    for group in GROUPS:
        for name, found in places.presets(group).items():
            if len(found) > 1:
                yield ConfigProblem(group, f"{found[1]} has the name of Telescope's own preset {group}={name}: rename it")
        for file in places.unread(group):
            yield ConfigProblem(group, f"{file} is not read: presets end in .yaml, so rename it to {file.stem}.yaml")


def _model_name(container: Mapping[str, Any]) -> str | None:
    model = container.get("model")
    name = model.get("name") if isinstance(model, Mapping) else None
    return name if isinstance(name, str) else None


def _model_problems(container: Mapping[str, Any]) -> list[ConfigProblem]:
    name = _model_name(container)
    problem = None if name is None else model_problem(name)
    return [] if problem is None else [problem]


def _with_model_folder(container: dict[str, Any]) -> dict[str, Any]:
    """A local model's folder as an absolute path, so that every process finds it from anywhere."""
    name = _model_name(container)
    path = None if name is None or name in embedded_models() else model_path(name)
    return container if path is None else {**container, "model": {**container["model"], "name": str(path)}}


def places_for(config_dir: str | None) -> Places:
    """Our presets and the user's folder. Raises `UsageError` where there is no such folder or its plug-ins clash with ours."""
    conf = Path(__file__).resolve().parent.parent / "_conf"
    if config_dir is None:
        return Places(conf)
    user = Path(config_dir).expanduser()
    if not user.is_dir():
        raise UsageError(f"--config-dir={config_dir}: there is no such folder")
    places = Places(conf, user.absolute())
    hide_variables(places.find_references())
    try:
        for group in GROUPS:
            places.options(group)
        files(SANDBOXES, places.plugin_path)
        files(TRANSPORTS, places.plugin_path)
    except PluginError as error:
        raise UsageError(str(error)) from error
    return places
