"""Bytes as a safetensors file: what the library's scanner and Python's reader make of them, against a plain
reference. A program for atheris, with libFuzzer's arguments.
"""

from __future__ import annotations

import os
import sys

import atheris
from watching import watch

from support.headers import RefusedError, parsed_in_both_ways, reference
from tensorlift.errors import HeaderError, TruncatedError
from tensorlift.format import entries, foreign, header, quoting
from tensorlift.format.dtypes import ALL
from tensorlift.format.header import PREFIX_BYTES, Header, header_length
from tensorlift.sources import reading
from tensorlift.sources.finding import Found, Source


def rows_of(found: Header) -> list[tuple[str, str, tuple[int, ...], int, int]]:
    codes = [ALL[i].code for i in found.dtypes]
    return [*zip(found.names, codes, found.shapes, found.starts.tolist(), found.sizes.tolist(), strict=True)]


def read_of(content: bytes) -> Header | None:
    """By way of the library's threads, from a file of memory; None where it is refused."""
    fd = os.memfd_create("fuzz")
    try:
        os.write(fd, content)
        path = f"/proc/self/fd/{fd}"
        source = Source(path, path.encode(), None, len(content))
        return reading.read_headers(Found(path, (source,))).shards[0].header
    except (HeaderError, TruncatedError):
        return None
    finally:
        os.close(fd)


def one_input(content: bytes) -> None:
    try:
        metadata, rows = reference(content)
    except RefusedError:
        rows = None
    try:
        length = header_length(content[:PREFIX_BYTES], len(content), "file")
        parsed = parsed_in_both_ways(content[8 : 8 + length], len(content), "file")
    except (HeaderError, TruncatedError):
        parsed = None
    assert (parsed is None) == (rows is None)
    read = read_of(content)
    assert (read is None) == (rows is None)
    for found in (parsed, read):
        if found is not None:
            assert (found.metadata, rows_of(found)) == (metadata, rows)


if __name__ == "__main__":
    watch(entries, foreign, header, quoting, reading)
    # A merge starts the program anew, by its name alone.
    atheris.Setup([f"{sys.executable} {sys.argv[0]}", *sys.argv[1:]], one_input)
    atheris.Fuzz()
