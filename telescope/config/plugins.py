"""Plug-ins by file name: which there are, and the settings class of one.

A plug-in is a Python file (or a folder with `__init__.py`) in a package of its kind (telescope/algorithms, say), or in the
kind's folder below a user's own plug-in folder (`plugins/algorithms`), or a module that an installed package names as an entry
point of `telescope.algorithms`. It defines one class derived from the kind's base. The kinds stand below.
Refuses to import torch: plug-ins import it where they need it. The user's folders are written into the resolved configuration
(`plugin_path`), so that every process of a run finds the same files.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import importlib.util
import inspect
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution, entry_points
from pathlib import Path
from types import ModuleType
from typing import Generic, TypeVar, cast

from packaging.requirements import InvalidRequirement, Requirement
from pydantic import PydanticUserError, ValidationError

from telescope.algorithms.base import Algorithm
from telescope.backends.base import BackendSettings
from telescope.config.words import did_you_mean
from telescope.environments.base import Environment
from telescope.environments.sandboxes.base import Provider
from telescope.settings import Settings
from telescope.weights.base import Transport

S = TypeVar("S", bound=Settings)
TELESCOPE = Path(__file__).resolve().parent.parent

_UNTYPED = ("model-field-missing-annotation", "model-field-overridden")
"""pydantic's codes for an attribute of a settings class that has no type."""


class PluginError(ValueError):
    """A plug-in that does not exist, can't be imported, or defines no usable class. The text is a whole sentence."""


class NotAPlugin(PluginError):
    """The file is there but defines no class of the kind: a helper beside the plug-ins."""


@dataclass(frozen=True)
class Kind(Generic[S]):
    """One sort of plug-in, e.g. `Kind("algorithm", "algorithms", Algorithm)`."""

    word: str
    folder: str
    """Of the user's own, and behind `telescope.` the name of entry points."""
    base: type[S]
    adapt: Callable[[type], type[S] | None] = lambda other: None
    """Makes a class of the kind of one that is none by itself; None for all other classes."""
    within: tuple[str, ...] = ()
    """Where our own lie, below telescope, e.g. `environments.tasks`; empty: in the package of the folder's name."""
    reserved: tuple[str, ...] = ()
    """Names that mean something else where one is chosen."""

    @property
    def packages(self) -> tuple[str, ...]:
        """Those of our own plug-ins, e.g. `telescope.algorithms`."""
        return tuple(f"telescope.{package}" for package in self.within or (self.folder,))


def _adapt_legacy(other: type) -> type[Environment] | None:
    """The environment of a class of the older API; whoever wrote one has imported the module."""
    legacy = sys.modules.get("telescope.environments.legacy")
    return None if legacy is None else cast("type[Environment] | None", legacy.adapt(other))


ALGORITHMS: Kind[Algorithm] = Kind("algorithm", "algorithms", Algorithm)
BACKENDS: Kind[BackendSettings] = Kind("backend", "backends", BackendSettings)
ENVIRONMENTS: Kind[Environment] = Kind(
    "environment", "environments", Environment, _adapt_legacy, ("environments.tasks", "environments.adapters")
)
SANDBOXES: Kind[Provider] = Kind(
    "sandbox provider",
    "sandboxes",
    Provider,  # type: ignore[type-abstract]  # it is there to be derived from
    within=("environments.sandboxes",),
)
TRANSPORTS: Kind[Transport] = Kind(
    "weight transport",
    "transports",
    Transport,  # type: ignore[type-abstract]  # it is there to be derived from
    reserved=("auto",),
    within=("weights.transports",),
)


@dataclass(frozen=True)
class PluginFile:
    """Where a plug-in lies: `PluginFile("cispo", <path>/telescope/algorithms/cispo.py, "telescope.algorithms.cispo")`.

    An installed package's has no file until it is imported.
    """

    name: str
    file: Path | None
    module: str

    @property
    def place(self) -> str:
        return str(self.file or f"the installed module {self.module}")


