"""One native engine: plan in, tickets out, errors in the project's tree.

Destinations must stay valid until their pieces have landed or the engine is closed; whoever owns the memory
closes the engine first.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from tensorlift.engine import abi
from tensorlift.engine.abi import RefusedError, Status
from tensorlift.engine.failures import Failure, exception_of
from tensorlift.engine.sizing import EngineSize
from tensorlift.errors import RequestError, TensorliftError
from tensorlift.format.checkpoint import Shard
from tensorlift.plan.pieces import PIECE

__all__ = ["Engine", "release_pinned"]

P = ParamSpec("P")
T = TypeVar("T")

# A wait returns this often, so that Ctrl-C and progress come through.
_SLICE_MILLISECONDS = 100


class Engine:
    """A native engine for one device; a context manager. For several threads, but not after a fork."""

    def __init__(
        self,
        size: EngineSize,
        device_kind: int = abi.DEVICE_CPU,
        device_index: int = 0,
        *,
        trace: bool = False,
        warm: bool = False,
        keep: bool = False,
    ) -> None:
        """Creates the engine; no thread starts and nothing is pinned before the first piece, unless ``warm``.

        ``trace``: keep what each thread does when, for trace(). ``keep``: leave the pinned ring to later
        engines of the device, until release_pinned().
        Raises LibraryError, DriverError, MachineError.
        """
        self._abi = abi.library()
        self._shards: list[Shard] = []
        self._pid = os.getpid()
        self._ending = False
        self._end: RefusedError | None = None
        # Calls under way and their threads. Entered and left without a lock, so that whatever a signal's
        # handler raises cannot leave one behind that close() would wait for.
        self._inside: dict[object, int] = {}
        self._lock = threading.RLock()
        self._idle = threading.Condition(self._lock)
        self._handle = abi.Handle()
        options = abi.Options(
            abi_version=abi.ABI_VERSION,
            device_kind=device_kind,
            device_index=device_index,
            chunk_bytes=size.chunk_size,
            slot_bytes=size.slot_size,
            pinned_bytes=size.pinned_bytes,
            threads=size.threads,
            io_depth=size.io_depth,
            backend_count=len(size.backends),
            flags=abi.OPTION_TRACE * trace | abi.OPTION_WARM * warm | abi.OPTION_KEEP * keep,
        )
        for at, name in enumerate(size.backends):
            options.backends[at] = abi.BACKEND_CODES[name]
        for cpu in size.near:
            if cpu < 64 * len(options.cpus):
                options.cpus[cpu // 64] |= 1 << cpu % 64
        try:
            self._abi.engine_create(options, self._handle)
        except RefusedError as refused:
            raise self._explained(refused) from None
        _alive.add(self)

    def __del__(self) -> None:
        """Closes. Not a weakref's callback: in a cycle that comes before those who still use the engine."""
        if getattr(self, "_handle", None):
            self.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        """Whether close() is through."""
        return not self._handle

    @property
    def forked(self) -> bool:
        """Whether this process is a child of the one that the engine works for."""
        return os.getpid() != self._pid

    @property
    def shards(self) -> tuple[Shard, ...]:
        """The files added, by their index."""
        return tuple(self._shards)

    def add_file(self, shard: Shard) -> int:
        """Names a file for pieces; returns its index. It must still be the file whose header was read."""
        facts = shard.absolute, shard.device, shard.inode, shard.nbytes
        index = self._call(self._abi.engine_add_file, *facts)
        self._shards.append(shard)
        return index

    def submit(self, pieces: npt.NDArray[Any], stream: int = 0) -> int:
        """Appends pieces (an array of plan.pieces.PIECE); returns the ticket of all that were submitted so
        far.

        With a device, the copies wait for the work that ``stream`` (a handle of the driver) holds now.
        """
        pieces = np.ascontiguousarray(pieces, PIECE)
        return self._call(self._abi.engine_submit, pieces.ctypes.data, len(pieces), stream)

    @property
    def landed(self) -> int:
        """Number of leading pieces that have landed."""
        return self._call(self._abi.engine_landed)

    def wait(self, ticket: int, tick: Callable[[], object] | None = None) -> None:
        """Waits, without the GIL, until the pieces below ``ticket`` have landed; raises what stopped them.

        ``tick`` is called between slices of at most 100 ms; what it raises comes out.
        """
        if self.landed >= ticket:
            return
        while not self._call(self._abi.engine_wait, ticket, _SLICE_MILLISECONDS):
            if tick is not None:
                tick()

    def stream_wait(self, stream: int) -> None:
        """Makes a stream of the device wait for all copies issued so far, without waiting on the host."""
        self._call(self._abi.engine_stream_wait, stream)

    def stats(self) -> abi.Stats:
        """The engine's counters now."""
        return self._call(self._abi.engine_stats)

    def digests(self, first: int, count: int) -> npt.NDArray[np.uint8]:
        """Digests of the pieces from the one numbered ``first`` on: (count, 16) bytes, XXH3-128, big endian.

        Of pieces with the flag DIGEST; zeros for others. RequestError where one of them has not landed.
        """
        return self._call(self._abi.engine_digests, first, count)

    def trace(self) -> npt.NDArray[Any]:
        """What the threads did so far: an array of TRACE_EVENT in no order, at most 1,048,576 of them."""
        return self._call(self._abi.engine_trace)

    def bytes_done(self) -> int:
        """Bytes delivered so far, by all paths."""
        return int(sum(self.stats().bytes_by_path))

    def file_info(self, file: int) -> abi.FileInfo:
        """What was decided for a file of add_file."""
        return self._call(self._abi.engine_file_info, file)

    def cancel(self) -> None:
        """Starts no further read; waits raise from now on. Nothing after close()."""
        with contextlib.suppress(RequestError):
            self._call(self._abi.engine_cancel)

    def set_aside(self) -> None:
        """close() keeps what is pinned, for release_pinned(): the driver gives it back only to a device that
        rests, and this one may never.
        """
        self._abi.engine_set_aside(self._handle)

    def close(self) -> None:
        """Cancels, waits for reads and copies under way, frees all. After it no byte is written anywhere.

        Other threads that wait get an error; a second close() returns when the first is through, and does
        the rest where that one was interrupted.
        """
        self._ending = True
        if self.forked:
            # Locks may be held for ever by threads that this process does not have; the library only forgets.
            self._abi.engine_destroy(self._handle)
            return
        own = threading.get_ident()
        with self._lock:
            self._abi.engine_cancel(self._handle)
            # A call of another thread must not find its engine freed under it. One of this thread's own, in
            # which a signal's handler closes, has not begun or is over: it will find no engine.
            while any(thread != own for thread in list(self._inside.values())):
                self._idle.wait(1)
            self._end = self._abi.engine_destroy(self._handle) or self._end

    def check_end(self) -> None:
        """After close(): raises what the driver said of copies that were still on their way when they had
        landed, and for files that were written to meanwhile. Not close() itself: it also ends what has
        failed before.
        """
        if self._end is not None:
            raise self._explained(self._end)
        for shard in self._shards:
            if _was_written_to(shard):
                raise exception_of(Failure(Status.REPLACED, "it was written to while it was read"), shard)

    def _call(
        self, function: Callable[Concatenate[abi.Handle, P], T], *given: P.args, **named: P.kwargs
    ) -> T:
        """Calls a function of the library; what it refuses comes out as an error of the tree."""
        if self.forked:
            raise exception_of(Failure(Status.FORKED, ""), None)
        call = object()
        try:
            self._inside[call] = threading.get_ident()
            if self._ending:
                raise RequestError("the engine is closed")
            return function(self._handle, *given, **named)
        except RefusedError as refused:
            raise self._explained(refused) from None
        finally:
            self._inside.pop(call, None)
            if self._ending:
                with self._lock:
                    self._idle.notify_all()

    def _explained(self, refused: RefusedError) -> TensorliftError:
        if self.closed and refused.status == Status.ARGUMENT:
            return RequestError("the engine is closed")
        error = refused.error
        numbers = (error.os_errno, error.driver_code, error.offset, error.wanted, error.got)
        shard = self._shards[error.file] if 0 <= error.file < len(self._shards) else None
        return exception_of(Failure(refused.status, error.text, *numbers), shard)


def release_pinned() -> int:
    """Gives back the pinned memory that loads with ``keep_pinned`` have left, of all devices; its bytes.

    And that of loads that ended because a rank was gone, in a gather through the caller's own group: once
    that group was aborted, for until then their device does not rest, and this would wait for it.

    What loads under way have pinned is given back when they end, whatever they were told. From any thread.
    """
    return abi.library().pinned_release()


def _was_written_to(shard: Shard) -> bool:
    """Since before its header was read: what came may be part old, part new. Not what has replaced it."""
    if not shard.written_ns:
        return False
    try:
        now = os.stat(shard.absolute)
        if (now.st_dev, now.st_ino, now.st_mtime_ns) == (shard.device, shard.inode, shard.written_ns):
            return False
        # Some file systems have no such time and say another one whenever they are asked.
        steady = os.stat(shard.absolute).st_mtime_ns == now.st_mtime_ns
    except OSError:  # removed meanwhile: what was open was the old one
        return False
    return steady and (now.st_dev, now.st_ino) == (shard.device, shard.inode)


_alive: weakref.WeakSet[Engine] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Reads under way must end before the memory that they fill goes with the interpreter."""
    for engine in list(_alive):
        engine.close()
