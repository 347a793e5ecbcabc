"""What only the transport of one host has: descriptors, rights, and a seed that lies about its memory."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support import leaks
from tensorlift.engine.abi_fork import Memory
from tensorlift.engine.abi_types import Error, RefusedError, Status
from tensorlift.forking import shm
from tensorlift.forking.chunks import Chunk
from tensorlift.forking.connection import NotHereError
from tensorlift.forking.handshake import welcome
from tensorlift.forking.listener import Listener
from tensorlift.forking.manifest import Layout
from tensorlift.forking.sender import Sender
from tensorlift.forking.shared_memory import shared_tensors
from tensorlift.forking.shm import ShmConnection, ShmServer

LEASE, PATIENCE = "a" * 32, 60.0


class Seed:
    """Memory of both kinds."""

    def __init__(self) -> None:
        self.tensors = [
            shared_tensors([Layout(f"t{k}", "uint8", (100,), (1,)) for k in range(3)]) for _ in range(2)
        ]
        self.private = np.arange(100, dtype=np.uint8)
        regions = [Memory(one.data_ptr(), 100) for made in self.tensors for one in made.values()]
        self.sender = Sender([*regions, Memory(self.private.ctypes.data, 100)], lambda lease: True)
        self.server = ShmServer(self.sender)

    def connect(self) -> ShmConnection:
        return ShmConnection(self.server.offer.address, "", LEASE, PATIENCE)

    def close(self) -> None:
        self.server.close()
        self.sender.close()
        self.tensors.clear()


@pytest.fixture
def seed() -> Iterator[Seed]:
    with leaks.nothing_left():
        made = Seed()
        yield made
        made.close()


def test_memory_of_both_kinds(seed: Seed) -> None:
    for number, made in enumerate(seed.tensors):
        for tensor in made.values():
            tensor.fill_(10 + number)
    connection = seed.connect()
    assert connection.how == "memfd and process_vm_readv"
    assert len(connection._files) == 2
    memory = np.zeros(100, np.uint8)
    places = np.array([[0, 100, memory.ctypes.data]], np.uint64)
    for region, expected in enumerate([10] * 3 + [11] * 3):
        connection.fetch(Chunk(region, 0, 100), 0, places, True)
        assert (memory == expected).all()
    connection.fetch(Chunk(6, 0, 100), 0, places, True)
    assert np.array_equal(memory, seed.private)
    connection.close()


def refuse(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def fail(*_: object) -> None:
        error = Error()
        error.os_errno = code
        error.message = f"cannot read the seed's memory: {os.strerror(code)}".encode()
        raise RefusedError(Status.READ, error)

    monkeypatch.setattr(shm, "copy_from", fail)


@pytest.mark.parametrize(
    ("code", "scope", "says"),
    [
        (errno.EPERM, "1\n", r"permitted \(kernel.yama.ptrace_scope is 1\): give the fork CAP_SYS_PTRACE"),
        (errno.EPERM, None, r"permitted: give the fork CAP_SYS_PTRACE, or offer weights in shared memory"),
        (errno.ESRCH, None, r"No such process: let both share a pid namespace, or offer weights in shared"),
        (errno.ENOSYS, None, r"cannot read the seed's memory: Function not implemented$"),
    ],
)  # fmt: skip
def test_what_helps(
    seed: Seed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int, scope: str | None, says: str
) -> None:
    monkeypatch.setattr(shm, "_YAMA", tmp_path / "ptrace_scope")
    if scope is not None:
        (tmp_path / "ptrace_scope").write_text(scope)
    refuse(monkeypatch, code)
    with pytest.raises(NotHereError, match=says):
        seed.connect()


def test_a_process_that_cannot_be_seen(seed: Seed, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one in another pid namespace, of which the kernel says 0."""
    real = socket.socket.getsockopt

    def hidden(peer: socket.socket, level: int, option: int, *more: int) -> Any:
        if option == socket.SO_PEERCRED:
            return struct.pack("3i", 0, 0, 0)
        return real(peer, level, option, *more)

    monkeypatch.setattr(socket.socket, "getsockopt", hidden)
    with pytest.raises(NotHereError, match="the seed's process cannot be seen from here: let both share"):
        seed.connect()


