"""Routing kept in the worker: the table over the KV cache's blocks, both model runners, what a server refuses. No engine."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from telescope.inference.engine import EngineRefused
from telescope.inference.vllm.kept_copies import CannotKeep
from telescope.inference.vllm.kept_routing import KeptRouting, RoutersShape, find_routers, keep_routing, room, shape_of
from telescope.inference.vllm.routing_path import SHAPE, TAKE, RoutingPath

CPU, BLOCK, MARK = torch.device("cpu"), 4, 255
SHAPE_OF_TWO = RoutersShape(layers=2, experts=8, top_k=2)


class Router:
    """vLLM's, as far as it is used."""

    def __init__(self, experts: int = 8, top_k: int = 2) -> None:
        self.global_num_experts, self.top_k = experts, top_k
        self.capture: Any = None

    def set_capture_fn(self, capture: Any) -> None:
        self.capture = capture


class FullAttentionSpec:
    block_size, page_size_bytes = BLOCK, BLOCK * 100


class Runner:
    """The older model runner, or the newer one; `layers` of them have no router."""

    def __init__(self, routers: Sequence[Router | None], *, newer: bool) -> None:
        layers = [torch.nn.Module() for _ in routers]
        for layer, router in zip(layers, routers, strict=True):
            if router is not None:
                layer.router = router  # type: ignore[assignment]
        self._model = torch.nn.ModuleList(layers)
        self.slots = torch.full((64,), -1, dtype=torch.int64)
        if newer:
            self.req_states = object()
            self.block_tables = SimpleNamespace(slot_mappings=self.slots[None])
        else:
            buffer = SimpleNamespace(gpu=self.slots)
            self.input_batch = SimpleNamespace(block_table=[SimpleNamespace(slot_mapping=buffer)])

    def get_model(self) -> torch.nn.Module:
        return self._model


