"""The tree of a run: every setting of every process, frozen and checked. No Hydra, no torch. References to environment
variables stay as they are in it: their values are read for a check, and by the process that needs them.

`telescope.run` resolves a configuration once and writes it to the run directory; every other process reads it with `load_run`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import (
    BaseModel,
    Field,
    PlainSerializer,
    PlainValidator,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError

from telescope.algorithms.base import Algorithm
from telescope.backends.base import BackendSettings
from telescope.config import plugins
from telescope.config.end_saves import EndSaves, choose_end_saves
from telescope.config.eval_measure import EvalMeasure
from telescope.config.evals import FROM_SERVERS, Eval, EvalEntry, EvalSettings, is_of_its_own, make_evals, make_own_environments
from telescope.config.redacted_output import hide_variables
from telescope.config.redaction import Redactor, find_secret_values, spell_all
from telescope.config.resume import FIXED
from telescope.config.secrets import find_missing, find_references, has_reference, reveal_all
from telescope.config.sections import (
    CheckpointSettings,
    ClusterSettings,
    EnvironmentEntry,
    InferenceSettings,
    LoggingSettings,
    ModelSettings,
    OrchestratorSettings,
    RolloutSettings,
    TrainerSettings,
    WeightSyncSettings,
    WireSettings,
)
from telescope.environments.base import Environment
from telescope.runlog.files import DamagedFile, read_bytes, read_json
from telescope.settings import Settings

S = TypeVar("S", bound=Settings)

FORMAT = 1
EVAL_NAME = re.compile(r"[A-Za-z0-9_-]{1,100}")
NOT_HASHED = ("name", "run_dir")
"""Where a run lies and what it is called do not change what it computes."""
STANDPOINT = ("node_rank", "interface", "head", "key_file")
"""Of `cluster`: how one host of a run sees itself and the others; each has its own."""


def settings_of(kind: plugins.Kind[S], value: Any, info: ValidationInfo) -> S:
    """An instance as it is, or `{"name": "cispo", "clip_high": 0.3}` made into one.

    Raises pydantic's custom error of type `plugin` (no such plug-in) or `nested` (its context holds the inner errors).
    """
    if isinstance(value, kind.base):
        return value
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        raise PydanticCustomError("plugin", "names no {word}: give {word}.name", {"word": kind.word})
    fields = {key: field for key, field in value.items() if key != "name"}
    return _build(kind, value["name"], fields, info.data.get("plugin_path", ()))


def _build(kind: plugins.Kind[S], name: str, fields: Mapping[str, Any], plugin_path: Sequence[str]) -> S:
    try:
        return plugins.make(kind, name, plugin_path, json.dumps(fields))
    except plugins.PluginError as error:
        raise PydanticCustomError("plugin", "{sentence}", {"sentence": str(error)}) from error
    except ValidationError as error:
        raise nested([((), error)]) from error


def nested(
    errors: Sequence[tuple[tuple[str, ...], ValidationError | str]], model: type[Settings] | None = None
) -> PydanticCustomError:
    """Errors of inner models, each with its place below the field, in one error that `telescope.config.validate` can unfold.
    `model`: the class that refused, where it is not the plug-in named there."""
    text = "; ".join(str(error) for _, error in errors)
    return PydanticCustomError("nested", "{text}", {"text": text, "errors": list(errors), "model": model})


def _algorithm(value: Any, info: ValidationInfo) -> Algorithm:
    return settings_of(plugins.ALGORITHMS, value, info)


def _backend(value: Any, info: ValidationInfo) -> BackendSettings:
    return settings_of(plugins.BACKENDS, value, info)


def _with_name(plugin: Settings) -> dict[str, Any]:
    return {"name": plugins.name_of(plugin), **plugin.model_dump(mode="json")}


class RunConfig(Settings):
    plugin_path: tuple[str, ...] = ()
    """Folders with the user's own plug-ins (`algorithms/`, `backends/`, `environments/`); follows from `--config-dir`."""
    name: str = Field(default="", pattern=r"^[A-Za-z0-9._+-]*$", max_length=100)
    """What the run is called, e.g. in the name of its directory; empty: model and algorithm, as in `tiny-grpo`."""
    run_dir: str | None = None
    """Where everything about the run is written; null: `runs/<date>_<time>_<name>`. Never reused."""
    number_of_steps: int = Field(default=300, ge=0, le=1_000_000_000)
    """Steps to train; each trains one batch and makes one weight version. With cluster.trainer_num_workers=0: those that were
    trained before, by which the evals' rows go; 0: none."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of everything drawn at random: prompt order, environments, sampling."""
    debug: bool = False
    """Log in more detail (level DEBUG) in every process."""
    model: ModelSettings = Field(default_factory=ModelSettings)
    environments: dict[str, EnvironmentEntry]
    eval: EvalSettings = Field(default_factory=EvalSettings)
    evals: dict[str, EvalEntry] = Field(default_factory=dict)
    """Evals by name, e.g. `'+evals.math500={every:20}'`; each may differ from `eval`. Empty: see `eval.every`."""
    orchestrator: OrchestratorSettings = Field(default_factory=OrchestratorSettings)
    rollout: RolloutSettings = Field(default_factory=RolloutSettings)
    trainer: TrainerSettings = Field(default_factory=TrainerSettings)
    algorithm: Annotated[Algorithm, PlainValidator(_algorithm), PlainSerializer(_with_name)]
    backend: Annotated[BackendSettings, PlainValidator(_backend), PlainSerializer(_with_name)]
    inference: InferenceSettings = Field(default_factory=InferenceSettings)
    weight_sync: WeightSyncSettings = Field(default_factory=WeightSyncSettings)
    checkpoint: CheckpointSettings = Field(default_factory=CheckpointSettings)
    wire: WireSettings = Field(default_factory=WireSettings)
    cluster: ClusterSettings = Field(default_factory=ClusterSettings)
    logging: LoggingSettings = Field(default_factory=LoggingSettings)

    @field_validator("run_dir")
    @classmethod
    def _run_dir_is_a_name(cls, run_dir: str | None) -> str | None:
        if run_dir is not None and not run_dir.strip():
            raise ValueError("run_dir is empty: name a folder, or leave it out for runs/<date>_<time>_<name>")
        return run_dir

    @field_validator("environments")
    @classmethod
    def _environments(cls, entries: dict[str, EnvironmentEntry], info: ValidationInfo) -> dict[str, EnvironmentEntry]:
        """Every entry's kwargs checked by its class and completed with its defaults (skipped for a file we wrote)."""
        if not entries:
            raise ValueError("environments is empty: a run needs one at least, e.g. env=countdown")
        if info.context is not None and info.context.get("resolved"):
            return entries
        return _complete_all(entries, info.data.get("plugin_path", ()), _environ_of(info))

    @field_validator("evals")
    @classmethod
    def _evals(cls, entries: dict[str, EvalEntry], info: ValidationInfo) -> dict[str, EvalEntry]:
        """Names fit into names of metrics; the kwargs of an environment of its own are checked and completed like those of
        `environments`."""
        for name in entries:
            if not EVAL_NAME.fullmatch(name):
                raise ValueError(
                    f"evals.{name}: the name of an eval has letters, digits, '_' and '-' (100 at most), since metrics are "
                    "called after it"
                )
        if info.context is not None and info.context.get("resolved"):
            return entries
        environments = info.data.get("environments", {})
        own = make_own_environments(entries, environments)
        completed = _complete_all(own, info.data.get("plugin_path", ()), _environ_of(info))
        return {
            name: entry.model_copy(update={"kwargs": completed[name].kwargs})
            if is_of_its_own(name, entry, environments)
            else entry
            for name, entry in entries.items()
        }

    @field_validator("weight_sync")
    @classmethod
    def _transport_takes_its_settings(cls, sync: WeightSyncSettings, info: ValidationInfo) -> WeightSyncSettings:
        """The transport exists, and its own settings are checked by its class and completed with its defaults."""
        if sync.transport == "auto" or (info.context is not None and info.context.get("resolved")):
            return sync
        plugin_path = info.data.get("plugin_path", ())
        try:
            kind = plugins.load(plugins.TRANSPORTS, sync.transport, plugin_path)
        except plugins.PluginError as error:
            raise nested([(("transport",), str(error))]) from error
        try:
            environ = _environ_of(info)
            given = _reveal_known(sync.transport_kwargs, environ)
            made = plugins.make(plugins.TRANSPORTS, sync.transport, plugin_path, given)
            completed = keep_references(made, sync.transport_kwargs, environ)
        except plugins.PluginError as error:
            raise nested([(("transport",), str(error))]) from error
        except ValidationError as error:
            raise nested([(("transport_kwargs",), error)], kind) from error
        except ValueTaken as error:
            raise nested([(("transport_kwargs",), str(error))]) from error
        return sync.model_copy(update={"transport_kwargs": completed})

    def environment(self, name: str) -> Environment:
        """Build the environment of entry `name` of `played`. Secrets given as `${oc.env:NAME}` are read here, in the process
        that needs them. Raises `KeyError` for an unknown entry, `SecretMissing` or pydantic's ValidationError."""
        entry = self.played[name]
        kwargs = json.dumps(reveal_all(entry.kwargs))
        environment = plugins.load(plugins.ENVIRONMENTS, entry.name, self.plugin_path)
        return environment.model_validate_json(kwargs, strict=True, context={"plugin_path": self.plugin_path})

    def reward_min(self, name: str) -> float | None:
        """Lower end of the rewards expected of entry `name` of `played`; None where nobody states it."""
        entry = self.played[name]
        stated = plugins.load(plugins.ENVIRONMENTS, entry.name, self.plugin_path)
        return stated.reward_min if entry.reward_min is None else entry.reward_min

    def reward_range(self, name: str) -> tuple[float, float] | None:
        """Both ends of the rewards expected of entry `name`: its own, else those its environment states; None unless both are
        known."""
        entry = self.played[name]
        stated = plugins.load(plugins.ENVIRONMENTS, entry.name, self.plugin_path)
        low = stated.reward_min if entry.reward_min is None else entry.reward_min
        high = stated.reward_max if entry.reward_max is None else entry.reward_max
        return None if low is None or high is None else (low, high)

    @property
    def active_evals(self) -> tuple[Eval, ...]:
        """The evals of the run, in the order in which they play."""
        return make_evals(self.eval, self.evals, self.environments)

    @property
    def played(self) -> dict[str, EnvironmentEntry]:
        """All environments that workers load: those that are trained on, and those that evals alone play, by the eval's
        name. Of a run that does not train, what its evals play."""
        both = self.environments | make_own_environments(self.evals, self.environments)
        if self.trains:
            return both
        return {one.label: both[one.label] for one in self.active_evals}

    @property
    def trained(self) -> dict[str, EnvironmentEntry]:
        """The environments that are trained on."""
        return self.environments if self.trains else {}

    @property
    def trains(self) -> bool:
        """False for a run without trainer ranks, which plays its evals and ends (`telescope eval`)."""
        return self.cluster.trainer_num_workers > 0

    @property
    def end_saves(self) -> EndSaves:
        """What is saved after the last step, and at a stop."""
        return choose_end_saves(self)

    @property
    def saves(self) -> bool:
        """Whether the run makes any checkpoint."""
        return self.trains and (self.checkpoint.every > 0 or self.end_saves.any)

    @property
    def stop_timeout_s(self) -> float:
        """How long a run that is asked to stop may take for its step and its save: `checkpoint.stop_timeout_s`, and without
        checkpoint.every no more than a walltime's warning leaves. 0: nothing is saved."""
        if not self.end_saves.any:
            return 0.0
        asked, slurm = self.checkpoint.stop_timeout_s, self.cluster.slurm
        return asked if slurm is None or self.checkpoint.every else min(asked, slurm.save_s)

    @property
    def first_version(self) -> int:
        """The weight version that servers begin with."""
        return 0 if self.trains else self.number_of_steps

    @property
    def servers(self) -> int:
        """Inference servers that are started: a server has `tensor_parallel_size` of the inference workers."""
        if self.inference.engine == "remote":
            return 0
        return self.cluster.inference_num_workers // self.inference.tensor_parallel_size

    @property
    def stop_measure(self) -> EvalMeasure | None:
        """What is to gain in a run with `eval.stop_after`."""
        if self.eval.stop_after is None or not self.active_evals:
            return None
        return self.checkpoint.best or EvalMeasure(self.active_evals[0].name)

    @property
    def eval_servers(self) -> int:
        """Servers held for each eval that is due during training."""
        asked, servers = self.eval.num_servers, self.servers
        if self.inference.sleep_while_training != "off" or not self.active_evals:
            return 0
        return asked if asked != "auto" else int(servers >= FROM_SERVERS)

    @property
    def algorithm_name(self) -> str:
        return plugins.name_of(self.algorithm)

    @property
    def backend_name(self) -> str:
        return plugins.name_of(self.backend)


