"""The four remote providers, with their real SDKs imported: the same story told to each of them.

Daytona and E2B speak to a server on the loopback that answers as theirs do (paths, bodies and framings as the SDKs send them);
Prime is given a client and Modal a module that check every call against the real signatures. Behind all four, commands really
run, in a folder of the test's own.
"""

from __future__ import annotations

import asyncio
import base64
import inspect
import json
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import daytona as daytona_sdk
import e2b_code_interpreter
import modal as modal_sdk
import prime_sandboxes
import pytest
from aiohttp import web
from modal.sandbox._filesystem import _SandboxFilesystem as ModalFilesystem

from telescope.environments.sandboxes import remote
from telescope.environments.sandboxes.base import (
    Ending,
    FileRefused,
    Limits,
    Sandbox,
    SandboxError,
    SandboxUnavailable,
    Wall,
)
from telescope.environments.sandboxes.daytona import Daytona
from telescope.environments.sandboxes.e2b import E2B
from telescope.environments.sandboxes.modal import Modal
from telescope.environments.sandboxes.prime import Prime
from telescope.environments.sandboxes.remote import RemoteProvider, command_line, outcome
from tests.sandboxes.conftest import works
from tests.sandboxes.contract import CONTRACT
from tests.sandboxes.contract import LIMITS as CONTRACT_LIMITS

LIMITS = Limits(cpus=2.0, memory_mb=2048, disk_mb=64, time_s=60.0, output_kb=4, transfer_mb=1)


class Enclosed:
    """A shell with a table of processes of its own, in which a provider's service runs beside what a guest does."""

    SERVICE = "600.25"

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    @asynccontextmanager
    async def open(cls) -> AsyncIterator[Enclosed]:
        # What carries the output on starts when the line is over: nothing of it can be taken for something of the guest's.
        each = 'while IFS= read -r -d "" line; do said=$(bash -c "$line" < /dev/null); base64 -w 0 <<< "$said"; echo; done'
        alone = ["bwrap", "--dev-bind", "/", "/", "--unshare-pid", "--proc", "/proc", "--die-with-parent"]
        command = [*alone, "bash", "-c", f"sleep {cls.SERVICE} & {each}"]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, limit=2**22)
        try:
            yield cls(process)
        finally:
            process.kill()
            await process.wait()

    async def shell(self, line: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line.encode() + b"\0")
        return base64.b64decode(await self._process.stdout.readline()).decode()


class Machine:
    """What a provider has behind its interface: a folder and a shell. It remembers what it was asked."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.created: list[dict[str, Any]] = []
        self.deleted: list[str] = []
        self.broken = False
        self.takes_no_files = False
        self.failing_deletes = 0
        self.code = 0
        """Exit code of the last line."""
        self.gate: asyncio.Event | None = None
        """Where there is one, a sandbox is made only when it is set."""
        self.asked = asyncio.Event()
        self.enclosed: Enclosed | None = None
        """Where its lines run, if not among the processes of this machine."""

    def here(self, text: str) -> str:
        return text.replace(remote.HOME, str(self.home))

    async def shell(self, command: str) -> str:
        if self.enclosed is not None:
            return await self.enclosed.shell(self.here(command))
        process = await asyncio.create_subprocess_exec(
            "bash", "-c", self.here(command), stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE
        )
        printed, _ = await process.communicate()
        assert process.returncode is not None
        self.code = process.returncode if process.returncode >= 0 else 128 - process.returncode
        return printed.decode()

    def write(self, path: str, content: bytes) -> None:
        if self.takes_no_files:
            raise OSError("the store is down")
        place = Path(self.here(path))
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)

    def read(self, path: str) -> bytes:
        return Path(self.here(path)).read_bytes()


def checked(real: Callable[..., Any], answer: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """A function that takes only what the SDK's own takes."""
    signature = inspect.signature(real)

    async def call(*arguments: Any, **named: Any) -> Any:
        signature.bind(None, *arguments, **named)  # None stands for self
        return await answer(*arguments, **named)

    return call


