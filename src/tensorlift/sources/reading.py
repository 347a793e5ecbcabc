"""Reading the headers of files: each file opened once, unless it is to be said what is wrong with it."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import NamedTuple

from tensorlift.engine.headers import FileHeaders, HeaderScan
from tensorlift.errors import LibraryError, TruncatedError
from tensorlift.format.checkpoint import Checkpoint, Shard, check_together, join, join_some
from tensorlift.format.header import LENGTH_BYTES, PREFIX_BYTES, header_length, parse
from tensorlift.format.quoting import clean
from tensorlift.sources.finding import Found, Source
from tensorlift.sources.problems import not_a_file, refused

__all__ = ["read_headers", "read_headers_in_parts"]

# Opening and one small read wait for storage, not for a CPU; eight at a time hide the round trips of a
# network mount and stay far below any limit of open files.
_THREADS = 8
_FIRST_READ = 64 << 10  # bytes, as in the library
# Least bytes of files that are laid out together once reading has begun: some 20 ms of a fast link, against
# about one that a part costs.
_PART_BYTES = 1 << 30


def read_headers(found: Found, meanwhile: Callable[[], object] | None = None) -> Checkpoint:
    """Opens, checks and closes each file, and joins their tensors; ``meanwhile`` is called once files are
    being read without Python, if they are.

    Size and identity in the result are those of the open file whose header was read. Of several bad files the
    first in order is reported. Raises HeaderError, TruncatedError, CheckpointError, or ReadError for what the
    operating system refuses.
    """
    shards = [_parsed(*read) for read in _read_all(found.files, meanwhile)]
    return join(shards, found.where, found.weight_map, found.members)


def read_headers_in_parts(found: Found) -> Generator[Checkpoint, None, None]:
    """The same, piece by piece: each part is some of the files, so that their tensors can be read while other
    headers still are. What concerns several files is checked before the last part comes.
    """
    parts: list[Checkpoint] = []
    some: list[Shard] = []
    seen: set[tuple[int, int]] = set()
    members = found.members
    begin, wanted, held, total = 0, 0, 0, 0
    for at, read in enumerate(_read_all(found.files)):
        shard = _parsed(*read)
        # Without an index two names may mean one file.
        if found.weight_map is not None or (shard.device, shard.inode) not in seen:
            some.append(shard)
            held += shard.nbytes
        seen.add((shard.device, shard.inode))
        is_last = at == len(found.files) - 1
        if (some and held >= wanted) or is_last:
            parts.append(join_some(some, found.where, found.weight_map, members[begin : begin + len(some)]))
            if is_last:
                check_together(parts, found.where, found.weight_map, members)
            yield parts[-1]
            # At first the smallest part, so that reading begins; then few, for each costs a little: as much
            # as is being read already.
            total += held
            some, begin, wanted, held = [], at + 1, max(_PART_BYTES, total), 0


class _Read(NamedTuple):
    """A header, and its file's size, device and inode."""

    source: Source
    identity: tuple[int, int, int]
    scan: HeaderScan


def _read_all(files: Sequence[Source], meanwhile: Callable[[], object] | None = None) -> Iterator[_Read]:
    """Headers in the order of the files, read by a few threads where there are several.

    What has to hold the GIL the caller's thread does while the next files are read.
    """
    try:
        headers = FileHeaders([source.absolute for source in files], _THREADS if len(files) > 1 else 0)
    except LibraryError:  # nothing is loaded without it, but headers can be shown
        yield from map(_read, files)
        return
    with contextlib.closing(headers):
        if meanwhile is not None:
            meanwhile()
        for at, source in enumerate(files):
            scan = headers.take(at)
            # What the library does not read is read again, to say why; it may be there by now.
            yield _read(source) if scan is None else _Read(source, scan.identity, scan)


def _read(source: Source) -> _Read:
    info, raw = _header_bytes(source)
    return _Read(source, (info.st_size, info.st_dev, info.st_ino), HeaderScan(raw))


def _header_bytes(source: Source) -> tuple[os.stat_result, bytes]:
    """A file's facts, and the JSON bytes of its header."""
    try:
        # O_NONBLOCK: opening a named pipe that took the file's place must not wait for a writer.
        fd = os.open(source.absolute, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise refused(error, source.path, "opened") from None
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise not_a_file(source.path, info.st_mode)
        # No readahead: what it brings of a cold file the engine would read again, directly.
        with contextlib.suppress(OSError):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        # Plain read() on purpose: it works where a sandbox forbids the calls that take an offset.
        head = os.read(fd, _FIRST_READ)
        length = header_length(head[:PREFIX_BYTES], info.st_size, source.path)
        if LENGTH_BYTES + length <= len(head):
            return info, head[LENGTH_BYTES : LENGTH_BYTES + length]
        os.lseek(fd, LENGTH_BYTES, os.SEEK_SET)
        return info, _read_exactly(fd, length, source.path)
    except OSError as error:
        raise refused(error, source.path, "read") from None
    finally:
        os.close(fd)


def _read_exactly(fd: int, nbytes: int, path: str) -> bytes:
    parts: list[bytes] = []
    missing = nbytes
    while missing:
        part = os.read(fd, missing)
        if not part:
            raise TruncatedError(
                f"{clean(path)}: the header has {nbytes:,} bytes, but {missing:,} of them are gone: the file "
                "became shorter while it was read"
            )
        parts.append(part)
        missing -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _parsed(source: Source, identity: tuple[int, int, int], scan: HeaderScan) -> Shard:
    nbytes, device, inode = identity
    header = parse(scan.raw, nbytes, source.path, scan.result())
    *found, written_ns = source.written
    same = found == [device, inode]
    return Shard(source.path, source.absolute, nbytes, device, inode, header, written_ns if same else 0)
