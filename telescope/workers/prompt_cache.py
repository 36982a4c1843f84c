"""Opening prompts made and tokenised off the event loop: ahead where the orchestrator said what comes next, else when asked.

Owns the threads of it and what they have made. Holds no random state: what is made ahead follows from the orchestrator's
position in the data, and all of it may be forgotten at any moment.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor

from telescope.environments.base import Prompt
from telescope.environments.template import ChatTemplate, Rendered
from telescope.records import PromptRef
from telescope.workers.loading import LoadedEnvironment

Made = tuple[Prompt, Rendered | None]
"""A prompt with its tokens; without them where the template refuses it: the dialogue will say why."""
KEPT = 4096
"""Prompts remembered; those used longest ago go first."""
THREADS_ON_DEMAND = 4


class PromptCache:
    """Used from one event loop."""

    def __init__(self, template: ChatTemplate | None) -> None:
        """`template`: None where prompts become no tokens here."""
        self.template = template
        self._made: OrderedDict[PromptRef, Future[Made]] = OrderedDict()
        self._in_line: set[PromptRef] = set()  # made ahead, as far as nobody has asked for them
        self._ahead = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        self._now = ThreadPoolExecutor(THREADS_ON_DEMAND, thread_name_prefix="opening")

    def prefetch(self, loaded: LoadedEnvironment, references: Iterable[PromptRef]) -> None:
        """Begin to make these prompts, in this order; those known already are passed over."""
        for reference in references:
            if reference not in self._made:
                self._in_line.add(reference)
                self._keep(reference, self._ahead.submit(self._make, loaded, reference))

    async def get_prompt(self, loaded: LoadedEnvironment, reference: PromptRef) -> Prompt:
        """The prompt, its tokens remembered by the template. Raises what making it raises, which is then tried again."""
        future = self._made.get(reference)
        if future is None or (reference in self._in_line and future.cancel()):  # not begun, and a rollout waits: it goes first
            future = self._now.submit(self._make, loaded, reference)
            self._keep(reference, future)
        self._in_line.discard(reference)
        self._made.move_to_end(reference)
        try:
            prompt, rendered = await asyncio.shield(asyncio.wrap_future(future))
        except (Exception, CancelledError):
            self._made.pop(reference, None)
            raise
        if rendered is not None and self.template is not None:
            self.template.remember(prompt.turns, rendered)
        return prompt

    def is_ready(self, reference: PromptRef) -> bool:
        """Whether the prompt and its tokens are there."""
        future = self._made.get(reference)
        return future is not None and future.done() and not future.cancelled()

    def close(self) -> None:
        """Waits for no thread: one may hang in an environment's own code."""
        for pool in (self._ahead, self._now):
            pool.shutdown(wait=False, cancel_futures=True)

    def _keep(self, reference: PromptRef, future: Future[Made]) -> None:
        self._made[reference] = future
        if len(self._made) > KEPT:
            oldest, forgotten = self._made.popitem(last=False)
            if oldest in self._in_line:
                self._in_line.discard(oldest)
                forgotten.cancel()

    def _make(self, loaded: LoadedEnvironment, reference: PromptRef) -> Made:
        try:
            prompt = loaded.prompts[reference.split][reference.index]
        except StopIteration as error:  # no future of the event loop can carry it
            raise RuntimeError(f"it raised StopIteration {error}".rstrip()) from error
        if self.template is None:
            return prompt, None
        try:
            return prompt, self.template.render(prompt.turns)
        except Exception:  # noqa: BLE001 a thread's edge: the rollout meets the same error, and tells it with its cause
            return prompt, None