class PrimeClient:
    """Stands in for `AsyncSandboxClient`: its own speaks protobuf to a gateway."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.policy: dict[str, list[str] | None] = {}
        for name in ("create", "wait_for_creation", "set_network", "get_network", "execute_command", "upload_bytes",
                     "download_file", "delete", "aclose"):  # fmt: skip
            setattr(self, name, checked(getattr(prime_sandboxes.AsyncSandboxClient, name), getattr(self, f"_{name}")))

    async def _create(self, request: prime_sandboxes.CreateSandboxRequest) -> Any:
        if self.machine.broken:
            raise prime_sandboxes.APIError("HTTP 503")
        self.machine.created.append(request.model_dump(exclude_none=True))
        return SimpleNamespace(id="sbx-1", status="PENDING")

    async def _wait_for_creation(self, identity: str) -> None:
        assert identity == "sbx-1"
        if self.machine.gate is not None:
            self.machine.asked.set()
            await self.machine.gate.wait()

    async def _set_network(self, identity: str, *, deny: list[str]) -> Any:
        self.policy[identity] = deny
        return SimpleNamespace(applied=True)

    async def _get_network(self, identity: str) -> Any:
        return SimpleNamespace(applied=True)

    async def _execute_command(self, identity: str, command: str, timeout: int) -> Any:
        return prime_sandboxes.CommandResponse(stdout=await self.machine.shell(command), stderr="", exit_code=0)

    async def _upload_bytes(self, identity: str, path: str, content: bytes, filename: str) -> None:
        assert filename == Path(path).name
        self.machine.write(path, content)

    async def _download_file(self, identity: str, path: str, local: str) -> None:
        Path(local).write_bytes(self.machine.read(path))

    async def _delete(self, identity: str) -> None:
        if self.machine.failing_deletes:
            self.machine.failing_deletes -= 1
            raise prime_sandboxes.APIError("HTTP 502")
        self.machine.deleted.append(identity)

    async def _aclose(self) -> None:
        pass


def modal_module(machine: Machine) -> Any:
    """Stands in for the module `modal`, which speaks gRPC."""

    def aio(real: Any, answer: Callable[..., Awaitable[Any]]) -> Any:
        return SimpleNamespace(aio=checked(real, answer))

    async def lookup(name: str, create_if_missing: bool = False) -> str:
        return f"app {name}"

    async def create(**named: Any) -> Any:
        if machine.broken:
            raise modal_sdk.exception.ConnectionError("no route")
        machine.created.append(named)
        return SimpleNamespace(
            exec=aio(modal_sdk.Sandbox.exec, run),
            terminate=aio(modal_sdk.Sandbox.terminate, terminate),
            filesystem=SimpleNamespace(
                write_bytes=aio(ModalFilesystem.write_bytes, write), read_bytes=aio(ModalFilesystem.read_bytes, read)
            ),
        )

    async def run(shell: str, flag: str, line: str, timeout: int) -> Any:
        assert (shell, flag) == ("sh", "-c")
        printed = await machine.shell(line)

        async def read_all() -> str:
            return printed

        async def wait() -> int:
            return 0

        return SimpleNamespace(stdout=SimpleNamespace(read=SimpleNamespace(aio=read_all)), wait=SimpleNamespace(aio=wait))

    async def terminate() -> None:
        machine.deleted.append("sbx-1")

    async def write(content: bytes, path: str) -> None:
        machine.write(path, content)

    async def read(path: str) -> bytes:
        return machine.read(path)

    return SimpleNamespace(
        App=SimpleNamespace(lookup=SimpleNamespace(aio=lookup)),
        Image=SimpleNamespace(from_registry=lambda tag: f"image {tag}"),
        Sandbox=SimpleNamespace(create=SimpleNamespace(aio=lambda **named: checked_create(create, named))),
    )


async def checked_create(create: Callable[..., Awaitable[Any]], named: dict[str, Any]) -> Any:
    inspect.signature(modal_sdk.Sandbox.create).bind(**named)
    return await create(**named)


def daytona_server(machine: Machine) -> web.Application:
    async def create(request: web.Request) -> web.Response:
        if machine.broken:
            return web.json_response({"message": "no runner"}, status=400)
        machine.created.append(await request.json())
        return web.json_response(await described(request))

    async def described(request: web.Request) -> dict[str, Any]:
        words = dict.fromkeys(("organizationId", "name", "user", "target", "desiredState"), "x")
        numbers = dict.fromkeys(("cpu", "gpu", "memory", "disk"), 1)
        flags = dict.fromkeys(("public", "networkBlockAll", "kvm", "spot"), False)
        base = f"http://{request.host}/toolbox"
        return {**words, **numbers, **flags, "id": "sbx-1", "env": {}, "labels": {}, "state": "started",
                "desiredState": "started", "toolboxProxyUrl": base}  # fmt: skip

    async def get(request: web.Request) -> web.Response:
        return web.json_response(await described(request))

    async def execute(request: web.Request) -> web.Response:
        asked = await request.json()
        return web.json_response({"exitCode": 0, "result": await machine.shell(asked["command"])})

    async def upload(request: web.Request) -> web.Response:
        path, content = "", b""
        async for part in await request.multipart():
            if part.name.endswith("path"):
                path = (await part.read()).decode()
            else:
                content = bytes(await part.read())
        machine.write(path, content)
        return web.json_response({})

    async def download(request: web.Request) -> web.Response:
        asked = await request.json()
        with_boundary = "frontier"
        path = asked["paths"][0]
        head = f'--{with_boundary}\r\nContent-Disposition: form-data; name="file"; filename="{path}"\r\n\r\n'.encode()
        body = head + machine.read(path) + f"\r\n--{with_boundary}--\r\n".encode()
        return web.Response(body=body, headers={"Content-Type": f"multipart/form-data; boundary={with_boundary}"})

    async def delete(request: web.Request) -> web.Response:
        machine.deleted.append(request.match_info["id"])
        return web.json_response(await described(request))

    app = web.Application()
    app.router.add_post("/api/sandbox", create)
    app.router.add_get("/api/sandbox/{id}", get)
    app.router.add_delete("/api/sandbox/{id}", delete)
    app.router.add_post("/toolbox/{id}/process/execute", execute)
    app.router.add_post("/toolbox/{id}/files/bulk-upload", upload)
    app.router.add_post("/toolbox/{id}/files/bulk-download", download)
    return app


def e2b_server(machine: Machine) -> web.Application:
    async def create(request: web.Request) -> web.Response:
        if machine.broken:
            return web.json_response({"message": "no capacity"}, status=400)
        machine.created.append(await request.json())
        made = {"sandboxID": "sbx-1", "templateID": "code-interpreter-v1", "envdVersion": "0.4.0", "clientID": "x"}
        return web.json_response({**made, "envdAccessToken": "token", "alias": "x"}, status=201)

    async def write(request: web.Request) -> web.Response:
        path = request.query["path"]
        if request.content_type == "application/octet-stream":
            machine.write(path, await request.read())
        else:
            async for part in await request.multipart():
                machine.write(path, bytes(await part.read()))
        return web.json_response([{"name": Path(path).name, "type": "file", "path": path}])

    async def read(request: web.Request) -> web.Response:
        return web.Response(body=machine.read(request.query["path"]))

    async def start(request: web.Request) -> web.StreamResponse:
        (length,) = struct.unpack(">I", (await request.read())[1:5])
        asked = json.loads((await request.read())[5 : 5 + length])["process"]
        printed = await machine.shell(asked["args"][-1])
        events = [{"start": {"pid": 7}}, {"data": {"stdout": base64.b64encode(printed.encode()).decode()}}]
        events.append({"end": {"exitCode": machine.code, "exited": True, "status": f"exit status {machine.code}"}})
        body = b"".join(_framed(0, {"event": event}) for event in events) + _framed(2, {})
        return web.Response(body=body, headers={"Content-Type": "application/connect+json"})

    async def kill(request: web.Request) -> web.Response:
        machine.deleted.append(request.match_info["id"])
        return web.Response(status=204)

    app = web.Application()
    app.router.add_post("/v2/sandboxes", create)
    app.router.add_post("/files", write)
    app.router.add_get("/files", read)
    app.router.add_post("/process.Process/Start", start)
    app.router.add_delete("/sandboxes/{id}", kill)
    return app


def _framed(flags: int, message: dict[str, Any]) -> bytes:
    body = json.dumps(message).encode()
    return struct.pack(">BI", flags, len(body)) + body


async def served(app: web.Application) -> tuple[web.AppRunner, str]:
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "home")


def holding(provider: RemoteProvider, **held: Any) -> Any:
    """The provider with what its own `connect` would have made."""
    for name, value in held.items():
        setattr(provider, name, value)
    return provider


@pytest.fixture(params=["prime", "modal", "daytona", "e2b"])
async def provider(request: pytest.FixtureRequest, machine: Machine) -> AsyncIterator[RemoteProvider]:
    runner = None
    made: RemoteProvider
    match request.param:
        case "prime":
            made = holding(Prime(lifetime_s=600.0), _client=PrimeClient(machine))
        case "modal":
            made = holding(Modal(lifetime_s=600.0), _sdk=modal_module(machine))
        case "daytona":
            runner, url = await served(daytona_server(machine))
            config = daytona_sdk.DaytonaConfig(api_key="key", api_url=f"{url}/api", target="eu", use_deprecated_polling=True)
            made = holding(Daytona(lifetime_s=600.0), _client=daytona_sdk.AsyncDaytona(config))
        case _:
            runner, url = await served(e2b_server(machine))
            options = {"api_key": "e2b_" + "0" * 40, "api_url": url, "sandbox_url": url}
            made = holding(E2B(lifetime_s=600.0), _options=options)
    yield made
    await made.close()
    if runner is not None:
        await runner.cleanup()


ASKED = {
    "prime": {"docker_image": "python:3.11-slim", "cpu_cores": 2.0, "memory_gb": 2.0, "disk_size_gb": 1.0,
              "timeout_minutes": 10, "labels": ["telescope"]},
    "modal": {"image": "image python:3.11-slim", "cpu": (2.0, 2.0), "memory": (2048, 2048), "timeout": 600,
              "block_network": True, "app": "app telescope-sandboxes"},
    "daytona": {"cpu": 2, "memory": 2, "disk": 1, "networkBlockAll": True},
    "e2b": {"templateID": "code-interpreter-v1", "timeout": 600, "allow_internet_access": False,
            "metadata": {"made-by": "telescope"}},
}  # fmt: skip


@pytest.mark.parametrize("rule", CONTRACT, ids=lambda rule: rule.__name__)
async def test_each_provider_keeps_the_contract(
    rule: Callable[[Sandbox], Awaitable[None]], provider: RemoteProvider, machine: Machine
) -> None:
    await provider.start(CONTRACT_LIMITS)
    sandbox = await provider.create(CONTRACT_LIMITS)
    try:
        await rule(sandbox)
    finally:
        await sandbox.delete()
    assert machine.deleted == ["sbx-1", "sbx-1"]  # the probe's and this one, each once


async def test_each_provider_is_asked_for_what_limits_and_settings_say(provider: RemoteProvider, machine: Machine) -> None:
    isolation = await provider.start(LIMITS)
    assert isolation.wall is Wall.REMOTE
    assert "no network" in isolation.holds
    sandbox = await provider.create(LIMITS)
    told = await sandbox.exec(["pwd"], cwd="a")
    await sandbox.delete()
    assert told.text == f"{machine.home}/a\n"
    asked = machine.created[-1]
    assert {key: asked.get(key) for key in ASKED[provider.name]} == ASKED[provider.name]
    if isinstance(provider, Prime):
        assert provider._client.policy == {"sbx-1": ["*"]}


async def test_a_provider_that_fails_is_no_outcome_but_an_error_that_names_it(
    provider: RemoteProvider, machine: Machine
) -> None:
    await provider.start(LIMITS)
    machine.broken = True
    with pytest.raises(SandboxError, match=f"^{provider.name} create: "):
        await provider.create(LIMITS)


async def test_a_provider_that_does_not_work_is_refused_at_the_start(provider: RemoteProvider, machine: Machine) -> None:
    machine.broken = True
    with pytest.raises(SandboxUnavailable, match=f"sandbox.provider={provider.name} does not work: {provider.name} create"):
        await provider.start(LIMITS)


async def test_what_is_left_at_the_end_is_deleted(provider: RemoteProvider, machine: Machine) -> None:
    await provider.start(LIMITS)
    await provider.create(LIMITS)
    await provider.close()
    assert machine.deleted == ["sbx-1", "sbx-1"]


def test_the_sdks_have_every_call_that_is_made() -> None:
    for name in ("set_network", "get_network", "upload_bytes", "download_file", "execute_command"):
        assert inspect.iscoroutinefunction(getattr(prime_sandboxes.AsyncSandboxClient, name))
    assert {"allow_internet_access", "timeout", "metadata"} <= set(
        inspect.signature(e2b_code_interpreter.AsyncSandbox.create).parameters
    )
    assert "network_block_all" in daytona_sdk.CreateSandboxFromImageParams.model_fields


KILL_THE_SHELL = ["sh", "-c", "read pid name state shell rest < /proc/$PPID/stat; kill -9 $shell"]


async def test_a_guest_that_kills_its_shell_is_an_outcome_and_no_failure_of_the_provider(provider: RemoteProvider) -> None:
    await provider.start(LIMITS)
    sandbox = await provider.create(LIMITS)
    killed = await sandbox.exec(KILL_THE_SHELL)
    assert (killed.ending, killed.exit_code, killed.stdout) == (Ending.DIED, 137, b"")
    assert (await sandbox.exec(["echo", "again"])).ending is Ending.DIED
    with pytest.raises(FileRefused, match="the guest took its sandbox down"):
        await sandbox.upload("a", b"x")
    with pytest.raises(FileRefused, match="the guest took its sandbox down"):
        await sandbox.download("a")


SLEEPERS = "for f in /proc/[0-9]*/cmdline; do tr '\\0' ' ' < $f; echo; done | grep -o '^sleep.*[0-9]'"
RUNS_ON = (
    "for s in 601 602; do setsid env -i sleep $s & done; (sleep 603 &); nohup sleep 604 > /dev/null 2>&1 & "
    "exec 1>&- 2>&-; setsid sh -c 'trap \"\" TERM HUP INT; sleep 605 & exec sleep 606' & exit 3"
)


async def test_what_a_command_leaves_running_is_ended_with_it_and_the_providers_own_is_not(
    provider: RemoteProvider, machine: Machine
) -> None:
    if not works("bubblewrap"):
        pytest.skip("bwrap cannot run on this host: there is no table of processes to be alone in")
    async with Enclosed.open() as machine.enclosed:
        await provider.start(LIMITS)
        sandbox = await provider.create(LIMITS)
        told = await sandbox.exec(["bash", "-c", RUNS_ON])
        assert (told.ending, told.exit_code) == (Ending.EXITED, 3)
        assert (await machine.enclosed.shell(SLEEPERS)).splitlines() == [f"sleep {Enclosed.SERVICE}"]
        assert (await sandbox.exec(["echo", "again"])).text == "again\n"


@pytest.mark.parametrize(("same", "tried"), [(True, False), (False, True)])
async def test_on_the_workers_own_machine_nothing_is_swept(machine: Machine, same: bool, tried: bool) -> None:
    """A fake of a provider has no sandbox: other people's processes begin there at any time. Here `kill` only says so."""
    machine.home.mkdir()
    line = remote._sweep(remote.here() if same else "another machine")
    printed = await machine.shell(f'kill() {{ n=200; echo tried; }}; b=" "; {line}')
    assert ("tried" in printed) is tried


