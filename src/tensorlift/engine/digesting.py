"""Digests of tensors, made by the engine as their bytes pass: checked in a load, or made for a sidecar."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tensorlift.engine import abi
from tensorlift.engine.engine import Engine
from tensorlift.engine.sizing import size_engine
from tensorlift.errors import DigestError, LibraryError
from tensorlift.format.checkpoint import Checkpoint
from tensorlift.format.digests import DIGEST_BYTES, Expected, listed
from tensorlift.format.quoting import clean, quote
from tensorlift.options import LoadOptions
from tensorlift.plan.chunks import CHUNK, chunk_edges, digest_pieces
from tensorlift.plan.parts import spread_of
from tensorlift.plan.pieces import JOIN

__all__ = ["Checks", "check_built", "check_in_memory", "digest_checkpoint", "tree_digests"]

Ints = npt.NDArray[np.int64]
Digests = npt.NDArray[np.uint8]

# XXH3-128 of no bytes, seed 0: what a library that was built without xxHash cannot answer.
_OF_NOTHING = bytes.fromhex("99aa06d3014798d86001c324468d497f")
# Bytes of one part of a pass that keeps nothing: some reads for each thread; and how many are under way, so
# that threads never wait for Python.
_WINDOW = 16 << 20
_WINDOWS = 3
_PAGE = 4096


def tree_digests(pieces: Digests, edges: Ints) -> Digests:
    """(tensors, 16) bytes: digest i from those of its chunks, ``pieces[edges[i]:edges[i + 1]]``."""
    made = np.zeros((len(edges) - 1, DIGEST_BYTES), np.uint8)
    digest_parts(np.ascontiguousarray(pieces, np.uint8), edges * DIGEST_BYTES, made)
    return made


def digest_parts(data: Digests, edges: Ints, made: Digests) -> None:
    """``made[i]`` (16 bytes, big endian): XXH3-128 of the bytes from ``edges[i]`` to ``edges[i + 1]``.

    All arrays contiguous. Keeps the GIL, so for few bytes a part.
    """
    function, source, target = abi.library().call["tl_digest"], data.ctypes.data, made.ctypes.data
    begins, nbytes = (edges[:-1] + source).tolist(), np.diff(edges).tolist()
    for part, (begin, size) in enumerate(zip(begins, nbytes, strict=True)):
        function(begin, size, target + part * DIGEST_BYTES)


def check_built() -> None:
    """Raises LibraryError where the native library has no xxHash."""
    if tree_digests(np.zeros((0, DIGEST_BYTES), np.uint8), np.zeros(2, np.int64)).tobytes() != _OF_NOTHING:
        raise LibraryError(
            "the native library was built without xxHash, so it makes no digests; install libxxhash-dev and "
            "build it again, or load without verify"
        )


def check_in_memory(checkpoint: Checkpoint, row: int, address: int, nbytes: int, expected: Expected) -> None:
    """Compares one tensor whose bytes lie at ``address``; DigestError. Keeps the GIL, so for small ones.

    ``check_built`` has to have passed.
    """
    function = abi.library().call["tl_digest"]
    starts = range(0, nbytes, CHUNK)
    pieces, found = np.zeros((len(starts), DIGEST_BYTES), np.uint8), np.zeros(DIGEST_BYTES, np.uint8)
    for number, start in enumerate(starts):
        function(address + start, min(CHUNK, nbytes - start), pieces.ctypes.data + number * DIGEST_BYTES)
    function(pieces.ctypes.data, pieces.nbytes, found.ctypes.data)
    wanted = expected.digests[row].tobytes()
    if expected.known[row] and found.tobytes() != wanted:
        raise _wrong([_line(checkpoint, row, found.tobytes(), wanted)], expected)


def _wrong(lines: Sequence[str], expected: Expected) -> DigestError:
    return DigestError(
        f"{listed(lines)}\nThe bytes are damaged, or were changed after the digests were made "
        f"({clean(expected.where)}): download or copy the file again, or make new digests"
    )


def _line(checkpoint: Checkpoint, row: int, found: bytes, wanted: bytes) -> str:
    path = checkpoint.shards[int(checkpoint.shard_of[row])].path
    return (
        f"{clean(path)}: tensor {quote(checkpoint.names[row])}: digest is {found.hex()}, "
        f"expected {wanted.hex()}"
    )


class Checks:
    """What one engine's tensors have to be: makes their pieces, then compares what the engine digested.

    Tensors are numbered as in ``rows``; the engine has to get all their pieces, in order.
    """

    def __init__(
        self,
        engine: Engine,
        checkpoint: Checkpoint,
        rows: npt.NDArray[np.int64],
        expected: Expected,
        before: int = 0,
    ) -> None:
        """``before``: pieces that the engine gets first. Raises LibraryError where digests are not built."""
        check_built()
        self._engine, self._checkpoint, self._rows, self._expected = engine, checkpoint, rows, expected
        self._starts, self._sizes = checkpoint.starts[rows], checkpoint.sizes[rows]
        # What has no digest to be compared with, such as a slice, is not digested.
        self._digested, self._spread = expected.known[rows], spread_of(checkpoint, rows)
        self._edges, self._before = chunk_edges(self._sizes, self._digested), before
        self.checked = 0
        """Tensors that were compared and are right."""

    def pieces(
        self,
        first: int,
        last: int,
        files: npt.NDArray[np.int32],
        addresses: npt.NDArray[np.uint64],
        arenas: npt.NDArray[np.int32] | None = None,
    ) -> npt.NDArray[Any]:
        """Pieces of tensors [first, last), which go to ``addresses``; ``arenas`` joins those of one arena."""
        part = slice(first, last)
        spread = None if self._spread is None else self._spread.take(part)
        pieces = digest_pieces(
            files, self._starts[part], self._sizes[part], addresses, self._digested[part], spread
        )
        if arenas is not None:
            owners = np.repeat(arenas, np.diff(self._edges[first : last + 1]))
            pieces["flags"][1:] |= np.where(owners[1:] == owners[:-1], JOIN, 0).astype(np.uint32)
        return pieces

    def ticket(self, last: int) -> int:
        """Pieces of the tensors before ``last``."""
        return int(self._edges[last])

    def check(self, first: int, last: int) -> None:
        """Compares tensors [first, last), which have landed; DigestError that names file and tensor."""
        low, high = int(self._edges[first]), int(self._edges[last])
        found = tree_digests(
            self._engine.digests(self._before + low, high - low), self._edges[first : last + 1] - low
        )
        rows = self._rows[first:last]
        wanted, known = self._expected.digests[rows], self._expected.known[rows]
        wrong = np.flatnonzero(known & (found != wanted).any(axis=1))
        if len(wrong):
            lines = [
                _line(self._checkpoint, int(rows[i]), found[i].tobytes(), wanted[i].tobytes())
                for i in wrong.tolist()
            ]
            raise _wrong(lines, self._expected)
        self.checked += int(known.sum())


def digest_checkpoint(
    checkpoint: Checkpoint, options: LoadOptions, tick: Callable[[int, int], object] | None = None
) -> Digests:
    """Digests of all rows: (rows, 16) bytes. Reads everything through about 48 MiB of memory; keeps nothing.

    ``tick`` is called now and then with (bytes done, bytes in all). Raises what reading raises.
    """
    check_built()
    total = int(checkpoint.sizes.sum())
    edges = chunk_edges(checkpoint.sizes)
    made = np.zeros((int(edges[-1]), DIGEST_BYTES), np.uint8)
    if len(made):
        engine = Engine(size_engine(options, total, device=False, digest=True))
        # Room for a whole window behind any offset within a page.
        handle, address = abi.library().arena_host(_WINDOWS * (_WINDOW + _PAGE))
        try:
            _stream(
                engine,
                checkpoint,
                address,
                made,
                (lambda: tick(engine.bytes_done(), total)) if tick else None,
            )
        finally:
            # First the engine: it may be writing still.
            engine.close()
            abi.library().arena_release(handle)
    return tree_digests(made, edges)


def _stream(
    engine: Engine, checkpoint: Checkpoint, address: int, made: Digests, tick: Callable[[], object] | None
) -> None:
    files = np.array([engine.add_file(shard) for shard in checkpoint.shards], np.int32)
    nowhere = np.zeros(len(checkpoint), np.uint64)
    pieces = digest_pieces(files[checkpoint.shard_of], checkpoint.starts, checkpoint.sizes, nowhere)
    under_way: deque[tuple[int, int]] = deque()
    places = itertools.cycle(range(address, address + _WINDOWS * (_WINDOW + _PAGE), _WINDOW + _PAGE))
    for first, last in itertools.pairwise(_windows(pieces["nbytes"].astype(np.int64))):
        if len(under_way) == _WINDOWS:
            _collect(engine, *under_way.popleft(), made, tick)
        part = pieces[first:last]
        # As far behind a page as in the file: direct reads land in place.
        begin = next(places) + int(part["file_offset"][0]) % _PAGE
        ends = np.cumsum(part["nbytes"])
        part["destination"] = np.uint64(begin) + ends - part["nbytes"]
        engine.submit(part)
        under_way.append((first, last))
    for window in under_way:
        _collect(engine, *window, made, tick)


def _windows(sizes: Ints) -> Sequence[int]:
    """Edges of stretches of pieces of at most a window's bytes each."""
    ends = np.cumsum(sizes)
    edges = [0]
    while edges[-1] < len(sizes):
        begin = int(ends[edges[-1] - 1]) if edges[-1] else 0
        edges.append(int(np.searchsorted(ends, begin + _WINDOW, side="right")))
    return edges


def _collect(engine: Engine, first: int, last: int, made: Digests, tick: Callable[[], object] | None) -> None:
    engine.wait(last, tick)
    made[first:last] = engine.digests(first, last - first)
    if tick is not None:
        tick()
