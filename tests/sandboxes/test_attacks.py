"""Every attack of the table, by each local provider, in a fresh sandbox each; then those that need more than one command."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from telescope.environments.sandboxes.base import Ending, FileRefused, Limits, Outcome, SandboxError
from telescope.environments.sandboxes.local import LocalProvider
from tests.sandboxes.attacks import ATTACKS, LIMITS, PRELUDE, Attack
from tests.sandboxes.machine import provider_named

PYTHON = ["python3", "-I", "-S", "-c"]


async def run_all(provider: LocalProvider, attacks: list[Attack], port: int, secret: str) -> dict[str, Outcome]:
    await provider.start(LIMITS)
    slots = asyncio.Semaphore(3)

    async def one(attack: Attack) -> Outcome:
        code = PRELUDE + attack.code.replace("PORT", str(port)).replace("SECRET", secret)
        code = code.replace("ABSTRACT", f"telescope-test-{os.getpid()}")
        async with slots:
            sandbox = await provider.create(LIMITS)
            try:
                return await sandbox.exec([*PYTHON, code], timeout_s=attack.limit_s)
            finally:
                await sandbox.delete()

    try:
        outcomes = await asyncio.gather(*(one(attack) for attack in attacks))
        return dict(zip((attack.name for attack in attacks), outcomes, strict=True))
    finally:
        await provider.close()


# gVisor's kernel takes half a second to start, and longer on a busy machine; a container some tenths.
LOCAL = ["bubblewrap", pytest.param("gvisor", marks=pytest.mark.slow), pytest.param("podman", marks=pytest.mark.slow)]


def attacked(name: str, home: Path) -> dict[str, Outcome]:
    """What became of each attack on one provider, with something on this machine for each to find."""
    secret = home / "secret"
    secret.write_text("HUSH")
    os.environ["TELESCOPE_TEST_SECRET"] = "HUSH"
    try:
        with socket.socket(socket.AF_UNIX) as abstract, socket.create_server(("127.0.0.1", 0)) as server:
            abstract.bind(f"\0telescope-test-{os.getpid()}")
            abstract.listen()
            chosen = [attack for attack in ATTACKS if name in attack.only]
            return asyncio.run(run_all(provider_named(name), chosen, server.getsockname()[1], str(secret)))
    finally:
        del os.environ["TELESCOPE_TEST_SECRET"]


@pytest.fixture(scope="module")
def on_bubblewrap(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    return attacked("bubblewrap", tmp_path_factory.mktemp("host"))


@pytest.fixture(scope="module")
def on_gvisor(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    return attacked("gvisor", tmp_path_factory.mktemp("host"))


@pytest.fixture(scope="module")
def on_podman(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    return attacked("podman", tmp_path_factory.mktemp("host"))


def achieved_nothing(outcome: Outcome, attack: Attack) -> None:
    assert outcome.ending == attack.ending, outcome
    assert outcome.text.rstrip("\n") in attack.reports, outcome


@pytest.mark.timeout(400)
@pytest.mark.parametrize("attack", [attack for attack in ATTACKS if "bubblewrap" in attack.only], ids=lambda a: a.name)
def test_an_attack_on_bubblewrap_achieves_nothing(attack: Attack, on_bubblewrap: dict[str, Outcome]) -> None:
    achieved_nothing(on_bubblewrap[attack.name], attack)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("attack", [attack for attack in ATTACKS if "gvisor" in attack.only], ids=lambda a: a.name)
def test_an_attack_on_gvisor_achieves_nothing(attack: Attack, on_gvisor: dict[str, Outcome]) -> None:
    achieved_nothing(on_gvisor[attack.name], attack)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("attack", [attack for attack in ATTACKS if "podman" in attack.only], ids=lambda a: a.name)
def test_an_attack_on_podman_achieves_nothing(attack: Attack, on_podman: dict[str, Outcome]) -> None:
    achieved_nothing(on_podman[attack.name], attack)


@pytest.fixture(params=LOCAL)
async def provider(request: pytest.FixtureRequest) -> AsyncIterator[LocalProvider]:
    made = provider_named(request.param)
    await made.start(LIMITS)
    yield made
    await made.close()


async def test_children_together_get_no_more_memory_than_one(provider: LocalProvider) -> None:
    """RLIMIT_AS is a limit of each process: only the group stops ten children of 60 MB each."""
    code = """
import os, signal
r, w = os.pipe()
done, told = os.pipe()
def lost(*_):
    raise ChildProcessError
signal.signal(signal.SIGCHLD, lost)
n = 0
try:
    for _ in range(10):
        if not os.fork():
            os.close(w)
            kept = bytearray(b"x") * (60 << 20)
            os.write(told, b"x")
            os.read(r, 1)
            os._exit(0)
    while n < 10 and os.read(done, 1):
        n += 1
except ChildProcessError:
    pass
