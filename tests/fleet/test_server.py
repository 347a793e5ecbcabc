"""Who may ask a registry, and what it does not take."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import socket
import ssl
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import trustme
from prometheus_client.parser import text_string_to_metric_families

from support import leaks
from support.registries import KEY, announced, serving
from tensorlift.errors import OptionError, RequestError, SeedError
from tensorlift.fleet import server as module
from tensorlift.fleet.contract import LONGEST_BODY, ForkReport, Load, Near
from tensorlift.fleet.registry_client import RegistryClient
from tensorlift.fleet.server import RegistryServer
from tensorlift.forking.seed import Seed

TOKEN = "töken"
PATHS = (
    ("GET", "/"), ("GET", "/events"), ("GET", "/metrics"), ("POST", "/v1/seeds"), ("POST", "/v1/forks"),
    ("POST", "/v1/candidates"), ("POST", f"/v1/seeds/{'a' * 32}"), ("DELETE", f"/v1/seeds/{'a' * 32}"),
    ("GET", "/nothing"), ("PUT", "/v1/seeds"), ("GET", "/v1/seeds"), ("OPTIONS", "*"),
)  # fmt: skip
SEED = msgspec.json.encode(announced(1))
JSON = {"Content-Type": "application/json"}


def asked(
    server: RegistryServer, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> tuple[int, bytes, http.client.HTTPMessage]:
    connection = http.client.HTTPConnection(*server.url.partition("//")[2].split(":"), timeout=60)
    try:
        connection.request(method, path, body, headers or {})
        answer = connection.getresponse()
        return answer.status, b"" if path == "/events" else answer.read(), answer.headers
    finally:
        connection.close()


def basic(text: str, code: str = "utf-8") -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(text.encode(code)).decode()}


def bearer(text: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {text}"}


def test_a_stranger_is_told_nothing() -> None:
    with serving(token=TOKEN) as server:
        wrong = [{}, bearer("x"), bearer(""), basic("me:x"), basic(TOKEN), {"Authorization": "Basic !"}]
        for headers in wrong:
            for method, path in PATHS:
                status, body, told = asked(
                    server, method, path, SEED if method == "POST" else None, JSON | headers
                )
                assert (status, body) == (401, b"")
                assert told["WWW-Authenticate"].startswith("Basic realm=")
                assert told["Connection"] == "close"
        client = RegistryClient(server.url)
        with pytest.raises(SeedError, match=r"wants a token.* give that of the registry") as refused:
            client.candidates(KEY, Near())
        assert TOKEN not in str(refused.value)


def test_a_page_in_a_browser_that_was_led_here_by_a_name() -> None:
    with serving() as server:
        for method, path in (("GET", "/"), ("POST", "/v1/seeds")):
            body = SEED if method == "POST" else None
            assert asked(server, method, path, body, JSON | {"Host": "evil.example:80"})[0] == 421
            assert asked(server, method, path, body, JSON | {"Host": "localhost:80"})[0] == 200
    with serving(token=TOKEN) as server:
        assert asked(server, "GET", "/", None, basic(f"me:{TOKEN}") | {"Host": "a.name"})[0] == 200


def test_a_browser_may_look_and_no_more() -> None:
    """What it sends by itself, also where a page of somebody else makes it."""
    with serving(token=TOKEN) as server:
        RegistryClient(server.url, TOKEN).announce(announced(1))
        for headers in (basic(f"me:{TOKEN}"), basic(f":{TOKEN}", "latin-1"), bearer(TOKEN)):
            for path in ("/", "/events", "/metrics"):
                assert asked(server, "GET", path, headers=headers)[0] == 200
        for method, path in PATHS[3:8]:
            assert asked(server, method, path, SEED, JSON | basic(f"me:{TOKEN}"))[0] == 401
        assert TOKEN.encode() not in asked(server, "GET", "/", headers=bearer(TOKEN))[1]


def test_what_a_page_of_somebody_else_can_send_without_asking_is_not_taken() -> None:
    with serving() as server:
        for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
            status, body, _ = asked(server, "POST", "/v1/seeds", SEED, {"Content-Type": kind})
            assert (status, json.loads(body)["reason"]) == (409, "expected Content-Type: application/json")
        assert server._registry.view().seeds == []


def test_bodies_that_are_none() -> None:
    with serving() as server:
        for body in (b"", b"{", b"[]", b"\xff", b"[" * 10_000, b'{"instance": "a"}', b'{"key": "\\ud800"}'):
            status, answer, _ = asked(server, "POST", "/v1/seeds", body, JSON)
            assert status == 400
            assert json.loads(answer)["reason"].startswith("the body is not what is wanted here")
        long = asked(server, "POST", "/v1/seeds", b" " * (LONGEST_BODY + 1), JSON)
        assert (long[0], json.loads(long[1])["reason"]) == (409, "a body has at most 16,384 bytes")
        # Whose length is not said before.
        parts = asked(server, "POST", "/v1/seeds", iter([b" " * 8192] * 3), JSON)
        assert parts[0] == 409
        assert asked(server, "GET", "/nothing")[0] == 404
        assert asked(server, "PUT", "/v1/seeds", SEED, JSON)[0] == 405


HEAD = (
    "POST /v1/seeds HTTP/1.1\r\nHost: localhost\r\n"
    "Content-Type: application/json\r\nContent-Length: 99\r\n\r\n"
)


def test_a_body_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BODY_SECONDS", 0.1)
    with serving() as server, socket.create_connection(server._socket.getsockname(), 60) as peer:
        peer.sendall(HEAD.encode() + b"{")
        found = b""
        while b"a body has to come in 0.1 s" not in found:
            found += (came := peer.recv(4096))
            assert came
    with serving() as server, socket.create_connection(server._socket.getsockname(), 60) as peer:
        peer.sendall(HEAD.encode() + b"{")
        peer.close()
        assert RegistryClient(server.url).announce(announced(1)) == 15


def test_who_asks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or never says all of what he asks."""
    monkeypatch.setattr(module, "_HEAD_SECONDS", 0.2)
    with serving() as server:
        for said in (b"", b"GET / HTTP/1.1\r\nX: "):
            with socket.create_connection(server._socket.getsockname(), 60) as peer:
                peer.sendall(said)
                assert peer.recv(10) == b""


