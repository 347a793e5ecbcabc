"""What is bounded before memory is touched: JSON of few bytes that would take many, long products."""

from __future__ import annotations

import math
import tracemalloc
import zlib
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorlift.engine.headers import HeaderScan
from tensorlift.errors import TensorliftError
from tensorlift.forking import manifest
from tensorlift.format import digests
from tensorlift.format.bounds import LARGEST, MOST_PARTS, is_too_much, product
from tensorlift.format.header import parse
from tensorlift.format.listing import parse_index

BOMBS = {
    "lists": b"[" + b"[]," * MOST_PARTS + b"[]]",
    "nested lists": b"[" * (MOST_PARTS + 1) + b"]" * (MOST_PARTS + 1),
    "objects": b"[" + b"{}," * MOST_PARTS + b"{}]",
    "keys": b"{" + b'"":0,' * MOST_PARTS + b'"":0}',
}
READERS: dict[str, Callable[[bytes], object]] = {
    "header": lambda text: parse(text, 1 << 40, "file", HeaderScan(text).result()),
    "digests": lambda text: digests.decode(text, "file"),
    "index": lambda text: parse_index(text, "file"),
    "manifest": lambda text: manifest.decode(zlib.compress(text, 1, wbits=31), "seed"),
}


@pytest.mark.parametrize("bomb", BOMBS)
@pytest.mark.parametrize("reader", READERS)
def test_what_would_take_much_memory_is_refused_before_it_does(reader: str, bomb: str) -> None:
    text = b'{"a":' + BOMBS[bomb] + b"}"
    tracemalloc.start()
    try:
        with pytest.raises(TensorliftError, match="more than 8,000,000 lists, objects and keys"):
            READERS[reader](text)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # Copies of the text, none of what it spells.
    assert peak < 6 * len(text)


def test_as_much_as_a_million_tensors_take_is_taken() -> None:
    entry = b'"":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
    assert not is_too_much(entry * 1_000_000)
    assert is_too_much(entry * 1_200_000)


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**63 - 1) | st.integers(0, 3), max_size=40))
def test_a_product_is_right_or_beyond_what_counts(factors: list[int]) -> None:
    exact, found = math.prod(factors), product(factors)
    assert found == exact or (found > LARGEST and exact > LARGEST)


def test_a_product_of_many_large_numbers_is_not_worked_out() -> None:
    assert LARGEST < product([2**62] * 1_000_000) < 2**126
    assert product([2**62] * 1_000_000 + [0]) == 0
