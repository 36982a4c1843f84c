"""Which servers are held for evals: they take nothing of training and keep their version until the evals played on them end.

    due at version v ─▶ hold: no new requests of training, no update ─▶ the evals end ─▶ release ─▶ updated ─▶ training's again

A server is held at the version that is served. While it is, the others are updated without it; released, it is behind like one
that has joined late, and is brought up the same way before it takes training's requests. Owns who is held; refuses to know
samples and updates.
"""

from __future__ import annotations

from telescope.flow import commands as do
from telescope.flow.placement import Placement
from telescope.flow.settings import FlowSettings


class EvalServers:
    """`say` takes commands."""

    def __init__(self, settings: FlowSettings, placement: Placement, say: do.Say) -> None:
        self._wanted = settings.eval_servers
        self._placement = placement
        self._say = say
        self.held: tuple[str, ...] = ()
        self._returning: tuple[str, ...] = ()
        """Released, and behind."""
        self.version = -1
        """Of all that are held."""

    @property
    def busy(self) -> bool:
        """Some are held, or have yet to be brought up."""
        return bool(self.held or self._returning)

    def hold(self, version: int, evals: tuple[tuple[str, int], ...]) -> bool:
        """Hold the least loaded of those that serve the version; one stays with training. False where none can be held."""
        servers = self._placement.servers
        able = [name for name, server in servers.items() if server.version == version]
        chosen = sorted(able, key=lambda name: servers[name].load)[: max(0, min(self._wanted, len(able) - 1))]
        if not chosen:
            return False
        self.held, self.version = tuple(sorted(chosen)), version
        self._put_apart()
        self._say(do.HoldServers(self.held, version, evals))
        return True

    def release(self, version: int) -> None:
        """The evals played on them have ended. `version`: served by the others."""
        released, self.held = self.held, ()
        servers = self._placement.servers
        self._returning = tuple(name for name in released if servers[name].version != version)
        self._put_apart()
        self._say(do.ReleaseServers(released))

    def take_back(self, version: int) -> None:
        """An update is over: what serves the version is training's again."""
        if self._returning:
            servers = self._placement.servers
            self._returning = tuple(name for name in self._returning if servers[name].version != version)
            self._put_apart()

    def lose(self, server: str) -> None:
        if server in self.held or server in self._returning:
            self.held = tuple(name for name in self.held if name != server)
            self._returning = tuple(name for name in self._returning if name != server)
            self._put_apart()

    def leave_training_one(self, lost: str) -> bool:
        """Whether training has a server, or will have one, once `lost` is gone."""
        return any(name not in self.held and name != lost for name in self._placement.servers)

    def _put_apart(self) -> None:
        self._placement.put_apart(self.held, self._returning)
