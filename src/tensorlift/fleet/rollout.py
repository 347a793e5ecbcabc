"""How long a fleet takes to have its weights: arithmetic, with the choice of seeds that registries make.

Each instance sends and receives at most what its link does, what a seed sends is shared evenly by those that
read from it, and an instance is a seed once it has all, and was announced. Nothing else costs anything: no
switch is full, no seed is slow, nothing fails.
"""

from __future__ import annotations

import heapq
import random

from tensorlift.errors import SeedError
from tensorlift.fleet.choosing import Seen, chosen
from tensorlift.fleet.contract import Near

__all__ = ["from_one", "from_storage", "from_tree"]

# Shares of a whole: below that a read is through, whatever rounding says.
_THROUGH = 1e-9


def from_one(instances: int, nbytes: float, link: float) -> float:
    """Seconds until all have it from one seed, of ``nbytes`` and at ``link`` bytes a second."""
    return instances * nbytes / link


def from_storage(instances: int, nbytes: float, link: float, storage: float) -> float:
    """From storage that gives all together so much, and each instance no more than its link takes."""
    return max(instances * nbytes / storage, nbytes / link)


def from_tree(
    instances: int,
    nbytes: float,
    link: float,
    readers: int = 1,
    seeds: int = 1,
    between: float = 0.0,
    chance: random.Random | None = None,
) -> list[float]:
    """When each instance has all, where one seed is there at first and forks are seeds.

    readers: of a seed at once; seeds: that a fork reads at once; between: seconds from the last byte of a
    fork to the first that it sends.
    """
    picks = (chance or random.Random(0)).random
    load: dict[str, int] = {"0": 0}
    coming: list[tuple[float, str]] = []
    reading: dict[str, tuple[float, list[str]]] = {}
    waiting, now, ends = instances, 0.0, list[float]()
    while len(ends) < instances:
        while waiting:
            try:
                found = chosen([_seen(one, load[one], readers) for one in load], Near(), seeds, (), picks)
            except SeedError:  # none has room
                break
            name = str(instances - waiting + 1)
            reading[name] = 1.0, [one.instance for one in found]
            for one in found:
                load[one.instance] += 1
            waiting -= 1
        rates = {
            name: min(link, sum(link / load[seed] for seed in given)) / nbytes
            for name, (_, given) in reading.items()
        }
        step = min((left / rates[name] for name, (left, _) in reading.items()), default=float("inf"))
        if coming:
            step = min(step, coming[0][0] - now)
        now += step
        for name, (left, given) in list(reading.items()):
            left -= rates[name] * step
            reading[name] = left, given
            if left <= _THROUGH:
                del reading[name]
                ends.append(now)
                heapq.heappush(coming, (now + between, name))
                for seed in given:
                    load[seed] -= 1
        while coming and coming[0][0] <= now:
            load[heapq.heappop(coming)[1]] = 0
    return ends


def _seen(name: str, load: int, readers: int) -> Seen:
    return Seen(name, name, "", Near(), load, readers)
