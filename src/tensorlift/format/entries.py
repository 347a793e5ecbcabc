"""The JSON of a header as checked columns.

Two ways lead to the same columns. The quick one is a scanner's (the native library's); whatever makes it
doubt (it never says what) sends the header down the exact one here, which takes entry after entry, names the
first that breaks a rule, or finds none. So no check of the quick way needs words, and no check of the exact
one speed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tensorlift.errors import HeaderError
from tensorlift.format.bounds import LARGEST, MOST_PARTS, is_too_much, product
from tensorlift.format.dtypes import BY_CODE
from tensorlift.format.quoting import clean, plural, quote

__all__ = ["METADATA_KEY", "Columns", "Scanned", "plain_metadata", "read"]

METADATA_KEY = "__metadata__"
"""The one key of a header that is no tensor: a map of strings to strings."""


@dataclass(frozen=True, slots=True)
class Columns:
    """The tensors of a header in the order of its JSON; offsets are bytes from the start of the data."""

    metadata: dict[str, str] | None
    names: list[str]
    dtypes: npt.NDArray[np.uint8]
    shapes: list[tuple[int, ...]]
    begins: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Scanned:
    """What a scanner found in a header whose entries are all there and right, each by itself, with names
    that differ.

    ``starts`` count from the start of the file; ``metadata`` is the JSON of an object, not checked;
    ``tiled``: each range begins where the one before it ends, the first behind the header.
    """

    names: list[str]
    dtypes: npt.NDArray[np.uint8]
    shapes: list[tuple[int, ...]]
    starts: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    metadata: bytes | None
    tiled: bool


def read(raw: bytes | memoryview, path: str) -> Columns:
    """Decodes the JSON bytes of a header and checks each entry by itself: its keys, dtype, shape and size.

    How the entries' ranges lie to each other and to the file is not looked at. Raises HeaderError.
    """
    try:
        text = str(raw, "utf-8")
    except UnicodeDecodeError as error:
        raise HeaderError(
            f"{clean(path)}: the header is no UTF-8 text: {error.reason} at byte {error.start:,} of it; "
            "the file is damaged, or it is no safetensors file"
        ) from None
    if is_too_much(bytes(raw)):
        raise HeaderError(
            f"{clean(path)}: the header's JSON has more than {MOST_PARTS:,} lists, objects and keys; it is "
            "no safetensors file, or is to be written as several"
        )
    return _exact(text, path)


def plain_metadata(scanned: Scanned) -> tuple[bool, dict[str, str] | None]:
    """(whether nothing about it is doubtful, the metadata)."""
    if scanned.metadata is None:
        return True, None
    try:
        metadata = json.loads(scanned.metadata, object_pairs_hook=_pairs, parse_constant=_constant)
        return True, _exact_metadata(metadata, "")
    except (ValueError, RecursionError, HeaderError):
        return False, None


def _countable(shape: list[int]) -> bool:
    """Whether the strides of a tensor of this shape fit int64 (those of an empty tensor count a 0 as 1)."""
    return product(filter(None, shape)) <= LARGEST


class _DoubledError(ValueError):
    """A key comes twice in one object."""


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _DoubledError(key)
            seen.add(key)
    return table


def _constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON")


def _exact(text: str, path: str) -> Columns:
    """The columns by way of the entries one after the other; raises for the first that breaks a rule."""
    where = clean(path)
    try:
        table = json.loads(text, object_pairs_hook=_pairs, parse_constant=_constant)
    except _DoubledError as error:
        raise HeaderError(
            f"{where}: the key {quote(error.args[0])} comes twice in the header; which one holds is not "
            "defined, so the file is refused: write it again"
        ) from None
    except RecursionError:
        raise HeaderError(
            f"{where}: the header's JSON is nested too deeply; it is no safetensors file"
        ) from None
    except ValueError as error:
        raise HeaderError(
            f"{where}: the header is no valid JSON: {quote(str(error))[1:-1]}; the file is damaged, or it "
            "is no safetensors file"
        ) from None
    if type(table) is not dict:
        raise HeaderError(f"{where}: the header is no JSON object but {quote(table)}")
    metadata = _exact_metadata(table.pop(METADATA_KEY, None), where)
    rows = [_exact_row(name, entry, where) for name, entry in table.items()]
    bounds = np.array([row[2:] for row in rows], dtype=np.int64).reshape(-1, 2)
    return Columns(
        metadata,
        list(table),
        np.array([row[0] for row in rows], dtype=np.uint8),
        [row[1] for row in rows],
        bounds[:, 0],
        bounds[:, 1],
    )


def _exact_metadata(found: object, where: str) -> dict[str, str] | None:
    if found is None:  # absent, or null: the reference implementation takes both
        return None
    if type(found) is not dict:
        raise HeaderError(f"{where}: {METADATA_KEY} has to be a map of strings, found {quote(found)}")
    for key, value in found.items():
        if type(value) is not str:
            raise HeaderError(
                f"{where}: {METADATA_KEY}[{quote(key)}] has to be a string, found {quote(value)}; "
                "write it as text"
            )
        _check_text(key, f"a key of {METADATA_KEY}", where)
        _check_text(value, f"{METADATA_KEY}[{quote(key)}]", where)
    return found


def _check_text(text: str, what: str, where: str) -> None:
    """JSON escapes can spell half a surrogate pair, which is no text and cannot be written anywhere."""
    if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
        raise HeaderError(f"{where}: {what} has half a surrogate pair: {quote(text)}")


def _exact_row(name: str, entry: object, where: str) -> tuple[int, tuple[int, ...], int, int]:
    """Dtype id, shape, begin and end of one entry."""
    _check_text(name, "a tensor's name", where)
    who = f"{where}: tensor {quote(name)}"
    if type(entry) is not dict:
        raise HeaderError(f"{who}: its entry has to be a JSON object, found {quote(entry)}")
    for key in ("dtype", "shape", "data_offsets"):
        if key not in entry:
            raise HeaderError(f"{who}: its entry has no '{key}'")
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if type(code) is not str or code not in BY_CODE:
        raise HeaderError(
            f"{who}: unknown dtype {quote(code)}; known are {', '.join(BY_CODE)}. "
            "A newer tensorlift may know it"
        )
    if type(shape) is not list or any(type(n) is not int or not 0 <= n <= LARGEST for n in shape):
        raise HeaderError(
            f"{who}: its shape has to be a list of integers from 0 to 2**63 - 1, found {quote(shape)}"
        )
    if type(offsets) is not list or len(offsets) != 2 or any(type(n) is not int for n in offsets):
        raise HeaderError(f"{who}: its data_offsets have to be two integers, found {quote(offsets)}")
    begin, end = offsets
    if not 0 <= begin <= end <= LARGEST:
        raise HeaderError(
            f"{who}: its data_offsets have to be a range of bytes, 0 <= begin <= end < 2**63, found "
            f"{quote(offsets)}"
        )
    dtype = BY_CODE[code]
    kind = f"{code} {quote(shape)}"
    if not _countable(shape):
        raise HeaderError(f"{who}: {kind} has more elements than 2**63 - 1")
    bits = product(shape) * dtype.bits
    if bits % 8:
        raise HeaderError(f"{who}: {kind} takes {quote(bits)} bits, which fill no whole number of bytes")
    if bits // 8 != end - begin:
        raise HeaderError(
            f"{who}: {kind} takes {plural(bits // 8, 'byte')}, but data_offsets {quote(offsets)} hold "
            f"{plural(end - begin, 'byte')}; the file is damaged or was written wrongly"
        )
    return dtype.id, tuple(shape), begin, end
