"""A host whose kernel gives no namespaces (some containers) can run no sandbox: found out by a command of the test's own, and
only then are the tests that need one skipped, with that reason."""

from __future__ import annotations

import subprocess
from collections.abc import Generator, Iterator
from functools import cache
from typing import Any

import pytest

from telescope.environments.sandboxes.base import SandboxUnavailable
from tests.sandboxes.machine import remove_images

TRY = {
    "bubblewrap": [
        "bwrap",
        "--unshare-all",
        "--unshare-user",
        "--disable-userns",
        "--ro-bind",
        "/",
        "/",
        "--proc",
        "/proc",
        "--dev",
        "/dev",
        "true",
    ],
    "gvisor": ["runsc", "--rootless", "--network=none", "do", "true"],
}


@cache
def works(provider: str) -> bool:
    """Whether the program itself runs here, without any code of ours."""
    try:
        return subprocess.run(TRY[provider], capture_output=True, timeout=60, check=False).returncode == 0
    except FileNotFoundError:
        return False


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    try:
        return (yield)
    except SandboxUnavailable as error:
        _skip_or_raise(error)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: Any) -> Generator[None, Any, Any]:
    try:
        return (yield)
    except SandboxUnavailable as error:
        _skip_or_raise(error)


def _skip_or_raise(error: SandboxUnavailable) -> None:
    hopeless = [name for name in TRY if name in str(error).lower().partition(":")[0] and not works(name)]
    if not hopeless:
        raise error
    pytest.skip(f"{TRY[hopeless[0]][0]} cannot run on this host: {error}")


@pytest.fixture(scope="session", autouse=True)
def _images_are_removed() -> Iterator[None]:
    yield
    remove_images()
