"""Journals kept for good: each is a run that once went wrong, or would have under a design that was thought of.

To add one, put the run's `journal/core.jsonl` into `journals/` under a name that says what happened, and its ending into
`ENDINGS`. What must hold of every journal: today's core says the same again, and breaks none of the rules in saying it. Where
the core decides otherwise on purpose, the journal is recorded anew in the same commit.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from telescope.flow.core import Core
from telescope.flow.replay import decode_line, decode_opening, encode_opening, read_opening, replay
from telescope.runlog.journal import journal_lines
from tests.flow.rules import Rules

FOLDER = Path(__file__).parent / "journals"
ENDINGS = {
    # servers that die with requests or are fenced in an update, and come back: requests are placed again, none is lost
    "servers_lost_in_mid_request_and_in_mid_update": ("all 5 steps are trained", {"discarded: zero_advantage": 2}),
    # reports of full caches, some of them lost; lanes that shrink and grow; rewards that take long
    "pressed_servers_and_lanes_freed_early": ("all 5 steps are trained", {"discarded: zero_advantage": 7}),
    # a request was once taken for gone when its rollout had ended, and the wire ran out of credits
    "servers_that_answer_long_after_the_cancel": ("all 5 steps are trained", {"cancelled: off_policy": 20}),
    # a failure with its server was once excused without end, and such a rollout tried for ever
    "a_request_that_outlasts_its_servers_every_time": ("enough", {"failed: too slow": 1}),
    # a cancel was once said once, and the run ended where the wire had lost it
    "a_cancel_that_the_wire_lost": (
        "worker-0 did not answer the cancel of rollout 0 within 30 s: it hangs, or a server that generates for it does; "
        "see their logs",
        {"failed: no answer from worker-0 within 100 s": 1},
    ),
    # the last save of a run once had no longer than a stop has, and a stop at that time no limit of its own
    "a_last_save_that_takes_longer_than_a_stop_may": ("all 3 steps are trained", {"discarded: zero_advantage": 4}),
    "a_stop_while_the_last_save_hangs": (
        "all 3 steps are trained; no checkpoint of it: the checkpoint of step 3 was not done within 120 s",
        {"discarded: zero_advantage": 4},
    ),
}


def test_every_journal_of_the_folder_is_looked_at():
    assert {path.stem for path in FOLDER.glob("*.jsonl")} == set(ENDINGS)


@pytest.mark.parametrize("name", ENDINGS)
def test_the_core_says_the_same_again_and_keeps_the_rules(name: str):
    lines = list(journal_lines(FOLDER / f"{name}.jsonl"))
    found = replay(lines)
    assert found.disagreement is None, str(found.disagreement)
    settings = decode_opening(lines[0])
    core, rules = Core(settings), Rules(settings)
    for number, text in enumerate(lines[1:], start=2):
        line = decode_line(text, number)
        rules.saw(line.event, core.handle(line.event, line.now))
    reason, counted = ENDINGS[name]
    assert rules.stop is not None
    assert rules.stop.reason == reason
    assert counted.items() <= core.counts().reasons.items()


@pytest.mark.parametrize("name", ["goes_on_from_a_snapshot", "servers_and_workers_lost"])
def test_journals_that_an_earlier_version_wrote_replay(name: str):
    """Commit a1873a4 wrote them, when settings, commands and the snapshot's parts had other names in the code: all kinds of
    events and commands, curricula, and a run that goes on from a checkpoint. They are never recorded anew."""
    lines = gzip.decompress((FOLDER / "earlier" / f"{name}.jsonl.gz").read_bytes()).splitlines()
    found = replay(lines)
    assert found.disagreement is None, str(found.disagreement)
    assert found.events == len(lines) - 1
    first = read_opening(lines[0])
    assert holds(json.loads(lines[0]), json.loads(encode_opening(first.settings, first.snapshot)))


def holds(written: Any, again: Any) -> bool:
    """Whether all that was written is there again under its name; what is younger may stand beside it."""
    if isinstance(written, dict):
        return all(name in again and holds(value, again[name]) for name, value in written.items())
    return bool(written == again)
