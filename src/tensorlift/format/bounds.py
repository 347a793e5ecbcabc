"""How much JSON may spell before it is decoded: a byte of it can take thirty of memory."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated

import msgspec

__all__ = ["LARGEST", "MOST_PARTS", "Count", "is_too_much", "product"]

LARGEST = 2**63 - 1
"""Of int64: what file offsets, torch's extents and columns of numbers can hold."""
Count = Annotated[int, msgspec.Meta(ge=0, le=LARGEST)]
"""Such a number in JSON."""
MOST_PARTS = 8_000_000
"""Lists, objects and keys of them: what a million tensors take, and at most some 1.2 GB once decoded."""

_MOST_FACTORS = 16  # of products that are not worth looking at on the way


def is_too_much(text: bytes) -> bool:
    """Whether there are more than MOST_PARTS; those that are spelt inside strings count too."""
    return len(text) > MOST_PARTS and sum(map(text.count, (b"[", b"{", b":"))) > MOST_PARTS


def product(factors: Iterable[int]) -> int:
    """Of integers from 0 on; where there are many, and it is beyond LARGEST, only that it is."""
    given = tuple(factors)
    if len(given) <= _MOST_FACTORS:
        return math.prod(given)
    if 0 in given:
        return 0
    # Stops early: the whole product of a hundred thousand large numbers takes minutes.
    found = 1
    for factor in given:
        found *= factor
        if not -LARGEST <= found <= LARGEST:
            break
    return found
