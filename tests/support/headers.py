"""Headers parsed in both ways."""

from __future__ import annotations

import numpy as np

from tensorlift.engine.headers import HeaderScan
from tensorlift.errors import TensorliftError
from tensorlift.format.entries import Scanned
from tensorlift.format.header import Header, parse


def parsed_in_both_ways(raw: bytes, file_bytes: int, path: str) -> Header:
    """parse() with and without what the library's scanner found: the same header, or the same error."""
    exact, error = _outcome(raw, file_bytes, path, None)
    quick, same = _outcome(raw, file_bytes, path, HeaderScan(raw).result())
    assert (type(same), str(same)) == (type(error), str(error))
    if error is not None:
        raise error
    assert exact is not None
    assert quick is not None
    assert (quick.metadata, quick.names, quick.shapes) == (exact.metadata, exact.names, exact.shapes)
    for column in ("dtypes", "starts", "sizes"):
        one, other = getattr(quick, column), getattr(exact, column)
        assert one.dtype == other.dtype
        assert np.array_equal(one, other)
    return quick


def _outcome(
    raw: bytes, file_bytes: int, path: str, scanned: Scanned | None
) -> tuple[Header | None, TensorliftError | None]:
    try:
        return parse(raw, file_bytes, path, scanned), None
    except TensorliftError as error:
        return None, error
