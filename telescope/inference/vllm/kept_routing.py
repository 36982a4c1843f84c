"""Which experts each token went to, kept in the worker that computed it until somebody takes it, once, when a request has
ended.

vLLM can tell them itself: 0.32 by its newer model runner alone, request by request in each step, others by a copy off the
device in each step. Here routers write to a buffer of the step, a CUDA graph's captured ones too, and behind the forward pass
one copy on the device brings it to a table with a place for each one of the KV cache. What a request went through lies where
its keys and values lie. So prefixes out of the cache have the record of the request that computed them, the parts of a long
prompt need no care, and what is computed again is recorded again. When a request ends, the record of its KV blocks leaves by
one copy.

Owns the buffer, the table, and which KV blocks a request has (`KeptRouting`), how vLLM's two model runners fill them
(`keep_routing`), and their room on a card. What of it is right to train on is maths/routing.py's and the trainer's.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from telescope.inference.vllm.kept_copies import CannotKeep, EndedRequests, HostCopy, copy_to_host, send
from telescope.maths import routing
from telescope.weights.device_streams import new_stream

SAID_EVERY_S = 10.0
"""How often at most it is said that records were dropped."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RoutersShape:
    """L layers with experts, E of them each, of which a token goes to K."""

    layers: int
    experts: int
    top_k: int

    @property
    def dtype(self) -> np.dtype:
        return routing.dtype_of(self.experts)

    @property
    def token_bytes(self) -> int:
        return self.layers * self.top_k * self.dtype.itemsize


class KeptRouting:
    """A table [blocks, block_size, L, K] on `device`, and a step's buffer [tokens, L, K]. Used from the thread that runs the
    model.

    A place that no router wrote to has the mark of what is not recorded. A request that is preempted loses its KV blocks: what
    was there is kept as that of one that ended, until it runs again. `running_tokens`: of the requests that run, at most; each
    has a copy of its own when it ends, also of KV blocks that it shares.
    """

    def __init__(
        self, shape: RoutersShape, tokens: int, blocks: int, block_size: int, device: torch.device, *, running_tokens: int
    ) -> None:
        dtype = torch.uint8 if shape.dtype == np.uint8 else torch.int16
        self.shape = shape
        self._mark = routing.unrecorded(shape.dtype)
        place = (shape.layers, shape.top_k)
        self._step = torch.full((tokens, *place), self._mark, dtype=dtype, device=device)
        self._table = torch.full((blocks, block_size, *place), self._mark, dtype=dtype, device=device)
        self._blocks: dict[str, list[int]] = {}
        """Of requests that run, in order of their positions."""
        self._ended = EndedRequests(running_tokens * shape.token_bytes)
        self._taken: set[str] = set()
        """Those of whom all was taken while they still had their KV blocks."""
        self._aside = new_stream(device)
        self._said_s = -math.inf

    def writer(self, layer: int) -> Callable[[torch.Tensor], None]:
        """What the router of a layer, counted from 0, calls with its choice [tokens, K]."""

        def write(experts: torch.Tensor) -> None:
            self._step[: experts.shape[0], layer].copy_(experts)

        return write

    def begin_step(self, order: Any) -> None:
        """Follow the KV blocks of vLLM's SchedulerOutput, before any of them has a new owner's values."""
        going_on = order.scheduled_cached_reqs
        begun = {new.req_id for new in order.scheduled_new_reqs} | set(going_on.resumed_req_ids)
        preempted = set(getattr(order, "preempted_req_ids", None) or ())
        for name in (*order.finished_req_ids, *(preempted - begun)):  # who begins again is recorded anew: nothing is copied
            self._end(name)
        for new in order.scheduled_new_reqs:
            self._begin(new.req_id, new.block_ids)
        for name, added in zip(going_on.req_ids, going_on.new_block_ids, strict=True):
            if name in going_on.resumed_req_ids:
                self._begin(name, added)
            elif added is not None:
                self._blocks[name].extend(added[0])
        self._step[: order.total_num_scheduled_tokens].fill_(self._mark)

    def end_step(self, places: torch.Tensor) -> None:
        """Keep what routers have written of the step's tokens; `places` [tokens]: where they lie in the KV cache, on the
        device."""
        self._table.view(-1, *self._step.shape[1:]).index_copy_(0, places.long(), self._step[: len(places)])

    def take(self, name: str, tokens: int) -> np.ndarray:
        """[tokens, L, K]: of a request's first tokens; what was not kept has the mark. Once: what was taken is forgotten. Their
        steps have ended, since somebody has the tokens."""
        taken = np.full((tokens, self.shape.layers, self.shape.top_k), self._mark, self.shape.dtype)
        pieces = self._ended.forget(name)
        if name in self._blocks:
            self._taken.add(name)
            pieces = [self._copied(name, self._aside)]
        elif not pieces:
            self._warn_of_dropped(name)
        for piece in pieces:
            found = piece.read()
            found = found.reshape(-1, *found.shape[2:])[:tokens]
            taken[: len(found)] = found
        return taken

    def _warn_of_dropped(self, name: str) -> None:
        nbytes, now = self._ended.find_dropped(name), time.monotonic()
        if nbytes and now - self._said_s >= SAID_EVERY_S:
            self._said_s = now
            log.warning(
                "the recorded routing of an answer was dropped, %d bytes, since ended requests had more than %d and "
                "its server asked too late (has it CPU cores enough?): the trainer chooses the experts of its tokens",
                nbytes,
                self._ended.most,
            )

    def _begin(self, name: str, blocks: Sequence[Sequence[int]]) -> None:
        self._ended.forget(name)
        self._taken.discard(name)
        self._blocks[name] = list(blocks[0])

    def _end(self, name: str) -> None:
        """The copy stands in the stream in front of whatever the KV blocks' next owner writes."""
        if name not in self._blocks:
            return
        if name not in self._taken:
            self._ended.keep(name, [self._copied(name, None)])
        self._taken.discard(name)
        del self._blocks[name]

    def _copied(self, name: str, stream: Any) -> HostCopy:
        """`stream`: another one than the model's; the copy does not wait for the step that is under way, which writes behind
        the tokens that somebody has."""
        with torch.cuda.stream(stream) if stream is not None else nullcontext():
            blocks = send(torch.tensor(self._blocks[name], dtype=torch.int64), self._table.device)
            return copy_to_host(self._table.index_select(0, blocks), 0)


