"""Headers parsed in both ways, and by a plain reference."""

from __future__ import annotations

import json
import math
import struct

import numpy as np

from support.checkpoints import BITS
from tensorlift.engine.headers import HeaderScan
from tensorlift.errors import TensorliftError
from tensorlift.format.entries import Scanned
from tensorlift.format.header import Header, parse

Row = tuple[str, str, tuple[int, ...], int, int]


class RefusedError(Exception):
    """The reference's only error."""


def need(condition: bool) -> None:
    if not condition:
        raise RefusedError


def no_doubles(pairs):
    need(len({key for key, _ in pairs}) == len(pairs))
    return dict(pairs)


def refuse(_):
    raise RefusedError


def has_surrogate(text: str) -> bool:
    return any("\ud800" <= c <= "\udfff" for c in text)


def reference(content: bytes) -> tuple[dict[str, str] | None, list[Row]]:
    """The format's rules, one after the other, as plainly as they can be written."""
    need(len(content) >= 8)
    (length,) = struct.unpack("<Q", content[:8])
    need(2 <= length <= min(100_000_000, len(content) - 8))
    raw, data_bytes = content[8 : 8 + length], len(content) - 8 - length
    need(raw[:1] == b"{")
    try:
        head = json.loads(raw.decode("utf-8"), object_pairs_hook=no_doubles, parse_constant=refuse)
    except (ValueError, RecursionError):
        raise RefusedError from None
    need(isinstance(head, dict))
    metadata = head.pop("__metadata__", None)
    if metadata is not None:
        need(isinstance(metadata, dict))
        need(all(isinstance(v, str) and not has_surrogate(k + v) for k, v in metadata.items()))
    rows = []
    for name, entry in head.items():
        need(not has_surrogate(name))
        need(isinstance(entry, dict) and {"dtype", "shape", "data_offsets"} <= set(entry))
        code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        need(isinstance(code, str) and code in BITS)
        need(isinstance(shape, list) and all(type(n) is int and 0 <= n < 2**63 for n in shape))
        need(isinstance(offsets, list) and len(offsets) == 2 and all(type(n) is int for n in offsets))
        begin, end = offsets
        need(0 <= begin <= end)
        need(math.prod(shape) * BITS[code] == 8 * (end - begin))
        need(math.prod(max(n, 1) for n in shape) < 2**63)
        rows.append((name, code, tuple(shape), begin, end))
    rows.sort(key=lambda row: row[3:])
    at = 0
    for row in rows:
        need(row[3] == at)
        at = row[4]
    need(at == data_bytes)
    return metadata, [(n, c, s, 8 + length + b, e - b) for n, c, s, b, e in rows]


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
