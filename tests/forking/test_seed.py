"""A seed and who asks it: manifests, leases, tokens, updates, strangers, and what is left when it ends."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from support import leaks
from tensorlift.engine.abi_fork import Memory, Outcome
from tensorlift.errors import OptionError, RequestError, SeedError
from tensorlift.forking import control
from tensorlift.forking.client import SeedClient
from tensorlift.forking.leases import LeaseRefusedError
from tensorlift.forking.manifest import ModelKey
from tensorlift.forking.matching import copies_of, errands
from tensorlift.forking.offering import named_tensors, offer
from tensorlift.forking.seed import Seed
from tensorlift.forking.transports import connect

KEY = ModelKey(model="org/model", revision="abc")
TOKEN = "t\u00f6ken"


def model(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = {f"t{k}": torch.rand(50 + k, 7, generator=generator) for k in range(9)}
    return {**made, "tied": made["t3"], "transposed": made["t4"].t(), "empty": torch.empty(0, 3)}


@pytest.fixture
def seed() -> Iterator[Seed]:
    with leaks.nothing_left():
        made = Seed(model(), KEY, token=TOKEN)
        yield made
        made.close()


def read(seed: SeedClient, into: dict[str, torch.Tensor], token: str = TOKEN) -> list[int]:
    """All of it by one connection; the outcomes."""
    manifest = seed.manifest()
    ours = offer(named_tensors(into))
    lease = seed.lease(30)
    connection = connect(manifest.transports, token, lease.id, 60).connection
    outcomes = [
        connection.fetch(chunk, manifest.epoch, places, digest=True).outcome
        for chunk, places, _ in errands(copies_of(manifest.tensors, ours.tensors, ours.memories), 1000)
    ]
    connection.close()
    seed.release(lease.id)
    return outcomes


def test_weights_come_over(seed: Seed) -> None:
    client, into = SeedClient(seed.url, TOKEN), model(1)
    assert client.manifest().key == KEY
    assert set(read(client, into)) == {Outcome.OK}
    for name, tensor in model().items():
        assert torch.equal(into[name], tensor), name
    stats = seed.stats()
    assert (stats["readers"], stats["refused_leases"], stats["refused_chunks"]) == (0, 0, 0)
    assert stats["sent_bytes"] == sum(region.nbytes for region in client.manifest().regions)


def test_an_update(seed: Seed) -> None:
    client, into = SeedClient(seed.url, TOKEN), model(1)
    old = client.manifest()
    lease = client.lease(3)  # of a reader that is stopped
    connection = connect(old.transports, TOKEN, lease.id, 60).connection
    tensors = {one.name: one.tensor for one in seed._named}
    with seed.updating(timeout=60, weights="v2"):
        with pytest.raises(SeedError, match=r"it updates its weights; ask again in 0\.1 s") as caught:
            client.lease(10)
        assert caught.value.retry_seconds == 0.1
        tensors["t0"].fill_(5)
    now = client.manifest()
    assert (now.epoch, now.weights, now.instance) == (1, "v2", old.instance)
    assert client.state().epoch == 1
    # The one that was stopped goes on where it was, and gets nothing.
    memory = np.zeros(100, np.uint8)
    places = np.array([[0, 100, memory.ctypes.data]], np.uint64)
    chunk = errands(copies_of(old.tensors, old.tensors, apart(old.regions)), 100)[0].chunk
    assert connection.fetch(chunk, old.epoch, places, digest=True).outcome == Outcome.STALE
    connection.close()
    with pytest.raises(SeedError, match="has lapsed"):
        client.renew(lease.id, 10)
    assert set(read(client, into)) == {Outcome.OK}
    assert (into["t0"] == 5).all()


def test_an_update_waits_for_its_readers(seed: Seed) -> None:
    client = SeedClient(seed.url, TOKEN)
    lease = client.lease(60)
    begun, changed = threading.Event(), threading.Event()

    def change() -> None:
        begun.set()
        with seed.updating(timeout=600):
            changed.set()

    thread = threading.Thread(target=change)
    thread.start()
    begun.wait()
    assert not changed.wait(0.2)
    assert read_one(client, lease.id) == Outcome.OK
    client.release(lease.id)
    thread.join()
    assert changed.is_set()
    assert client.state().epoch == 1


def apart(regions: Sequence[object]) -> list[Memory]:
    """Memory that nobody has, for places that are not used."""
    return [Memory(at << 40, 0) for at in range(len(regions))]


def read_one(client: SeedClient, lease: str) -> int:
    manifest = client.manifest()
    connection = connect(manifest.transports, TOKEN, lease, 60).connection
    places = np.zeros((0, 3), np.uint64)
    chunk = errands(copies_of(manifest.tensors, manifest.tensors, apart(manifest.regions)), 100)[0].chunk
    outcome = connection.fetch(chunk, manifest.epoch, places, digest=True).outcome
    connection.close()
    return int(outcome)


def test_an_update_that_fails_opens_again(seed: Seed) -> None:
    client = SeedClient(seed.url, TOKEN)
    with pytest.raises(ZeroDivisionError), seed.updating():
        raise ZeroDivisionError
    assert client.lease(10).epoch == 1


def test_an_update_that_is_interrupted_while_it_waits(seed: Seed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C: nothing has changed, and forks are let in again."""
    client = SeedClient(seed.url, TOKEN)

    def interrupt(timeout: float) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(seed, "_wait_for_readers", interrupt)
        with pytest.raises(KeyboardInterrupt), seed.updating():
            pytest.fail("it has begun")
    assert client.lease(10).epoch == 0
    assert set(read(client, model(1))) == {Outcome.OK}


