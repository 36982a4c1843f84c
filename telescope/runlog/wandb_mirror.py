"""Step metrics to Weights & Biases: a mirror of the run directory, never a part of the run.

One thread talks to the client; a slow, absent or failing W&B costs rows of the mirror and one warning, never a step. Works
whole with WANDB_MODE=offline. Owns no credential: the client finds its own login. Owns no metric either: a key of W&B is a key
of the step's metrics, and is renamed where it is counted: orchestrator/cohorts.py and recorder.py for rewards, groups and
times, orchestrator/eval_scores.py for evals, backends/ and algorithms/ for the loss (docs/architecture.md, "Where does this
line live?").
"""

from __future__ import annotations

import logging
import netrc
import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from telescope.config.sections import LoggingSettings
from telescope.exit_codes import STOPS
from telescope.runlog.attempts import Lineage, read_lineage
from telescope.runlog.layout import RunDirectory
from telescope.runlog.reader import rows_of_attempt

log = logging.getLogger(__name__)

STEP, ATTEMPT = "step", "attempt"
EVAL, AXIS = "eval/", "/step"
"""Names of an eval's numbers begin so; that of the weights' step ends so."""
STANDALONE = "standalone"
"""1 in rows of evals that were played outside the run."""
QUEUE_STEPS = 1024
INIT_TIMEOUT_S = 60


def wanted(settings: LoggingSettings, environ: Mapping[str, str]) -> bool:
    """Whether to mirror: as configured, else where WANDB_MODE, a key or a stored login is found."""
    if settings.use_wandb is not None:
        return settings.use_wandb
    mode = environ.get("WANDB_MODE", "")
    if mode:
        return mode != "disabled"
    return bool(environ.get("WANDB_API_KEY")) or _has_stored_login(environ)


