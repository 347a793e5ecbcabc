"""A fork's connection to a seed, whatever its transport: chunks are asked for over a socket, one by one."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence

from tensorlift.engine import abi, abi_fork
from tensorlift.engine.abi_types import RefusedError, Status
from tensorlift.errors import DeviceError
from tensorlift.forking.chunks import Chunk

__all__ = ["NotHereError", "SocketConnection"]


class NotHereError(Exception):
    """A transport cannot be had between this process and that seed, for this reason; another one may."""


class SocketConnection:
    """Over a socket whose other side is known. Chunks come one after another, by one thread."""

    registering = 0.0
    """Seconds that went by until memory was registered, here and there, for those that need it."""

    @property
    def how(self) -> str:
        """What a transport with several ways has taken."""
        return ""

    def __init__(
        self, peer: socket.socket, seconds: float, origins: Sequence[abi_fork.Origin | None] | None = None
    ) -> None:
        """``seconds``: how long the seed may do nothing. ``origins``: where this process reads each region of
        the seed itself; without one the bytes come over the socket.
        """
        self._socket, self._origins = peer, origins
        self._staging: dict[tuple[int, int], abi_fork.Staging] = {}
        self._milliseconds = max(1, int(seconds * 1000))
        self._asked = abi_fork.Chunk()
        peer.setblocking(True)

    def fetch(
        self,
        chunk: Chunk,
        epoch: int,
        places: abi_fork.Places,
        digest: bool,
        device: tuple[int, int] = (abi.DEVICE_CPU, 0),
    ) -> abi_fork.Chunk:
        """Writes a chunk to its places; what came of it is in ``outcome``, ``verified`` and ``seed_epoch``.

        ``device``: kind and index of the one that all places are on. Raises ConnectionError where the
        connection is of no use any more, DeviceError where the device is not.
        """
        asked = abi_fork.Chunk(
            region=chunk.region, offset=chunk.offset, nbytes=chunk.nbytes, epoch=epoch, digest=digest,
            milliseconds=self._milliseconds, done=self._asked.done,
        )  # fmt: skip
        self._asked = asked
        try:
            staging, origin = self._staging_of(device), self._origin(chunk.region, device)
            abi_fork.fetch_chunk(self._socket.fileno(), asked, places, staging, origin)
        except RefusedError as refused:
            error = refused.error
            if refused.status == Status.DRIVER:
                raise DeviceError(f"bytes cannot be written to the device: {error.text}") from None
            raise ConnectionError(f"{error.text} ({error.got:,} of {chunk.nbytes:,} bytes came)") from None
        return asked

    @property
    def moved(self) -> int:
        """Bytes that have come so far, also while another thread is in fetch()."""
        done: int = self._asked.done
        return done

    def _origin(self, region: int, device: tuple[int, int]) -> abi_fork.Origin | None:
        if self._origins is None:
            return None
        # One that the seed has not told of has no bytes, and is the seed's to refuse.
        return self._origins[region] if region < len(self._origins) else abi_fork.Origin()

    def _staging_of(self, device: tuple[int, int]) -> abi_fork.Staging | None:
        if device[0] == abi.DEVICE_CPU:
            return None
        if device not in self._staging:
            self._staging[device] = abi_fork.Staging(*device)
        return self._staging[device]

    def shutdown(self) -> None:
        """Ends a fetch() of another thread with an error."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """No other thread may be in fetch()."""
        self._socket.close()
        for staging in self._staging.values():
            staging.close()
