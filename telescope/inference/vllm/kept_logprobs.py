"""Log-probs of sampled tokens, kept in the worker that sampled them until somebody takes them, once, when a request has ended.

vLLM carries a log-prob that a request asks for through the engine's process, serialisation and the front end, one number for
each request in each step, in Python: up to half of all tokens per second are lost to it. Here the sampler's own numbers are
written into a table on the device, a row for each request and a column for each position of a token, and a row leaves by one
copy.

Owns the table (`KeptLogprobs`) and how vLLM's two model runners fill it (`keep`). It takes the numbers from the processed
logits that the sampler drew from, as vLLM's `logprobs_mode=processed_logprobs` does, so they are the same to the bit; the
engine compares both at its start. A place that was never written is NaN, which nobody takes for a log-prob.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from telescope.inference.vllm.kept_copies import CannotKeep, EndedRequests, HostCopy, copy_to_host, send
from telescope.weights.device_streams import new_stream


@dataclass
class _Live:
    """A request's row. `first`, `last`: positions of its tokens that may be sampled while it has this row. `before`: of rows
    that it had, where it lost them."""

    row: int
    first: int
    last: int
    before: list[HostCopy]


class KeptLogprobs:
    """A table [rows, positions] float32 on `device`. Used from the thread that runs the model.

    A request that loses its row, as one that is preempted may, and gets another one later has a piece of each; a later piece is
    right where two overlap. Nobody's number: what is written to the last column, `nowhere`.
    """

    def __init__(self, device: torch.device, rows: int, positions: int) -> None:
        self.values = torch.full((rows, positions + 1), torch.nan, dtype=torch.float32, device=device)
        self.nowhere = positions
        self._live: dict[str, _Live] = {}
        self._ended = EndedRequests()
        self._taken: set[str] = set()
        """Those of whom all was taken while they still had a row."""
        self._aside = new_stream(device)
        self.undo: Callable[[], None] = lambda: None
        """Makes the model runner forget this table."""

    def begin(self, name: str, row: int, first: int, last: int) -> None:
        """Give a row to a request: from now on positions `first` to `last` of it may be written."""
        self.values[row].fill_(torch.nan)
        self._live[name] = _Live(row, first, min(last + 1, self.nowhere), self._ended.forget(name))

    def row_of(self, name: str) -> int | None:
        live = self._live.get(name)
        return None if live is None else live.row

    def write(self, rows: torch.Tensor, positions: torch.Tensor, logprobs: torch.Tensor) -> None:
        """All three [requests], on the device."""
        self.values.index_put_((rows.long(), positions.long()), logprobs)

    def end(self, name: str) -> int | None:
        """Take a request's row away, and keep what is in it; the row, which may have another owner at once. The copy stands
        in the stream in front of whatever that one writes."""
        live = self._live.pop(name, None)
        if live is None:
            return None
        if name in self._taken:
            self._taken.discard(name)
            return live.row
        self._ended.keep(name, [*live.before, self._copied(live, None)])
        return live.row

    def grow(self) -> range:
        """Have twice as many rows; the new ones."""
        rows = self.values.shape[0]
        self.values = torch.cat([self.values, torch.full_like(self.values, torch.nan)])
        if self._aside is not None:
            self._aside.wait_stream(torch.cuda.current_stream(self.values.device))
        return range(rows, 2 * rows)

    def take(self, name: str, first: int, count: int) -> np.ndarray:
        """[count] float32: log-probs of the tokens from position `first` on, NaN where none was kept. Once: what was taken is
        forgotten. Their steps have ended, since somebody has the tokens."""
        taken = np.full(count, np.nan, dtype=np.float32)
        pieces = self._ended.forget(name)
        if (live := self._live.get(name)) is not None:
            self._taken.add(name)
            pieces = [*live.before, self._copied(live, self._aside)]
        for piece in pieces:
            place = max(0, piece.first - first)
            found = piece.read()[max(0, first - piece.first) :][: max(0, count - place)]
            taken[place:] = np.nan
            taken[place : place + len(found)] = found
        return taken

    def _copied(self, live: _Live, stream: Any) -> HostCopy:
        """`stream`: another one than the model's; the copy does not wait for the step that is under way."""
        with torch.cuda.stream(stream) if stream is not None else nullcontext():
            return copy_to_host(self.values[live.row, live.first : live.last], live.first)


def keep(runner: Any, rows: int, positions: int, device: torch.device) -> KeptLogprobs:
    """From now on this model runner's sampled log-probs are kept. `rows`: requests that may run at once; `positions`: of the
    longest one. Raises `CannotKeep`, and has then changed nothing."""
    if getattr(runner, "speculative_config", None) is not None:
        raise CannotKeep("speculative decoding samples elsewhere")
    if getattr(runner, "batch_sharder", None) is not None:
        raise CannotKeep("each worker samples a share of the requests")
    if getattr(runner, "sampler", None) is None:
        raise CannotKeep("the model runner has no sampler")
    kept = KeptLogprobs(device, rows, positions)
    if hasattr(runner, "req_states"):
        _fill_by_slot(runner, kept)
    else:
        _fill_by_name(runner, kept)
    return kept


