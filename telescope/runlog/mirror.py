"""Step metrics to Weights & Biases: a mirror of the run directory, never a part of the run.

One thread talks to the client; a slow, absent or failing W&B costs rows of the mirror and one warning, never a step. Works
whole with WANDB_MODE=offline. Owns no metric and no credential: the client finds its own login.
"""

from __future__ import annotations

import logging
import netrc
import os
import queue
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from telescope.config.parts import LoggingSettings

log = logging.getLogger(__name__)

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


class WandbMirror:
    """Queue of step metrics in front of one W&B run.

    `config` is the resolved configuration, in which secrets are references only. `folder` holds the client's own files.
    `run_id`: W&B's name for the run, which goes on where it is there already. A step that W&B has is not overwritten: what an
    attempt trains anew, after the checkpoint that it began from, stands there once, as the first one had it.
    """

    def __init__(
        self, settings: LoggingSettings, *, name: str, folder: Path, config: Mapping[str, Any], run_id: str | None = None
    ) -> None:
        self._settings, self._name, self._folder, self._config, self._id = settings, name, folder, config, run_id
        self._queue: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue(QUEUE_STEPS)
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

    def close(self, timeout_s: float = 10.0) -> None:
        """Let the client finish, but not for longer than `timeout_s`: what it has not sent stays in its folder."""
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
        import wandb

        self._folder.mkdir(parents=True, exist_ok=True)
        run = wandb.init(
            project=self._settings.wandb_project,
            name=self._settings.wandb_run_name or self._name,
            group=self._settings.wandb_group,
            tags=list(self._settings.wandb_tags),
            config=dict(self._config),
            dir=str(self._folder),
            id=self._id,
            resume="allow" if self._id else None,
            settings=wandb.Settings(init_timeout=INIT_TIMEOUT_S, silent=True, console="off", disable_git=True),
        )
        log.info("W&B mirrors this run: %s", run.url or f"offline in {self._folder}")
        while (entry := self._queue.get()) is not None:
            step, metrics = entry
            run.log(metrics, step=step)
        run.finish()


def mirror_for(
    settings: LoggingSettings, *, name: str, folder: Path, config: Mapping[str, Any], run_id: str | None = None
) -> WandbMirror | None:
    """The mirror, if one is wanted and the client is installed."""
    if not wanted(settings, os.environ):
        return None
    return WandbMirror(settings, name=name, folder=folder, config=config, run_id=run_id)
