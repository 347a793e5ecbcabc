"""Before a socket carries weights: both sides show that they know the token, the fork that it has a lease.

    seed   "TLH1", 32 random bytes
    fork   32 random bytes, the id of its lease (32 hexadecimal digits), a code over all of that
    seed   a code over all of that, or nothing: it closes

The codes are HMAC-SHA256 with the token as their key, each over a word for its side, so that neither can be
sent back as the other. The token itself never goes over the wire. Without one (on loopback, or where its
owner has said that it may be insecure) the key is empty, and the lease alone is what a fork has to know.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import time
from collections.abc import Callable

__all__ = ["NOT_TAKEN", "introduce", "receive", "welcome"]

# The seed has not said which: over HTTP one without a token takes any.
NOT_TAKEN = "the seed does not take this token or lease; a seed without a token wants none: leave it out"

_HELLO, _RANDOM_BYTES, _LEASE_BYTES, _CODE_BYTES = b"TLH1", 32, 32, 32
_FORK, _SEED = b"tensorlift fork", b"tensorlift seed"


def welcome(peer: socket.socket, token: str, is_live: Callable[[str], bool]) -> str | None:
    """The seed's side: the lease of a fork that knows the token, or None for whoever does not.

    A stranger is told nothing, not even why. The socket's timeout is for all of it; OSError where it ends.
    """
    ours = secrets.token_bytes(_RANDOM_BYTES)
    peer.sendall(_HELLO + ours)
    said = receive(peer, _RANDOM_BYTES + _LEASE_BYTES + _CODE_BYTES)
    theirs, lease, code = said[:32], said[32:64], said[64:]
    # Both are looked at before anything is said, so that a stranger learns nothing of leases.
    known = hmac.compare_digest(code, _code(token, _FORK, ours, theirs, lease))
    live = lease.isalnum() and is_live(lease.decode("ascii"))
    if not (known and live):
        return None
    peer.sendall(_code(token, _SEED, ours, theirs, lease))
    return lease.decode("ascii")


def introduce(peer: socket.socket, token: str, lease: str) -> None:
    """The fork's side. Raises ConnectionRefusedError where the seed does not take token or lease, or does not
    know the token itself; OSError for what else ends a connection.
    """
    hello = receive(peer, len(_HELLO) + _RANDOM_BYTES)
    if not hello.startswith(_HELLO):
        raise ConnectionRefusedError("who listens there is no seed of this version of tensorlift")
    theirs, ours = hello[len(_HELLO) :], secrets.token_bytes(_RANDOM_BYTES)
    given = lease.encode("ascii")
    peer.sendall(ours + given + _code(token, _FORK, theirs, ours, given))
    try:
        code = receive(peer, _CODE_BYTES)
    except ConnectionError:
        raise ConnectionRefusedError(NOT_TAKEN) from None
    if not hmac.compare_digest(code, _code(token, _SEED, theirs, ours, given)):
        raise ConnectionRefusedError("the seed does not know the token: it may be another process")


def _code(token: str, word: bytes, seed: bytes, fork: bytes, lease: bytes) -> bytes:
    return hmac.digest(token.encode("utf-8"), word + seed + fork + lease, "sha256")


def receive(peer: socket.socket, nbytes: int) -> bytes:
    """So many bytes; ConnectionAbortedError where the other side closes before.

    What it takes is taken off the socket's timeout, which so is one for all that is received: whoever drips
    is waited for no longer than whoever is silent.
    """
    parts = bytearray()
    left, begin = peer.gettimeout(), time.monotonic()
    while len(parts) < nbytes:
        part = peer.recv(nbytes - len(parts))
        if not part:
            raise ConnectionAbortedError(f"the other side closed after {len(parts)} of {nbytes} bytes")
        parts += part
        if left is not None:
            if (rest := left - (time.monotonic() - begin)) <= 0:
                raise TimeoutError(f"{len(parts)} of {nbytes} bytes came in time")
            peer.settimeout(rest)
    return bytes(parts)
