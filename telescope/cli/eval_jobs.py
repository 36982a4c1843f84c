"""What `telescope eval` plays: one job a target and step, each with the configuration and the folder of the run that plays it.

Of a run directory the weights of a checkpoint are exported to a folder, served, and removed when all is played. A result stands
for the weights, evals and servers that its digest is of, and for no others. Owns where results lie, and when two commands mean
the same. Refuses to start anything.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from telescope.cli.resume import WrongOverride
from telescope.cli.targets import (
    EVALS,
    URLS,
    TargetRefused,
    Tell,
    change,
    choose_key,
    compose_untrained,
    export_weights,
    judge,
    make_settings,
    name_model,
    read_trained,
    refuse_decided,
)
from telescope.config.evals import digest_sampling
from telescope.config.precision import served_precision
from telescope.config.run import RunConfig
from telescope.config.secrets import make_reference
from telescope.config.sections import find_url_mistake
from telescope.runlog import checkpoints, opening
from telescope.runlog.eval_rows import CHANGED, PLAYED, put_aside, read_in_state, sent_file, standalone_folder
from telescope.runlog.files import DamagedFile
from telescope.runlog.identity import read_identity
from telescope.runlog.layout import RunDirectory, write_atomically
from telescope.runlog.reader import rows

STEPS = re.compile(r"\d+(,\d+)*")
NOT_GIVEN = {
    "cluster.trainer_num_workers": "an eval trains nothing",
    "number_of_steps": "--steps names the checkpoints of a run that are evaluated",
    "run_dir": "--to says where results of a model or a URL lie, and those of a run lie in the run",
}
"""Settings that this command decides itself, and why."""


@dataclass(frozen=True)
class EvalJob:
    """One model, and the evals of `config` on it. `folder`: of the run that plays them. `identity`: digest of the weights and
    of all else that a score follows from. `weights`: where the `checkpoint` of the run `source` is exported to; None: the model
    is there."""

    target: str
    label: str
    config: RunConfig
    folder: Path
    arguments: tuple[str, ...]
    identity: str
    source: RunDirectory | None = None
    checkpoint: Path | None = None
    weights: Path | None = None

    @property
    def is_played(self) -> bool:
        """Whether each eval has its complete row. Raises `TargetRefused` where the folder is of another eval, and where an eval
        could not go on."""
        run = RunDirectory(self.folder)
        if not opening.is_run(self.folder) or self._is_of_other_weights:
            return False
        wanted = {(one.name, self.config.number_of_steps) for one in self.config.active_evals}
        try:
            played, changed = read_in_state(run, PLAYED), wanted & read_in_state(run, CHANGED)
        except DamagedFile as error:
            raise TargetRefused(f"{error}: remove {self.folder} to play it anew") from error
        if changed:
            raise TargetRefused(self.describe_change(min(changed)[0]))
        return wanted <= played

    def describe_change(self, name: str) -> str:
        return (
            f"{self.label}: the eval {name} has other prompts or settings than when it began, and its parts would not be of "
            f"one: remove {self.folder} to play it anew"
        )

    @property
    def _is_of_other_weights(self) -> bool:
        """Whether the run's step was evaluated before it was trained anew. Raises `TargetRefused` where the folder is not one
        that this command made for the same."""
        try:
            found = read_identity(RunDirectory(self.folder)).evaluated
        except (OSError, DamagedFile) as error:
            raise TargetRefused(f"{error}: remove {self.folder} to play it anew") from error
        if found == self.identity:
            return False
        if found and self.source is not None:
            return True
        held = "the result of another model, of other evals, or of other settings" if found else "a run of another command"
        raise TargetRefused(f"{self.folder} holds {held}: name another folder with --to")

    def prepare(self, say: Tell) -> RunConfig:
        """Have the weights there, and give the configuration of this attempt. Raises `TargetRefused`."""
        begun = opening.is_run(self.folder)
        if begun and self._is_of_other_weights:
            _make_room(self.folder)
            begun = False
        if self.weights is not None and self.source is not None and self.checkpoint is not None:
            _sweep(self.folder, self.weights)
            if not self.weights.exists():
                export_weights(self.source, self.config.number_of_steps, self.weights, say, merge=True)
            if name_weights(self.folder, self.checkpoint) != self.weights:
                raise TargetRefused(f"{self.label} was trained anew meanwhile: give the command again")
        resumed = self.config.checkpoint.model_copy(update={"resume": begun})
        return self.config.model_copy(update={"checkpoint": resumed})

    def finish(self, say: Tell) -> None:
        """All is played: the exported weights go, and the numbers to the run's W&B run, unless they are there."""
        if self.weights is not None:
            _sweep(self.folder, None)
        if self.source is not None:
            _send_to_wandb(self.source, self.folder, say)


