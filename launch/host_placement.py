"""How many servers and trainer ranks each host gets: pure arithmetic over counts. Knows no names of GPUs and no processes.

A strategy is kept exactly where it is strict. Where GPUs are places that nobody shares, a placement is refused only if there is
none: greedy choices come first, because they are what the soft strategies mean, and an exact search settles the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from telescope.config.cluster import Strategy

Counts = tuple[int, ...]
"""How many of a demand each host gets."""


@dataclass(frozen=True)
class Demand:
    """`count` bundles of `size` places, each on one host, e.g. 2 servers of 4 GPUs."""

    count: int
    size: int
    strategy: Strategy


def place_apart(first: Demand, second: Demand, room: Sequence[int]) -> tuple[Counts, Counts] | None:
    """Places of their own for both. None if no placement keeps both strategies.

    `room`: free places a host. The strict one chooses before the soft one, SPREAD before PACK, which fills what is left, the
    larger bundle before the smaller.
    """
    swapped = _rank_urgency(second) < _rank_urgency(first)
    one, two = (second, first) if swapped else (first, second)
    for leader, follower in ((one, two), (two, one)):
        for chosen in _propose(leader, room):
            rest = next(_propose(follower, _subtract(room, leader, chosen)), None)
            if rest is not None:
                return (chosen, rest) if leader is first else (rest, chosen)
    exact = _search_exactly(one, two, room)
    if exact is None:
        return None
    follower_counts = next(_propose(two, _subtract(room, one, exact)))
    return (follower_counts, exact) if swapped else (exact, follower_counts)


def place_sharing(first: Demand, second: Demand, room: Sequence[int]) -> tuple[Counts, Counts] | None:
    """Where there are too few places for both: a place may have one of each kind, and as few as possible do.

    The choices are those of `place_apart`, and whoever chooses last takes free places before shared ones: where neither is
    strict and bundles are of one place no place stays idle. None where one of them does not fit by itself."""
    swapped = _rank_urgency(second) < _rank_urgency(first)
    one, two = (second, first) if swapped else (first, second)
    found = [
        (chosen, rest) if leader is first else (rest, chosen)
        for leader, follower in ((one, two), (two, one))
        for chosen in _propose(leader, room)
        for rest in _place_beside(follower, room, [leader.size * count for count in chosen])
    ]
    return min(found, key=lambda both: _count_shared(first, second, both, room), default=None)  # the first of equals


def _count_shared(first: Demand, second: Demand, both: tuple[Counts, Counts], room: Sequence[int]) -> int:
    """Places with one of each."""
    needs = (a * first.size + b * second.size - places for a, b, places in zip(*both, room, strict=True))
    return sum(max(0, need) for need in needs)


def _place_beside(demand: Demand, room: Sequence[int], taken: Sequence[int]) -> Iterator[Counts]:
    """Placements of one demand on hosts with `taken` places that the other kind has."""
    free = [places - gone for places, gone in zip(room, taken, strict=True)]
    if demand.strategy == "STRICT_PACK":
        yield from _propose(demand, room)
    elif demand.strategy == "STRICT_SPREAD":
        fitting = [host for host in range(len(room)) if room[host] >= demand.size]
        chosen = sorted(fitting, key=lambda host: (max(0, demand.size - free[host]), -free[host]))[: demand.count]
        if len(chosen) == demand.count:
            yield tuple(int(host in chosen) for host in range(len(room)))
    elif sum(places // demand.size for places in room) >= demand.count:
        apart = min(demand.count, sum(places // demand.size for places in free))
        counts = next(_propose(replace(demand, count=apart), free))
        yield _fill_up(demand, counts, room, free)


def _fill_up(demand: Demand, counts: Counts, room: Sequence[int], free: Sequence[int]) -> Counts:
    """Those that found no free place, each where the fewest of its places are shared."""
    filled = list(counts)
    for _ in range(demand.count - sum(counts)):
        fitting = [host for host in range(len(room)) if (filled[host] + 1) * demand.size <= room[host]]
        host = min(fitting, key=lambda host: ((filled[host] + 1) * demand.size - free[host], host))
        filled[host] += 1
    return tuple(filled)


def place_alone(demand: Demand, room: Sequence[int]) -> Counts | None:
    """One demand as if it had the hosts for itself; None where it does not fit."""
    return next(_propose(demand, room), None)


def place_on_cores(demand: Demand, cores: float, room: list[float]) -> Counts | None:
    """On CPUs cores are a wish: what does not fit goes where there is most left. `cores`: of one bundle; `room` is used up.

    None where STRICT_SPREAD has more bundles than there are hosts.
    """
    counts, hosts = [0] * len(room), range(len(room))
    if demand.strategy == "STRICT_SPREAD" and demand.count > len(room):
        return None
    alone = max(hosts, key=lambda host: (room[host], -host))
    for _ in range(demand.count):
        host = alone if demand.strategy == "STRICT_PACK" else _choose_host_by_cores(demand.strategy, cores, room, counts)
        counts[host] += 1
        room[host] -= cores
    return tuple(counts)


def _choose_host_by_cores(strategy: Strategy, cores: float, room: Sequence[float], counts: Sequence[int]) -> int:
    hosts = range(len(room))
    if strategy == "PACK":
        fitting = [host for host in hosts if room[host] >= cores]
        begun = [host for host in fitting if counts[host]]
        if begun or fitting:
            return (begun or fitting)[0]
        return max(hosts, key=lambda host: (room[host], -host))
    return min(hosts, key=lambda host: (counts[host], -room[host], host))


def _rank_urgency(demand: Demand) -> tuple[int, int]:
    order: dict[Strategy, int] = {"STRICT_PACK": 0, "STRICT_SPREAD": 1, "SPREAD": 2, "PACK": 3}
    return order[demand.strategy], -demand.size


def _subtract(room: Sequence[int], demand: Demand, counts: Counts) -> list[int]:
    return [places - demand.size * count for places, count in zip(room, counts, strict=True)]


def _propose(demand: Demand, room: Sequence[int]) -> Iterator[Counts]:
    """Placements of one demand, the best of its strategy first; for STRICT_PACK all of them."""
    fits = [places // demand.size for places in room]
    hosts = range(len(room))
    if demand.strategy == "STRICT_PACK":
        for host in sorted((host for host in hosts if fits[host] >= demand.count), key=lambda host: fits[host]):
            yield tuple(demand.count if other == host else 0 for other in hosts)
    elif demand.strategy == "STRICT_SPREAD":
        for sign in (-1, 1):  # the roomiest hosts, or those that nobody else can use as well
            chosen = sorted((host for host in hosts if fits[host]), key=lambda host: sign * room[host])[: demand.count]
            if len(chosen) == demand.count:
                yield tuple(int(host in chosen) for host in hosts)
    elif sum(fits) >= demand.count:
        yield _pack(demand.count, fits) if demand.strategy == "PACK" else _spread(demand.count, fits, room)


def _pack(count: int, fits: Sequence[int]) -> Counts:
    """One host where one is enough, the tightest; else the roomiest first, which takes the fewest."""
    enough = [host for host, number in enumerate(fits) if number >= count]
    counts = [0] * len(fits)
    if enough:
        counts[min(enough, key=lambda host: fits[host])] = count
        return tuple(counts)
    for host in sorted(range(len(fits)), key=lambda host: -fits[host]):
        counts[host] = min(fits[host], count)
        count -= counts[host]
    return tuple(counts)


def _spread(count: int, fits: Sequence[int], room: Sequence[int]) -> Counts:
    counts = [0] * len(fits)
    for _ in range(count):
        free = (host for host in range(len(fits)) if fits[host] > counts[host])
        counts[min(free, key=lambda host: (counts[host], -room[host], host))] += 1
    return tuple(counts)


def _search_exactly(one: Demand, two: Demand, room: Sequence[int]) -> Counts | None:
    """Counts of `one` that leave room for `two`, or None where there are none.

    For each number of `one` placed on the hosts so far, the most of `two` that the rest holds. STRICT_PACK needs no search:
    all its placements were tried.
    """
    if "STRICT_PACK" in (one.strategy, two.strategy):
        return None
    most_one = 1 if one.strategy == "STRICT_SPREAD" else one.count
    most_two = 1 if two.strategy == "STRICT_SPREAD" else two.count
    best: dict[int, tuple[int, Counts]] = {0: (0, ())}
    for places in room:
        further: dict[int, tuple[int, Counts]] = {}
        for placed, (others, counts) in best.items():
            for count in range(min(most_one, places // one.size, one.count - placed) + 1):
                total = others + min(most_two, (places - count * one.size) // two.size)
                if total > further.get(placed + count, (-1, ()))[0]:
                    further[placed + count] = (total, (*counts, count))
        best = further
    total, counts = best.get(one.count, (-1, ()))
    return counts if total >= two.count else None
