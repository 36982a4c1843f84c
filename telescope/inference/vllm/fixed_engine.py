"""vLLM with weights that never change: nothing is opened for updates and no memory is set aside for them."""

from __future__ import annotations

from telescope.inference.vllm.engine import VllmEngine


class FixedEngine(VllmEngine):
    """See `Engine`; no version is ever prepared."""

    async def _open(self) -> None:
        """There is nothing to be found out."""

    def _memory(self) -> dict[str, float]:
        """All of the server's share is vLLM's."""
        return {}