def test_a_seed_that_ends_during_an_update(seed: Seed) -> None:
    assert set(read(SeedClient(seed.url, TOKEN), model(1))) == {Outcome.OK}
    before = seed.stats()
    with seed.updating():
        with pytest.raises(RequestError, match="one update at a time"), seed.updating():
            pytest.fail("it has begun")
        seed.close()
    with pytest.raises(RequestError, match="this seed is closed"), seed.updating():
        pytest.fail("it has begun")
    # What it has done can be asked for behind its end.
    assert seed.stats() == before | {"epoch": 1, "connections": 0}


def test_an_update_without_a_name_is_no_other_seeds_version(seed: Seed) -> None:
    client, versions = SeedClient(seed.url, TOKEN), []
    with Seed(model(), KEY, token=TOKEN) as other:
        for one in (seed, seed, other):
            with one.updating(timeout=0):
                pass
            versions.append(SeedClient(one.url, TOKEN).manifest().weights)
    assert len({"", *versions}) == 4
    assert client.manifest().weights == versions[1]


@pytest.mark.parametrize("more", [{"timeout": "soon"}, {"timeout": -1}, {"weights": 3}])
def test_an_update_that_does_not_begin(seed: Seed, more: dict[str, Any]) -> None:
    (name,) = more
    with pytest.raises(OptionError, match=f"^{name} is "), seed.updating(**more):
        pass
    assert SeedClient(seed.url, TOKEN).lease(10).epoch == 0


def test_no_more_readers_than_allowed() -> None:
    with Seed(model(), KEY, readers=2) as seed:
        client = SeedClient(seed.url)
        held = [client.lease(50), client.lease(20)]
        with pytest.raises(SeedError, match="as many readers as it takes; ask again in") as caught:
            client.lease(10)
        assert 0 < (caught.value.retry_seconds or 0) <= 20
        answer = ask(seed, "POST", "/v1/leases", b"{}")
        assert answer[0] == 429
        assert 0 < int(answer[1]["Retry-After"]) <= 20
        client.release(held[0].id)
        client.lease(10)
        assert seed.stats()["refused_leases"] == 2


def test_a_seed_that_ends(seed: Seed) -> None:
    client = SeedClient(seed.url, TOKEN)
    client.lease(60)
    seed.close()
    with pytest.raises(SeedError, match=r"^http://127.0.0.1:\d+ cannot be reached: "):
        client.manifest()
    seed.close()


def ask(
    seed: Seed, method: str, path: str, body: bytes | None = None, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection(*seed.url.removeprefix("http://").split(":"), timeout=60)
    try:
        connection.request(method, path, body, headers)
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


def test_a_token_is_in_no_message() -> None:
    with Seed(model(), KEY, token="hush") as seed:
        client = SeedClient(seed.url, "wrong-hush")
        with pytest.raises(SeedError, match="does not take this token") as caught:
            client.manifest()
        assert "hush" not in str(caught.value)
        assert "hush" not in repr(seed) + repr(client)
    for url in ("http://user:hush@host:1/path", "http://user:hush@host:1"):
        with pytest.raises(RequestError, match="is no URL of a seed") as refused:
            SeedClient(url)
        assert "hush" not in str(refused.value)


def test_a_seed_on_all_addresses() -> None:
    """It does not know by which of them it is reached; who has reached it does."""
    with Seed(model(), KEY, host="0.0.0.0", token="x") as seed:
        into = model(1)
        assert seed.url.startswith("http://0.0.0.0:")
        assert set(read(SeedClient(seed.url.replace("0.0.0.0", "127.0.0.1"), "x"), into, "x")) == {Outcome.OK}


@pytest.mark.parametrize(
    ("more", "error", "says"),
    [
        ({"host": "0.0.0.0"}, RequestError, "give a token, or say insecure=True"),
        ({"readers": 0}, OptionError, "readers is 0; expected a whole number from 1"),
        ({"limit": "fast"}, OptionError, "limit is 'fast'"),
        ({"token": ""}, OptionError, 'token is ""'),
        ({"token": "a\nb"}, OptionError, "cannot go into a header of HTTP"),
        ({"tls": ("no", "files")}, OptionError, "tls is "),
        ({"ca": "file", "join": "http://127.0.0.1:1"}, OptionError, "ca is for https://"),
        ({"ca": "file"}, OptionError, "ca is for join"),
        ({"join": "nowhere"}, RequestError, "'nowhere' is no URL of a seed"),
        ({"port": 80000}, OptionError, "port is 80000; expected a whole number up to 65535"),
        ({"port": "http"}, OptionError, "port is 'http'"),
        ({"port": True}, OptionError, "port is True"),
        ({"weights": 3}, OptionError, "weights is 3"),
        ({"join_timeout": float("nan"), "join": "http://127.0.0.1:1"}, OptionError, "join_timeout is nan"),
        ({"host": "192.0.2.1", "token": "x"}, OSError, "assign requested address"),
    ],
)
def test_a_seed_that_does_not_begin(more: dict[str, Any], error: type[Exception], says: str) -> None:
    with leaks.nothing_left(), pytest.raises(error, match=says):
        Seed(model(), KEY, **more)


def test_a_port_that_is_taken(seed: Seed) -> None:
    port = int(seed.url.rpartition(":")[2])
    with leaks.nothing_left(), pytest.raises(OSError):
        Seed(model(), KEY, port=port)


def test_who_is_told_of_the_end_is_told_behind_the_last_lease() -> None:
    """It may take a while, and forks that come meanwhile should ask another seed."""
    refused = list[str]()

    class Late:
        def changed(self) -> None:
            """Nothing."""

        def close(self) -> None:
            with pytest.raises(LeaseRefusedError) as error:
                seed.grant(10)
            refused.append(error.value.reason)

    seed = Seed({"a": torch.zeros(3)}, "k")
    seed.follow(Late())
    seed.close()
    assert refused == ["closed"]
