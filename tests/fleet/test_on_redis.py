"""One contract, whatever stands behind it: the embedded registry over HTTP, Redis; and what is Redis' own."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trustme

from support import leaks
from support.ports import free_port, nobody
from support.registries import KEY, announced, redis_server, serving
from support.waiting import until
from tensorlift.errors import RequestError, SeedError
from tensorlift.fleet import on_redis
from tensorlift.fleet.contract import ForkReport, Load, Near, Registry, View
from tensorlift.fleet.on_redis import RedisRegistry
from tensorlift.fleet.registry_urls import registry_of
from tensorlift.fleet.server import RegistryServer
from tensorlift.forking.manifest import ModelKey

OTHER = ModelKey(model="org/model", tp=(0, 2))


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with redis_server(tmp_path_factory.mktemp("redis")) as url:
        yield url


@pytest.fixture
def on_a_redis(redis_url: str) -> Iterator[RedisRegistry]:
    made = RedisRegistry(redis_url)
    made._redis.flushall()
    yield made
    made.close()


@pytest.fixture(params=["http", "redis", "http before redis"])
def known(request: pytest.FixtureRequest) -> Iterator[tuple[Registry, RegistryServer | RedisRegistry]]:
    """(as it is asked, what it knows)."""
    with contextlib.ExitStack() as stack:
        if request.param == "redis":
            registry = request.getfixturevalue("on_a_redis")
            yield registry, registry
            return
        if request.param == "http":
            server = stack.enter_context(serving())
        else:
            server = stack.enter_context(RegistryServer(request.getfixturevalue("on_a_redis")))
        yield registry_of(server.url), server


def view(known: RegistryServer | RedisRegistry) -> View:
    return known.view() if isinstance(known, RedisRegistry) else known._registry.view()


def test_the_contract(known: tuple[Registry, RegistryServer | RedisRegistry]) -> None:
    registry, behind = known
    with pytest.raises(SeedError, match=r"'org/model' \(target\): it knows none") as none:
        registry.candidates(KEY, Near())
    assert (none.value.retry_seconds, none.value.answered) == (None, True)
    assert registry.renew(announced(1).instance, Load()) is None
    for number in range(3):
        assert registry.announce(announced(number, place=f"z/r{number}", most_readers=2)) == 15
    registry.announce(announced(7, OTHER))
    assert registry.candidates(OTHER, Near(), 9) == [announced(7).url]
    # The near one first; it is sent one more than others before it is as far.
    asked = [registry.candidates(KEY, Near("", "z/r1"))[0] for _ in range(5)]
    assert (asked[0], sorted(set(asked))) == (announced(1).url, sorted(announced(n).url for n in range(3)))
    assert len(registry.candidates(KEY, Near(), 9, [announced(1).url])) == 1
    with pytest.raises(SeedError, match="all with as many readers as they take") as full:
        registry.candidates(KEY, Near())
    assert full.value.retry_seconds == 1
    assert registry.renew(announced(2).instance, Load(1, 50, 2.5, 2)) == 15
    assert registry.candidates(KEY, Near(), 9) == [announced(2).url]
    shown = {seed.instance: seed.load for seed in view(behind).seeds}
    assert shown[announced(2).instance] == Load(1, 50, 2.5, 2)
    registry.withdraw(announced(2).instance)
    registry.withdraw(announced(2).instance)
    assert len(view(behind).seeds) == 3
    registry.announce(announced(1, weights="2", most_readers=3))
    assert registry.candidates(KEY, Near()) == [announced(1).url]


def test_forks_tell(known: tuple[Registry, RegistryServer | RedisRegistry]) -> None:
    registry, behind = known
    fork = ForkReport(fork="a" * 32, key=KEY, state="reading", done_bytes=1, total_bytes=9, seeds=("u",))
    assert registry.report(fork) == 15
    assert list(view(behind).forks) == [fork]
    last = msgspec.structs.replace(fork, state="failed", reason="why")
    registry.report(last)
    shown = view(behind)
    assert (list(shown.forks), shown.ended, list(shown.recent)) == (
        [],
        {(KEY, "failed"): 1},
        [(last, "failed")],
    )


def test_those_that_wait_ask_less_often(known: tuple[Registry, RegistryServer | RedisRegistry]) -> None:
    registry, _ = known
    registry.announce(announced(1, most_readers=1))
    registry.candidates(KEY, Near())

    def retry() -> float | None:
        with pytest.raises(SeedError, match="as many readers as they take") as full:
            registry.candidates(KEY, Near())
        return full.value.retry_seconds

    forks = [ForkReport(fork=f"{number:032x}", key=KEY, state="waiting") for number in range(150)]
    for fork in forks:
        registry.report(fork)
    assert retry() == 1.5
    for fork, state in zip(forks[:51], ("reading", "done", "failed") * 17, strict=True):
        registry.report(msgspec.structs.replace(fork, state=state))
    assert retry() == 1


def test_what_cannot_be_announced(known: tuple[Registry, RegistryServer | RedisRegistry]) -> None:
    registry, behind = known
    for seed, message in (
        (announced(1, ModelKey(model="m", tp=(2, 2))), "rank 2 of 2"),
        (announced(1, url="http://node7:1"), "a seed is named by its address"),
        (announced(1, url="nonsense"), "is no URL of a seed"),
    ):
        with pytest.raises((RequestError, SeedError), match=message):
            registry.announce(seed)
    assert list(view(behind).seeds) == []


def test_a_seed_on_all_addresses_is_left_out(known: tuple[Registry, RegistryServer | RedisRegistry]) -> None:
    registry, _ = known
    registry.announce(announced(1, url="http://0.0.0.0:7000"))
    (found,) = registry.candidates(KEY, Near())
    assert found == "http://127.0.0.1:7000"
    with pytest.raises(SeedError, match="it knows no other than the 1 seed that failed"):
        registry.candidates(KEY, Near(), 1, [found])


def test_in_redis_seeds_lapse_by_themselves(
    on_a_redis: RedisRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_redis.announce(announced(2))
    with monkeypatch.context() as short:
        short.setattr(on_redis, "_LEASE", 50)
        on_a_redis.announce(announced(1))
    until(lambda: len(on_a_redis.view().seeds) == 1)
    assert on_a_redis.renew(announced(1).instance, Load()) is None
    assert on_a_redis.candidates(KEY, Near(), 9) == [announced(2).url]
    assert [seed.instance for seed in on_a_redis.view().seeds] == [announced(2).instance]
    # Nothing of it is left in the set of its key.
    assert on_a_redis._redis.scard(on_redis._of("key", KEY)) == 1


def test_a_redis_where_others_write(on_a_redis: RedisRegistry) -> None:
    on_a_redis.announce(announced(1))
    base = on_a_redis._redis
    base.sadd(on_redis._of("key", KEY), b"\xff\x00", b"junk", announced(3).instance)
    base.set("tensorlift:seed:junk", b"\xff{")
    base.set(f"tensorlift:seed:{announced(3).instance}", msgspec.json.encode({"url": 7}))
    base.set(f"tensorlift:sent:{announced(1).instance}", b"9" * 5000)
    base.set("tensorlift:fork:x", b"[]")
    base.hset("tensorlift:ended", b"x", 3)
    base.hset("tensorlift:ended", msgspec.json.encode((KEY, "done")), b"many")
    base.lpush("tensorlift:recent", b"{")
    assert on_a_redis.view() == View([announced(1)], [], {(KEY, "done"): 0}, [])
    base.delete(f"tensorlift:sent:{announced(1).instance}")
    assert on_a_redis.candidates(KEY, Near(), 9) == [announced(1).url]
    evil = msgspec.structs.replace(announced(4), url="http://evil.example:80")
    base.set(f"tensorlift:seed:{evil.instance}", msgspec.json.encode(evil))
    base.sadd(on_redis._of("key", KEY), evil.instance)
    # It is no reason to do without the others.
    assert on_a_redis.candidates(KEY, Near(), 9) == [announced(1).url]
    on_a_redis.withdraw(announced(1).instance)
    with pytest.raises(SeedError, match=r"names a seed that is not gone to: 'evil.example' is a name"):
        on_a_redis.candidates(KEY, Near(), 9)
    base.delete(on_redis._of("key", KEY))
    base.set(on_redis._of("key", KEY), "no set")
    with pytest.raises(SeedError, match=r"^redis://127.0.0.1:\d+ refuses: WRONGTYPE"):
        on_a_redis.candidates(KEY, Near())


def test_whichever_address_a_redis_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that its name has, the first that there is a way to."""
    ours, nowhere = ("127.0.0.1", 6379), ("127.0.0.1", 6379, 0, 0)
    v4, v6 = ((kind, socket.SOCK_DGRAM, 0, "") for kind in (socket.AF_INET, socket.AF_INET6))
    found: list[Any] = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    registry = RedisRegistry("redis://redis.example")
    # No address of IPv6, for which there is no way.
    found[:] = [(*v6, nowhere), (*v4, ours)]
    assert registry._own_address() == "127.0.0.1"
    for found[:] in ([(*v6, nowhere)], []):
        with pytest.raises(SeedError, match=r"redis\.example:6379 cannot be reached: ."):
            registry._own_address()
    if socket.has_ipv6 and Path("/proc/net/if_inet6").exists():
        found[:] = [(*v6, ("::1", 6379, 0, 0))]
        assert registry._own_address() == "::1"
    registry.close()


