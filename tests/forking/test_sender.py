"""What is sent at a low limit, and what becomes of a socket that is not served."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

import numpy as np
import pytest

from support import leaks
from support.waiting import until
from tensorlift.engine.abi_fork import Memory
from tensorlift.forking.sender import Sender

MIB = 1 << 20


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with leaks.nothing_left():
        ours, theirs = socket.socketpair()
        ours.settimeout(60)
        with ours, theirs:
            yield ours, theirs


@pytest.mark.parametrize("copies", [0, 1])
def test_a_low_limit_shows_signs_of_life(pair: tuple[socket.socket, socket.socket], copies: int) -> None:
    """A whole block would take 10 s under it; its digest comes in parts too."""
    memory = np.zeros(MIB, np.uint8)
    sender = Sender([Memory(memory.ctypes.data, MIB)], bool, limit=100_000)
    ours, theirs = pair
    sender.serve(theirs)
    ours.sendall(struct.pack("<4sIQQQII", b"TLRQ", 0, 0, MIB, 0, 1, copies))
    assert len(ours.recv(16, socket.MSG_WAITALL)) == 16
    first = ours.recv(MIB)
    # Counted behind what was sent.
    until(lambda: sender.stats()["sent_bytes"])
    sender.close()
    assert 0 < len(first) < (16 if copies else MIB)
    assert sender.stats()["sent_bytes"] < MIB


def test_a_socket_is_closed_also_when_it_is_not_served(pair: tuple[socket.socket, socket.socket]) -> None:
    sender = Sender([], bool)
    sender.close()
    ours, theirs = pair
    sender.serve(theirs)
    assert ours.recv(1) == b""