class _Arguments:
    """Reads some arguments of a function's calls, which vLLM gives by place or by name. Raises `CannotKeep` where the function
    has no such ones."""

    def __init__(self, function: Callable[..., Any], *names: str) -> None:
        places = list(inspect.signature(function).parameters)
        if missing := [name for name in names if name not in places]:
            raise CannotKeep(f"this vLLM's {function.__qualname__} has no {missing[0]!r}")
        self._places = {name: places.index(name) for name in names}

    def read(self, name: str, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        place = self._places[name]
        return given[place] if place < len(given) else named[name]

    def replaced(
        self, name: str, value: Any, given: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        place = self._places[name]
        if place < len(given):
            return (*given[:place], value, *given[place + 1 :]), named
        return given, {**named, name: value}


def _fill_by_slot(runner: Any, kept: KeptLogprobs) -> None:
    """vLLM's newer model runner: a request has one slot as long as it runs, and the GPU knows the slots of a step."""
    from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs

    states, sampler = runner.req_states, runner.sampler
    add, remove, sample = states.add_request, states.remove_request, sampler.sample
    to_add = _Arguments(add, "req_id", "prompt_len", "all_token_ids", "max_tokens")
    to_sample = _Arguments(sample, "expanded_idx_mapping", "pos", "return_logprobs")

    def add_request(*given: Any, **named: Any) -> Any:
        answer = add(*given, **named)
        name, prompt, tokens, most = (
            to_add.read(each, given, named) for each in ("req_id", "prompt_len", "all_token_ids", "max_tokens")
        )
        kept.begin(name, states.req_id_to_index[name], len(tokens), prompt + most)
        return answer

    def remove_request(req_id: str) -> Any:
        kept.end(req_id)
        return remove(req_id)

    def sample_and_keep(*given: Any, **named: Any) -> Any:
        rows, after = (to_sample.read(each, given, named) for each in ("expanded_idx_mapping", "pos"))
        # True: else a fused kernel may draw, which leaves no processed logits
        given, named = to_sample.replaced("return_logprobs", True, given, named)
        sampled, logits = sample(*given, **named)
        kept.write(rows, after + 1, compute_token_logprobs(logits, sampled.view(-1, 1))[:, 0])
        return sampled, logits

    def undo() -> None:
        states.add_request, states.remove_request, sampler.sample = add, remove, sample

    states.add_request, states.remove_request, sampler.sample = add_request, remove_request, sample_and_keep
    kept.undo = undo


def _fill_by_name(runner: Any, kept: KeptLogprobs) -> None:
    """vLLM's older model runner, and the CPU's: requests change places in the batch, so rows are ours, by name, and kept by a
    request that is preempted."""
    sampler = runner.sampler
    update, sample = runner._update_states, sampler.sample
    _Arguments(update, "scheduler_output")
    _Arguments(sample, "logits", "sampling_metadata")
    told = ("requests", "input_batch", "optimistic_seq_lens_cpu", "discard_request_mask")
    if not all(hasattr(runner, name) for name in told):
        raise CannotKeep(f"this vLLM's {type(runner).__name__} does not tell the positions of a step")
    free = list(range(kept.values.shape[0]))

    def update_states(scheduler_output: Any) -> Any:
        for name in scheduler_output.finished_req_ids:
            if (row := kept.end(name)) is not None:
                free.append(row)
        return update(scheduler_output)

    def row_for(name: str, position: int) -> int:
        if (row := kept.row_of(name)) is not None:
            return row
        if not free:
            free.extend(kept.grow())
        state = runner.requests[name]
        row = free.pop()
        most = state.sampling_params.max_tokens if state.sampling_params is not None else 1
        kept.begin(name, row, position, state.num_prompt_tokens + most)
        return row

    def sample_and_keep(logits: torch.Tensor, sampling_metadata: Any, *given: Any, **named: Any) -> Any:
        sampled, logprobs = sample(logits, sampling_metadata, *given, **named)
        names = runner.input_batch.req_ids
        if len(names) == len(sampled):
            if logprobs is None:  # where all are greedy, vLLM gives none unless one was asked for
                logprobs = sampler.compute_logprobs(logits)
            positions = runner.optimistic_seq_lens_cpu[: len(names)]
            rows = torch.tensor([row_for(name, place) for name, place in zip(names, positions.tolist(), strict=True)])
            # at the end of a part of a prompt, or of an answer that is computed again, vLLM draws a token and drops it
            dropped = torch.from_numpy(runner.discard_request_mask.np[: len(names)])
            positions = positions.masked_fill(dropped, kept.nowhere)
            chosen = logprobs.gather(-1, sampled.long().view(-1, 1))[:, 0]
            kept.write(send(rows, logits.device), send(positions, logits.device), chosen)
        return sampled, logprobs

    def undo() -> None:
        runner._update_states, sampler.sample = update, sample

    runner._update_states, sampler.sample = update_states, sample_and_keep
    kept.undo = undo
