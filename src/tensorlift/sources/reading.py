"""Reading the headers of files: each file opened once, at most a handful at a time."""

from __future__ import annotations

import contextlib
import os
import stat
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice

from tensorlift.errors import TruncatedError
from tensorlift.format.checkpoint import Checkpoint, Shard, join
from tensorlift.format.header import LENGTH_BYTES, PREFIX_BYTES, header_length, parse
from tensorlift.format.quoting import clean
from tensorlift.sources.finding import Found, Source
from tensorlift.sources.problems import not_a_file, refused

__all__ = ["read_headers"]

# Opening and one small read wait for storage, not for a CPU; eight at a time hide the round trips of a
# network mount and stay far below any limit of open files.
_THREADS = 8
# Bytes of the first read: the whole header of a usual shard (a few hundred tensors take 30 to 60 kB).
_FIRST_READ = 64 << 10


def read_headers(found: Found) -> Checkpoint:
    """Opens, checks and closes each file, and joins their tensors.

    Size and identity in the result are those of the open file whose header was read. Of several bad files the
    first in order is reported. Raises HeaderError, TruncatedError, CheckpointError, or ReadError for what the
    operating system refuses.
    """
    shards = [_parsed(*read) for read in _read_all(found.files)]
    members = [source.member or "" for source in found.files]
    return join(shards, found.where, found.weight_map, members)


def _read_all(files: Sequence[Source]) -> Iterator[tuple[Source, os.stat_result, bytes]]:
    """Header bytes in the order of the files, read by a few threads where there are several.

    Parsing holds the GIL anyway, so the caller's thread does it while the next files are read; no more than
    twice the threads' number of headers wait in memory.
    """
    if len(files) == 1:
        yield _read(files[0])
        return
    pool = ThreadPoolExecutor(min(_THREADS, len(files)), thread_name_prefix="tensorlift-headers")
    try:
        rest = iter(files)
        ahead = deque(_asked(pool, source) for source in islice(rest, 2 * _THREADS))
        while ahead:
            read = ahead.popleft()()
            ahead.extend(_asked(pool, source) for source in islice(rest, 1))
            yield read
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _asked(pool: ThreadPoolExecutor, source: Source) -> Callable[[], tuple[Source, os.stat_result, bytes]]:
    """What answers with the header bytes of a file: a thread that reads them now, else the caller's own."""
    try:
        return pool.submit(_read, source).result
    except RuntimeError:  # no thread could be started: too many, or no memory for one
        return partial(_read, source)


def _read(source: Source) -> tuple[Source, os.stat_result, bytes]:
    """The JSON bytes of a file's header."""
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
            return source, info, head[LENGTH_BYTES : LENGTH_BYTES + length]
        os.lseek(fd, LENGTH_BYTES, os.SEEK_SET)
        return source, info, _read_exactly(fd, length, source.path)
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


def _parsed(source: Source, info: os.stat_result, raw: bytes) -> Shard:
    header = parse(raw, info.st_size, source.path)
    return Shard(source.path, source.absolute, info.st_size, info.st_dev, info.st_ino, header)
