"""Which seeds a fork gets."""

from __future__ import annotations

import pytest

from tensorlift.errors import SeedError
from tensorlift.fleet.choosing import Seen, chosen, distance
from tensorlift.fleet.contract import Near


def seen(name: str, load: int = 0, near: Near | None = None, weights: str = "", most: int = 8) -> Seen:
    return Seen(name, f"http://10.0.0.1:{ord(name)}", weights, near or Near(name), load, most)


def names(seeds: list[Seen], near: Near | None = None, count: int = 9, without: tuple[str, ...] = ()) -> str:
    numbers = iter(range(100))
    found = chosen(seeds, near or Near("me", "z1/r1"), count, without, lambda: next(numbers))
    return "".join(one.instance for one in found)


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (Near("me", "elsewhere"), 1),
        (Near("x", "z1/r1"), 2),
        (Near("x", "z1/r2"), 3),
        (Near("x", "z2/r1"), 4),
        (Near("x", ""), 4),
        (Near("x", "z1"), 3),
        (Near("", "z1/r1/n5"), 3),
    ],
)
def test_distances(other: Near, expected: int) -> None:
    assert distance(Near("me", "z1/r1"), other) == expected
    assert distance(other, Near("me", "z1/r1")) == expected


def test_who_has_not_said_where_he_is_is_on_no_host() -> None:
    assert distance(Near(), Near()) == 2


def test_the_idle_first_and_the_near_first() -> None:
    here, rack, row, far = (Near("me"), Near("x", "z1/r1"), Near("x", "z1/r2"), Near("x", "z2/r1"))
    assert names([seen("f", 0, far), seen("w", 0, row), seen("r", 0, rack), seen("h", 0, here)]) == "hrwf"
    # Three readers on this host are as many as can be waited for instead of asking another zone.
    assert names([seen("f", 0, far), seen("h", 4, here)]) == "fh"
    assert names([seen("f", 0, far), seen("h", 2, here)]) == "hf"
    assert names([seen("a", 3, rack), seen("b", 1, rack), seen("c", 2, rack)]) == "bca"
    assert names([seen("a", 3, rack), seen("b", 1, rack), seen("c", 2, rack)], count=2) == "bc"


def test_chance_decides_between_equals() -> None:
    seeds = [seen(name, 0, Near("x", "z1/r1")) for name in "abc"]
    backwards = iter((3, 2, 1))
    assert [one.instance for one in chosen(seeds, Near(), 3, (), lambda: next(backwards))] == ["c", "b", "a"]


def test_versions_are_not_mixed() -> None:
    assert (
        names([seen("a", 1, weights="new"), seen("b", 0, weights="old"), seen("c", 2, weights="old")]) == "bc"
    )


def test_a_url_is_named_once() -> None:
    assert names([seen("a"), seen("b")._replace(url=seen("a").url)]) in ("a", "b")


def test_who_is_full_is_left_out() -> None:
    assert names([seen("a", 8), seen("b", 7)]) == "b"
    with pytest.raises(
        SeedError, match=r"^2 seeds of it, all with as many readers as they take; raise readers=$"
    ) as full:
        names([seen("a", 8), seen("b", 3, most=2)])
    assert full.value.retry_seconds == 1
    with pytest.raises(SeedError) as crowded:
        chosen([seen("a", 8)], Near(), 1, (), lambda: 0.0, waiting=1000)
    assert crowded.value.retry_seconds == 10


def test_there_is_none() -> None:
    with pytest.raises(SeedError, match=r"^it knows none$") as none:
        names([])
    assert none.value.retry_seconds is None
    with pytest.raises(SeedError, match=r"^it knows no other than the 1 seed that failed$"):
        names([seen("a")], without=(seen("a").url,))
    assert names([seen("a"), seen("b")], without=(seen("a").url,)) == "b"
