"""What a fork asks, and what it makes of those who are no seeds."""

from __future__ import annotations

import socket
import threading

import pytest

from tensorlift.errors import ManifestError, RequestError, SeedError
from tensorlift.forking.client import SeedClient


@pytest.mark.parametrize(
    "url",
    ["", "seed", "ftp://a:1", "http://a", "http://:1", "http://a:b", "http://a:99999", "http://a:1/x"],
)
def test_what_is_no_url_of_a_seed(url: str) -> None:
    with pytest.raises(RequestError, match="is no URL of a seed; it looks like http://host:port"):
        SeedClient(url)


class Other:
    """Who listens where a seed should be."""

    def __init__(self, *parts: bytes) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.thread = threading.Thread(target=self.answer, args=[b"".join(parts)])
        self.thread.start()

    def answer(self, text: bytes) -> None:
        peer, _ = self.listener.accept()
        peer.recv(10_000)
        peer.sendall(text)
        peer.close()

    def close(self) -> None:
        self.thread.join()
        self.listener.close()


def answer(status: str, body: bytes, length: int | None = None) -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body) if length is None else length}\r\n\r\n"
    return head.encode() + body


@pytest.mark.parametrize(
    ("said", "error", "says"),
    [
        (b"", SeedError, "cannot be reached: "),
        (b"SSH-2.0-OpenSSH_9.2\r\n", SeedError, "cannot be reached: "),
        (answer("200 OK", b"<html>"), SeedError, "answers what no seed answers: '<html>'"),
        (answer("500 Oh", b"\xff" * 9), SeedError, "answers with status 500: it is no seed of this version"),
        (answer("200 OK", b"{}", length=50), SeedError, "answers what no seed answers: '{}'"),
        (answer("200 OK", b"x" * ((1 << 20) + 1)), SeedError, "answers with more than 1,048,576 bytes"),
        (answer("429 No", b'{"reason": "full", "retry_seconds": 3}'), SeedError, "ask again in 3.0 s"),
        (answer("410 No", b'{"reason": "\\u001b[31m"}'), SeedError, r": \x1b[31m"),
    ],
)
def test_who_is_no_seed(said: bytes, error: type[Exception], says: str) -> None:
    other = Other(said)
    with pytest.raises(error) as caught:
        SeedClient(other.url, seconds=20).state()
    other.close()
    assert str(caught.value).startswith(other.url)
    assert says in str(caught.value)


def test_a_manifest_that_is_none() -> None:
    other = Other(answer("200 OK", b"{}"))
    with pytest.raises(ManifestError, match="does not decompress"):
        SeedClient(other.url).manifest()
    other.close()
