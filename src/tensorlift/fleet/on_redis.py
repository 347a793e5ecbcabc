"""A registry in Redis: each seed and fork tells for itself, and keys with a time to live forget it.

tensorlift:seed:INSTANCE   an Announcement, as long as it is renewed
tensorlift:sent:INSTANCE   forks that were sent there and have not come
tensorlift:key:DIGEST      the instances of a key; those that are gone are taken out when they are found
tensorlift:waiting:DIGEST  forks that wait for a seed of a key, each with the time until which it counts
tensorlift:fork:FORK       a ForkReport, as long as it is under way
tensorlift:ended           how many forks of a key ended how
tensorlift:recent          the last that ended
"""

from __future__ import annotations

import hashlib
import ipaddress
import random
import socket
import time
import urllib.parse
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
import redis

from tensorlift.errors import RequestError, SeedError
from tensorlift.fleet.choosing import Seen, chosen
from tensorlift.fleet.contract import (
    LEASE_SECONDS,
    RECENT,
    SENT_SECONDS,
    Announcement,
    ForkReport,
    Load,
    Near,
    View,
    check_announcement,
    check_report,
)
from tensorlift.fleet.registry_client import front_of, gone_to
from tensorlift.forking.keys import told_key
from tensorlift.forking.manifest import ModelKey
from tensorlift.forking.urls import Endpoint, placed, split_url
from tensorlift.format.quoting import clean

__all__ = ["RedisRegistry"]

_SECONDS = 5.0
_LEASE, _SENT = int(LEASE_SECONDS * 1000), int(SENT_SECONDS * 1000)
# The set of a key outlives its seeds, which may come again.
_SET = 10 * _LEASE
_NOBODY = "0.0.0.0"
_P = "tensorlift:"
_T = TypeVar("_T")


