"""From what a caller names to headers that are read: files, lists, folders, indexes, Hub caches and Hub ids.

`find` looks at names (and at an index's text), `read_headers` opens each file once, `expected_digests`
reads a sidecar, `asked_of` turns what a caller asks for into rows, parts of them and digests. Which files
make a checkpoint is decided in `format.listing`, how they are joined in `format.checkpoint`.
"""

from tensorlift.sources.asking import asked_of
from tensorlift.sources.finding import Found, PathLike, Source, file_bytes, find
from tensorlift.sources.reading import read_headers, read_headers_in_parts
from tensorlift.sources.sidecars import expected_digests

__all__ = [
    "Found",
    "PathLike",
    "Source",
    "asked_of",
    "expected_digests",
    "file_bytes",
    "find",
    "read_headers",
    "read_headers_in_parts",
]
