"""Forks over links that are slow or lose packets, between hosts that are network namespaces."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from support import child, hosts
from support.seeds import NBYTES, is_version, running, weights
from tensorlift.forking.fork import fork_into

FORK: dict[str, Any] = {"chunk_bytes": 100_000, "patience": 60.0}


def fork_from_two(prepare: Callable[[int], object], **more: Any) -> Any:
    """By a third host: (right, bytes by the first and the second seed, why seeds were left)."""
    made = hosts.make(3, "100mbit")
    prepare(made[0])

    def seed(at: int) -> Any:
        inside = functools.partial(hosts.enter, made[at])
        return running("seed", inside, version=1, host=f"10.9.0.{at + 1}", insecure=True)

    with seed(0) as one, seed(1) as other:
        urls = [one.said(), other.said()]
        hosts.move(made[2])
        found = weights(0)
        result = fork_into(found, urls, **FORK | more)
    assert result.bytes == NBYTES
    by_source = [result.by_source.get(url, 0) for url in urls]
    return is_version(found, 1), by_source, [why.removeprefix(urls[0]) for why in result.left]


def one_is_slow() -> Any:
    return fork_from_two(lambda host: hosts.slow(host, "200kbit"), patience=10.0)


def one_loses() -> Any:
    return fork_from_two(lambda host: hosts.lossy(host, 2))


def both_lose() -> Any:
    made = hosts.make(2, "100mbit")
    for host in made:
        hosts.lossy(host, 2)
    inside = functools.partial(hosts.enter, made[0])
    with running("seed", inside, version=1, host="10.9.0.1", insecure=True) as seed:
        url = seed.said()
        hosts.move(made[1])
        found = weights(0)
        result = fork_into(found, url, **FORK)
    return is_version(found, 1), result.by_source == {url: NBYTES}, list(result.left)


def test_a_slow_link_does_not_hold_the_fork() -> None:
    """A chunk takes it 4 s, the other seed 10 ms: what it holds at the end is brought by the other."""
    if reason := hosts.why_not():
        pytest.skip(reason)
    right, (slow, fast), left = child.call(one_is_slow, seconds=110)
    assert right
    assert fast > 10 * slow
    assert all(why.startswith(": it is slow: ") for why in left)


@pytest.mark.parametrize("losing", [one_loses, both_lose])
def test_a_lossy_link(losing: Callable[[], Any]) -> None:
    """Packets that are lost cost time alone."""
    if reason := hosts.why_not_lossy():
        pytest.skip(reason)
    right, _, left = child.call(losing, seconds=110)
    assert right
    assert all(": it is slow: " in why for why in left)
