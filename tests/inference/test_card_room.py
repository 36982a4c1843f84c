"""An engine waits for room on a GPU that a trainer uses by turns, and not for ever."""

from __future__ import annotations

import pytest

from telescope.inference.engine import EngineRefused
from telescope.inference.vllm.gpu_memory import GIB, room_made


async def test_an_engine_starts_at_once_where_there_is_room_and_else_when_there_is():
    asked: list[int] = []

    def free() -> int:
        asked.append(1)
        return (10 if len(asked) < 3 else 40) * GIB

    await room_made(free, 10 * GIB, limit_s=60.0)
    assert len(asked) == 1
    await room_made(free, 36 * GIB, limit_s=60.0)
    assert len(asked) == 3


async def test_a_card_that_stays_full_is_told_in_numbers():
    with pytest.raises(EngineRefused) as raised:
        await room_made(lambda: 10 * GIB, 36 * GIB, limit_s=0.0)
    assert str(raised.value) == (
        "the server's GPU has 10.00 GiB free after 0 s, and inference.gpu_memory_utilization asks for 36.00: another process "
        "holds the rest; lower it, or end that process"
    )