def _has_stored_login(environ: Mapping[str, str]) -> bool:
    host = urlparse(environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    path = Path(environ.get("NETRC", Path.home() / ".netrc"))
    try:
        return netrc.netrc(str(path)).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


@dataclass(frozen=True)
class MirrorShare:
    """What one attempt has of a W&B run."""

    run_id: str | None = None
    """W&B's name for the run, which goes on where it is there already; None: a run of its own."""
    attempt: int = 1
    after: int = 0
    """The step that the attempt goes on from."""
    before: int = 0
    """Rows that earlier attempts have in the same run, those of steps that are trained anew too."""


def share_of(run: RunDirectory, lineage: Lineage, run_id: str) -> MirrorShare:
    """All attempts that go on from each other are one W&B run; one that begins at step 1 again is another curve, and has
    another, which is called after it."""
    first, before = 1, 0
    for number in range(1, lineage.attempt):
        earlier = RunDirectory(run.earlier_attempt(number))
        if number > 1 and not read_lineage(earlier).step:
            first, before = number, 0
        before += len(rows_of_attempt(earlier, "step_metrics"))
    if not lineage.step:
        first, before = lineage.attempt, 0
    return MirrorShare(run_id if first == 1 else f"{run_id}-{first}", lineage.attempt, lineage.step, before)


class WandbMirror:
    """Queue of step metrics in front of one W&B run.

    `config` is the resolved configuration, in which secrets are references only. `folder` holds the client's own files. `share`
    is asked in the mirror's own thread: it reads what earlier attempts left, which may be damaged and must not end the run.
    W&B takes no row twice, nor one of an earlier step than its last: what an attempt trains anew, after the checkpoint that it
    began from, comes as rows of its own behind the others. Each row has its `step`, which is the axis of all charts, and its
    `attempt`; of a step's rows the last one counts.
    """

    def __init__(
        self,
        settings: LoggingSettings,
        *,
        name: str,
        folder: Path,
        config: Mapping[str, Any],
        share: Callable[[], MirrorShare] = MirrorShare,
    ) -> None:
        self._settings, self._name, self._folder, self._config, self._share = settings, name, folder, config, share
        self._queue: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue(QUEUE_STEPS)
        self._exit_code = 0
        self.dropped = 0
        self.failure = ""
        self.abandoned = False
        """The client did not finish in time. Its exit hooks would hold the process: leave it by `os._exit`, as ours all do."""
        self._thread = threading.Thread(target=self._work, name="wandb-mirror", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queue one step's metrics; never waits."""
        try:
            self._queue.put_nowait((step, dict(metrics)))
        except queue.Full:
            self.dropped += 1

    def log_eval(self, latest: int, name: str, step: int, metrics: Mapping[str, float]) -> None:
        """Queue an eval's numbers, of the weights of `step`, with the row of the `latest` step that was reported: W&B takes no
        row of an earlier one. Their charts have `eval/<name>/step` as their axis."""
        self.log(latest, {**metrics, f"{EVAL}{name}{AXIS}": float(step)})

    def close(self, timeout_s: float = 10.0, exit_code: int = 0) -> None:
        """Let the client finish, but not for longer than `timeout_s`: what it has not sent stays in its folder.

        `exit_code`: the run's, by which W&B calls it finished or failed; one that was stopped has not failed."""
        self._exit_code = 0 if exit_code in STOPS else exit_code
        try:
            self._queue.put(None, timeout=timeout_s)
        except queue.Full:
            self.dropped += self._queue.qsize()
        self._thread.join(timeout_s)
        self.abandoned = self._thread.is_alive()
        if self.abandoned:
            log.warning("W&B did not finish within %.0f s; `wandb sync %s` sends the rest", timeout_s, self._folder)
        if self.dropped:
            log.warning("%d steps are missing in W&B; the run directory has them", self.dropped)

    def _work(self) -> None:
        try:
            self._mirror()
        except Exception as error:  # noqa: BLE001 the mirror's own edge: what the client raises must not reach the run
            self.failure = f"{type(error).__name__}: {error}"
            log.warning("W&B mirroring has ended (%s); the run goes on, its directory is whole", self.failure)

    def _mirror(self) -> None:
        share = self._share()
        import wandb

        self._folder.mkdir(parents=True, exist_ok=True)
        run = wandb.init(
            project=self._settings.wandb_project,
            name=self._settings.wandb_run_name or self._name,
            group=self._settings.wandb_group,
            tags=list(self._settings.wandb_tags),
            config=dict(self._config),
            dir=str(self._folder),
            id=share.run_id,
            resume="allow" if share.run_id else None,
            settings=wandb.Settings(init_timeout=INIT_TIMEOUT_S, silent=True, console="off", disable_git=True),
        )
        log.info("W&B mirrors this run: %s", run.url or f"offline in {self._folder}")
        run.define_metric(STEP)
        run.define_metric("*", step_metric=STEP)
        # W&B's own count: what it has, it knows better than the disk of a run that was killed, and offline it knows nothing
        before = max(share.before, run.starting_step - 1)
        axes, early = set[str](), dict[str, float]()
        while (entry := self._queue.get()) is not None:
            step, metrics = entry
            for axis in {name for name in metrics if name.startswith(EVAL) and name.endswith(AXIS)} - axes:
                axes.add(axis)
                run.define_metric(axis)
                run.define_metric(f"{axis.removesuffix(AXIS)}/*", step_metric=axis)
            if step <= share.after and before:  # an eval's: that row is an earlier attempt's, and can't be added to
                early |= metrics
                continue
            run.log({**early, **metrics, STEP: step, ATTEMPT: share.attempt}, step=before + step - share.after)
            early = {}
        if early:
            run.log({**early, ATTEMPT: share.attempt}, step=before + 1)
        run.finish(exit_code=self._exit_code)


def mirror_for(
    settings: LoggingSettings, *, name: str, folder: Path, config: Mapping[str, Any], share: Callable[[], MirrorShare]
) -> WandbMirror | None:
    """The mirror, if one is wanted and the client is installed."""
    if not wanted(settings, os.environ):
        return None
    return WandbMirror(settings, name=name, folder=folder, config=config, share=share)


def send_evals(
    settings: LoggingSettings,
    share: MirrorShare,
    *,
    name: str,
    folder: Path,
    metrics: Sequence[tuple[str, int, Mapping[str, float]]],
) -> str:
    """Numbers of evals that were played outside their run to its W&B run, which has ended: (eval, step, metrics) each. Gives
    why they did not come there; empty where they did."""
    try:
        import wandb

        folder.mkdir(parents=True, exist_ok=True)
        run = wandb.init(
            project=settings.wandb_project,
            name=settings.wandb_run_name or name,
            dir=str(folder),
            id=share.run_id,
            resume="allow",
            settings=wandb.Settings(init_timeout=INIT_TIMEOUT_S, silent=True, console="off", disable_git=True),
        )
        for eval_name, step, values in metrics:
            axis = f"{EVAL}{eval_name}{AXIS}"
            run.define_metric(axis)
            run.define_metric(f"{EVAL}{eval_name}/*", step_metric=axis)
            run.log({**values, axis: float(step), STANDALONE: 1.0})
        run.finish()
    except Exception as error:  # noqa: BLE001 the client raises anything; the results are in the run directory
        return f"{type(error).__name__}: {error}"
    return ""