def list_jobs(target: str, asked: argparse.Namespace, overrides: Sequence[str]) -> Iterator[EvalJob]:
    """Raises `TargetRefused`, `WrongOverride` and `UsageError`."""
    path = Path(target)
    refuse_decided(overrides, NOT_GIVEN)
    if target.startswith(URLS):
        yield _make_url_job(target, asked, overrides)
    elif opening.is_run(path):
        yield from _list_run_jobs(target, RunDirectory(path.absolute()), asked, overrides)
    else:
        yield _make_model_job(target, asked, overrides)


def _spell_options(asked: argparse.Namespace) -> tuple[str, ...]:
    """Those by which a model or a URL is evaluated, as they are typed."""
    key = asked.key_env if asked.model else None
    given = {"--model": asked.model, "--key-env": key, "--to": asked.to, "-cd": asked.config_dir}
    return tuple(str(part) for name, value in given.items() if value is not None for part in (name, value))


# ---- a run


def _list_run_jobs(target: str, run: RunDirectory, asked: argparse.Namespace, overrides: Sequence[str]) -> Iterator[EvalJob]:
    trained = read_trained(run, target)
    if asked.to is not None:
        raise TargetRefused(f"--to is for models and URLs: results of a run lie in the run, {run.evals}")
    refuse_decided(overrides, {"model.name": "what is evaluated is the run's own model; name another one as the target"})
    root = checkpoints.root(run, trained.checkpoint.dir)
    for step in _choose_steps(run, trained, asked.steps):
        config = judge(change(make_settings(trained, step), overrides))
        folder = standalone_folder(run, digest_evals(config), step)
        checkpoint = checkpoints.complete_folder(root, step) if step else None
        weights = None if checkpoint is None else name_weights(folder, checkpoint)
        identity = digest_evals(config, _identify_model(trained.model.name) if weights is None else weights.name)
        model = trained.model.name if weights is None else str(weights)
        config = config.model_copy(update={"run_dir": str(folder), "model": config.model.model_copy(update={"name": model})})
        arguments = (target, "--steps", str(step), *overrides)
        yield EvalJob(target, f"{target} step {step}", config, folder, arguments, identity, run, checkpoint, weights)


def name_weights(folder: Path, checkpoint: Path) -> Path:
    """Beside the results of a step, with a digest of the checkpoint in its name: one that is trained anew has another. Raises
    `TargetRefused`."""
    try:
        made = (checkpoint / checkpoints.COMPLETE).read_bytes()
    except OSError as error:
        raise TargetRefused(f"{checkpoint} can't be read ({error.strerror}): choose another step") from error
    return folder.with_name(f"{folder.name}.{hashlib.blake2b(made, digest_size=5).hexdigest()}.model")


def _make_room(folder: Path) -> None:
    """The result of a step that was trained anew since. Raises `TargetRefused` while it is still played."""
    from telescope._launch.prepare_attempt import CannotResume, refuse_alive

    run = RunDirectory(folder)
    try:
        refuse_alive(run)
        put_aside(folder, os.urandom(4).hex())
    except CannotResume as error:
        raise TargetRefused(str(error)) from error


def _sweep(folder: Path, kept: Path | None) -> None:
    """Remove exported weights of the step, but `kept`, and what an export that was killed has left."""
    for left in folder.parent.glob(f"{folder.name}.*.model"):
        if left != kept:
            shutil.rmtree(left, ignore_errors=True)
    for left in folder.parent.glob(f".{folder.name}.*.model.partial-*"):
        if not Path("/proc", left.name.rpartition("-")[2]).exists():
            shutil.rmtree(left, ignore_errors=True)


def _choose_steps(run: RunDirectory, config: RunConfig, given: str) -> list[int]:
    there = checkpoints.steps(checkpoints.root(run, config.checkpoint.dir))
    if given == "all":
        return [0, *there]
    if given == "last":
        if not there:
            raise TargetRefused(f"{run.path} has no checkpoint (checkpoint.at_end): --steps 0 evaluates its initial model")
        return [there[-1]]
    if not STEPS.fullmatch(given):
        raise WrongOverride(f"--steps {given}: give numbers with commas between, `last` or `all`")
    wanted = list(dict.fromkeys(int(step) for step in given.split(",")))
    if missing := [step for step in wanted if step and step not in there]:
        has = ", ".join(map(str, there)) or "none"
        raise TargetRefused(f"{run.path} has no checkpoint of step {missing[0]}; there are {has}, and 0 is its initial model")
    return wanted


