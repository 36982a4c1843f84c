"""The worker's methods where servers keep their routing, and how they are there in time.

CUDA graphs keep what was called while they were captured, so routers must be listened to before that: importing this module,
which vLLM does in the worker before it loads a model, changes two of its worker's methods. Where no run asks for routing nobody
imports it.
"""

from __future__ import annotations

from typing import Any

from telescope.inference.vllm.kept_copies import CannotKeep
from telescope.inference.vllm.kept_routing import KeptRouting, keep_routing, room
from telescope.inference.vllm.worker_extension import WeightExtension


class RoutingExtension(WeightExtension):
    """One worker of several keeps the routing: all of them route every token alike."""

    telescope_routing: KeptRouting | None = None
    telescope_no_routing: str = "vLLM made no KV cache"

    def telescope_routing_shape(self) -> tuple[str, int, int, int]:
        """Why no routing is kept, or empty; and layers with experts, experts a layer, experts a token."""
        kept = self.telescope_routing
        if kept is None:
            return self.telescope_no_routing, 0, 0, 0
        return "", kept.shape.layers, kept.shape.experts, kept.shape.top_k

    def telescope_take_routing(self, wanted: list[tuple[str, int]]) -> bytes:
        """Of ended requests, by vLLM's names: the routing of so many of their first tokens, [tokens, L, K], one request after
        another."""
        if self.telescope_routing is None:
            return b""
        return b"".join(self.telescope_routing.take(*one).tobytes() for one in wanted)


def keep_from_the_start() -> None:
    """Have vLLM's workers leave room for the table, and keep their routing as soon as they have a KV cache."""
    from vllm.v1.worker.gpu_worker import Worker

    measure, initialize = Worker.determine_available_memory, Worker.initialize_from_config

    def determine_available_memory(self: Any) -> int:
        available = int(measure(self))
        return available - room(self, available)

    def initialize_from_config(self: Any, kv_cache_config: Any) -> None:
        initialize(self, kv_cache_config)
        if self.rank:
            return
        try:
            self.telescope_routing = keep_routing(self, kv_cache_config)
        except CannotKeep as cause:
            self.telescope_no_routing = str(cause)
        except (ImportError, AttributeError, TypeError, ValueError, RuntimeError) as cause:  # another vLLM, or no memory
            self.telescope_no_routing = f"{type(cause).__name__}: {cause}"

    Worker.determine_available_memory, Worker.initialize_from_config = determine_available_memory, initialize_from_config


keep_from_the_start()