class Worker:
    """Runs a step of made-up tokens: token t of a request r goes to experts (r + t) % 8 and (r + t + 1 + layer) % 8."""

    device, rank = CPU, 0

    def __init__(self, *, newer: bool = False, routers: Sequence[Router | None] | None = None, **parallel: Any) -> None:
        self.routers = [Router(), None, Router()] if routers is None else list(routers)
        self.model_runner = Runner(self.routers, newer=newer)
        sizes = {"tensor_parallel_size": 1, "use_ubatching": False, **parallel}
        self.vllm_config = SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_batched_tokens=32, max_num_seqs=2),
            model_config=SimpleNamespace(max_model_len=7), parallel_config=SimpleNamespace(**sizes),
            speculative_config=None,
        )  # fmt: skip
        self.blocks: dict[int, list[int]] = {}
        self.kv_cache_spec: dict[str, Any] = {"one": FullAttentionSpec(), "two": FullAttentionSpec()}

    def get_kv_cache_spec(self) -> dict[str, Any]:
        return self.kv_cache_spec

    def execute_model(self, order: Any) -> str:
        tokens = [(int(name), place) for name, (first, count) in order.ran.items() for place in range(first, first + count)]
        for at, (name, place) in enumerate(tokens):
            self.model_runner.slots[at] = self.blocks[name][place // BLOCK] * BLOCK + place % BLOCK
        listening = [router for router in self.routers if router is not None and router.capture is not None]
        for layer, router in enumerate(listening):
            padded = [*tokens, (7, 7)]  # as a CUDA graph's batch is
            router.capture(torch.tensor([experts(*token, layer) for token in padded], dtype=torch.int32))
        return "out"

    def step(
        self,
        ran: Mapping[str, tuple[int, int]],
        *,
        new: Mapping[str, list[int]] = {},
        added: Mapping[str, list[int]] = {},
        resumed: Sequence[str] = (),
        finished: Sequence[str] = (),
        preempted: Sequence[str] = (),
    ) -> None:
        """`ran`: of each request the first position of the step and how many."""
        for name, blocks in new.items():
            self.blocks[int(name)] = list(blocks)
        for name, blocks in added.items():
            self.blocks[int(name)] = [*([] if name in resumed else self.blocks[int(name)]), *blocks]
        cached = [name for name in ran if name not in new]
        going_on = SimpleNamespace(
            req_ids=cached, resumed_req_ids=set(resumed), new_block_ids=[(added[n],) if n in added else None for n in cached]
        )
        order = SimpleNamespace(
            finished_req_ids=set(finished), preempted_req_ids=set(preempted), scheduled_cached_reqs=going_on, ran=ran,
            scheduled_new_reqs=[SimpleNamespace(req_id=name, block_ids=(blocks,)) for name, blocks in new.items()],
            total_num_scheduled_tokens=sum(count for _, count in ran.values()),
        )  # fmt: skip
        assert self.execute_model(order) == "out"


def experts(name: int, place: int, layer: int) -> list[int]:
    return [(name + place) % 8, (name + place + 1 + layer) % 8]


def expected(name: int, tokens: int) -> list[Any]:
    return [[experts(name, place, layer) for layer in range(2)] for place in range(tokens)]


@pytest.fixture(autouse=True)
def specs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm.v1.kv_cache_interface", SimpleNamespace(FullAttentionSpec=FullAttentionSpec))


def cache(blocks: int = 8, kinds: int = 1) -> Any:
    groups = [SimpleNamespace(kv_cache_spec=FullAttentionSpec()) for _ in range(kinds)]
    return SimpleNamespace(num_blocks=blocks, kv_cache_groups=groups)


@pytest.fixture(params=[False, True], ids=["older", "newer"])
def pair(request: pytest.FixtureRequest) -> tuple[Worker, KeptRouting]:
    worker = Worker(newer=request.param)
    return worker, keep_routing(worker, cache())


def test_a_prompt_in_parts_and_answers_side_by_side_leave_whole_and_once(pair: tuple[Worker, KeptRouting]):
    worker, kept = pair
    worker.step({"1": (0, 5), "2": (0, 2)}, new={"1": [3, 1], "2": [6]})
    worker.step({"2": (2, 1), "1": (5, 4)}, added={"1": [0]})
    worker.step({"1": (9, 1)}, finished=("2",), new={})
    assert kept.take("2", 3).tolist() == expected(2, 3)
    assert kept.take("1", 10).tolist() == expected(1, 10), "it still runs: somebody has its tokens"
    worker.step({"3": (0, 4)}, new={"3": [3]}, finished=("1",))
    for name in ("1", "2", "stranger"):
        assert (kept.take(name, 2) == MARK).all()
    assert kept.take("3", 4).tolist() == expected(3, 4)


def test_blocks_that_have_a_new_owner_in_the_same_step_are_copied_first(pair: tuple[Worker, KeptRouting]):
    worker, kept = pair
    worker.step({"1": (0, 4)}, new={"1": [2]})
    worker.step({"5": (0, 4)}, new={"5": [2]}, finished=("1",))
    assert kept.take("1", 4).tolist() == expected(1, 4)
    assert kept.take("5", 4).tolist() == expected(5, 4)


def test_a_prefix_out_of_the_cache_has_the_record_of_who_computed_it(pair: tuple[Worker, KeptRouting]):
    worker, kept = pair
    worker.step({"1": (0, 6)}, new={"1": [2, 3]})
    worker.step({"4": (4, 3)}, new={"4": [2, 5]}, finished=("1",))
    assert kept.take("4", 7).tolist() == [*expected(1, 4), *expected(4, 7)[4:]]


@pytest.mark.parametrize("comes_back", [True, False])
def test_who_is_preempted_loses_nothing_and_is_recorded_anew_where_it_comes_back(
    pair: tuple[Worker, KeptRouting], comes_back: bool
):
    worker, kept = pair
    worker.step({"1": (0, 6)}, new={"1": [2, 3]})
    worker.step({"5": (0, 8)}, new={"5": [2, 3]}, preempted=("1",))
    if comes_back and hasattr(worker.model_runner, "req_states"):
        worker.step({"1": (0, 7)}, new={"1": [0, 1]})
    elif comes_back:
        worker.step({"1": (0, 7)}, added={"1": [0, 1]}, resumed=("1",))
    assert kept.take("1", 6).tolist() == expected(1, 6)
    assert kept.take("5", 8).tolist() == expected(5, 8)


def test_who_begins_again_in_the_order_that_preempts_it_is_not_copied(
    pair: tuple[Worker, KeptRouting], monkeypatch: pytest.MonkeyPatch
):
    """As all do where new weights have them computed again."""
    worker, kept = pair
    worker.step({"1": (0, 6), "2": (0, 3)}, new={"1": [2, 3], "2": [4]})
    copied: list[str] = []
    monkeypatch.setattr(kept, "_copied", lambda name, stream: copied.append(name))
    if hasattr(worker.model_runner, "req_states"):
        worker.step({"1": (0, 7), "2": (0, 4)}, new={"1": [0, 1], "2": [5]}, preempted=("1", "2"))
    else:
        worker.step({"1": (0, 7), "2": (0, 4)}, added={"1": [0, 1], "2": [5]}, resumed=("1", "2"), preempted=("1", "2"))
    assert copied == []
    monkeypatch.undo()
    assert kept.take("1", 7).tolist() == expected(1, 7)
    worker.step({"1": (7, 1)}, preempted=("2",))
    assert kept.take("2", 4).tolist() == expected(2, 4)


def test_what_no_router_tells_has_the_mark_and_never_what_was_there_before():
    worker = Worker()
    kept = keep_routing(worker, cache())
    worker.step({"1": (0, 4)}, new={"1": [2]})
    worker.routers[2].set_capture_fn(None)  # type: ignore[union-attr]
    worker.step({"3": (0, 4)}, new={"3": [2]}, finished=("1",))
    found = kept.take("3", 4)
    assert found[:, 0].tolist() == [layers[0] for layers in expected(3, 4)]
    assert (found[:, 1] == MARK).all()


def test_as_many_ended_requests_are_kept_as_may_run_and_who_was_dropped_is_told_of_with_its_bytes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Two requests of 7 tokens, which take 8 places, may run: 64 bytes."""
    monkeypatch.setattr("telescope.inference.vllm.kept_copies.ENDED_BYTES", 0)
    worker = Worker()
    kept = keep_routing(worker, cache())
    worker.step({"1": (0, 7), "2": (0, 7)}, new={"1": [0, 1], "2": [0, 2]})
    worker.step({"3": (0, 4), "4": (0, 4)}, new={"3": [4], "4": [5]}, finished=("1", "2"))
    assert kept.take("2", 7)[4:].tolist() == expected(2, 7)[4:]
    worker.step({"5": (0, 4)}, new={"5": [6]}, finished=("3",))
    worker.step({"6": (0, 4)}, new={"6": [7]}, finished=("4", "5"))
    assert caplog.messages == [], "nobody has asked for it: it may have been called off"
    assert (kept.take("1", 7) == MARK).all()
    assert (kept.take("stranger", 7) == MARK).all()
    (said,) = caplog.messages
    assert "was dropped, 32 bytes, since ended requests had more than 64" in said


def test_more_than_255_experts_take_two_bytes():
    kept = KeptRouting(RoutersShape(1, 300, 1), 4, 2, BLOCK, CPU, running_tokens=8)
    kept.writer(0)(torch.tensor([[299], [256]]))
    kept.end_step(torch.tensor([0, 1]))
    kept._blocks["1"] = [0]
    assert kept.take("1", 3).tolist() == [[[299]], [[256]], [[32767]]]


@pytest.mark.parametrize(
    ("worker", "groups", "why"),
    [
        (Worker(prefill_context_parallel_size=2), 1, r"inference\.vllm\.prefill_context_parallel_size=2 spreads a step"),
        (Worker(use_ubatching=True), 1, "use_ubatching cuts a step's tokens"),
        (Worker(routers=[None]), 1, "no layer with experts whose router"),
        (Worker(routers=[Router(), Router(experts=9)]), 1, "different numbers of experts"),
        (Worker(routers=[Router(experts=40_000)]), 1, "at most 32,767 experts"),
        (Worker(), 2, "not one of full attention alone"),
    ],
)
def test_what_can_not_be_recorded_is_refused_and_left_as_it_was(worker: Worker, groups: int, why: str):
    with pytest.raises(CannotKeep, match=why):
        keep_routing(worker, cache(kinds=groups))
    assert "execute_model" not in vars(worker)
    assert all(router.capture is None for router in worker.routers if router is not None)


def test_the_tables_room_is_its_share_of_what_a_token_takes():
    """4 bytes beside 200 of keys and values, and a step of 32 tokens."""
    assert shape_of(find_routers(Worker().model_runner.get_model())) == SHAPE_OF_TWO
    assert room(Worker(), 204_000) == 4_000 + 32 * 4
    assert room(Worker(routers=[None]), 204_000) == 0
    hybrid = Worker()
    hybrid.kv_cache_spec["three"] = SimpleNamespace(block_size=BLOCK, page_size_bytes=BLOCK * 100)
    assert room(hybrid, 204_000) == 0, "it will be refused"


# ---- the server's end ------------------------------------------------------------------------------------------------


class Workers:
    def __init__(self, cause: str = "", *, lacking: bool = False) -> None:
        self.cause, self.lacking = cause, lacking
        self.asked: list[list[str]] = []

    async def __call__(self, method: str, *arguments: Any) -> list[Any]:
        await asyncio.sleep(0)
        if method == SHAPE:
            return [(self.cause, 2, 8, 2), ("", 0, 0, 0)]
        assert method == TAKE
        self.asked.append([name for name, _ in arguments[0]])
        found = [np.array(expected(int(name), tokens), np.uint8) for name, tokens in arguments[0]]
        if self.lacking:
            found[0][1, 1] = MARK
        return [b"".join(each.tobytes() for each in found), b""]


async def test_answers_that_end_together_come_by_one_question_and_their_last_token_has_no_record():
    workers = Workers()
    path = RoutingPath(workers)
    await path.open()
    one, two, three = await asyncio.gather(path.of("1", 3), path.of("2", 5), path.of("3", 2))
    for name, tokens, found in ((1, 3, one), (2, 5, two), (3, 2, three)):
        assert found[:-1].tolist() == expected(name, tokens - 1)
        assert (found[-1] == MARK).all()
        assert (found.shape, found.dtype) == ((tokens, 2, 2), np.uint8)
    assert len(workers.asked) <= 2
    path.check_trial()


async def test_a_question_asks_for_so_many_bytes_and_who_is_left_comes_with_the_next(monkeypatch: pytest.MonkeyPatch):
    """4 bytes a token: answers of 3 tokens, but for the last one's, are 8. One alone may be more."""
    monkeypatch.setattr("telescope.inference.vllm.batched_take.QUESTION_BYTES", 16)
    workers = Workers()
    path = RoutingPath(workers)
    await path.open()
    names = [*map(str, range(1, 6)), "6"]
    found = await asyncio.gather(*(path.of(name, 9 if name == "6" else 3) for name in names))
    assert workers.asked == [["1", "2"], ["3", "4"], ["5"], ["6"]]
    for name, one in zip(names, found, strict=True):
        assert one[:-1].tolist() == expected(int(name), len(one) - 1)


async def test_a_server_that_can_not_record_refuses_to_start_and_names_the_setting():
    with pytest.raises(EngineRefused, match=r"router_replay=true, .* it uses: no router; set trainer\.router_replay=false"):
        await RoutingPath(Workers("no router")).open()
    path = RoutingPath(Workers(lacking=True))
    await path.open()
    await path.of("1", 4)
    with pytest.raises(EngineRefused, match=r"of 1 of this server's 1 trial answers .* set trainer\.router_replay=false"):
        path.check_trial()
