"""Small reads on the caller's own thread.

Waking a thread of the engine costs more than reading a small tensor: asking for 1,000 tensors of 8 KiB one by
one took 0.9 ms each through the engine on a 2-core machine under load, 0.05 ms this way. Buffered, in place,
on a CPU only.
"""

from __future__ import annotations

import errno
import os
import threading

from tensorlift.engine import abi
from tensorlift.engine.abi import Status
from tensorlift.engine.failures import Failure, exception_of
from tensorlift.errors import ReadError
from tensorlift.format.checkpoint import Shard

__all__ = ["LARGEST", "SmallReads"]

# From here on threads and direct reads pay.
LARGEST = 1 << 20
# Files kept open. Opening one more costs some 10 us; a checkpoint may have more shards than the process may
# have descriptors.
_MOST_OPEN = 32


class _Descriptor:
    """An open file that closes with its last user: no thread reads from a number given out again."""

    __slots__ = ("number",)

    def __init__(self, shard: Shard) -> None:
        try:
            # O_NONBLOCK: opening a named pipe that took the file's place must not wait for a writer.
            self.number = os.open(shard.absolute, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise exception_of(Failure(Status.OPEN, "", error.errno or 0), shard) from error
        facts = os.fstat(self.number)
        same = (facts.st_dev, facts.st_ino) == (shard.device, shard.inode)
        if same and facts.st_size < shard.nbytes:
            failure = Failure(Status.TRUNCATED, "", 0, 0, 0, shard.nbytes, facts.st_size)
            raise exception_of(failure, shard)
        if not same or facts.st_size > shard.nbytes:
            found = f"it was {shard.nbytes} bytes long, now {facts.st_size}"
            raise exception_of(Failure(Status.REPLACED, found), shard)
        # Tensors are asked for in any order: no readahead beyond what is asked for.
        os.posix_fadvise(self.number, 0, 0, os.POSIX_FADV_RANDOM)

    def __del__(self) -> None:
        number = getattr(self, "number", None)
        if number is not None:
            os.close(number)


class SmallReads:
    """Files opened at their first read and kept open; may be used from several threads."""

    def __init__(self) -> None:
        self._files: dict[int, _Descriptor] = {}
        self._lock = threading.Lock()

    def read(self, number: int, shard: Shard, offset: int, nbytes: int, address: int) -> None:
        """Reads ``nbytes`` bytes at ``offset`` of a file to ``address``; ``number`` is the file's own for
        this object.

        Raises TruncatedError, ReadError, FileError as the engine does.
        """
        with self._lock:
            file = self._opened(number, shard)
        done = 0
        while done < nbytes:
            try:
                got = abi.pread(file.number, address + done, nbytes - done, offset + done)
            except InterruptedError:
                continue
            except OSError as error:
                failure = Failure(Status.READ, "", error.errno or 0, 0, offset, nbytes, done)
                raise exception_of(failure, shard) from error
            if got == 0:
                raise exception_of(Failure(Status.TRUNCATED, "", 0, 0, offset, nbytes, done), shard)
            done += got

    def _opened(self, number: int, shard: Shard) -> _Descriptor:
        """The open file; the one that was asked for longest ago makes room."""
        file = self._files.pop(number, None)
        if file is None:
            if len(self._files) >= _MOST_OPEN:
                del self._files[next(iter(self._files))]
            try:
                file = _Descriptor(shard)
            except ReadError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE) or not self._files:
                    raise
                self._files.clear()
                file = _Descriptor(shard)
        self._files[number] = file
        return file

    def close(self) -> None:
        """Closes each file when its last read is over."""
        with self._lock:
            self._files.clear()
