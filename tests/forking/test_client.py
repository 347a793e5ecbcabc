"""Who answers in place of a seed: slowly, wrongly, or with what would break a fork."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest
import torch

from tensorlift.errors import ForkError, ManifestError, RequestError, SeedError
from tensorlift.forking import http_client, reader, transports
from tensorlift.forking.client import SeedClient
from tensorlift.forking.fork import fork_into
from tensorlift.forking.manifest import Manifest, ModelKey, Offer
from tensorlift.forking.seed import Seed

pytestmark = pytest.mark.usefixtures("clean")

HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 100000000\r\n\r\n"


@contextlib.contextmanager
def answering(said: bytes, drip: bytes = b"") -> Iterator[str]:
    """The URL of who says the same to everyone, and then drips until he is hung up on."""
    ended = threading.Event()

    def answer() -> None:
        while not ended.is_set():
            with contextlib.suppress(OSError), listener.accept()[0] as peer:
                peer.recv(10_000)
                peer.sendall(said)
                while drip and not ended.wait(0.02):
                    peer.sendall(drip)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            ended.set()
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 200 OK\r\nX: ", HEAD])
def test_who_drips_is_not_waited_for_for_ever(said: bytes) -> None:
    """Each byte comes in time, and never the last."""
    with (
        answering(said, b"x") as url,
        pytest.raises(SeedError, match=r"cannot be reached: .*(timed out|only .* of an answer)"),
    ):
        SeedClient(url, seconds=0.5).manifest()


@pytest.mark.parametrize(
    ("said", "more"),
    [
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n", b"X: y\r\n"),
        (b"HTTP/1.1 200 OK\r\n\r\n", b"x"),
    ],
)
def test_an_answer_without_an_end_is_given_up_however_fast_it_comes(said: bytes, more: bytes) -> None:
    """Lines before an answer and behind it, small chunks, a body: there is no length that would end them."""
    with (
        answering(said, more * (1_000_000 // len(more))) as url,
        pytest.raises(SeedError, match=r"more than .* bytes"),
    ):
        SeedClient(url, seconds=60).state()


@pytest.mark.parametrize("said", [HEAD + b"abc", HEAD, HEAD.replace(b"200 OK", b"503 No") + b"{}"])
def test_an_answer_that_ends_early(said: bytes) -> None:
    """Of a seed that ends meanwhile: it was told as one that publishes what is no manifest."""
    with answering(said) as url, pytest.raises(SeedError, match=r"ends after .* of its body") as told:
        SeedClient(url).manifest()
    assert not told.value.answered


def test_who_is_slow_and_works_is_waited_for() -> None:
    """Longer than an answer may take, for as long as bytes come of one that may be long."""
    body = b'{"ranks": []}'.ljust(20_000)
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with (
        answering(head + body[:10_000].rjust(10_000), body[10_000:10_200]) as url,
        pytest.raises(ForkError, match="there is nothing"),
    ):
        SeedClient(url, seconds=0.2).peer(ModelKey(model="m"))


@pytest.mark.parametrize(
    "ask",
    [
        SeedClient.state,
        lambda client: client.lease(1.0),
        lambda client: client.renew("0" * 32, 1.0, 0.5),
        lambda client: client.release("0" * 32, 0.5),
        SeedClient.manifest,
    ],
)
def test_who_never_ends_is_not_waited_for(
    ask: Callable[[SeedClient], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fast enough to be no drip: a seed held its forks so for hours, also those that had all their bytes, and
    while it was to prolong a lease nobody looked after the other seeds.
    """
    monkeypatch.setattr(http_client, "_MOST_TIMES", 3.0)
    chunks = b"1;" + b"x" * 500 + b"\r\n \r\n"
    with answering(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", chunks) as url:
        begin = time.monotonic()
        with pytest.raises(SeedError, match=r"cannot be reached: (timed out|only .* of an answer)"):
            ask(SeedClient(url, seconds=0.5))
        assert time.monotonic() - begin < 5


LEASE = b'{"id": "%s", "epoch": 0, "seconds": %s}'
GOOD = b"0123456789abcdef" * 2


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (b"200 OK", LEASE % (b"\xc3\xa9" * 16, b"30")),
        (b"200 OK", LEASE % (b"../../state", b"30")),
        (b"200 OK", LEASE % (GOOD, b"-1")),
        (b"200 OK", LEASE % (GOOD, b"1e999")),
        (b"503 No", b'{"reason": "updating", "retry_seconds": -1}'),
    ],
)
def test_leases_that_are_none(status: bytes, body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were an error of another kind, or none."""
    head = b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n" % (status, len(body))
    offered = {"a": torch.ones(5)}
    with answering(head + body) as url, Seed(offered, "m") as seed:
        lease, lying = SeedClient.lease, SeedClient(url)
        monkeypatch.setattr(SeedClient, "lease", lambda _, seconds: lease(lying, seconds))
        with pytest.raises(ForkError, match="20 of 20 bytes could not be had"):
            fork_into({"a": torch.zeros(5)}, seed.url, patience=60.0)


def test_a_lease_is_given_back_by_who_is_interrupted_at_another(monkeypatch: pytest.MonkeyPatch) -> None:
    offered, real = {"a": torch.ones(5)}, SeedClient.lease

    with Seed(offered, "m", weights="1") as first, Seed(offered, "m", weights="1") as second:

        def interrupted(client: SeedClient, seconds: float) -> object:
            if client.url == second.url:
                assert first.stats()["readers"] == 1
                raise KeyboardInterrupt
            return real(client, seconds)

        monkeypatch.setattr(SeedClient, "lease", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fork_into({"a": torch.zeros(5)}, [first.url, second.url], patience=60.0)
        assert first.stats()["readers"] == 0


def test_a_stopped_seed_does_not_hold_the_fork_up_that_prolongs_its_lease(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[float | None] = []
    real = SeedClient.ask

    def ask(client: SeedClient, method: str, path: str, *more: object, **named: object) -> bytes:
        if path.startswith("/v1/leases/") and method == "POST":
            asked.append(named.get("seconds"))  # type: ignore[arg-type]
        return real(client, method, path, *more, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(SeedClient, "ask", ask)
    monkeypatch.setattr(reader, "_LEASE_SECONDS", 0.5)
    offered, found = ({f"t{k}": torch.zeros(10_000) for k in range(5)} for _ in range(2))
    with Seed(offered, "m", limit="200KB/s") as seed:
        fork_into(found, seed.url, patience=60.0, chunk_bytes=10_000)
    assert asked
    assert set(asked) == {1.0}


@pytest.mark.parametrize("host", ["a b", "\ud800", "a\x7fb"])
def test_hosts_that_are_none(host: str) -> None:
    with pytest.raises(RequestError, match="is no URL of a seed"):
        SeedClient(f"http://{host}:80")


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
        (b"\xff\0" * 30_000, SeedError, "\\x00…; look whether the seed runs"),
        (answer("200 OK", b"<html>"), SeedError, "answers what no seed answers: '<html>'"),
        (answer("500 Oh", b"\xff" * 9), SeedError, "answers with status 500: it is no seed of this version"),
        (answer("200 OK", b"{}", length=50), SeedError, "the answer ends after 2 bytes of its body"),
        (answer("200 OK", b"{}"), SeedError, "answers what no seed answers: '{}'"),
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
    assert len(str(caught.value)) < 1000


def test_what_a_seed_says_of_its_transports_is_harmless_to_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, told = SeedClient.manifest, dict[str, str]()

    def manifest(client: SeedClient) -> Manifest:
        offers = (Offer("\x1b[2J\n", "x"), *real(client).transports[:0])
        return msgspec.structs.replace(real(client), transports=offers, off=told)

    monkeypatch.setattr(SeedClient, "manifest", manifest)
    for number in range(50):
        told[f"{number}\x1b[2J"] = "\r\x07" * 2000
    with Seed({"a": torch.ones(5)}, "m") as seed, pytest.raises(ForkError) as error:
        fork_into({"a": torch.zeros(5)}, seed.url)
    assert str(error.value).isprintable()
    assert r"0\x1b[2J is off there: \r\x07" in str(error.value)
    assert len(str(error.value)) < 5000
    with pytest.raises(ConnectionRefusedError, match=r"the seed offers \\x1b\[2J\\n"):
        transports.connect([Offer("\x1b[2J\n", "x")], "", "", 1.0)


def test_a_manifest_that_is_none() -> None:
    other = Other(answer("200 OK", b"{}"))
    with pytest.raises(ManifestError, match="does not decompress"):
        SeedClient(other.url).manifest()
    other.close()
