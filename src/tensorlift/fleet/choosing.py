"""Which seeds a fork gets: pure, and the same for every registry and for what is predicted of a fleet."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from tensorlift.errors import SeedError
from tensorlift.fleet.contract import Near
from tensorlift.format.quoting import plural

__all__ = ["Seen", "chosen", "distance"]

# How often those that wait for room should ask, where few do.
_RETRY_SECONDS = 1.0
# So many questions a second of those that wait are enough for a registry. Where many wait, a seed that has
# room is found at once however seldom each of them asks.
_QUESTIONS = 100


class Seen(NamedTuple):
    """A seed of the wanted key, as far as choosing goes."""

    instance: str
    url: str
    weights: str
    near: Near
    load: int
    """Forks that read from it, or were sent to it and have not come yet."""
    most_readers: int


def distance(one: Near, other: Near) -> int:
    """1 on the same host, 2 at the same place, and one more for each part of the place they do not share."""
    if one.host and one.host == other.host:
        return 1
    parts, others = (near.place.split("/") if near.place else [] for near in (one, other))
    shared = 0
    while shared < min(len(parts), len(others)) and parts[shared] == others[shared]:
        shared += 1
    return 2 + max(len(parts), len(others)) - shared


def chosen(
    seeds: Sequence[Seen],
    near: Near,
    count: int,
    without: Collection[str],
    chance: Callable[[], float],
    waiting: int = 0,
) -> list[Seen]:
    """At most ``count``, of one version, the best first: by (readers + 1) x distance, and by chance.

    That is about how long a seed would take: its readers share what it can send, and what is further away has
    more of a network between. waiting: forks that ask again and again. Raises SeedError where there is
    none.
    """
    there = [seed for seed in seeds if seed.url not in without]
    if not there:
        known = plural(len(seeds), "seed")
        raise SeedError(f"it knows no other than the {known} that failed" if seeds else "it knows none")
    free = [seed for seed in there if seed.load < seed.most_readers]
    if not free:
        raise SeedError(
            f"{plural(len(there), 'seed')} of it, all with as many readers as they take; raise readers=",
            retry_seconds=max(_RETRY_SECONDS, waiting / _QUESTIONS),
        )
    ranked = sorted(free, key=lambda seed: ((seed.load + 1) * distance(near, seed.near), chance()))
    # Two instances at one URL are a process that has begun again, and its predecessor.
    by_url = {seed.url: seed for seed in ranked if seed.weights == ranked[0].weights}
    return list(by_url.values())[:count]
