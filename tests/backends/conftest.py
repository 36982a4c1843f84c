"""One backend at a time: its process group is closed after each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.backends.watching import Watching, watch


@pytest.fixture
def build() -> Iterator[Callable[..., Watching]]:
    """`build(job, **settings)`; the backend before is closed first."""
    built: list[Watching] = []

    def make(job, **settings):
        if built:
            built.pop().close()
        built.append(watch(job, **settings))
        return built[-1]

    yield make
    for backend in built:
        backend.close()
