"""What every provider of sandboxes must do, as a table of rules: each gets a started provider and its limits.

A provider of one's own is tested by `pytest.mark.parametrize("rule", CONTRACT)`, as tests/sandboxes/test_contract.py does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from telescope.environments.sandboxes.base import Ending, FileRefused, Limits, Provider, Sandbox, SandboxError

LIMITS = Limits(memory_mb=256, disk_mb=16, time_s=60.0, output_kb=4, transfer_mb=1)


async def files_go_in_and_come_back(sandbox: Sandbox) -> None:
    await sandbox.upload("a/b.bin", bytes(range(256)))
    assert await sandbox.download("a/b.bin") == bytes(range(256))
    assert (await sandbox.exec(["wc", "-c", "a/b.bin"])).text.split() == ["256", "a/b.bin"]
    await sandbox.upload("a/b.bin", b"shorter")
    assert await sandbox.download("a/b.bin") == b"shorter"


async def a_command_has_its_streams_folder_and_environment(sandbox: Sandbox) -> None:
    await sandbox.upload("a/b", b"x")
    line = 'cat; echo "$WORD" >&2; ls; exit 3'
    told = await sandbox.exec(["sh", "-c", line], stdin=b"\xff\x00", env={"WORD": "a b"}, cwd="a")
    assert (told.exit_code, told.stdout, told.stderr) == (3, b"\xff\x00b\n", b"a b\n")
    assert (told.ending, told.ok) == (Ending.EXITED, False)
    words = await sandbox.exec(["printf", "%s|", "a b", "$HOME", "'", ""])
    assert (words.text, words.ok) == ("a b|$HOME|'||", True)


async def input_that_nobody_reads_and_input_that_is_long_are_no_matter(sandbox: Sandbox) -> None:
    large = b"x" * 1_000_000
    assert (await sandbox.exec(["wc", "-c"], stdin=large)).text.strip() == "1000000"
    assert (await sandbox.exec(["true"], stdin=large)).ok


async def signals_and_missing_programs_are_exit_codes(sandbox: Sandbox) -> None:
    assert (await sandbox.exec(["sh", "-c", "kill -9 $$"])).exit_code == 137
    assert (await sandbox.exec(["no-such-program"])).exit_code == 127


async def a_command_that_runs_too_long_is_ended(sandbox: Sandbox) -> None:
    late = await sandbox.exec(["sleep", "600"], timeout_s=1.0)
    assert (late.ending, late.exit_code) == (Ending.TIMED_OUT, 137)
    assert (await sandbox.exec(["echo", "on"])).text == "on\n"


async def a_command_that_writes_too_much_is_cut(sandbox: Sandbox) -> None:
    flood = await sandbox.exec(["sh", "-c", "head -c 100000 /dev/zero"])
    assert (flood.ending, len(flood.stdout)) == (Ending.FLOODED, LIMITS.output_kb * 1024)


async def who_holds_the_output_open_is_not_waited_for(sandbox: Sandbox) -> None:
    left = await sandbox.exec(["sh", "-c", "sleep 600 & echo started"])
    assert (left.text, left.ending) == ("started\n", Ending.EXITED)


async def a_missing_or_a_large_file_is_refused(sandbox: Sandbox) -> None:
    with pytest.raises(FileRefused):
        await sandbox.download("nothing")
    assert (await sandbox.exec(["sh", "-c", "head -c 1100000 /dev/zero > large"])).ok
    with pytest.raises(FileRefused, match="transfer_mb=1"):
        await sandbox.download("large")
    with pytest.raises(ValueError, match="transfer_mb=1"):
        await sandbox.upload("large", bytes(1_100_000))


async def a_deleted_sandbox_runs_nothing_and_can_be_deleted_again(sandbox: Sandbox) -> None:
    assert (await sandbox.exec(["true"])).ok
    await sandbox.delete()
    await sandbox.delete()
    with pytest.raises(SandboxError):
        await sandbox.exec(["true"])


CONTRACT: tuple[Callable[[Sandbox], Awaitable[None]], ...] = (
    files_go_in_and_come_back,
    a_command_has_its_streams_folder_and_environment,
    input_that_nobody_reads_and_input_that_is_long_are_no_matter,
    signals_and_missing_programs_are_exit_codes,
    a_command_that_runs_too_long_is_ended,
    a_command_that_writes_too_much_is_cut,
    who_holds_the_output_open_is_not_waited_for,
    a_missing_or_a_large_file_is_refused,
    a_deleted_sandbox_runs_nothing_and_can_be_deleted_again,
)


async def two_sandboxes_share_nothing(provider: Provider) -> None:
    """And whatever is left is deleted at the close. Not for those whose tests stand in for their machine."""
    first, second = await asyncio.gather(provider.create(LIMITS), provider.create(LIMITS))
    await first.upload("mine", b"1")
    with pytest.raises(FileRefused):
        await second.download("mine")
    await provider.close()
    for sandbox in (first, second):
        with pytest.raises(SandboxError):
            await sandbox.exec(["true"])
