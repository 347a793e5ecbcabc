"""What exchange="auto" does, and that it goes the right way with each thing it looks at."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import pytest

from tensorlift.distributed.agreement import Request
from tensorlift.distributed.policy import choose, ranks_per_host

GIB = 1 << 30


def requests(world: int, per_host: int | None = None, **changes: Any) -> list[Request]:
    plain = Request(
        exchange="auto",
        device="cuda",
        verify=False,
        own="arena",
        arena_size=256 << 20,
        rows=b"",
        temporary=True,
        host="",
        cached=0.0,
    )
    return [
        msgspec.structs.replace(plain, host=f"host {rank // (per_host or world)}", **changes)
        for rank in range(world)
    ]


def gain(given: list[Request], nbytes: int) -> float:
    """Predicted seconds that a gather saves."""
    exchange, why, figures = choose(given, nbytes)
    saved = figures["none_seconds"] - figures["gather_seconds"]
    assert exchange == ("gather" if saved > 0 else "none")
    assert f"{figures['gather_seconds']:.2f} s with it" in why
    assert f"{figures['none_seconds']:.2f} s where each rank reads all" in why
    return saved


def test_large_models_on_devices_are_gathered_and_small_ones_not() -> None:
    assert gain(requests(8), 600 * GIB) > 60
    assert gain(requests(8), 1 << 20) < 0
    # Seven communicators' worth of nothing.
    assert choose(requests(8), 0)[0] == "none"


def test_on_a_cpu_the_connection_is_slower_than_the_page_cache() -> None:
    assert gain(requests(4, device="cpu", cached=1.0), 10 * GIB) < 0
    assert gain(requests(4, device="cpu"), 10 * GIB) < 0


@pytest.mark.parametrize("nbytes", [GIB, 30 * GIB, 600 * GIB])
def test_what_speaks_for_a_gather(nbytes: int) -> None:
    """More bytes, more ranks, less in the cache, no communicator to make: none of them ever makes it lose."""

    def rises(gains: list[float]) -> bool:
        return all(one <= other + 1e-9 for one, other in pairwise(gains))

    assert rises([gain(requests(8), nbytes * factor) for factor in (1, 2, 4)])
    assert rises([gain(requests(world), nbytes) for world in (2, 4, 8)])
    assert rises([gain(requests(8, cached=share), nbytes) for share in (1.0, 0.5, 0.0)])
    assert gain(requests(8, temporary=True), nbytes) < gain(requests(8, temporary=False), nbytes)


def test_digests_are_of_whole_tensors() -> None:
    exchange, why, figures = choose(requests(8, verify=True), 600 * GIB)
    assert (exchange, figures) == ("none", {})
    assert "digests" in why


def test_what_is_cached_is_that_of_the_rank_that_knows_least_of_it() -> None:
    given = requests(3)
    shares = [1.0, 0.25, -1.0]
    mixed = [msgspec.structs.replace(one, cached=share) for one, share in zip(given, shares, strict=True)]
    figures = choose(mixed, GIB)[2]
    assert (figures["cached"], figures["cached_known"]) == (0.25, 1.0)
    # Nobody knows: as if all came from storage.
    unknown = choose(requests(3, cached=-1.0), GIB)
    assert (unknown[2]["cached"], unknown[2]["cached_known"]) == (0.0, 0.0)
    assert unknown[2]["none_seconds"] == choose(requests(3), GIB)[2]["none_seconds"]


def test_ranks_of_a_host() -> None:
    assert ranks_per_host(requests(8, 4)) == 4
    assert ranks_per_host(requests(6, 4)) == 4
    assert ranks_per_host(requests(3, 1)) == 1
    # Who does not know counts as alone.
    assert ranks_per_host([msgspec.structs.replace(one, host="") for one in requests(3)]) == 1
    assert choose(requests(8, 4), GIB)[2]["ranks_per_host"] == 4.0