OTHER_USER = """
import os, sys
from tensorlift.forking import shm
from tensorlift.engine import abi
abi.library()
os.setgid(65534); os.setuid(65534)
try:
    shm.ShmConnection(sys.argv[1], "", "a" * 32, 60)
except shm.NotHereError as error:
    print(error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user(seed: Seed) -> None:
    done = subprocess.run(
        [sys.executable, "-c", OTHER_USER, seed.server.offer.address], env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.stdout == (
        "cannot read the seed's memory: Operation not permitted: it runs as user 0, this process as 65534; "
        "run both as one\n"
    ), done.stderr


@pytest.mark.parametrize("address", ["", "127.0.0.1:80", "x" * 65, "é" * 32 + ":" + "0" * 32])
def test_addresses_that_are_none(address: str) -> None:
    with pytest.raises(NotHereError, match="on another host"):
        ShmConnection(address, "", LEASE, PATIENCE)


def test_nobody_listens() -> None:
    with leaks.nothing_left(), pytest.raises(NotHereError, match="nobody listens on the seed's socket"):
        ShmConnection(f"{shm.host_id()}:{secrets.token_hex(16)}", "", LEASE, PATIENCE)


def table(files: object, *regions: object) -> bytes:
    text = json.dumps({"files": files, "regions": regions}).encode()
    return struct.pack("<Q", len(text)) + text


def nothing_more(peer: socket.socket) -> None:
    """It says no more and closes."""


def passing(*descriptors: Callable[[], int]) -> Callable[[socket.socket], None]:
    def send(peer: socket.socket) -> None:
        made = [make() for make in descriptors]
        socket.send_fds(peer, [b"F"], made)
        for one in made:
            os.close(one)

    return send


def pipe() -> int:
    ours, theirs = os.pipe()
    os.close(theirs)
    return ours


def memory(seals: int = fcntl.F_SEAL_SHRINK, nbytes: int = 9) -> int:
    made = os.memfd_create("lying", os.MFD_ALLOW_SEALING)
    os.truncate(made, nbytes)
    fcntl.fcntl(made, fcntl.F_ADD_SEALS, seals)
    return made


@pytest.mark.parametrize(
    ("said", "then", "error"),
    [
        (struct.pack("<Q", 2**63), nothing_more, "9,223,372,036,854,775,808 bytes about its memory"),
        (struct.pack("<Q", 3) + b"{}}", nothing_more, "is no table of it"),
        (table(0, [-3, 0, 1]), nothing_more, "is no table of it"),
        (table(0, [-1, -4096, 1]), nothing_more, "is no table of it"),
        (table(65), nothing_more, "is no table of it"),
        (table(0, [0, 0, 10]), passing(), "in a file that has not come"),
        (table(1, [0, 0, 10]), nothing_more, "0 of 1 files of memory came"),
        (table(1, [0, 0, 10]), passing(memory, memory), "2 of 1 files of memory came"),
        (table(2, [1, 0, 10]), passing(memory, pipe), "is no file of memory"),
        # Reading what is no longer there would be a signal.
        (table(1, [0, 0, 9]), passing(lambda: memory(fcntl.F_SEAL_GROW)), "is no file of memory that stays"),
        (table(1, [0, 0, 9]), passing(lambda: memory(nbytes=0)), "is no file of memory that stays"),
        (table(1, [0, 0, 10]), passing(memory), "in a file that is shorter"),
        (table(1, [0, 2**63 - 1, 10]), passing(memory), "in a file that is shorter"),
        (b"", nothing_more, "closed after 0 of 8 bytes"),
    ],
)  # fmt: skip
def test_a_seed_that_lies(said: bytes, then: Callable[[socket.socket], None], error: str) -> None:
    def lie(peer: socket.socket) -> None:
        welcome(peer, "", lambda lease: True)
        peer.sendall(said)
        then(peer)

    with leaks.nothing_left():
        name = secrets.token_hex(16)
        listener = Listener(shm._socket_name(name), 0, lie, 4)
        listener.start()
        try:
            with pytest.raises(ConnectionAbortedError, match=error):
                ShmConnection(f"{shm.host_id()}:{name}", "", LEASE, PATIENCE)
        finally:
            listener.close()
