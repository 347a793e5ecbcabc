"""What a seed says of its memory behind a handshake: its length, and JSON."""

from __future__ import annotations

import socket
import struct
from typing import Any, TypeVar

import msgspec

from tensorlift.forking.handshake import receive

__all__ = ["receive_table", "send_table"]

_LENGTH = struct.Struct("<Q")
# Some hundred thousand regions, and the metadata or the handles of as many.
_LONGEST_BYTES = 64 << 20

T = TypeVar("T")


def send_table(peer: socket.socket, table: Any) -> None:
    """The seed's side; OSError."""
    said = msgspec.json.encode(table)
    peer.sendall(_LENGTH.pack(len(said)) + said)


def receive_table(peer: socket.socket, kind: type[T]) -> T:
    """The fork's side: a table of that type. ConnectionAbortedError where none comes; OSError."""
    (length,) = _LENGTH.unpack(receive(peer, _LENGTH.size))
    if length > _LONGEST_BYTES:
        raise ConnectionAbortedError(f"the seed says {length:,} bytes about its memory, which no seed does")
    try:
        return msgspec.json.decode(receive(peer, length), type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise ConnectionAbortedError("what the seed says about its memory is no table of it") from None