class RedisRegistry:
    """A Registry; whoever may write to that Redis is believed."""

    def __init__(self, url: str) -> None:
        """``url``: as redis-py reads it, with its user and password. Raises RequestError."""
        try:
            parts = urllib.parse.urlsplit(url)
            self._host, self._port = parts.hostname or "localhost", parts.port or 6379
            self._redis: Any = redis.Redis.from_url(
                url, socket_timeout=_SECONDS, socket_connect_timeout=_SECONDS, health_check_interval=0
            )
            # Options that it does not know it would refuse when it connects.
            pool = self._redis.connection_pool
            pool.connection_class(**pool.connection_kwargs)
        except (ValueError, TypeError, redis.RedisError):
            # What is wrong with it may have the password in it.
            raise RequestError(
                "registry is no URL of a Redis, or has options that redis-py does not know: "
                "redis://[user:password@]host:port/db"
            ) from None
        endpoint = Endpoint(parts.scheme, self._host, self._port)
        self.url = f"unix://{parts.path}" if parts.scheme == "unix" else endpoint.url
        """Without who asks, and his password."""
        self._front = endpoint._replace(scheme="http").url

    @contextmanager
    def _asking(self) -> Iterator[Any]:
        try:
            yield self._redis
        except redis.ResponseError as error:
            raise SeedError(f"{self.url} refuses: {clean(str(error))}") from None
        except (redis.RedisError, OSError) as error:
            raise SeedError(
                f"{self.url} cannot be reached: {clean(str(error))}; look whether Redis runs there and lets "
                "this host and user in",
                answered=False,
            ) from None

    def announce(self, seed: Announcement) -> float:
        """See Registry. RequestError for what is none, or cannot be reached by others."""
        check_announcement(seed)
        # Which of its addresses it would be is of interest for one that listens on all.
        seen = self._own_address() if _is_on_all(seed.url) else _NOBODY
        seed = msgspec.structs.replace(
            seed, url=placed(seed.url, front_of(self._front, seed.url), seen, True)
        )
        with self._asking() as base, base.pipeline() as many:
            many.set(_P + "seed:" + seed.instance, msgspec.json.encode(seed), px=_LEASE)
            many.sadd(_of("key", seed.key), seed.instance)
            many.pexpire(_of("key", seed.key), _SET)
            many.execute()
        return LEASE_SECONDS

    def _own_address(self) -> str:
        """By which this host is seen from there."""
        problem: Exception = OSError("it has no address")
        try:
            for family, kind, _, _, address in socket.getaddrinfo(
                self._host, self._port, type=socket.SOCK_DGRAM
            ):
                try:
                    with socket.socket(family, kind) as one:
                        one.connect(address)  # sends nothing
                        return str(ipaddress.ip_address(one.getsockname()[0]))
                except OSError as error:
                    problem = error
        except (OSError, UnicodeError) as error:
            problem = error
        raise SeedError(f"{self.url} cannot be reached: {clean(str(problem))}", answered=False)

    def renew(self, instance: str, load: Load) -> float | None:
        """See Registry."""
        with self._asking() as base:
            seed = _read(base.get(_P + "seed:" + instance), Announcement)
            sent = _number(base.get(_P + "sent:" + instance))
            if seed is not None and (came := min(sent, load.leases - seed.load.leases)) > 0:
                base.decrby(_P + "sent:" + instance, came)
                base.pexpire(_P + "sent:" + instance, _SENT)
        return None if seed is None else self.announce(msgspec.structs.replace(seed, load=load))

    def withdraw(self, instance: str) -> None:
        """See Registry."""
        with self._asking() as base:
            base.delete(_P + "seed:" + instance, _P + "sent:" + instance)

    def candidates(
        self, key: ModelKey, near: Near, count: int = 1, without: Collection[str] = ()
    ) -> list[str]:
        """See Registry."""
        with self._asking() as base:
            try:
                waiting = base.zcount(_of("waiting", key), time.time(), "+inf")
                seen = self._seen(base, key)
                where = gone_to([one.url for one in seen], self._front)
                seen = [one for one in seen if one.url in where]
                # A fork knows a seed that listens on all addresses by where it went.
                left = {url for url, to in where.items() if not {url, to}.isdisjoint(without)}
                found = chosen(seen, near, count, left, random.random, waiting)
            except SeedError as error:
                raise SeedError(f"{self.url}: {told_key(key)}: {error}", error.retry_seconds) from None
            with base.pipeline() as many:
                for one in found:
                    many.incr(_P + "sent:" + one.instance)
                    many.pexpire(_P + "sent:" + one.instance, _SENT)
                many.execute()
        return [where[one.url] for one in found]

    def _seen(self, base: Any, key: ModelKey) -> list[Seen]:
        instances = [raw.decode("ascii", "replace") for raw in base.smembers(_of("key", key))]
        if not instances:
            return []
        raws = base.mget([_P + "seed:" + one for one in instances])
        if gone := [one for one, raw in zip(instances, raws, strict=True) if raw is None]:
            base.srem(_of("key", key), *gone)
        sent = base.mget([_P + "sent:" + one for one in instances])
        seeds = zip(_all_of(raws, Announcement), sent, strict=True)
        return [
            Seen(
                seed.instance,
                seed.url,
                seed.weights,
                seed.near,
                seed.load.readers + _number(more),
                seed.most_readers,
            )
            for seed, more in seeds
            if seed is not None and seed.key == key
        ]

    def report(self, fork: ForkReport) -> float:
        """See Registry."""
        check_report(fork)
        with self._asking() as base, base.pipeline() as many:
            many.zremrangebyscore(_of("waiting", fork.key), "-inf", time.time())
            if fork.state == "waiting":
                many.zadd(_of("waiting", fork.key), {fork.fork: time.time() + LEASE_SECONDS})
                many.pexpire(_of("waiting", fork.key), _SET)
            else:
                many.zrem(_of("waiting", fork.key), fork.fork)
            if fork.has_ended:
                many.delete(_P + "fork:" + fork.fork)
                many.hincrby(_P + "ended", msgspec.json.encode((fork.key, fork.state)), 1)
                many.lpush(_P + "recent", msgspec.json.encode(fork))
                many.ltrim(_P + "recent", 0, RECENT - 1)
            else:
                many.set(_P + "fork:" + fork.fork, msgspec.json.encode(fork), px=_LEASE)
            many.execute()
        return LEASE_SECONDS

    def view(self) -> View:
        """What a page shows. Forks that stopped telling are not counted."""
        with self._asking() as base:
            seeds, forks = (
                base.mget(names) if (names := list(base.scan_iter(f"{_P}{kind}:*", 1000))) else []
                for kind in ("seed", "fork")
            )
            ended, recent = base.hgetall(_P + "ended"), base.lrange(_P + "recent", 0, RECENT - 1)
        counted = {
            found: _number(times)
            for raw, times in ended.items()
            if (found := _read(raw, tuple[ModelKey, str])) is not None
        }
        return View(
            [one for one in _all_of(seeds, Announcement) if one],
            [one for one in _all_of(forks, ForkReport) if one],
            counted,
            [(one, one.state) for one in _all_of(recent, ForkReport) if one],
        )

    def close(self) -> None:
        """See Registry."""
        self._redis.close()


def _is_on_all(url: str) -> bool:
    try:
        return ipaddress.ip_address(split_url(url).host).is_unspecified
    except ValueError:  # a name, which is refused
        return False


def _of(kind: str, key: ModelKey) -> str:
    return f"{_P}{kind}:" + hashlib.sha256(msgspec.json.encode(key)).hexdigest()


def _read(raw: Any, kind: type[_T]) -> _T | None:
    """None for what is not there (any more), and for what is nothing of ours."""
    try:
        return None if raw is None else msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _number(raw: Any) -> int:
    return int(raw) if raw and raw.isdigit() and len(raw) < 20 else 0


def _all_of(raws: Iterable[Any], kind: type[_T]) -> Iterator[_T | None]:
    return (_read(raw, kind) for raw in raws)
