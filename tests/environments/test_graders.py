"""Grader processes: what a call returns, what stops it, and that nothing of it stays."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from pathlib import Path

import psutil
import pytest

from telescope.environments.failures import GraderError
from telescope.environments.graders.pool import GraderOverrun, grade, open_graders
from tests.environments import grader_tasks as tasks


async def test_a_value_comes_from_the_main_thread_of_one_process_that_is_used_again():
    async with open_graders(1) as graders:
        assert await grade(tasks.double, 21) == 42
        assert await grade(tasks.in_main_thread) is True
        assert await grade(tasks.process_id) == graders.alive[0]
        assert await grade(tasks.echo, (1, "zwölf", None), {"a": [0.5]}) == [[1, "zwölf", None], {"a": [0.5]}]
        assert graders.started == 1


async def test_a_call_deep_in_c_is_killed_and_the_next_one_gets_a_new_process():
    async with open_graders(1) as graders:
        first = await grade(tasks.process_id)
        with pytest.raises(GraderOverrun, match=r"grader_tasks.deaf: it used more than 0.3 s of processor time"):
            await grade(tasks.deaf, limit_s=0.3, clock_limit_s=100)
        assert not psutil.pid_exists(first)
        assert await grade(tasks.double, 1) == 2
        assert graders.started == 2


@pytest.mark.parametrize("endless", [tasks.loop, tasks.swallow, tasks.tower])
async def test_an_endless_call_is_stopped_and_its_process_stays(endless):
    async with open_graders(1) as graders:
        with pytest.raises(GraderOverrun, match=r"0.1 s of processor time"):
            await grade(endless, limit_s=0.1, clock_limit_s=100)
        assert await grade(tasks.double, 1) == 2
        assert graders.started == 1


async def test_a_call_that_waits_for_ever_is_the_graders_fault_not_the_answers():
    async with open_graders(1) as graders:
        with pytest.raises(GraderError, match=r"no answer within 0.3 s on the clock") as raised:
            await grade(tasks.sleep, clock_limit_s=0.3)
        assert not isinstance(raised.value, GraderOverrun)
        assert await grade(tasks.double, 1) == 2
        assert graders.started == 2


async def test_memory_is_bounded_and_a_fresh_process_decides():
    async with open_graders(1, memory_mb=512) as graders:
        assert await grade(tasks.allocate, 100) == 100 << 20
        with pytest.raises(GraderOverrun, match="more memory"):
            await grade(tasks.allocate, 1000)
        assert graders.started == 2  # the second was asked because the first had been used
        assert await grade(tasks.double, 1) == 2


async def test_what_a_grader_raises_is_named_and_its_process_stays():
    async with open_graders(1) as graders:
        with pytest.raises(GraderError, match=r"tests.environments.grader_tasks.explode: ValueError: no such answer"):
            await grade(tasks.explode, "no such answer")
        with pytest.raises(GraderError, match="SystemExit: 3"):
            await grade(tasks.leave)
        with pytest.raises(GraderError, match="TypeError"):
            await grade(tasks.thing)
        assert graders.started == 1
        with pytest.raises(GraderError, match="its process ended with status 7"):
            await grade(tasks.die)
        assert await grade(tasks.double, 1) == 2


async def test_what_a_grader_prints_or_reads_is_kept_from_the_pipes():
    async with open_graders(1):
        assert await grade(tasks.chatter) == "nothing to read"
        assert await grade(tasks.double, 4) == 8


async def test_calls_side_by_side_share_the_processes_and_each_gets_its_own_value():
    async with open_graders(2) as graders:
        assert await asyncio.gather(*(grade(tasks.double, n) for n in range(50))) == [2 * n for n in range(50)]
        assert graders.started == 2


async def test_a_cancelled_call_takes_its_process_along():
    async with open_graders(1) as graders:
        mine = await grade(tasks.process_id)
        call = asyncio.create_task(grade(tasks.sleep, limit_s=600))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert await grade(tasks.process_id) != mine
        assert mine not in graders.alive


async def test_no_process_outlives_the_block():
    async with open_graders(2) as graders:
        await asyncio.gather(*(grade(tasks.double, n) for n in range(4)))
        alive = graders.alive
        busy = asyncio.create_task(grade(tasks.loop, limit_s=600))
        await asyncio.sleep(0)
    assert alive
    assert not any(psutil.pid_exists(pid) for pid in alive)
    with pytest.raises(GraderError):
        await busy


async def test_a_process_that_was_starting_at_the_end_is_ended_too():
    async with open_graders(1) as graders:
        call = asyncio.create_task(grade(tasks.loop, limit_s=600))
        await asyncio.sleep(0)
    with pytest.raises(GraderError, match=r"leaving|status"):
        await call
    assert graders.alive == []


async def test_a_grader_sees_no_key_of_a_service(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JUDGE_API_KEY", "s3cr3t-value")
    monkeypatch.setenv("ANYTHING_ELSE", "1")
    seen = set(await grade(tasks.variables, limit_s=60.0))
    assert {"PATH", "OMP_NUM_THREADS"} <= seen
    assert not {"JUDGE_API_KEY", "ANYTHING_ELSE"} & seen


async def test_without_open_processes_a_call_makes_its_own():
    assert await grade(tasks.double, 3) == 6


async def test_only_functions_of_modules_and_plain_arguments_can_be_handed_over():
    def inner() -> None: ...

    for function in (inner, lambda: None):
        with pytest.raises(TypeError, match="define it at the top of a module"):
            await grade(function)
    with pytest.raises(TypeError, match="must be numbers, texts, lists and dicts"):
        await grade(tasks.double, object())


async def test_a_function_of_a_users_own_file_is_found_by_its_path(tmp_path: Path):
    file = tmp_path / "my_task.py"
    file.write_text("def shout(text):\n    return text.upper()\n")
    spec = importlib.util.spec_from_file_location("telescope_plugins_abc.my_task", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
        assert await grade(module.shout, "hey") == "HEY"
    finally:
        del sys.modules[spec.name]


async def test_texts_that_no_utf8_has_and_values_that_are_too_long_leave_the_process_as_it_was():
    async with open_graders(1) as graders:
        assert await grade(tasks.half_a_pair) == "\ud800"
        with pytest.raises(GraderError, match="ValueError: \ud800"):
            await grade(tasks.raises_half_a_pair)
        with pytest.raises(GraderError, match="its value is 20971533 bytes long, more than 16777216"):
            await grade(tasks.long_value)
        assert await grade(tasks.double, 4) == 8
        assert graders.started == 1


async def test_a_call_that_gets_at_the_pipes_is_ended_and_the_next_one_gets_a_new_process(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("telescope.environments.graders.pool.ENDING_S", 0.1)
    async with open_graders(1) as graders:
        for hostile in (tasks.shuts_its_pipe, tasks.writes_into_the_pipe):
            with pytest.raises(GraderError, match="its process ended with status"):
                await grade(hostile, limit_s=100)
            assert await grade(tasks.double, 4) == 8
        assert graders.started == 3
