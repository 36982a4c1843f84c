"""What `telescope serve` and `telescope chat` serve: a step of a run, a model, or LoRA adapters over a model.

Owns which weights a command line means, the configuration of the one server that has them, and the folder to which a checkpoint
is exported while it is served. Refuses to start anything (server_process.py does), and changes nothing of a run: it may go on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from telescope.cli.resume import WrongOverride
from telescope.cli.sweep import RESULTS as SWEEP_RESULTS
from telescope.cli.targets import (
    TargetRefused,
    Tell,
    change,
    check_key_variable,
    compose_untrained,
    export_weights,
    judge,
    make_settings,
    name_model,
    read_trained,
    refuse_decided,
)
from telescope.config.models import model_problem, positions
from telescope.config.run import RunConfig
from telescope.config.secrets import make_reference
from telescope.config.sections import DEFAULT_PORT, LoraSettings, is_loopback
from telescope.runlog import checkpoints, opening, temporary
from telescope.runlog.holder import find_state
from telescope.runlog.layout import RunDirectory

LATEST = "latest"
DECIDED = {
    "cluster.trainer_num_workers": "a server trains nothing",
    "cluster.inference_num_workers": "one server is started; inference.tensor_parallel_size says on how many GPUs",
    "number_of_steps": "--step names the checkpoint of a run",
    "run_dir": "a server makes no run directory",
    "inference.http": "a server is for HTTP",
    "inference.host": "--host says where it listens",
    "inference.base_port": "--port says where it listens",
    "inference.api_key": "--key-env names the variable with its key",
    "model": "the target is the model",
    "model.name": "the target is the model",
    "model.lora": "it follows from what is served",
}
"""Settings that the commands decide themselves, and why."""
SEQUENCES = 256
"""Answers that a server without rollouts samples at once; more wait (`inference.http_sequences`)."""
ADAPTER_CONFIG = "adapter_config.json"
SIZE = "inference.tensor_parallel_size"


@dataclass(frozen=True)
class ServedModel:
    """`label`: for sentences, e.g. `runs/mine step 40`; `name`: what clients ask for, e.g. `mine@40`. `source`: the run that it
    is of, whose checkpoint of `step` is exported first; 0: the weights are there. `adapter`: a folder of LoRA adapters over the
    model."""

    label: str
    name: str
    config: RunConfig
    source: RunDirectory | None = None
    step: int = 0
    adapter: Path | None = None
    remark: str = ""
    """What the user should know of it before it starts."""


def find_model(target: str, asked: argparse.Namespace, overrides: Sequence[str]) -> ServedModel:
    """`asked`: the command's `step`, `host`, `port`, `key_env`, `env` and `config_dir`. Raises `TargetRefused`, `WrongOverride`
    and `UsageError`."""
    path = Path(target)
    refuse_decided(overrides, DECIDED)
    if opening.is_run(path):
        return _find_in_run(target, RunDirectory(path.absolute()), asked, overrides)
    if asked.step is not None:
        raise WrongOverride(f"--step names a checkpoint of a run directory, and {target} is none: leave it out")
    if (path / checkpoints.COMPLETE).is_file():
        raise TargetRefused(_explain_checkpoint(path))
    if (path / ADAPTER_CONFIG).is_file():
        return _find_adapters(target, path.absolute(), asked, overrides)
    if path.is_dir() and not (path / "config.json").is_file():
        raise TargetRefused(
            f"{target} is neither a run directory (it has no run.json), nor a model (no config.json), nor LoRA adapters (no "
            f"{ADAPTER_CONFIG}): name one of these"
        )
    config = _compose(name_model(target, _places(asked)), _limit_to_positions(target), asked, overrides)
    return ServedModel(target, _name(path.name), config)


def _name(stem: str) -> str:
    """As a command line and JSON take it without quotes."""
    return re.sub(r"[^A-Za-z0-9._+@-]", "-", stem)[:80] or "model"


# ---- a run


def _find_in_run(target: str, run: RunDirectory, asked: argparse.Namespace, overrides: Sequence[str]) -> ServedModel:
    trained = read_trained(run, target)
    if trained.inference.engine != "vllm":
        raise TargetRefused(
            f"{target} ran with inference.engine={trained.inference.engine}, which has no model to serve: name a run that "
            "served with vllm"
        )
    goes_on = is_going_on(run)
    step = _choose_step(run, trained, asked.step, goes_on)
    settings = make_settings(trained, step)
    settings["inference"] |= {"http_sequences": SEQUENCES, **_make_address(asked)}
    if asked.env is not None:
        own = {} if asked.env in trained.environments else {"environment": asked.env}
        settings["evals"] = {asked.env: own}
    settings = change(settings, overrides)
    settings["cluster"]["inference_num_workers"] = settings["inference"]["tensor_parallel_size"]  # one server
    config = judge(settings)
    config = config.model_copy(update={"model": config.model.model_copy(update={"lora": trained.model.lora if step else None})})
    remark = (
        f"{target} goes on, and this is its step {step}. Its own servers have its newest weights: `telescope servers {target}` "
        "says where, and `telescope chat --url URL` talks to them."
        if goes_on
        else ""
    )
    return ServedModel(f"{target} step {step}", _name(f"{run.path.name}@{step}"), config, run, step, remark=remark)


def _choose_step(run: RunDirectory, trained: RunConfig, given: str | None, goes_on: bool) -> int:
    """0 for the initial model. Raises `TargetRefused` and `WrongOverride`."""
    there = checkpoints.steps(checkpoints.root(run, trained.checkpoint.dir))
    has = f"there are {', '.join(map(str, there))}" if there else "there is none"
    if given is None or given == LATEST:
        if there:
            return there[-1]
        if (run.path.parent / SWEEP_RESULTS).is_file():
            why = "its sweep kept the weights of its best point alone (checkpoint.at_end=weights keeps all)"
        elif not opening.look(run).summary.get("steps", True):
            why = "it ended before its first step was trained"
        elif every := trained.checkpoint.every:
            why = f"it saves one every {every} steps (checkpoint.every)"
        else:
            why = "it saves one at its end (checkpoint.at_end)" if trained.saves else "it saves none (checkpoint.at_end)"
        meanwhile = f"; `telescope servers {run.path}` says where its own servers answer meanwhile" if goes_on else ""
        raise TargetRefused(
            f"{run.path} has no checkpoint to serve: {why}{meanwhile}. --step 0 takes the model that it began with; `telescope "
            "run … checkpoint.every=10` saves every ten steps"
        )
    if not given.isdecimal():
        raise WrongOverride(f"--step {given}: give a number, or {LATEST}")
    if (step := int(given)) and step not in there:
        raise TargetRefused(f"{run.path} has no checkpoint of step {step}; {has}, and 0 is the model that it began with")
    return step


def is_going_on(run: RunDirectory) -> bool:
    """Whether a process of this host watches the run."""
    holder = opening.look(run).holder
    return holder is not None and find_state(holder, run) == "alive"


def _explain_checkpoint(path: Path) -> str:
    run, step = path.absolute().parent.parent, path.name.removeprefix("step_").lstrip("0")
    whose = str(run) if opening.is_run(run) else "RUN_DIR"
    return (
        f"{path} is a checkpoint, which holds the state of trainers and no model: give the run and its step, {whose} --step "
        f"{step or 'N'}, or make a model of it, `telescope export {step or 'N'} --run-dir {whose} --to FOLDER`"
    )


# ---- a model


def _find_adapters(target: str, path: Path, asked: argparse.Namespace, overrides: Sequence[str]) -> ServedModel:
    """Adapters as peft writes them, over the model that they name. Raises `TargetRefused`."""
    file = path / ADAPTER_CONFIG
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        base, rank, alpha = str(found["base_model_name_or_path"]), int(found["r"]), int(found["lora_alpha"])
        targets = found["target_modules"]
        modules = tuple(str(each) for each in targets) if isinstance(targets, list) else ()
        lora = LoraSettings(rank=rank, alpha=alpha, **({"target_modules": modules} if modules else {}))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TargetRefused(f"{file} is not what peft writes of LoRA adapters ({type(error).__name__}: {error})") from error
    if problem := model_problem(base):
        raise TargetRefused(
            f"{target} holds adapters over the model {base}, and there is none here ({problem.sentence}): put where it lies as "
            f"base_model_name_or_path into {file}"
        )
    config = _compose(["model=any", f'model.name="{base}"'], _limit_to_positions(base), asked, overrides)
    changed: dict[str, Any] = {"lora": lora}
    template = path / "chat_template.jinja"
    if config.model.chat_template is None and template.is_file():
        changed["chat_template"] = template.read_text(encoding="utf-8")
    config = config.model_copy(update={"model": config.model.model_copy(update=changed)})
    return ServedModel(f"{target} over {Path(base).name}", _name(path.name), config, adapter=path)


def _compose(chosen: Sequence[str], limits: Sequence[str], asked: argparse.Namespace, overrides: Sequence[str]) -> RunConfig:
    inference = {"http_sequences": SEQUENCES, **_make_address(asked)}
    played = choose_environment(asked.env)
    sizes = [one.partition("=")[2] for one in overrides if one.startswith(f"{SIZE}=")]
    one_server = [f"cluster.inference_num_workers={size}" for size in sizes[-1:] or ["1"]]
    config = compose_untrained([*chosen, *played, *limits, *one_server, *overrides], asked.config_dir)
    return config.model_copy(update={"inference": config.inference.model_copy(update=inference)})


def choose_environment(name: str | None) -> list[str]:
    """Overrides by which an environment is played, which every configuration must have: `--env`'s, else any."""
    return ["+evals.any={environment:countdown}"] if name is None else [f"env={name}", f"+evals.{name}={{}}"]