def files(kind: Kind[S], plugin_path: Sequence[str] = ()) -> dict[str, PluginFile]:
    """Candidates by name, our own first, without importing one. `base` and names with a leading underscore are none."""
    found = _own(kind)
    for name, module in _installed(f"telescope.{kind.folder}"):
        _add(found, kind, PluginFile(name, None, module))
    for folder in plugin_path:
        home = Path(folder) / kind.folder
        digest = hashlib.sha256(str(home.resolve()).encode()).hexdigest()[:12]
        for name, file in _python_files(home):
            _add(found, kind, PluginFile(name, file, f"telescope_plugins_{digest}.{name}"))
    return found


def _own(kind: Kind[S]) -> dict[str, PluginFile]:
    found = [
        PluginFile(name, file, f"{package}.{name}")
        for package in kind.packages
        for name, file in _python_files(TELESCOPE.joinpath(*package.split(".")[1:]))
    ]
    return {plugin.name: plugin for plugin in sorted(found, key=lambda plugin: plugin.name)}


def _add(found: dict[str, PluginFile], kind: Kind[S], plugin: PluginFile) -> None:
    if plugin.name in kind.reserved:
        raise PluginError(
            f"{plugin.place}: no {kind.word} can be called {plugin.name}, which leaves the choice to Telescope: rename it"
        )
    other = found.get(plugin.name)
    if other is not None:
        raise PluginError(f"{plugin.place} has the name of the {kind.word} in {other.place}: rename one of them")
    found[plugin.name] = plugin


@cache
def _installed(group: str) -> tuple[tuple[str, str], ...]:
    """(name, module) of the entry points; read once, as what is installed does not change under a running process."""
    return tuple(sorted({(entry.name, entry.module) for entry in entry_points(group=group)}))


def find(kind: Kind[S], plugin_path: Sequence[str] = ()) -> dict[str, type[S] | PluginError]:
    """The class of every plug-in by name; a broken file stands there with its error, helpers are left out."""
    return _classes(kind, files(kind, plugin_path))


def find_others(kind: Kind[S], plugin_path: Sequence[str] = ()) -> dict[str, type[S] | PluginError]:
    """The same of the user's folders and of installed packages alone; imports none of ours."""
    own = _own(kind)
    return _classes(kind, {name: plugin for name, plugin in files(kind, plugin_path).items() if name not in own})


def _classes(kind: Kind[S], candidates: Mapping[str, PluginFile]) -> dict[str, type[S] | PluginError]:
    found: dict[str, type[S] | PluginError] = {}
    for name, plugin in candidates.items():
        try:
            found[name] = _class_of(kind, plugin)
        except NotAPlugin:
            continue
        except PluginError as error:
            found[name] = error
    return found


def load(kind: Kind[S], name: str, plugin_path: Sequence[str] = ()) -> type[S]:
    """The settings class of one plug-in; imports its file alone. Raises `PluginError` with the nearest name.

    One of our own is not looked for among all installed packages, which costs each process a tenth of a second: that no other
    has its name is seen to where all are listed, before a run begins.
    """
    plugin = _own(kind).get(name) or files(kind, plugin_path).get(name)
    if plugin is None:
        known = find(kind, plugin_path)
        hint = did_you_mean(name, known)
        places = "" if "Did you mean" in hint else f" Your own are looked for in {_own_homes(kind, plugin_path)}."
        raise PluginError(f"there is no {kind.word} '{name}'.{hint}{places}")
    return _class_of(kind, plugin)


def _own_homes(kind: Kind[S], plugin_path: Sequence[str]) -> str:
    """`/home/me/mine/plugins/environments`; without a folder of the user's, how to give one."""
    homes = [str(Path(folder) / kind.folder) for folder in plugin_path]
    return ", ".join(homes) or f"plugins/{kind.folder} below the folder given as --config-dir"


def name_of(plugin: Settings) -> str:
    """The plug-in's name from an instance of its class: the name of its file."""
    return type(plugin).__module__.rpartition(".")[2]


