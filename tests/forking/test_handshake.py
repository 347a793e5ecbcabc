"""The handshake: who knows the token and has a lease gets in, others get nothing; a false seed is noticed."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from tensorlift.forking.handshake import introduce, receive, welcome

LEASE, OTHER = "0123456789abcdef" * 2, "f" * 32


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with_timeouts = socket.socketpair()
    for one in with_timeouts:
        one.settimeout(60)
    yield with_timeouts
    for one in with_timeouts:
        one.close()


def side(work: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    result: list[object] = []

    def run() -> None:
        try:
            result.append(work())
        except OSError as error:
            result.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, result


def meet(
    pair: tuple[socket.socket, socket.socket], seed_token: str, fork_token: str, lease: str = LEASE
) -> tuple[object, object]:
    """What came of it on the seed's side and on the fork's; None is a success of the fork's."""
    seed, fork = pair

    def serve() -> str | None:
        found = welcome(seed, seed_token, LEASE.__eq__)
        if found is None:
            seed.shutdown(socket.SHUT_RDWR)
        return found

    thread, served = side(serve)
    forked, result = side(lambda: introduce(fork, fork_token, lease))
    forked.join()
    thread.join()
    return served[0], result[0]


@pytest.mark.parametrize("token", ["", "secret", "s\u00e9cret \u2603"])
def test_the_right_token(pair: tuple[socket.socket, socket.socket], token: str) -> None:
    assert meet(pair, token, token) == (LEASE, None)


@pytest.mark.parametrize(
    ("seed", "fork", "lease"),
    [("secret", "Secret", LEASE), ("secret", "", LEASE), ("", "secret", LEASE), ("secret", "secret", OTHER)],
)
def test_a_wrong_token_or_lease(
    pair: tuple[socket.socket, socket.socket], seed: str, fork: str, lease: str
) -> None:
    served, forked = meet(pair, seed, fork, lease)
    assert served is None
    assert isinstance(forked, ConnectionRefusedError)
    assert str(forked).startswith("the seed does not take this token or lease; a seed without a token")
    assert "secret" not in str(forked)


def test_a_code_that_is_sent_back(pair: tuple[socket.socket, socket.socket]) -> None:
    """A seed that does not know the token could answer with what it was told."""
    false, fork = pair

    def echo() -> None:
        false.sendall(b"TLH1" + b"r" * 32)
        false.sendall(false.recv(96, socket.MSG_WAITALL)[64:])

    thread, _ = side(echo)
    with pytest.raises(ConnectionRefusedError, match="does not know the token"):
        introduce(fork, "secret", LEASE)
    thread.join()


def test_codes_of_another_connection_do_not_count() -> None:
    """What a listener has recorded is of no use."""
    recorded: list[bytes] = []
    for _ in range(2):
        seed, fork = socket.socketpair()
        thread, served = side(lambda seed=seed: welcome(seed, "secret", bool))
        hello = fork.recv(36, socket.MSG_WAITALL)
        if recorded:
            fork.sendall(recorded[0])
            thread.join()
            assert served == [None]
        else:
            inner, outer = socket.socketpair()
            outer.sendall(hello)
            speaking, _ = side(lambda inner=inner: introduce(inner, "secret", LEASE))
            recorded.append(outer.recv(96, socket.MSG_WAITALL))
            fork.sendall(recorded[0])
            thread.join()
            assert served == [LEASE]
            outer.close()
            speaking.join()
            inner.close()
        seed.close()
        fork.close()


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 95])
def test_a_stranger_who_says_too_little(pair: tuple[socket.socket, socket.socket], said: bytes) -> None:
    seed, stranger = pair
    stranger.sendall(said)
    stranger.shutdown(socket.SHUT_WR)
    with pytest.raises(ConnectionAbortedError, match=f"closed after {len(said)} of 96 bytes"):
        welcome(seed, "secret", bool)


def test_a_stranger_who_says_nonsense(pair: tuple[socket.socket, socket.socket]) -> None:
    seed, stranger = pair
    stranger.sendall(b"\xff" * 96)
    assert welcome(seed, "secret", pytest.fail) is None


def test_a_silent_peer_costs_no_more_than_the_timeout(pair: tuple[socket.socket, socket.socket]) -> None:
    for one in pair:
        one.settimeout(0.1)
    with pytest.raises(TimeoutError):
        welcome(pair[0], "", bool)
    with pytest.raises(TimeoutError):
        introduce(pair[0], "", LEASE)


def test_no_seed(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[0].sendall(b"HTTP/1.1 400 Bad Request\r\n" + b" " * 20)
    with pytest.raises(ConnectionRefusedError, match="no seed of this version"):
        introduce(pair[1], "", LEASE)


def test_who_drips_is_not_waited_for_for_ever(pair: tuple[socket.socket, socket.socket]) -> None:
    """Each byte comes in time, all of them do not."""
    pair[0].settimeout(0.5)
    ended = threading.Event()

    def drip() -> None:
        while not ended.wait(0.02):
            pair[1].sendall(b"x")

    thread = threading.Thread(target=drip)
    thread.start()
    try:
        with pytest.raises(TimeoutError):
            receive(pair[0], 100_000)
    finally:
        ended.set()
        thread.join()