def _limit_to_positions(name: str) -> list[str]:
    """A short model's lengths, where the defaults are beyond it; what the user gives comes behind them."""
    most = positions(name)
    if most is None or most >= 4096:
        return []
    return [f"inference.max_model_len={most}", f"rollout.max_tokens={most // 2}"]


def _places(asked: argparse.Namespace) -> Any:
    from telescope.compose.load import places_for

    return places_for(asked.config_dir)


# ---- the server


def _make_address(asked: argparse.Namespace) -> dict[str, Any]:
    """Where it listens and for whom: this machine, unless a key lets others in. Raises `WrongOverride`."""
    key = None if asked.key_env is None else make_reference(check_key_variable(asked.key_env))
    if key is None and not is_loopback(asked.host):
        raise WrongOverride(
            f"--host {asked.host} lets other machines in, and nothing asks them for a key: export one, e.g. "
            'SERVE_KEY="$(openssl rand -hex 32)", and give --key-env SERVE_KEY'
        )
    port = DEFAULT_PORT if asked.port is None else asked.port
    return {"http": True, "host": asked.host, "base_port": port, "api_key": key}


@contextlib.contextmanager
def ready_weights(model: ServedModel, say: Tell) -> Iterator[ServedModel]:
    """The same with its weights in place while the block runs: those of a checkpoint are exported into the run's `served/`, and
    removed afterwards; those that a killed process has left there go now. Raises `TargetRefused`."""
    if model.source is None or not model.step:
        yield model
        return
    place = model.source.served
    try:
        place.mkdir(mode=0o700, exist_ok=True)
        folder = temporary.make(base=place)
    except OSError as error:
        raise TargetRefused(
            f"{place} can't be written ({error.strerror}): export the step elsewhere, `telescope export {model.step} --run-dir "
            f"{model.source.path} --to FOLDER`, and give that folder"
        ) from error
    try:
        weights = folder / model.name
        export_weights(model.source, model.step, weights, say, merge=False)
        if model.config.model.lora is not None:
            yield replace(model, adapter=weights)
        else:
            own = model.config.model.model_copy(update={"name": str(weights)})
            yield replace(model, config=model.config.model_copy(update={"model": own}))
    finally:
        temporary.discard(folder)
        with contextlib.suppress(OSError):  # another command serves from there
            place.rmdir()
