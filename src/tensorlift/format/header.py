"""The header of a safetensors file, checked in full before a byte of data is believed.

    0        8                8 + n                                       end of file
    |  n     |  JSON, n bytes  |  data: the tensors' ranges, back to back  |
    '- u64, little endian      '- data_offsets count from here

Every check is against what is known already: n against the file's size before anything is read, the JSON
against the format's grammar, each range against shape and dtype, all ranges against each other and the file's
size. What passes has every byte of the data in exactly one tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tensorlift.errors import HeaderError, TruncatedError
from tensorlift.format.dtypes import ALL
from tensorlift.format.entries import Columns, Scanned, plain_metadata, read
from tensorlift.format.foreign import PREFIX_BYTES, recognise
from tensorlift.format.quoting import clean, plural, quote

__all__ = ["LENGTH_BYTES", "LONGEST_HEADER", "PREFIX_BYTES", "Header", "header_length", "parse"]

LENGTH_BYTES = 8
"""Bytes of the length field."""
LONGEST_HEADER = 100_000_000
"""Bytes that a header may have: MAX_HEADER_SIZE of the reference implementation."""


@dataclass(frozen=True, slots=True)
class Header:
    """The tensors of one file, in the order of their bytes (ties: in the order of the JSON)."""

    metadata: dict[str, str] | None
    """The free-form map of the file; None where there is none."""
    names: list[str]
    dtypes: npt.NDArray[np.uint8]
    """`Dtype.id` of each tensor."""
    shapes: list[tuple[int, ...]]
    """As written in the file: F4 counts half bytes."""
    starts: npt.NDArray[np.int64]
    """First byte of each tensor, from the start of the file."""
    sizes: npt.NDArray[np.int64]
    """Bytes of each tensor."""


def header_length(prefix: bytes, file_bytes: int, path: str) -> int:
    """Bytes of the JSON, from the first bytes of a file.

    `prefix` has the first PREFIX_BYTES of the file (all of a shorter one), `file_bytes` is the file's size.
    Raises TruncatedError where the file is shorter than the length field promises, and HeaderError where that
    field can be no length, or the file is plainly something else.
    """
    where = clean(path)
    if not file_bytes:
        raise TruncatedError(
            f"{where}: the file is empty (0 bytes); a safetensors file has at least {LENGTH_BYTES + 2}. "
            "Download or copy it again"
        )
    length = int.from_bytes(prefix[:LENGTH_BYTES], "little")
    room = file_bytes - LENGTH_BYTES
    if (
        len(prefix) >= LENGTH_BYTES
        and 2 <= length <= min(room, LONGEST_HEADER)
        and prefix[8:9] in (b"{", b"")
    ):
        return length
    _refuse_foreign(prefix, where)
    if len(prefix) < LENGTH_BYTES:
        raise TruncatedError(
            f"{where}: the file has {plural(len(prefix), 'byte')}, and the length field at its start alone "
            f"takes {LENGTH_BYTES}. Download or copy it again"
        )
    if length > LONGEST_HEADER:
        raise HeaderError(
            f"{where}: the length field says that the header has {length:,} bytes, but at most "
            f"{LONGEST_HEADER:,} are allowed (the file has {file_bytes:,}): the file is damaged, or it is "
            "no safetensors file"
        )
    if length > room:
        raise TruncatedError(
            f"{where}: the length field says that the header has {length:,} bytes, but only {room:,} "
            f"follow: at least {plural(length - room, 'byte')} missing. Download or copy the file again"
        )
    if length < 2:
        raise HeaderError(
            f"{where}: the length field says that the header has {plural(length, 'byte')}, but the shortest "
            f"one, {{}}, "
            "has 2: the file is damaged, or it is no safetensors file"
        )
    raise HeaderError(
        f"{where}: the header has to begin with '{{', found {quote(prefix[8:16])}: the file is damaged, or "
        "it is no safetensors file"
    )


def _refuse_foreign(prefix: bytes, where: str) -> None:
    kind = recognise(prefix)
    if kind is not None:
        raise HeaderError(f"{where}: this is no safetensors file but {kind[0]}; {kind[1]}")


def parse(raw: bytes | memoryview, file_bytes: int, path: str, scanned: Scanned | None = None) -> Header:
    """The header from exactly its JSON bytes; `scanned` is what a scanner found in them, if it could.

    Raises HeaderError for whatever breaks a rule of the format, naming file, tensor, what was wanted and
    found, and TruncatedError where the header is right and the file ends too early.
    """
    where = clean(path)
    if bytes(raw[:1]) != b"{":
        raise HeaderError(f"{where}: the header has to begin with '{{', found {quote(bytes(raw[:8]))}")
    first_byte = LENGTH_BYTES + len(raw)
    certain, metadata = (False, None) if scanned is None else plain_metadata(scanned)
    if scanned is not None and certain:
        if scanned.tiled and _end(scanned, first_byte) == file_bytes:
            # Nothing of this looks at a column: numpy gives the GIL away for each longer than 500.
            return Header(
                metadata, scanned.names, scanned.dtypes, scanned.shapes, scanned.starts, scanned.sizes
            )
        begins = scanned.starts - first_byte
        columns = Columns(
            metadata, scanned.names, scanned.dtypes, scanned.shapes, begins, begins + scanned.sizes
        )
    else:
        columns = read(raw, path)
    data_bytes = file_bytes - first_byte
    begins, ends = columns.begins, columns.ends
    names, dtypes, shapes = columns.names, columns.dtypes, columns.shapes
    if not (begins[1:] == ends[:-1]).all():
        order = np.lexsort((ends, begins))  # by begin, then by end; equal ones stay in the order of the JSON
        begins, ends, dtypes = begins[order], ends[order], dtypes[order]
        rows = order.tolist()
        names, shapes = [names[i] for i in rows], [shapes[i] for i in rows]
    ordered = Columns(columns.metadata, names, dtypes, shapes, begins, ends)
    _check_tiling(ordered, data_bytes, first_byte, where)
    return Header(columns.metadata, names, dtypes, shapes, begins + first_byte, ends - begins)


def _end(scanned: Scanned, first_byte: int) -> int:
    """Where the last tensor ends, from the start of the file."""
    return int(scanned.starts[-1]) + int(scanned.sizes[-1]) if len(scanned.starts) else first_byte


def _check_tiling(columns: Columns, data_bytes: int, first_byte: int, where: str) -> None:
    """The ranges, in order, have to follow each other from 0 to the end of the data."""
    begins, ends = columns.begins, columns.ends
    wanted = np.zeros_like(begins)
    wanted[1:] = ends[:-1]
    wrong = np.flatnonzero(begins != wanted)
    if len(wrong):
        _refuse_gap(columns, int(wrong[0]), where)
    covered = int(ends[-1]) if len(ends) else 0
    if covered > data_bytes:
        i = int(np.searchsorted(ends, data_bytes, side="right"))
        whole, have = int(ends[i] - begins[i]), max(0, data_bytes - int(begins[i]))
        raise TruncatedError(
            f"{where}: the file has {plural(data_bytes + first_byte, 'byte')}, but its header describes "
            f"{covered + first_byte:,}: {plural(covered - data_bytes, 'byte')} missing. "
            f"The first that is not whole is {_describe(columns, i)}: {have:,} of {whole:,} "
            "bytes are there. Download or copy the file again"
        )
    if covered < data_bytes:
        last = f" ({_describe(columns, len(ends) - 1)})" if len(ends) else ""
        raise HeaderError(
            f"{where}: {plural(data_bytes - covered, 'byte')} after the last tensor{last}: the tensors end "
            f"at byte {covered:,} of the data, which has {data_bytes:,}. The file is damaged or was written "
            "wrongly"
        )


def _describe(columns: Columns, i: int) -> str:
    code = ALL[int(columns.dtypes[i])].code
    return f"tensor {quote(columns.names[i])} ({code} {quote(columns.shapes[i])})"


def _refuse_gap(columns: Columns, i: int, where: str) -> None:
    """Raises for tensor i, which does not begin where the one before it ends."""
    begin, end = int(columns.begins[i]), int(columns.ends[i])
    before = int(columns.ends[i - 1]) if i else 0
    found = f"{_describe(columns, i)} has bytes {begin:,} to {end:,} of the data"
    after = f"{_describe(columns, i - 1)} ends at {before:,}" if i else "the data begin at 0"
    if begin > before:
        problem = f"{plural(begin - before, 'byte')} before it belong to no tensor"
    elif i and begin == int(columns.begins[i - 1]) and end == before:
        problem = "both have the same bytes"
    else:
        problem = f"{plural(before - begin, 'byte')} would belong to both"
    raise HeaderError(
        f"{where}: {found}, but {after}: {problem}. Ranges have to follow each other without hole or "
        "overlap; the file is damaged or was written wrongly"
    )