def _python_files(home: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted(home.iterdir()) if home.is_dir() else ():
        file = path / "__init__.py" if path.is_dir() else path
        name = path.stem
        if file.suffix == ".py" and file.is_file() and name != "base" and not name.startswith("_"):
            yield name, file


def _class_of(kind: Kind[S], plugin: PluginFile) -> type[S]:
    module = _import(kind, plugin)
    own = [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and f"{value.__module__}.".startswith(f"{plugin.module}.")
        and not value.__name__.startswith("_")
        and (issubclass(value, kind.base) or kind.adapt(value) is not None)
    ]
    leaves = [value for value in own if not any(value in other.__mro__[1:] for other in own)]
    if plugin.module.startswith("telescope."):  # abstract ones among our own are there to be derived from
        leaves = [value for value in leaves if not inspect.isabstract(value)]
    if not leaves:
        raise NotAPlugin(
            f"{plugin.place} defines no class derived from {kind.base.__name__}, so it is not one of the {kind.folder}"
        )
    if len(leaves) > 1:
        names = ", ".join(leaf.__name__ for leaf in leaves)
        raise PluginError(f"{plugin.place} defines several {kind.base.__name__} classes ({names}): keep one a file")
    chosen = leaves[0]
    found = chosen if issubclass(chosen, kind.base) else kind.adapt(chosen)
    assert found is not None  # else it would not be among them
    if unlike := _unlike_base(kind, found):
        raise PluginError(f"{plugin.place}: {unlike}")
    missing = lacking(getattr(found, "requires", ()), f"{kind.word} '{plugin.name}' in {plugin.place}")
    if missing:
        raise PluginError(
            f"{kind.word} '{plugin.name}' needs what is not installed: {_install_line(missing)}{_other_versions(missing)}"
        )
    return found


def split_function(named: str, otherwise: str) -> tuple[Path, str]:
    """The file, from the root on, and the name of a function that is given as `score.py` or `score.py:name`."""
    file, colon, name = named.rpartition(":")
    if not colon or not file.endswith(".py"):
        file, name = named, otherwise
    return Path(file).expanduser().absolute(), name


def load_function(named: str, otherwise: str) -> Callable[..., object]:
    """The function that is given as `score.py:name` or, with the name `otherwise`, as `score.py`. Its file is imported as a
    user's plug-in is. Raises `PluginError`."""
    file, name = split_function(named, otherwise)
    digest = hashlib.sha256(str(file).encode()).hexdigest()[:12]
    module_name = f"telescope_functions_{digest}.{file.stem}"
    module = sys.modules.get(module_name)
    if module is None:
        if file.suffix != ".py" or not file.is_file():
            raise PluginError(f"{file} is not a Python file that is there: give the function as file.py:{name}")
        try:
            module = _import_file(file, module_name)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # someone's own code: it may raise anything, and even leave with sys.exit
            sys.modules.pop(module_name, None)
            raise PluginError(f"{file} can't be imported: {_said(error)}") from error
    found = getattr(module, name, None)
    if not callable(found):
        own = [
            key for key, value in vars(module).items() if getattr(value, "__module__", "") == module_name and callable(value)
        ]
        raise PluginError(f"{file} has no function {name!r}; it has {', '.join(own) or 'none'}: give it as file.py:name")
    return cast("Callable[..., object]", found)


def _unlike_base(kind: Kind[S], found: type[S]) -> str:
    """Why a class can't do what its base promises; empty where it can, as far as names and parameters tell."""
    if lacks := sorted(getattr(found, "__abstractmethods__", ())):
        return f"{found.__name__} lacks {', '.join(lacks)}: define each as {kind.base.__name__} says"
    for name in sorted(getattr(kind.base, "__abstractmethods__", ())):
        owed, own = inspect.signature(getattr(kind.base, name)), inspect.signature(getattr(found, name))
        try:
            own.bind(*owed.parameters)
        except TypeError:
            return f"{found.__name__}.{name}{own} can't be called as {kind.base.__name__} says, {name}{owed}"
    return ""


def make(kind: Kind[S], name: str, plugin_path: Sequence[str], values: str, context: Mapping[str, object] | None = None) -> S:
    """An instance of a plug-in with these settings, JSON. Raises `PluginError`, also for what the class itself raises, and
    pydantic's ValidationError."""
    found = load(kind, name, plugin_path)
    try:
        made = found.model_validate_json(values, strict=True, context=dict(context or {}))
        _ = made.model_fields_set  # a class whose __init__ leaves out pydantic's has none
    except ValidationError:
        raise
    except Exception as error:  # someone's own code: it may raise anything
        place = sys.modules[found.__module__].__file__ or found.__module__
        raise PluginError(
            f"{kind.word} '{name}' can't be made of its settings: {type(error).__name__}: {error} (in {place}); settings are "
            "fields of the class, and it needs no __init__"
        ) from error
    return made


def lacking(requires: Sequence[str], place: str) -> dict[str, str]:
    """Of requirements as pip takes them (PEP 508), those that are not met, with the version that is there instead, if any.

    One whose marker does not hold here (`; python_version < "3.12"`) asks for nothing. Raises `PluginError` for one that pip
    would not take either.
    """
    found: dict[str, str] = {}
    for text in requires:
        try:
            requirement = Requirement(text)
        except InvalidRequirement as error:
            why = str(error).partition("\n")[0]
            raise PluginError(f"{place} requires {text!r}, which is not a requirement that pip takes: {why}") from error
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        there = _installed_version(requirement.name)
        if there is None or not requirement.specifier.contains(there, prereleases=True):
            found[text] = there or ""
    return found


def _installed_version(package: str) -> str | None:
    try:
        return distribution(package).version
    except PackageNotFoundError:
        return None


def _other_versions(missing: Mapping[str, str]) -> str:
    there = [f"{Requirement(text).name} {version}" for text, version in missing.items() if version]
    return f" ({', '.join(there)} is installed)" if there else ""


def _install_line(requirements: Iterable[str]) -> str:
    """A line for the shell: quoted where a version's comparison would redirect."""
    return f"python -m pip install {' '.join(shlex.quote(requirement) for requirement in requirements)}"


def _import(kind: Kind[S], plugin: PluginFile) -> ModuleType:
    loaded = sys.modules.get(plugin.module)
    if loaded is not None:
        return loaded
    try:
        if plugin.file is not None and not plugin.module.startswith("telescope."):
            return _import_file(plugin.file, plugin.module)
        if plugin.module.rpartition(".")[2] != plugin.name:
            raise ImportError(f"an entry point has the name of its module, so it must be {plugin.module.rpartition('.')[2]}")
        return importlib.import_module(plugin.module)
    except KeyboardInterrupt:
        raise
    except ModuleNotFoundError as error:
        sys.modules.pop(plugin.module, None)
        raise PluginError(_not_found(kind, plugin, error)) from error
    except BaseException as error:  # someone's own code: it may raise anything, and even leave with sys.exit
        sys.modules.pop(plugin.module, None)
        raise PluginError(f"{kind.word} '{plugin.name}' can't be imported: {_said(error)} (in {plugin.place})") from error


def _said(error: BaseException) -> str:
    if isinstance(error, PydanticUserError) and error.code in _UNTYPED:
        what = error.message.partition(". ")[0]
        return f"{what}: write a setting with its type (`words: tuple[str, ...] = ...`), anything else as ClassVar[...]"
    return f"{type(error).__name__}: {error}"


def _not_found(kind: Kind[S], plugin: PluginFile, error: ModuleNotFoundError) -> str:
    """With the line that installs what is missing: what the file itself says it requires, else the package of that name."""
    top = (error.name or "").partition(".")[0]
    said = f"{kind.word} '{plugin.name}' can't be imported: {type(error).__name__}: {error} (in {plugin.place})"
    if not top or top == "telescope" or plugin.module.startswith(f"{top}."):
        return said
    return f"{said}. If it is a package, install it: {_install_line(_stated(plugin) or [top])}"


def _stated(plugin: PluginFile) -> list[str]:
    """What a file that can't be imported says in `requires = (...)` or `REQUIRED_PACKAGES = [...]`, read without running it."""
    if plugin.file is None:
        return []
    for node in ast.walk(ast.parse(plugin.file.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if any(isinstance(target, ast.Name) and target.id in ("requires", "REQUIRED_PACKAGES") for target in targets):
            with contextlib.suppress(ValueError):
                return list(lacking([str(each) for each in ast.literal_eval(node.value)], plugin.place))
    return []


def _import_file(file: Path, name: str) -> ModuleType:
    inside = [str(file.parent)] if file.name == "__init__.py" else None
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=inside)
    if spec is None or spec.loader is None:
        raise ImportError("it is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
