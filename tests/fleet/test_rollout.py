"""The arithmetic of a roll-out, where it can be done by hand."""

from __future__ import annotations

import random

import pytest

from tensorlift.fleet.rollout import from_one, from_storage, from_tree


def test_one_seed_and_storage() -> None:
    assert from_one(100, 125e9, 12.5e9) == 1000
    assert from_storage(100, 125e9, 12.5e9, 125e9) == 100
    # Storage that is faster than the link of an instance.
    assert from_storage(5, 125e9, 12.5e9, 1e15) == 10


@pytest.mark.parametrize(("instances", "rounds"), [(1, 1), (3, 2), (7, 3), (1023, 10), (1024, 11)])
def test_with_one_reader_seeds_double(instances: int, rounds: int) -> None:
    ends = from_tree(instances, 10, 1, readers=1)
    assert len(ends) == instances
    assert ends[-1] == pytest.approx(10 * rounds)
    assert ends == sorted(ends)
    assert ends[0] == pytest.approx(10)


def test_with_eight_readers_seeds_are_nine_times_as_many_after_eight_times_as_long() -> None:
    ends = from_tree(80, 10, 1, readers=8)
    assert ends[:8] == pytest.approx([80] * 8)
    assert ends[-1] == pytest.approx(160)


def test_what_lies_between_counts_in_each_round() -> None:
    assert from_tree(7, 10, 1, between=2)[-1] == pytest.approx(10 + 2 + 10 + 2 + 10)


def test_many_seeds_at_once_are_no_faster_than_the_link() -> None:
    """Two seeds, and then one fork that reads both: the second of two has its link full."""
    ends = from_tree(2, 10, 1, readers=2, seeds=2)
    assert ends == pytest.approx([20, 20])
    assert from_tree(1, 10, 1, readers=2, seeds=2) == pytest.approx([10])


def test_chance_changes_little() -> None:
    for start in range(3):
        ends = from_tree(100, 10, 1, readers=2, between=1, chance=random.Random(start))
        assert 90 <= ends[-1] <= 110