def read_until(peer: socket.socket, wanted: bytes, times: int = 1) -> None:
    found = b""
    while found.count(wanted) < times:
        found += (came := peer.recv(65536))
        assert came


NOTHING = b"GET /nothing HTTP/1.1\r\nHost: localhost\r\n\r\n"


def test_strangers_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do they end what is answered: a page that somebody looks at, a connection that is kept."""
    monkeypatch.setattr(module, "_MOST_STRANGERS", 4)
    monkeypatch.setattr(module, "_MOST_CONNECTIONS", 12)
    with serving(token=TOKEN) as server, contextlib.ExitStack() as stack:
        address, known = server._socket.getsockname(), bearer(TOKEN)
        page, kept = (http.client.HTTPConnection(*address, timeout=60) for _ in range(2))
        for one, path in ((page, "/events"), (kept, "/metrics")):
            stack.callback(one.close)
            one.request("GET", path, headers=known)
        shown = stack.enter_context(page.getresponse())
        assert shown.read1()
        assert kept.getresponse().read()
        before = kept.sock
        for _ in range(40):
            stack.enter_context(socket.create_connection(address, 60))
        assert asked(server, "GET", "/metrics", headers=known)[0] == 200
        assert len(server._strangers) <= 4
        kept.request("GET", "/metrics", headers=known)
        assert kept.getresponse().read()
        assert kept.sock is before
        RegistryClient(server.url, TOKEN).announce(announced(1))
        assert shown.read1()


def test_who_asks_nothing_whole_behind_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where one byte has come of the next head, with which uvicorn's own patience ends."""
    monkeypatch.setattr(module, "_HEAD_SECONDS", 1.0)
    with serving() as server, socket.create_connection(server._socket.getsockname(), 60) as peer:
        peer.sendall(NOTHING * 3)
        read_until(peer, b"Not Found", 6)  # in the status and in the body
        with contextlib.suppress(ConnectionError):
            peer.sendall(b"G")
            assert peer.recv(10) == b""