def _send_to_wandb(run: RunDirectory, folder: Path, say: Tell) -> None:
    """Once, and not while the run itself writes there: W&B takes one writer at a time."""
    from telescope.orchestrator.eval_scores import name_metrics
    from telescope.runlog.attempts import read_lineage
    from telescope.runlog.holder import find_state
    from telescope.runlog.identity import read_identity
    from telescope.runlog.wandb_mirror import send_evals, share_of, wanted

    trained, sent = opening.read(run), sent_file(folder)
    if sent.exists() or not wanted(trained.logging, os.environ):
        return
    seen = opening.look(run)
    if not seen.has_ended and seen.holder is not None and find_state(seen.holder, run) != "gone":
        say("The run goes on and writes to W&B itself: give the command again when it has ended, and the numbers go there too.")
        return
    complete = [row for row in rows(RunDirectory(folder), "evals") if row["state"] == "complete"]
    metrics = [(row["eval"], row["step"], name_metrics(row)) for row in complete]
    share = share_of(run, read_lineage(run), read_identity(run).run_id)
    if failure := send_evals(trained.logging, share, name=trained.name, folder=folder.parent / "wandb", metrics=metrics):
        say(f"The numbers did not reach W&B ({failure}): give the command again to try again.")
    else:
        write_atomically(sent, "", mode=0o600)


# ---- a model


def _make_model_job(target: str, asked: argparse.Namespace, overrides: Sequence[str]) -> EvalJob:
    from telescope.compose.load import places_for

    places = places_for(asked.config_dir)
    if any(override.startswith(("model=", "model.name=")) for override in overrides):
        raise WrongOverride(f"{target} is the model: leave model= and model.name= out")
    config = _compose([*name_model(target, places), *overrides], asked)
    return _place_job(target, config, asked, Path(target).name, overrides)


def _compose(overrides: Sequence[str], asked: argparse.Namespace) -> RunConfig:
    """A configuration of evals alone. Raises `TargetRefused`, `WrongOverride` and `UsageError`."""
    if not any(EVALS.fullmatch(one) for one in overrides) and not any(one.startswith("experiment=") for one in overrides):
        raise WrongOverride("name what is to be played, e.g. evals.math500={}")
    config = compose_untrained(overrides, asked.config_dir)
    if not config.evals:
        raise WrongOverride("name what is to be played, e.g. evals.math500={}")
    return config


def _place_job(
    target: str, config: RunConfig, asked: argparse.Namespace, stem: str, overrides: Sequence[str], model: str = ""
) -> EvalJob:
    stem = re.sub(r"[^A-Za-z0-9._+-]", "-", stem)[:60]
    digest = digest_evals(config, model or _identify_model(config.model.name))
    folder = asked.to.absolute() if asked.to is not None else Path("runs", "evals", f"{stem}-{digest}").absolute()
    config = config.model_copy(update={"run_dir": str(folder), "name": config.name or f"{stem}-eval"})
    return EvalJob(target, target, config, folder, (target, *_spell_options(asked), *overrides), digest)


def _identify_model(name: str) -> str:
    """The name, and of a folder what its files are: other weights in it are another model."""
    folder = Path(name)
    if not folder.is_dir():
        return name
    files = sorted((file.name, file.stat()) for file in folder.iterdir() if file.is_file())
    return f"{name} {[(file, seen.st_size, seen.st_mtime_ns) for file, seen in files]}"


def digest_evals(config: RunConfig, model: str = "") -> str:
    """10 hexadecimal digits over what is played, how it is served and how it is sampled, not over where: two commands of one
    digest mean the same."""
    rollout, inference, template = config.rollout, config.inference, config.model
    played = {
        one.name: [
            config.played[one.label].name,
            config.played[one.label].kwargs,
            *(one.num_samples, one.num_prompts, sorted(one.pass_at_k), one.pass_above),
            digest_sampling(one, config.played[one.label], rollout, inference.max_model_len),
            config.reward_min(one.label),
        ]
        for one in config.active_evals
    }
    precision = served_precision(config, config.cluster.device)
    served = [inference.engine, inference.vllm, precision, template.dtype, template.chat_template, template.enable_thinking]
    used = [played, config.seed, model, served, rollout.timeout_s, rollout.max_attempts]
    return hashlib.blake2b(json.dumps(used, sort_keys=True).encode(), digest_size=5).hexdigest()


# ---- a URL


def _make_url_job(target: str, asked: argparse.Namespace, overrides: Sequence[str]) -> EvalJob:
    if mistake := find_url_mistake(target):
        raise WrongOverride(f"the URL {mistake}")
    if asked.model is None:
        raise WrongOverride(f"{target} serves models: --model NAME says which one is asked for")
    remote = ["inference.engine=remote", f'+inference.remote={{url:"{target}",model:"{asked.model}"}}']
    if (key := choose_key(target, asked.key_env)) is not None:
        remote.append(f"+inference.remote.api_key={make_reference(key)}")
    fixed = ["model=tiny", "cluster.device=cpu", "cluster.inference_num_workers=1"]
    fixed += ["rollout.group_size=1", "rollout.retry_backoff_s=1"]
    config = _compose([*fixed, *remote, *overrides], asked)
    stem = f"{target.partition('://')[2].partition('/')[0]}-{asked.model}"
    return _place_job(target, config, asked, stem, overrides, f"{target} {asked.model}")