class ValueTaken(ValueError):
    """A settings class has put the value that a reference stands for where it would be written down."""


def _environ_of(info: ValidationInfo) -> Mapping[str, str]:
    found: Mapping[str, str] = (info.context or {}).get("environ", os.environ)
    return found


def _complete_all(
    entries: Mapping[str, EnvironmentEntry], plugin_path: Sequence[str], environ: Mapping[str, str]
) -> dict[str, EnvironmentEntry]:
    completed: dict[str, EnvironmentEntry] = {}
    errors: list[tuple[tuple[str, ...], ValidationError | str]] = []
    for key, entry in entries.items():
        try:
            completed[key] = _complete(entry, plugin_path, environ)
        except plugins.PluginError as error:
            errors.append(((key, "name"), str(error)))
        except ValidationError as error:
            errors.append(((key, "kwargs"), error))
        except ValueTaken as error:
            errors.append(((key, "kwargs"), str(error)))
    if errors:
        raise nested(errors)
    return completed


def _complete(entry: EnvironmentEntry, plugin_path: Sequence[str], environ: Mapping[str, str]) -> EnvironmentEntry:
    """The entry with the defaults of its environment filled in, checked with the values that references stand for."""
    kwargs = _reveal_known(entry.kwargs, environ)
    made = plugins.make(plugins.ENVIRONMENTS, entry.name, plugin_path, kwargs, {"plugin_path": plugin_path})
    return entry.model_copy(update={"kwargs": keep_references(made, entry.kwargs, environ)})