@pytest.mark.parametrize("who", ["registry", "seed"])
def test_who_keeps_a_connection_does_not_wait_for_each_answer(who: str) -> None:
    """40 ms each, of which half the answers were: what kernels wait with an acknowledgement."""
    with serving() as server, Seed({"a": torch.ones(3)}, KEY) as seed:
        url, path = (server.url, "/v1/candidates") if who == "registry" else (seed.url, "/v1/leases")
        connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
        seconds = []
        for _ in range(21):
            begin = time.monotonic()
            connection.request("POST", path, b"{}", JSON)
            connection.getresponse().read()
            seconds.append(time.monotonic() - begin)
        connection.close()
        assert sorted(seconds)[5] < 0.03


def test_a_long_answer_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a page has no end."""
    monkeypatch.setattr(module, "_HEAD_SECONDS", 1.0)
    with serving() as server, socket.create_connection(server._socket.getsockname(), 60) as peer:
        peer.sendall(NOTHING + b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        read_until(peer, b"No seed has announced itself yet")
        time.sleep(1.5)
        RegistryClient(server.url).announce(announced(1))
        read_until(peer, b"1 seed of")


def test_where_a_seed_may_be() -> None:
    """The rules of ranks behind a front: without a token only where it comes from."""
    with serving() as server:
        client = RegistryClient(server.url)
        with pytest.raises(
            SeedError, match=r"it comes from 127.0.0.1; without a token it can name no other address"
        ):
            client.announce(announced(1, url="http://10.0.0.5:7000"))
        client.announce(announced(1, url="http://0.0.0.0:7000"))
        assert client.candidates(KEY, Near()) == ["http://127.0.0.1:7000"]
        # Such a header is who sends it, not where it comes from.
        status, body, _ = asked(
            server, "POST", "/v1/seeds", msgspec.json.encode(announced(1, url="http://10.0.0.5:7000")),
            JSON | {"X-Forwarded-For": "10.0.0.5"},
        )  # fmt: skip
        assert (status, b"127.0.0.1" in body) == (409, True)
    with serving(host="0.0.0.0", token=TOKEN) as server:
        client = RegistryClient(server.url.replace("0.0.0.0", "127.0.0.1"), TOKEN)
        with pytest.raises(
            SeedError, match="a seed on loopback cannot be reached by all forks that ask here"
        ):
            client.announce(announced(1))
        client.announce(announced(1, url="http://10.0.0.5:7000"))
        client.announce(announced(2, url="https://10.0.0.6:7000"))
        assert sorted(client.candidates(KEY, Near(), 9)) == ["http://10.0.0.5:7000", "https://10.0.0.6:7000"]


def test_a_server_that_has_too_much_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_CONNECTIONS", 0)
    with serving() as server, pytest.raises(SeedError, match=r"status 503.* or has too much to do") as busy:
        RegistryClient(server.url).candidates(KEY, Near())
    assert busy.value.retry_seconds == 1


def test_a_fork_is_sent_to_no_other_place(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as server:
        client = RegistryClient(server.url)
        for url in ("http://evil.example:80", "http://10.0.0.5", "nonsense"):
            monkeypatch.setattr(server._registry, "candidates", lambda *_, url=url: [url])
            with pytest.raises(SeedError, match=f"^{server.url}: it names a seed that is not gone to"):
                client.candidates(KEY, Near())
        monkeypatch.setattr(server._registry, "candidates", lambda *_: ["nonsense", "http://10.0.0.5:1"])
        assert client.candidates(KEY, Near(), 9) == ["http://10.0.0.5:1"]


def test_under_tls(tmp_path: Path) -> None:
    authority = trustme.CA()
    made = authority.issue_cert("127.0.0.1")
    cert, key, ca = (str(tmp_path / name) for name in ("cert.pem", "key.pem", "ca.pem"))
    made.cert_chain_pems[0].write_to_path(cert)
    made.private_key_pem.write_to_path(key)
    authority.cert_pem.write_to_path(ca)
    with leaks.nothing_left(), serving(tls=(cert, key), token=TOKEN) as server:
        assert server.url.startswith("https://")
        client = RegistryClient(server.url, TOKEN, ca=ca)
        with pytest.raises(SeedError, match="a seed behind https:// has to be https:// too, not http://"):
            client.announce(announced(1))
        client.announce(announced(1, url="https://127.0.0.1:5"))
        assert client.candidates(KEY, Near()) == ["https://127.0.0.1:5"]
        with pytest.raises(SeedError, match="a certificate that is not trusted here"):
            RegistryClient(server.url, TOKEN, ca=ssl.create_default_context()).candidates(KEY, Near())
        with pytest.raises(SeedError, match="answers at http://, not https://"):
            RegistryClient(server.url.replace("https", "http"), TOKEN, 5).candidates(KEY, Near())


def test_where_it_may_listen() -> None:
    with (
        pytest.raises(RequestError, match=r"a registry on 0.0.0.0 is open to whoever reaches it"),
        serving(host="0.0.0.0"),
    ):
        pass
    with pytest.raises(OptionError, match="token is"), serving(token=""):
        pass
    with serving() as server:
        port = int(server.url.rpartition(":")[2])
        with pytest.raises(OSError, match="in use"), serving(port=port):
            pass
    with serving(host="0.0.0.0", insecure=True):
        pass


def test_metrics() -> None:
    with serving() as server:
        client = RegistryClient(server.url)
        client.announce(announced(1, readers=2, rate=5.0))
        client.announce(announced(2, readers=1, rate=2.5))
        client.report(ForkReport(fork="a" * 32, key=KEY, state="reading"))
        client.report(ForkReport(fork="b" * 32, key=KEY, state="done"))
        status, text, headers = asked(server, "GET", "/metrics")
    assert (status, headers["Content-Type"].startswith("text/plain; version=0.0.4")) == (200, True)
    samples = {
        (sample.name.removeprefix("tensorlift_registry_"), sample.labels.get("state")): sample
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }
    assert {name: sample.value for name, sample in samples.items()} == {
        ("seeds", None): 2,
        ("readers", None): 3,
        ("rate_bytes", None): 7.5,
        ("forks", "reading"): 1,
        ("ended_forks_total", "done"): 1,
    }
    assert samples["seeds", None].labels["model"] == "org/model"


def test_what_is_shown_is_made_once_for_all_and_by_no_thread_that_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seeds renew meanwhile, however long it takes."""
    going, may_end = threading.Event(), threading.Event()
    makers: list[int] = []

    def slow(view: object) -> str:
        makers.append(threading.get_ident())
        going.set()
        assert may_end.wait(60)
        return "all of it"

    monkeypatch.setattr(module, "_PAGE_SECONDS", 3600)
    monkeypatch.setattr(module.page, "content", slow)
    with serving() as server:
        client = RegistryClient(server.url)
        with ThreadPoolExecutor(5) as threads:
            pages = [threads.submit(asked, server, "GET", "/") for _ in range(5)]
            try:
                assert going.wait(60)
                assert client.announce(announced(1)) == 15
            finally:
                may_end.set()
            assert all(b"all of it" in one.result()[1] for one in pages)
        asked(server, "GET", "/events")
        assert len(makers) == 1
        assert makers[0] != server._thread.ident


def test_nothing_is_left() -> None:
    with leaks.nothing_left():
        for _ in range(2):
            with serving() as server:
                client = RegistryClient(server.url)
                client.announce(announced(1))
                client.renew(announced(1).instance, Load())
    # One that was never started.
    with leaks.nothing_left():
        with serving() as server:
            other = RegistryServer(server._registry)
        other.close()
