"""How many events a second the core handles, alone on one CPU core.

A run is played once in the test harness's world; its events are then handled again by fresh cores against the clock, without
the world, the checker and the journal. Run from the repository's root:

    python -m benchmarks.flow.core_events [--events 200000] [--repeats 5]
"""

from __future__ import annotations

import argparse
import time

from msgspec import structs

from telescope.flow.core import Core
from telescope.flow.events import AnyEvent
from telescope.flow.replay import decode_line, decode_opening, encode_line
from telescope.flow.settings import FlowSettings
from tests.flow.harness import Manners, World, sometimes_equal


def shapes(events: int) -> dict[str, tuple[FlowSettings, Manners]]:
    """Runs of about so many events: a small cluster with single turns, a large one with several, a troubled one."""
    environments = (("countdown", 1.0), ("math", 2.0))
    small = FlowSettings(
        number_of_steps=max(1, events // 2500), prompts_batch_size_for_trainer=32, environments=environments, group_size=8
    )
    large = structs.replace(small, number_of_steps=max(1, events // 20000), prompts_batch_size_for_trainer=128)
    return {
        "2 servers, 1 worker, 1 turn": (small, Manners(workers=1, capacity=1024, most_turns=1, reward=sometimes_equal)),
        "64 servers, 32 workers, 4 turns": (large, Manners(workers=32, capacity=512, servers=64, most_turns=4)),
        "8 servers, 4 workers, failures, stragglers": (
            small,
            Manners(workers=4, capacity=256, servers=8, failure_share=0.05, straggler_share=0.02, reward=sometimes_equal),
        ),
    }


def measure(settings: FlowSettings, script: list[tuple[AnyEvent, float]], repeats: int) -> float:
    """Best of several: events a second."""
    best = 0.0
    for _ in range(repeats):
        core = Core(settings)
        handle = core.handle
        started = time.process_time()
        for event, now in script:
            handle(event, now)
        best = max(best, len(script) / (time.process_time() - started))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=200_000)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    for name, (settings, manners) in shapes(arguments.events).items():
        world = World(settings, manners, seed=1, journal=True, check=False).run(most_events=10**8)
        settings = decode_opening(world.lines[0])
        lines = [decode_line(text, number) for number, text in enumerate(world.lines[1:], start=2)]
        rate = measure(settings, [(line.event, line.now) for line in lines], arguments.repeats)
        started = time.process_time()
        for line in lines:
            encode_line(line.now, line.event, line.commands)
        encoded = len(lines) / (time.process_time() - started)
        size = sum(map(len, world.lines)) / len(lines)
        print(f"{name}: {len(lines)} events, {rate:,.0f} events/s; journal {encoded:,.0f} lines/s of {size:.0f} bytes")


if __name__ == "__main__":
    main()
