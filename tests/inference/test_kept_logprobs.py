"""Log-probs kept in the worker: the table, both ways of filling it, and which way a server chooses. No engine."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from telescope.inference.vllm import kept_copies
from telescope.inference.vllm.kept_copies import CannotKeep
from telescope.inference.vllm.kept_logprobs import KeptLogprobs, keep
from telescope.inference.vllm.logprob_path import DROP, KEEP, TAKE, LogprobPath

CPU = torch.device("cpu")


def table(rows: int = 2, positions: int = 12) -> KeptLogprobs:
    return KeptLogprobs(CPU, rows, positions)


def write(kept: KeptLogprobs, row: int, first: int, values: Sequence[float]) -> None:
    for place, value in enumerate(values):
        kept.write(torch.tensor([row]), torch.tensor([first + place]), torch.tensor([float(value)]))


def same(found: np.ndarray, expected: Sequence[float]) -> bool:
    return np.array_equal(found, np.asarray(expected, np.float32), equal_nan=True)


NONE = float("nan")


def test_a_row_that_has_a_new_owner_keeps_nothing_of_the_one_before():
    kept = table()
    kept.begin("a", 0, 3, 9)
    write(kept, 0, 3, [-1, -2, -3])
    assert kept.end("a") == 0
    kept.begin("b", 0, 2, 9)
    write(kept, 0, 2, [-7])
    assert same(kept.take("a", 3, 3), [-1, -2, -3])
    assert same(kept.take("b", 2, 3), [-7, NONE, NONE])
    assert same(kept.take("a", 3, 3), [NONE, NONE, NONE])  # once
    assert same(kept.take("stranger", 3, 1), [NONE])


def test_what_is_taken_while_the_request_still_has_its_row_is_not_kept_a_second_time():
    kept = table()
    kept.begin("a", 0, 3, 9)
    write(kept, 0, 3, [-1, -2])
    assert same(kept.take("a", 3, 2), [-1, -2])
    kept.end("a")
    assert same(kept.take("a", 3, 2), [NONE, NONE])
    assert kept.end("a") is None


def test_a_preempted_request_is_put_together_from_its_rows_and_the_later_one_is_right():
    """After 3 tokens it loses its row, of which the engine kept 2: the third is sampled anew, under other weights."""
    kept = table()
    kept.begin("a", 0, 4, 12)
    write(kept, 0, 4, [-1, -2, -3])
    kept.end("a")
    kept.begin("other", 0, 1, 12)
    kept.begin("a", 1, 6, 12)
    write(kept, 1, 3, [-9, -9, -9])  # of places in the prompt that is computed again
    write(kept, 1, 6, [-30, -40])
    assert same(kept.take("a", 4, 4), [-1, -2, -30, -40])
    kept.begin("b", 0, 4, 12)
    write(kept, 0, 4, [-1, -2, -3])
    kept.end("b")
    kept.begin("b", 0, 6, 12)
    assert same(kept.take("b", 4, 3), [-1, -2, NONE])  # what was lost is missing, and never an old number


def test_of_ended_requests_that_nobody_asks_for_the_oldest_go_first(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kept_copies, "ENDED_BYTES", 3 * 4 * 4)
    kept = table()
    kept.begin("preempted", 1, 0, 3)
    write(kept, 1, 0, [-5])
    kept.end("preempted")
    kept.begin("preempted", 1, 1, 3)  # it runs again, and its first piece with it
    for name in "abcd":
        kept.begin(name, 0, 0, 3)
        write(kept, 0, 0, [-1, -2, -3])
        kept.end(name)
    assert same(kept.take("a", 0, 1), [NONE])
    assert same(kept.take("preempted", 0, 1), [-5])
    for name in "bcd":
        assert same(kept.take(name, 0, 3), [-1, -2, -3])


# ---- both model runners, as stand-ins --------------------------------------------------------------------------------


class Older:
    """The places of vLLM's older model runner that are used: requests move within the batch."""

    def __init__(self) -> None:
        self.requests: dict[str, Any] = {}
        self.input_batch = SimpleNamespace(req_ids=[])
        self.optimistic_seq_lens_cpu = torch.zeros(8, dtype=torch.int32)
        self.discard_request_mask = SimpleNamespace(np=np.zeros(8, dtype=bool))
        self.sampler = SimpleNamespace(sample=self.draw, compute_logprobs=lambda logits: logits.log_softmax(-1))
        self.gives = True

    def draw(self, logits: torch.Tensor, sampling_metadata: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        return logits.argmax(-1).int(), logits.log_softmax(-1) if self.gives else None

    def _update_states(self, scheduler_output: Any) -> None:
        for name in scheduler_output.finished_req_ids:
            del self.requests[name]

    def step(self, lengths: dict[str, int], finished: Sequence[str] = (), dropped: Sequence[str] = ()) -> torch.Tensor:
        """The requests of a step by their lengths; the log-prob of each one's token, in that order. `dropped`: whose token the
        engine does not keep."""
        for name in lengths:
            params = SimpleNamespace(max_tokens=6)
            self.requests.setdefault(name, SimpleNamespace(sampling_params=params, num_prompt_tokens=2))
        self._update_states(SimpleNamespace(finished_req_ids=finished))
        self.input_batch.req_ids = list(lengths)
        self.discard_request_mask.np[: len(lengths)] = [name in dropped for name in lengths]
        self.optimistic_seq_lens_cpu[: len(lengths)] = torch.tensor(list(lengths.values()), dtype=torch.int32)
        logits = torch.randn(len(lengths), 5)
        self.sampler.sample(logits, None)
        return logits.log_softmax(-1).max(-1).values


@pytest.mark.parametrize("gives", [True, False])
def test_rows_follow_requests_that_change_places_and_outnumber_the_table(gives: bool):
    torch.manual_seed(0)
    runner = Older()
    runner.gives = gives
    kept = keep(runner, 2, 12, CPU)
    first = runner.step({"a": 2, "b": 3, "c": 2})
    second = runner.step({"c": 3, "a": 3})
    third = runner.step({"d": 2, "c": 4}, finished=("a",))
    assert same(kept.take("a", 2, 2), [first[0].item(), second[1].item()])
    assert same(kept.take("c", 2, 3), [first[2].item(), second[0].item(), third[1].item()])
    assert same(kept.take("b", 3, 1), [first[1].item()])
    runner.step({"d": 3}, finished=("b", "c"))
    kept.undo()
    runner.step({"d": 4})
    assert np.isnan(kept.take("d", 2, 3)).tolist() == [False, False, True]


def test_a_preempted_request_that_is_computed_again_in_parts_keeps_what_it_had():
    """At the end of each part but the last the engine draws a token that it drops, in the place of one that it has."""
    runner = Older()
    kept = keep(runner, 2, 12, CPU)
    first = runner.step({"a": 2})
    second = runner.step({"a": 3})
    runner.step({"b": 2})
    runner.step({"a": 2, "b": 3}, dropped=("a",))
    runner.step({"a": 3, "b": 4}, dropped=("a",))
    third = runner.step({"a": 4})
    assert same(kept.take("a", 2, 3), [first[0].item(), second[0].item(), third[0].item()])


@dataclass
class Slots:
    """Those of vLLM's newer model runner: the last free one goes first."""

    req_id_to_index: dict[str, int] = field(default_factory=dict)
    free: list[int] = field(default_factory=lambda: [0, 1])

    def add_request(
        self, req_id: str, prompt_len: int, all_token_ids: list[int], num_computed_tokens: int, max_tokens: int
    ) -> None:
        self.req_id_to_index[req_id] = self.free.pop()

    def remove_request(self, req_id: str) -> int | None:
        if (slot := self.req_id_to_index.pop(req_id, None)) is not None:
            self.free.append(slot)
        return slot


class Newer:
    """The places of vLLM's newer model runner that are used."""

    def __init__(self) -> None:
        self.req_states = Slots()
        self.sampler = SimpleNamespace(sample=self.draw)
        self.fused: list[bool] = []

    def draw(
        self, logits: torch.Tensor, expanded_idx_mapping: torch.Tensor, pos: torch.Tensor, return_logprobs: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.fused.append(not return_logprobs)
        return logits.argmax(-1), logits

    def add(self, name: str, prompt: int, tokens: int) -> None:
        self.req_states.add_request(name, prompt, [0] * tokens, num_computed_tokens=0, max_tokens=6)

    def step(self, lengths: dict[str, int]) -> torch.Tensor:
        slots = torch.tensor([self.req_states.req_id_to_index[name] for name in lengths], dtype=torch.int32)
        logits = torch.randn(len(lengths), 5)
        self.sampler.sample(logits, slots, torch.tensor(list(lengths.values())) - 1)
        return logits.log_softmax(-1).max(-1).values


def test_slots_change_hands_and_a_preempted_request_comes_back_in_another(monkeypatch: pytest.MonkeyPatch):
    kernels = SimpleNamespace(compute_token_logprobs=lambda logits, ids: logits.log_softmax(-1).gather(-1, ids))
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.gpu.sample.logprob", kernels)  # vLLM's own needs a GPU
    torch.manual_seed(0)
    runner = Newer()
    kept = keep(runner, 2, 12, CPU)
    runner.add("a", 2, 2)
    runner.add("b", 3, 3)
    first = runner.step({"a": 2, "b": 3})
    runner.step({"a": 3, "b": 4})  # of a's the engine drops this one
    runner.req_states.remove_request("a")
    runner.add("c", 2, 2)
    other = runner.step({"c": 2})
    runner.req_states.remove_request("b")
    runner.add("a", 2, 3)
    runner.step({"a": 2})  # a part of what is computed again
    last = runner.step({"a": 3, "c": 3})
    assert same(kept.take("a", 2, 2), [first[0].item(), last[0].item()])
    assert same(kept.take("c", 2, 2), [other[0].item(), last[1].item()])
    assert same(kept.take("b", 3, 1), [first[1].item()])
    assert not any(runner.fused)
    kept.undo()
    runner.step({"a": 4})
    assert runner.fused[-1]


def test_what_samples_elsewhere_or_looks_otherwise_is_refused_and_left_as_it_was():
    for change, why in (
        ({"speculative_config": object()}, "speculative decoding"),
        ({"batch_sharder": object()}, "a share of the requests"),
        ({"sampler": None}, "no sampler"),
    ):
        runner = Older()
        for name, value in change.items():
            setattr(runner, name, value)
        with pytest.raises(CannotKeep, match=why):
            keep(runner, 2, 12, CPU)
    runner = Older()
    runner.sampler.sample = other = lambda numbers: numbers
    with pytest.raises(CannotKeep, match="has no 'logits'"):
        keep(runner, 2, 12, CPU)
    assert runner.sampler.sample is other
    runner = Older()
    del runner.optimistic_seq_lens_cpu
    with pytest.raises(CannotKeep, match="does not tell the positions"):
        keep(runner, 2, 12, CPU)


# ---- the choice ------------------------------------------------------------------------------------------------------


@dataclass
class Workers:
    """Answers as the workers do: token i of a request has log-prob -(i + 1), in the worker `off` more."""

    cause: str = ""
    off: float = 0.0
    calls: list[tuple[str, Any]] = field(default_factory=list)
    fail: bool = False

    async def __call__(self, method: str, *arguments: Any) -> list[Any]:
        self.calls.append((method, *arguments))
        await asyncio.sleep(0)
        if self.fail:
            raise RuntimeError("the engine is gone")
        if method == KEEP:
            return [self.cause, ""]
        if method == TAKE:
            numbers = [told(count) + self.off for _, first, count in arguments[0]]
            return [np.concatenate(numbers).astype(np.float32).tobytes(), b""]
        return [None, None]


def told(count: int) -> np.ndarray:
    return -np.arange(1.0, count + 1.0, dtype=np.float32)


def completion(count: int, *, with_numbers: bool) -> Any:
    numbers = SimpleNamespace(logprobs=told(count).tolist(), start_indices=list(range(count))) if with_numbers else None
    return SimpleNamespace(token_ids=list(range(count)), logprobs=numbers)


async def trial(workers: Workers) -> LogprobPath:
    path = LogprobPath(workers)
    await path.begin_trial()
    for count in (1, 3):
        assert same(await path.of(completion(count, with_numbers=True), f"r{count}", 4), told(count).tolist())
    await path.end_trial()
    return path


async def test_alike_both_ways_log_probs_are_not_asked_of_vllm_any_more():
    workers = Workers()
    path = await trial(workers)
    assert (path.asked, path.kept) == (False, True)
    assert same(await path.of(completion(2, with_numbers=False), "r", 4), [-1, -2])
    assert workers.calls[-1] == (TAKE, [["r", 4, 2]])


@pytest.mark.parametrize("cause", ["", "speculative decoding samples elsewhere"])
async def test_where_they_differ_or_cannot_be_kept_they_come_with_each_token(cause: str, caplog: pytest.LogCaptureFixture):
    workers = Workers(cause, off=1e-7)
    caplog.set_level(logging.INFO)
    path = await trial(workers)
    assert (path.asked, path.kept) == (True, False)
    assert (DROP in [method for method, *_ in workers.calls]) == (not cause)
    assert cause in caplog.text if cause else "2 of 2 answers had other numbers in the worker" in caplog.text
    assert same(await path.of(completion(2, with_numbers=True), "r", 4), [-1, -2])


async def test_who_comes_while_a_question_is_under_way_is_asked_for_by_the_next_and_leaving_harms_nobody():
    workers = Workers()
    path = await trial(workers)
    before = len(workers.calls)
    tasks = [asyncio.create_task(path.of(completion(1 + i, with_numbers=False), f"r{i}", 4)) for i in range(9)]
    await asyncio.sleep(0)
    tasks[3].cancel()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(found[3], asyncio.CancelledError)
    others = {i: each for i, each in enumerate(found) if isinstance(each, np.ndarray) and same(each, told(1 + i).tolist())}
    assert list(others) == [0, 1, 2, 4, 5, 6, 7, 8]
    assert len(workers.calls) - before <= 2
    assert not path._taking._found


async def test_a_dead_engine_is_everybodys_error():
    workers = Workers()
    path = await trial(workers)
    workers.fail = True
    asked = [path.of(completion(1, with_numbers=False), f"r{i}", 4) for i in range(3)]
    found = await asyncio.gather(*asked, return_exceptions=True)
    assert [str(each) for each in found] == ["the engine is gone"] * 3
    assert not path._taking._found