def test_who_says_his_address_is_not_asked_for_it(
    on_a_redis: RedisRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which does not work everywhere where a Redis can be reached."""
    monkeypatch.delattr(RedisRegistry, "_own_address")
    assert on_a_redis.announce(announced(1, url="http://10.0.0.5:7000")) == 15
    with pytest.raises(RequestError, match="a seed is named by its address"):
        on_a_redis.announce(announced(1, url="http://node7:1"))
    with pytest.raises(AttributeError, match="_own_address"):
        on_a_redis.announce(announced(1, url="http://0.0.0.0:7000"))


def test_a_redis_that_is_not_there() -> None:
    with leaks.nothing_left():
        registry = registry_of(nobody().replace("http://", "redis://me:secret@"))
        with pytest.raises(SeedError, match=r"^redis://127\.0\.0\.1:\d+ cannot be reached: ") as down:
            registry.candidates(KEY, Near())
        assert (down.value.answered, "secret" in str(down.value)) == (False, False)
        registry.close()


def test_a_redis_with_a_password(tmp_path: Path) -> None:
    with redis_server(tmp_path, "geheim") as url:
        registry = registry_of(url)
        assert registry.announce(announced(1)) == 15
        registry.close()
        stranger = registry_of(url.replace("geheim", "falsch"))
        with pytest.raises(SeedError) as refused:
            stranger.announce(announced(2))
        assert not any(word in str(refused.value) for word in ("geheim", "falsch"))
        stranger.close()


def test_a_redis_behind_a_socket_and_under_tls(tmp_path: Path) -> None:
    authority = trustme.CA()
    made = authority.issue_cert("127.0.0.1")
    cert, key, ca, local = (tmp_path / name for name in ("cert.pem", "key.pem", "ca.pem", "redis.sock"))
    made.cert_chain_pems[0].write_to_path(cert)
    made.private_key_pem.write_to_path(key)
    authority.cert_pem.write_to_path(ca)
    port = free_port()
    options = ("--unixsocket", local, "--tls-port", port, "--tls-auth-clients", "no")
    options += ("--tls-cert-file", cert, "--tls-key-file", key, "--tls-ca-cert-file", ca)
    with redis_server(tmp_path, "", *options) as plain:
        first = registry_of(plain)
        first.announce(announced(1, url="http://0.0.0.0:7000"))
        first.close()
        for url, host in (
            (f"unix://{local}", "localhost"),
            (f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={ca}", "127.0.0.1"),
        ):
            other = registry_of(url)
            # Who listens on all addresses is where the Redis is that sees him so.
            assert other.candidates(KEY, Near()) == [f"http://{host}:7000"]
            other.close()
        stranger = registry_of(f"rediss://127.0.0.1:{port}")
        with pytest.raises(SeedError, match=r"cannot be reached: .*certificate"):
            stranger.candidates(KEY, Near())
        stranger.close()


@pytest.mark.parametrize(
    "url",
    [
        "redis://me:secret@host:port",
        "redis://host:1/0?passphrase=secret",
        "redis://host:1/0?db=secret",
        "redis://host:1/0?socket_timeout=secret",
        "rediss://host:1/0?ssl_cert_reqs=secret",
        "unix:///socket?passphrase=secret",
    ],
)
def test_a_url_that_is_none(url: str) -> None:
    """At once, not by the thread that asks; and with no secret of it."""
    with pytest.raises(RequestError, match="registry is no URL of a Redis, or has options") as refused:
        registry_of(url)
    assert "secret" not in str(refused.value)


def test_a_socket_is_named_by_its_path(tmp_path: Path) -> None:
    registry = registry_of(f"unix://{tmp_path}/redis?password=secret")
    with contextlib.closing(registry), pytest.raises(SeedError, match=f"^unix://{tmp_path}/redis cannot be"):
        registry.candidates(KEY, Near())