def test_who_cannot_be_ended_has_taken_the_sandbox_down() -> None:
    assert outcome(f"\n\n{remote.LEFT}\n", 1.0, 60.0, 4096).ending is Ending.DIED
    assert outcome("\n\n0\n", 1.0, 60.0, 4096).ending is Ending.EXITED


async def test_standard_input_lies_in_no_file_that_the_command_finds(provider: RemoteProvider) -> None:
    await provider.start(LIMITS)
    sandbox = await provider.create(LIMITS)
    told = await sandbox.exec(["sh", "-c", "cat; [ -p /proc/self/fd/0 ] && echo from a pipe; ls -A"], stdin=b"secret\n")
    assert told.text == "secret\nfrom a pipe\n"
    large = b"x" * 1_000_000
    assert (await sandbox.exec(["wc", "-c"], stdin=large)).text.strip() == "1000000"
    assert (await sandbox.exec(["true"], stdin=large)).ok  # nobody reads it


@pytest.fixture
async def prime(machine: Machine) -> AsyncIterator[Prime]:
    made = holding(Prime(lifetime_s=600.0), _client=PrimeClient(machine), _sdk=prime_sandboxes)
    yield made
    await made.close()


async def test_what_a_guest_has_shut_or_filled_is_not_the_providers_failure(prime: Prime, machine: Machine) -> None:
    sandbox = await prime.create(LIMITS)
    assert (await sandbox.exec(["sh", "-c", "echo > a; mkdir b; mkfifo c"])).ok
    for path in ("a/x", "b"):
        with pytest.raises(FileRefused, match="the guest left no room for 1 bytes there"):
            await sandbox.upload(path, b"x")
    with pytest.raises(FileRefused, match="there is no such file"):
        await sandbox.download("c")
    machine.takes_no_files = True  # now it is the provider's
    with pytest.raises(SandboxError, match="prime upload: OSError: the store is down"):
        await sandbox.upload("d", b"x")
    with pytest.raises(SandboxError, match="prime upload: OSError: the store is down"):
        await sandbox.exec(["cat"], stdin=b"x")
    assert (await sandbox.exec(["true"], cwd="a")).ending is Ending.DIED  # no place for its output either