def _reveal_known(settings: Mapping[str, Any], environ: Mapping[str, str]) -> str:
    """As JSON. Where a variable is not set here the references stay: preflight has the sentence."""
    return json.dumps(settings if find_missing(settings, environ) else reveal_all(settings, environ))


def keep_references(made: BaseModel, given: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """The settings of `made` as plain values, with the references that were given in place of their values. Raises `ValueTaken`
    where a value stands elsewhere too."""
    dumped: dict[str, Any] = _put_back(_with_references(made.model_dump(mode="json"), made), given)
    values = find_secret_values(environ, find_references(given))
    if names := [name for name, value in dumped.items() if any(part in json.dumps(value) for part in spell_all(values))]:
        raise ValueTaken(
            f"{names[0]} holds the value of a variable that another setting refers to: take it apart where it is used, in a "
            "private field (docs/security.md)"
        )
    return dumped


def _put_back(dumped: Any, given: Any) -> Any:
    if has_reference(given):
        return given
    if isinstance(dumped, dict) and isinstance(given, Mapping):
        return {name: _put_back(value, given.get(name)) for name, value in dumped.items()}
    if isinstance(dumped, list) and isinstance(given, list) and len(dumped) == len(given):
        return [_put_back(*each) for each in zip(dumped, given, strict=True)]
    return dumped


def _with_references(dumped: Any, made: Any) -> Any:
    """What was dumped, with each secret's text, a reference as nothing is revealed yet, in place of its stars, at any depth."""
    if isinstance(made, SecretStr):
        return made.get_secret_value()
    if isinstance(dumped, dict) and isinstance(made, BaseModel | Mapping):
        parts = {str(name): value for name, value in (made if isinstance(made, Mapping) else dict(made)).items()}
        return {name: _with_references(value, parts.get(name)) for name, value in dumped.items()}
    if isinstance(dumped, list) and isinstance(made, Sequence):
        return [_with_references(*each) for each in zip(dumped, made, strict=True)]
    return dumped


def as_json(config: RunConfig) -> dict[str, Any]:
    """The configuration as plain JSON values; `RunConfig.model_validate_json(json.dumps(as_json(config)))` gives it back."""
    return config.model_dump(mode="json")


def make_redactor(config: RunConfig, environ: Mapping[str, str] = os.environ) -> Redactor:
    """Of what a process of this run must not write down."""
    return Redactor.of(environ, find_references(as_json(config)))


def config_hash(config: RunConfig) -> str:
    """16 hexadecimal digits over all settings but name, run_dir, W&B's group and where a host stands: equal settings, equal
    hash."""
    return _hash_of(as_json(config))


def _hash_of(settings: Mapping[str, Any]) -> str:
    left_out = {"cluster": STANDPOINT, "logging": ("wandb_group",)}
    kept = {key: value for key, value in settings.items() if key not in NOT_HASHED}
    for section, names in left_out.items():
        if isinstance(kept.get(section), Mapping):
            kept[section] = {key: value for key, value in kept[section].items() if key not in names}
    text = json.dumps(kept, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def dump_run(config: RunConfig) -> str:
    """The text of a run's config.json: its hash, then every setting."""
    return json.dumps({"format": FORMAT, "config_hash": config_hash(config), **as_json(config)}, indent=2) + "\n"


def as_yaml(config: RunConfig) -> str:
    """The same for people: its hash in a comment, then every setting."""
    text: str = yaml.safe_dump(as_json(config), sort_keys=False, allow_unicode=True)
    return f"# hash {config_hash(config)}\n{text}"


def load_run(path: Path) -> RunConfig:
    """Read a run's config.json. A setting that is younger than the file has its default, so the hash may be another one: runs
    outlive the version that began them. Raises FileNotFoundError, and `DamagedFile` where the file is no such file, was edited,
    or means something else by now."""
    content = read_settings(path)
    try:
        config = RunConfig.model_validate_json(json.dumps(content), strict=True, context={"resolved": True})
    except ValidationError as error:
        raise DamagedFile(path, f"can't be used by this Telescope and its plug-ins: {_describe(error)}") from error
    refuse_other_meaning(path, content, config)
    return config


def read_settings(path: Path) -> dict[str, Any]:
    """The settings that a run's config.json holds, as they were written: no plug-in is loaded. Raises FileNotFoundError and
    `DamagedFile`."""
    content = read_json(path, dict[str, Any])
    if content.pop("format", None) != FORMAT:
        raise DamagedFile(path, f"is not the configuration of a run in format {FORMAT}")
    written, own = content.pop("config_hash", None), _hash_of(content)
    if own != written:
        raise DamagedFile(
            path,
            f"says hash {written} but its settings have hash {own}: the file was edited"
            + _describe_edits(path, content, written),
        )
    hide_variables(find_references(content))
    return content


def refuse_other_meaning(path: Path, written: Mapping[str, Any], config: RunConfig) -> None:
    """Raises `DamagedFile` where `config`, made of the file's settings, does not have them all as they were written."""
    if not _holds(written, as_json(config)):
        raise DamagedFile(
            path, "does not mean what it did when the run was made: the code of a plug-in changed; start a new run instead"
        )


def _describe(error: ValidationError) -> str:
    """In one line."""
    found = (
        f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors(include_url=False, include_input=False)
    )
    return "; ".join(" ".join(each.split()) for each in found)


SHOWN_EDITS = 3


def _describe_edits(path: Path, content: Mapping[str, Any], written: Any) -> str:
    """What was changed, where config.yaml beside it says how it was, and how settings are changed instead."""
    try:
        before = yaml.safe_load(read_bytes(path.with_name("config.yaml")))
    except (OSError, ValueError, yaml.YAMLError):
        before = None
    edits = list(_differences(before, content)) if isinstance(before, dict) and _hash_of(before) == written else []
    told = "; ".join(_describe_edit(*edit) for edit in edits[:SHOWN_EDITS])
    more = f" and {len(edits) - SHOWN_EDITS} more" if len(edits) > SHOWN_EDITS else ""
    may = (f"{place}={json.dumps(here)}" for place, _, here in edits if _is_plain(here) and place not in FIXED)
    example = next(may, "number_of_steps=600")
    command = f"telescope runs resume {shlex.quote(str(path.parent))} {shlex.quote(example)}"
    known, copy = (f" ({told}{more})", ", by config.yaml beside it") if told else ("", "")
    return (
        f"{known}. Put it back as it was{copy}: settings are changed on the command line, `{command}`. "
        "number_of_steps, cluster, trainer, inference, weight_sync, logging, temperatures and limits may change "
        "(docs/resuming.md has the others)"
    )


def _describe_edit(place: str, was: Any, here: Any) -> str:
    """Numbers are shown; a text may be a key that somebody typed."""
    plain = _is_plain(was) and _is_plain(here)
    return f"{place} was {json.dumps(was)} and is {json.dumps(here)}" if plain else f"{place} is another"


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, int | float)


def _differences(was: Any, here: Any, place: str = "") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(was, Mapping) and isinstance(here, Mapping):
        for name in dict.fromkeys([*was, *here]):
            yield from _differences(was.get(name), here.get(name), f"{place}.{name}" if place else str(name))
    elif was != here:
        yield place, was, here


def _holds(written: Any, read: Any) -> bool:
    """Whether all that was written is read as it stands there; more may be read."""
    if isinstance(written, Mapping) and isinstance(read, Mapping):
        return all(name in read and _holds(value, read[name]) for name, value in written.items())
    if isinstance(written, list) and isinstance(read, list):
        return len(written) == len(read) and all(_holds(*each) for each in zip(written, read, strict=True))
    return bool(written == read)
