"""What is asked over HTTP and answered: strangers, pages in a browser, and what is wrong with a request."""

from __future__ import annotations

import http.client
import json
import socket
import zlib
from collections.abc import Iterator

import pytest
import torch

from support import leaks
from tensorlift.forking import control
from tensorlift.forking.client import SeedClient
from tensorlift.forking.manifest import ModelKey
from tensorlift.forking.seed import Seed

KEY = ModelKey(model="org/model", revision="abc")


def model() -> dict[str, torch.Tensor]:
    return {"a": torch.ones(9)}


@pytest.fixture
def seed() -> Iterator[Seed]:
    with leaks.nothing_left():
        made = Seed(model(), KEY, token="t\u00f6ken")
        yield made
        made.close()


def ask(
    seed: Seed, method: str, path: str, body: bytes | None = None, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection(*seed.url.removeprefix("http://").split(":"), timeout=60)
    json_too = {} if body is None else {"Content-Type": "application/json"}
    try:
        connection.request(method, path, body, json_too | headers)
        answer = connection.getresponse()
        return answer.status, dict(answer.headers), answer.read()
    finally:
        connection.close()


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE", "NONSENSE"])
@pytest.mark.parametrize(
    "path", ["/", "/v1/manifest", "/v1/leases/x", "/v1/ranks", "/v1/ranks/x", "/metrics"]
)
@pytest.mark.parametrize("given", [None, "Bearer token", "Basic dDpr"])
def test_a_stranger_is_told_401_and_nothing_else(
    seed: Seed, method: str, path: str, given: str | None
) -> None:
    headers = {} if given is None else {"Authorization": given}
    status, found, body = ask(seed, method, path, **headers)
    assert (status, body) == (401, b"")
    assert seed.instance not in str(found)
    assert found["Server"] == "tensorlift "


def test_a_stranger_is_not_asked_to_go_on(seed: Seed) -> None:
    with socket.create_connection(tuple(seed.url.removeprefix("http://").split(":"))) as raw:
        raw.sendall(b"POST /v1/leases HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n")
        said = b""
        while part := raw.recv(1000):
            said += part
    assert said.startswith(b"HTTP/1.1 401 ")


def test_a_page_in_a_browser_that_was_led_here_by_a_name() -> None:
    with Seed(model(), KEY) as seed:
        port = seed.url.rpartition(":")[2]
        for name in (
            "evil.example",
            f"evil.example:{port}",
            "localhost.evil.example",
            "[",
            "127.0.0.1.evil.example",
        ):
            status, _, body = ask(seed, "GET", "/v1/state", Host=name)
            assert status == 421
            assert seed.instance.encode() not in body
        for name in (f"127.0.0.1:{port}", "localhost", f"[::1]:{port}", "10.0.0.1"):
            assert ask(seed, "GET", "/v1/state", Host=name)[0] == 200
    with Seed(model(), KEY, token="t") as seed:
        assert ask(seed, "GET", "/v1/state", Host="a.name", Authorization="Bearer t")[0] == 200
    with Seed(model(), KEY, host="0.0.0.0", insecure=True) as seed:
        assert ask(seed, "GET", "/v1/state", Host="a.name")[0] == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", "text/json"])
@pytest.mark.parametrize("path", ["/v1/leases", "/v1/ranks"])
def test_what_a_page_may_have_a_browser_post_is_refused(path: str, kind: str) -> None:
    rank = {"instance": "0" * 32, "key": {"model": KEY.model, "role": "other"}, "url": "http://127.0.0.1:1"}
    with Seed(model(), KEY) as seed:
        refused = ask(seed, "POST", path, json.dumps(rank).encode(), **{"Content-Type": kind})
        assert refused[0] == 415
        assert json.loads(refused[2])["reason"] == "expected Content-Type: application/json"
        assert seed.stats()["granted_leases"] == 0
        assert len(json.loads(ask(seed, "GET", "/v1/ranks")[2])["ranks"]) == 1
        kind = "application/json; charset=utf-8"
        assert ask(seed, "POST", path, json.dumps(rank).encode(), **{"Content-Type": kind})[0] == 200


@pytest.mark.parametrize(("site", "status"), [("cross-site", 415), ("same-site", 415), ("none", 200)])
def test_what_a_page_may_have_a_browser_get_gives_no_lease(
    site: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's question gives one to who asks; eight images of a page kept all forks out for a minute."""
    path = "/get_remote_instance_transfer_engine_info?rank=0"
    monkeypatch.setattr(Seed, "sglang", lambda seed, rank: {"epoch": seed.grant(60.0).epoch, "rank": rank})
    with Seed(model(), KEY) as seed:
        assert ask(seed, "GET", path, **{"Sec-Fetch-Site": site})[0] == status
        assert seed.stats()["granted_leases"] == (status == 200)


def test_what_is_wrong_with_a_request() -> None:
    with Seed(model(), KEY) as seed:
        assert ask(seed, "GET", "/v2/manifest")[0] == 404
        assert ask(seed, "DELETE", "/v1/manifest")[0] == 404
        assert ask(seed, "POST", "/v1/other", b"{}")[0] == 404
        assert ask(seed, "PUT", "/v1/leases")[0] == 501
        assert ask(seed, "POST", "/v1/leases", b"x" * 5000)[0] == 413
        assert ask(seed, "POST", "/v1/leases", b"{")[0] == 400
        assert ask(seed, "POST", "/v1/leases", b'{"seconds": "long"}')[0] == 400
        assert ask(seed, "POST", "/v1/leases", b"[" * 4000)[0] == 400
        assert ask(seed, "POST", "/v1/leases/unknown", b"{}")[0] == 410
        assert ask(seed, "DELETE", "/v1/leases/unknown")[0] == 204
        for body in (b"{", b"{}", b"[" * 4000, b'{"instance": "x", "key": {"model": "m"}, "url": ""}'):
            assert ask(seed, "POST", "/v1/ranks", body)[0] == 400
        rank = {"instance": "0" * 32, "key": {"model": "m", "tp": [2, 2]}, "url": "http://127.0.0.1:1"}
        for wrong in (
            {},
            {"key": {"model": "m"}, "url": "http://a:b"},
            {"key": {"model": KEY.model, "revision": "abc"}},
        ):
            assert ask(seed, "POST", "/v1/ranks", json.dumps(rank | wrong).encode())[0] == 409
        assert ask(seed, "DELETE", "/v1/ranks/unknown")[0] == 204
        assert json.loads(ask(seed, "GET", "/v1/ranks")[2])["ranks"][0]["url"] == ""
        with socket.create_connection(tuple(seed.url.removeprefix("http://").split(":"))) as raw:
            raw.sendall(b"POST /v1/leases HTTP/1.1\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n")
            assert raw.recv(100).startswith(b"HTTP/1.1 413 ")
        for seconds in ("1e999", "-5", "0"):
            assert ask(seed, "POST", "/v1/leases", b'{"seconds": %s}' % seconds.encode())[0] in (200, 400)
        with socket.create_connection(tuple(seed.url.removeprefix("http://").split(":"))) as raw:
            raw.sendall(b"\xff\xfe nonsense\r\n\r\n")
            while raw.recv(100):  # it ends
                pass
        assert SeedClient(seed.url).lease(5).epoch == 0


def test_a_manifest_is_compressed() -> None:
    with Seed(model(), KEY) as seed:
        status, headers, body = ask(seed, "GET", "/v1/manifest")
        assert (status, headers["Content-Encoding"]) == (200, "gzip")
        assert json.loads(zlib.decompress(body, wbits=31))["instance"] == seed.instance


def test_strangers_who_say_nothing_do_not_hold_a_seed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control._Handler, "timeout", None)  # for whoever waits for them it is for ever
    seed = Seed(model(), KEY)
    with leaks.nothing_left():
        address = tuple(seed.url.removeprefix("http://").split(":"))
        silent = [socket.create_connection(address) for _ in range(70)]
        seed.close()
        for one in silent:
            one.close()


def test_a_refusal_says_when_to_ask_again() -> None:
    with Seed(model(), KEY, readers=1) as seed:
        assert ask(seed, "POST", "/v1/leases", b'{"seconds": 20}')[0] == 200
        status, headers, _ = ask(seed, "POST", "/v1/leases", b"{}")
        assert status == 429
        assert 0 < int(headers["Retry-After"]) <= 20
