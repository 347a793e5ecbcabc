"""Who stands behind one URL, and for how long."""

from __future__ import annotations

import pytest

from tensorlift.errors import RequestError
from tensorlift.forking.manifest import ModelKey
from tensorlift.forking.ranks import Rank, RankTable


def key(rank: int, size: int = 8) -> ModelKey:
    return ModelKey(model="m", tp=(rank, size))


def rank(number: int, port: int = 1) -> Rank:
    return Rank(key(number), f"http://10.0.0.{number}:{port}")


def test_ranks_join_and_leave() -> None:
    table = RankTable(key(0), seconds=10)
    assert table.ranks(0) == (Rank(key(0)),)
    assert table.put("a" * 32, rank(1), 0) == 10
    table.put("b" * 32, rank(2), 5)
    assert table.ranks(5) == (Rank(key(0)), rank(1), rank(2))
    table.drop("a" * 32)
    table.drop("unknown")
    assert table.ranks(5) == (Rank(key(0)), rank(2))


def test_a_silent_rank_is_forgotten() -> None:
    table = RankTable(key(0), seconds=10)
    table.put("a" * 32, rank(1), 0)
    table.put("b" * 32, rank(2), 0)
    table.put("a" * 32, rank(1), 9)
    assert table.ranks(15) == (Rank(key(0)), rank(1))
    assert table.ranks(20) == (Rank(key(0)),)


def test_a_rank_that_begins_again_takes_its_place() -> None:
    table = RankTable(key(0))
    table.put("a" * 32, rank(1), 0)
    table.put("b" * 32, rank(1), 1)
    table.drop("a" * 32)
    assert table.ranks(2) == (Rank(key(0)), rank(1))


def test_another_instances_rank_takes_no_place() -> None:
    table = RankTable(key(0), seconds=10)
    table.put("a" * 32, rank(1, port=1), 0)
    with pytest.raises(RequestError, match=r"is here already, at http://10\.0\.0\.1:1: give each instance a"):
        table.put("b" * 32, rank(1, port=2), 9)
    assert table.ranks(9) == (Rank(key(0)), rank(1, port=1))
    table.put("a" * 32, rank(1, port=3), 9)  # the same one, at another place
    table.put("b" * 32, rank(1, port=2), 20)
    assert table.ranks(20) == (Rank(key(0)), rank(1, port=2))


def test_who_cannot_join() -> None:
    table = RankTable(key(0), most=1, seconds=10)
    with pytest.raises(RequestError, match=r"'m' \(target, tp 0 of 8\) is here already"):
        table.put("a" * 32, rank(0), 0)
    with pytest.raises(RequestError, match="its key has rank 8 of 8 in tp"):
        table.put("a" * 32, rank(8), 0)
    table.put("a" * 32, rank(1), 0)
    table.put("a" * 32, rank(1), 0)
    with pytest.raises(RequestError, match="1 ranks have joined already"):
        table.put("b" * 32, rank(2), 0)
    table.put("b" * 32, rank(2), 10)