def find_routers(model: Any) -> list[Any]:
    """vLLM's routers of a model's layers with experts, in order. Raises `CannotKeep` where there are none, or unlike ones."""
    named: list[Any] = [getattr(module, "router", None) for module in model.modules()]
    routers = list({id(router): router for router in named if hasattr(router, "set_capture_fn")}.values())
    if not routers:
        raise CannotKeep("the model has no layer with experts whose router vLLM lets one listen to")
    if len({(router.top_k, router.global_num_experts) for router in routers}) > 1:
        raise CannotKeep("layers of the model have different numbers of experts")
    return routers


def shape_of(routers: Sequence[Any]) -> RoutersShape:
    """Raises `CannotKeep`."""
    try:
        shape = RoutersShape(len(routers), int(routers[0].global_num_experts), int(routers[0].top_k))
        routing.dtype_of(shape.experts)
    except ValueError as error:
        raise CannotKeep(str(error)) from error
    return shape


def keep_routing(worker: Any, kv_cache_config: Any) -> KeptRouting:
    """From now on the routing of this worker's tokens is kept. To be called once its KV cache is there, and before CUDA graphs
    are captured. Raises `CannotKeep`, and has then changed nothing."""
    runner, config = worker.model_runner, worker.vllm_config
    _refuse_shares(config)
    block_size = _block_size(kv_cache_config)
    routers = find_routers(runner.get_model())
    places = _places_of(runner)
    tokens = config.scheduler_config.max_num_batched_tokens + config.parallel_config.tensor_parallel_size  # some pad to it
    device = torch.device(worker.device or "cpu")
    longest = -(-config.model_config.max_model_len // block_size) * block_size
    running = config.scheduler_config.max_num_seqs * longest
    shape = shape_of(routers)
    kept = KeptRouting(shape, tokens, kv_cache_config.num_blocks, block_size, device, running_tokens=running)
    for layer, router in enumerate(routers):
        router.set_capture_fn(kept.writer(layer))
    execute = worker.execute_model

    def execute_and_keep(scheduler_output: Any, *given: Any, **named: Any) -> Any:
        with torch.inference_mode():
            kept.begin_step(scheduler_output)
        answer = execute(scheduler_output, *given, **named)
        if count := scheduler_output.total_num_scheduled_tokens:
            with torch.inference_mode():
                kept.end_step(places()[:count])
        return answer

    worker.execute_model = execute_and_keep
    return kept


def room(worker: Any, available: int) -> int:
    """Bytes of a card's `available` ones, out of which vLLM would make its KV cache, that the table takes beside it; none
    where nothing will be kept."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    specs = worker.get_kv_cache_spec().values()
    if not all(isinstance(spec, FullAttentionSpec) for spec in specs):
        return 0
    try:
        shape = shape_of(find_routers(worker.model_runner.get_model()))
    except CannotKeep:
        return 0
    token_bytes = sum(spec.page_size_bytes / spec.block_size for spec in specs)
    tokens = int(worker.vllm_config.scheduler_config.max_num_batched_tokens)
    return tokens * shape.token_bytes + int(available * shape.token_bytes / (shape.token_bytes + token_bytes))


def _refuse_shares(config: Any) -> None:
    """Raises `CannotKeep` where a worker's routers see other tokens than its step has, or keys and values come from
    elsewhere."""
    parallel = config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise CannotKeep(f"inference.vllm.{name}={getattr(parallel, name)} spreads a step over workers")
    for name in ("use_ubatching", "enable_dbo", "use_sequence_parallel_moe"):
        if getattr(parallel, name, False):
            raise CannotKeep(f"vLLM's {name} cuts a step's tokens into parts")
    if getattr(config, "speculative_config", None) is not None:
        raise CannotKeep("speculative decoding drops tokens that were computed")
    if getattr(config, "kv_transfer_config", None) is not None:
        raise CannotKeep("inference.vllm.kv_transfer_config brings keys and values that were computed elsewhere")


def _block_size(kv_cache_config: Any) -> int:
    """Tokens of a KV block. Raises `CannotKeep` unless all layers have one kind of KV cache that keeps every token."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    kinds = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    if len(kinds) != 1 or not isinstance(kinds[0], FullAttentionSpec):
        raise CannotKeep(f"the KV cache is not one of full attention alone: {[type(kind).__name__ for kind in kinds]}")
    return int(kinds[0].block_size)


def _places_of(runner: Any) -> Callable[[], torch.Tensor]:
    """How a step's places in the KV cache are read, in order of its tokens, while its forward pass is the last one launched.
    Raises `CannotKeep`."""
    if hasattr(runner, "req_states"):
        tables = runner.block_tables
        if not hasattr(tables, "slot_mappings"):
            raise CannotKeep(f"this vLLM's {type(tables).__name__} has no 'slot_mappings'")
        return lambda: tables.slot_mappings[0]
    if not hasattr(runner.input_batch.block_table[0], "slot_mapping"):
        raise CannotKeep(f"this vLLM's {type(runner.input_batch.block_table[0]).__name__} has no 'slot_mapping'")
    return lambda: runner.input_batch.block_table[0].slot_mapping.gpu