print(n)
"""
    sandbox = await provider.create(LIMITS)
    outcome = await sandbox.exec([*PYTHON, code])
    await sandbox.delete()
    held = any("cores in all (" in what for what in provider.isolation(LIMITS).holds)
    if held:
        assert outcome.text.strip() != "10", outcome
        assert outcome.ending in {Ending.EXITED, Ending.DIED, Ending.TIMED_OUT}
    else:
        assert "memory of all processes together (no cgroup can be written)" in provider.isolation(LIMITS).lacks


async def test_a_guest_that_kills_everything_it_can_is_an_outcome_and_no_failure_of_the_provider(
    provider: LocalProvider,
) -> None:
    sandbox = await provider.create(LIMITS)
    for number in ("SIGKILL", "SIGINT", "SIGTERM", "SIGSTOP", "SIGCHLD"):
        code = f"import os, signal\nfor pid in (1, -1):\n  try: os.kill(pid, signal.{number})\n  except OSError as error: pass"
        outcome = await sandbox.exec([*PYTHON, code])
        assert outcome.ending is Ending.EXITED
        assert (await sandbox.exec(["echo", "here"])).text == "here\n"
    await sandbox.delete()


async def test_a_sandbox_that_dies_under_a_command_is_an_outcome_and_no_failure_of_the_provider(
    provider: LocalProvider,
) -> None:
    """A policy would get another try for a failure of the provider."""
    sandbox = await provider.create(LIMITS)
    running = asyncio.create_task(sandbox.exec([*PYTHON, "import time; time.sleep(600)"]))
    while not sandbox._begun:
        await asyncio.sleep(0)
    sandbox._process.kill()
    outcome = await running
    assert (outcome.ending, outcome.exit_code) == (Ending.DIED, 137)
    again = await sandbox.exec(["true"])
    assert (again.ending, again.exit_code, again.stdout) == (Ending.DIED, 137, b"")
    with pytest.raises(FileRefused, match="the guest took its sandbox down"):
        await sandbox.upload("a", b"x")
    with pytest.raises(FileRefused, match="the guest took its sandbox down"):
        await sandbox.download("a")
    await sandbox.delete()


async def test_orphans_of_a_command_take_no_place_of_its_processes(provider: LocalProvider) -> None:
    """They come to the first process, which buries them while the command still runs."""
    sandbox = await provider.create(LIMITS)
    code = """
import os, time
for _ in range(60):
    pid = os.fork()
    if not pid:
        if not os.fork():
            os._exit(0)
        os._exit(0)
    os.waitpid(pid, 0)
    time.sleep(0.02)
print("done")
"""
    outcome = await sandbox.exec([*PYTHON, code])
    assert (outcome.ending, outcome.text) == (Ending.EXITED, "done\n"), outcome.stderr
    await sandbox.delete()


async def test_a_sandbox_that_dies_before_any_command_is_the_providers_failure(provider: LocalProvider) -> None:
    sandbox = await provider.create(LIMITS)
    sandbox._process.kill()
    await sandbox._process.wait()
    with pytest.raises(SandboxError, match="the sandbox has died"):
        await sandbox.upload("a", b"x")
    await sandbox.delete()


async def test_nothing_of_a_command_is_left_for_the_next(provider: LocalProvider) -> None:
    sandbox = await provider.create(LIMITS)
    left = "import os\nfor _ in range(3):\n    if not os.fork():\n        os.setsid()\n        import time; time.sleep(600)\n"
    assert (await sandbox.exec([*PYTHON, left])).ok
    # SIGKILL has been sent to all of them; the kernel takes its time, and an entry may vanish between being listed and read.
    count = """
import os
def left():
    for pid in filter(str.isdigit, os.listdir('/proc')):
        try:
            if 'sleep(6' + '00)' in open(f'/proc/{pid}/cmdline').read():
                return True
        except OSError:
            pass
    return False
while left():
    os.sched_yield()
print(0)
"""
    assert (await sandbox.exec([*PYTHON, count])).text == "0\n"
    await sandbox.delete()


async def test_a_pipe_or_a_link_in_place_of_a_file_holds_nobody_up(provider: LocalProvider) -> None:
    sandbox = await provider.create(LIMITS)
    made = "os.mkfifo('pipe'); os.symlink('/root', 'link'); os.symlink('/usr/bin/python3', 'system'); os.mkdir('folder')"
    assert (await sandbox.exec([*PYTHON, f"import os; {made}"])).ok
    for path in ("pipe", "link", "folder", "nothing"):
        with pytest.raises(FileRefused):
            await sandbox.download(path)
    for path in ("pipe", "folder", "system"):
        with pytest.raises(FileRefused):
            await sandbox.upload(path, b"x")
    assert (await sandbox.exec(["echo", "well"])).text == "well\n"
    await sandbox.delete()


async def test_a_file_that_is_too_large_is_refused_and_not_read(provider: LocalProvider) -> None:
    limits = Limits(**{**LIMITS.model_dump(), "transfer_mb": 1})
    sandbox = await provider.create(limits)
    await sandbox.exec([*PYTHON, "open('big', 'wb').write(bytes(2 << 20))"])
    with pytest.raises(FileRefused, match="transfer_mb=1"):
        await sandbox.download("big")
    with pytest.raises(ValueError, match="transfer_mb=1"):
        await sandbox.upload("big", bytes(2 << 20))
    await sandbox.delete()


async def test_no_process_folder_or_group_is_left_after_the_end(provider: LocalProvider) -> None:
    sandboxes = [await provider.create(LIMITS) for _ in range(3)]
    folder, groups = provider._folder, provider._cgroups
    assert folder is not None
    pids = [sandbox._process.pid for sandbox in sandboxes]
    running = asyncio.ensure_future(sandboxes[0].exec(["sleep", "600"]))
    await sandboxes[1].delete()
    await provider.close()
    assert (await running).ending is Ending.DIED
    assert not folder.exists()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert groups is None or not any(parent.exists() for parent in groups.parents)
    assert threading.active_count() < 40


async def test_a_cancelled_command_takes_its_sandbox_with_it(provider: LocalProvider) -> None:
    sandbox = await provider.create(LIMITS)
    running = asyncio.ensure_future(sandbox.exec([*PYTHON, "print('up', flush=True); import time; time.sleep(600)"]))
    while not sandbox._turn.locked():
        await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    with pytest.raises(SandboxError, match="this sandbox is over"):
        await sandbox.exec(["true"])
