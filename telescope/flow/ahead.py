"""Which prompts workers may make ready: those of the next groups to be sent out, a bounded number ahead.

Looks at the draws to come without drawing: what is said here changes no decision, and where a prompt that came back pushes in,
the guess is mended when its group is admitted.
"""

from __future__ import annotations

from telescope.flow.draws import Draws
from telescope.records import PromptRef

REMEMBERED = 4
"""Times the number ahead: names of which is known that they were given. Workers keep more."""


class Ahead:
    """Groups are sent out in order of their ids: the prompts of `size` of them are named beyond the last one sent."""

    def __init__(self, draws: Draws, size: int) -> None:
        self._draws = draws
        self._size = size
        self._scout = draws.scout()
        self._admitted: dict[int, PromptRef] = {}  # not sent out yet, by group id
        self._foretold: dict[int, PromptRef | None] = {}  # not admitted yet; None: it hangs on results to come
        self._sent = draws.next_group - 1  # -1 at the start of a run
        self._next = draws.next_group  # the first group whose prompt was not named
        self._named: dict[PromptRef, None] = {}
        self._out: list[PromptRef] = []

    def admitted(self, group_id: int, prompt: PromptRef) -> None:
        """The group's prompt is drawn. Where it is another one than was foretold, the later ones are foretold anew."""
        self._admitted[group_id] = prompt
        if group_id >= self._next:
            return
        foretold = self._foretold.pop(group_id)
        if foretold == prompt:
            return
        self._name(prompt)
        if foretold is not None:
            self._scout = self._draws.scout()
            for later in range(self._draws.next_group, self._next):
                self._foretell(later)

    def sent(self, group_id: int) -> None:
        """The group's first sample is on its way."""
        self._sent = max(self._sent, group_id)

    def hints(self) -> tuple[PromptRef, ...]:
        """Prompts to be made ready that were not named before."""
        while self._next <= self._sent + self._size:
            if self._next >= self._draws.next_group:
                self._foretell(self._next)
            elif self._next > self._sent:
                self._name(self._admitted[self._next])
            self._next += 1
        # they are admitted in order of their ids
        while self._admitted and (oldest := next(iter(self._admitted))) <= self._sent:
            del self._admitted[oldest]
        out, self._out = tuple(self._out), []
        return out

    def _foretell(self, group_id: int) -> None:
        if self._scout.next_group < group_id:
            self._scout = self._draws.scout()
        prompt = self._scout.foretell()
        if prompt is not None:
            self._name(prompt)
        self._foretold[group_id] = prompt

    def _name(self, prompt: PromptRef) -> None:
        """Unless it was named a moment ago."""
        if prompt in self._named:
            return
        self._named[prompt] = None
        self._out.append(prompt)
        if len(self._named) > REMEMBERED * self._size:
            del self._named[next(iter(self._named))]
