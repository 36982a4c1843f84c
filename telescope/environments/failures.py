"""Who is to blame when a rollout goes wrong: the machinery, the policy, or whoever scores. Types only.

    InfrastructureError   a sandbox, a server, a network is down     tried again after a pause, then the sample leaves its group
    PolicyError           the policy did what it must not            a score (0 unless told otherwise), trained on, with a tag
    GraderError           a reward function or a judge gives none    the sample leaves its group at once; never a score of 0

Refuses to decide what becomes of a failure: the worker reports its kind, the core acts (docs/environments.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager


class InfrastructureError(RuntimeError):
    """Something that the policy has no part in did not work; another try may."""


class GraderError(RuntimeError):
    """The answer could not be scored. Another try would ask for another answer until one suits the grader, so there is none."""


class PolicyError(RuntimeError):
    """The policy's own doing ends the rollout: it is scored with `total` and trained on. `tag` names the reason in rows and
    charts, e.g. `PolicyError("no such tool: serch", tag="bad_call")`."""

    def __init__(
        self, message: str, *, tag: str = "policy_error", total: float = 0.0, metrics: Mapping[str, float] | None = None
    ) -> None:
        super().__init__(message)
        self.tag = tag
        self.total = total
        self.metrics = dict(metrics or {})


class ContextFull(PolicyError):
    """The dialogue has grown so long that the next prompt leaves no room for an answer. The tokens sampled so far stand."""

    def __init__(self, message: str) -> None:
        super().__init__(message, tag="overlong")


@contextmanager
def grading() -> Iterator[None]:
    """What goes wrong inside is a `GraderError`, unless it says itself what it is."""
    try:
        yield
    except (InfrastructureError, PolicyError, GraderError):
        raise
    except (Exception, SystemExit) as error:
        raise GraderError(f"{type(error).__name__}: {error}") from error