async def test_before_any_command_a_sandbox_that_takes_nothing_is_the_providers_failure(prime: Prime, machine: Machine) -> None:
    sandbox = await prime.create(LIMITS)
    machine.home.mkdir(parents=True)
    (machine.home / "a").touch()
    with pytest.raises(SandboxError, match="no folder can be made in a new sandbox"):
        await sandbox.exec(["true"], cwd="a")
    with pytest.raises(SandboxError, match="prime upload"):
        await sandbox.upload("a/x", b"x")


async def test_a_delete_that_fails_is_tried_again(prime: Prime, machine: Machine) -> None:
    first, second = await prime.create(LIMITS), await prime.create(LIMITS)
    machine.failing_deletes = 1
    with pytest.raises(SandboxError, match="prime delete: APIError: HTTP 502"):
        await first.delete()
    await asyncio.gather(first.delete(), first.delete())
    assert machine.deleted == ["sbx-1"]
    assert prime._sandboxes == {second}
    machine.failing_deletes = 1
    with pytest.raises(SandboxError, match="HTTP 502"):
        await second.delete()
    await prime.close()
    assert machine.deleted == ["sbx-1", "sbx-1"]


@pytest.mark.parametrize("failing_deletes", [0, 1])
async def test_a_sandbox_whose_caller_has_gone_is_deleted_when_it_is_made(
    prime: Prime, machine: Machine, failing_deletes: int
) -> None:
    machine.gate, machine.failing_deletes = asyncio.Event(), failing_deletes
    creating = asyncio.ensure_future(prime.create(LIMITS))
    await machine.asked.wait()
    creating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await creating
    assert machine.deleted == []
    machine.gate.set()
    await prime.close()
    assert machine.deleted == ["sbx-1"]
    assert prime._sandboxes == set()


def test_an_image_without_the_tools_is_refused_at_the_start() -> None:
    class Bare(PrimeClient):
        async def _execute_command(self, identity: str, command: str, timeout: int) -> Any:
            return prime_sandboxes.CommandResponse(stdout="sh: base64: not found\n", stderr="", exit_code=127)

    async def start() -> None:
        await holding(Prime(image="busybox"), _client=Bare(Machine(Path("/nowhere")))).start(LIMITS)

    with pytest.raises(
        SandboxUnavailable, match=r"base64: not found.*its image needs sh, base64, cat, head, mktemp, timeout and"
    ):
        asyncio.run(start())


def test_a_line_that_prints_something_else_is_the_guests_doing() -> None:
    for printed in ("", "\n\n", "a\n", "?\n?\n0\n", f"{remote.NOT_BEGUN}\n"):
        assert outcome(printed, 0.1, 1.0, 100).ending is Ending.DIED


def test_words_of_a_command_are_quoted() -> None:
    line = command_line(["echo", "a b", "$(reboot)", "'"], "", "/tmp/x y", {}, 1.5, LIMITS)
    assert "timeout -k 1 1.5 echo 'a b' '$(reboot)' ''\"'\"''" in line
    assert "cd '/tmp/x y'" in line
