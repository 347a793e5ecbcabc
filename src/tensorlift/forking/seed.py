"""A seed: a model's weights, offered to forks until it is closed."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from tensorlift.errors import RequestError
from tensorlift.forking.client import SeedClient
from tensorlift.forking.control import LeaseAnswer, StateAnswer, talk
from tensorlift.forking.encryption import Ca, Tls, seed_context
from tensorlift.forking.holding import Holding
from tensorlift.forking.joining import Joined, client_of_front
from tensorlift.forking.keys import check_host, checked_key, checked_token, checked_weights, told_key
from tensorlift.forking.leases import Lease, LeaseRefusedError, Leases
from tensorlift.forking.listener import Listener
from tensorlift.forking.manifest import Manifest, ModelKey, encode, layout_digest
from tensorlift.forking.offering import gpu_of, named_tensors, offer, places, settle
from tensorlift.forking.ranks import JoinRequest, RankTable
from tensorlift.forking.sglang_protocol_answer import info
from tensorlift.forking.tensor_digests import checked_digests, made_digests
from tensorlift.forking.transports import SERVED, Served
from tensorlift.forking.ways import Ways, ways_of
from tensorlift.format.quoting import quote
from tensorlift.options import parse_count, parse_port, parse_seconds, parse_switch

__all__ = ["Follower", "Seed"]

_log = logging.getLogger("tensorlift")

# A request takes milliseconds; a reader has one connection to ask by.
_MOST_TALKS = 64
# A fork that died holds its lease no longer.
_LONGEST_LEASE = 60.0
# For SGLang, which asks once, and whose requests have no end of their own.
_REGISTERING_SECONDS = 25.0
# Between two looks whether who has no lease any more is still connected.
_LINGER_SECONDS = 0.2


def _checked_wait(timeout: float) -> float:
    is_none = isinstance(timeout, (int, float)) and timeout == 0
    return 0.0 if is_none else parse_seconds(timeout, "timeout")


class Follower(Protocol):
    """Who has to know what becomes of a seed."""

    def changed(self) -> None:
        """It has another version of its weights, or readers."""

    def close(self) -> None:
        """It ends."""


class Seed:
    """Weights by several transports, and what is said about them over HTTP at ``url``.

    Tensors stay as long as the seed; changing them outside of updating() is seen by no reader. One that got
    other memory ends the offer with the next lease that is asked for; who reads meanwhile reads what it had.
    """

    def __init__(
        self,
        model: object,
        key: ModelKey | str,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        insecure: bool = False,
        limit: str | None = None,
        readers: int = 8,
        weights: str = "",
        tls: Tls | None = None,
        join: str | None = None,
        ca: Ca | None = None,
        join_timeout: float = 10.0,
        transports: Sequence[str] | None = None,
        devices: Sequence[str] | None = None,
        protocol: str = "",
        digests: bool | Mapping[str, str] = False,
    ) -> None:
        """Begins.

        limit: such as "2GB/s", or "25%" of the rate of the NICs or the network; readers: forks at once;
        weights: the version; transports: which are offered (shm and tcp), devices, protocol: the NICs of
        mooncake and nixl, and what they move bytes by (docs/fork.md); digests: of whole tensors, those that
        are known by name, or True to make them, now and behind each update, of what is in host
        memory.
        tls: (file of certificates, file of their key), or an ssl.SSLContext, for what is asked over HTTP.
        join: the URL of another seed, of the same token, that names this one to forks which want its key; ca:
        a file of certificates to trust that one by; join_timeout: seconds it may not be there yet. Raises
        RequestError for weights that cannot be offered and for an address that others reach without a token,
        OptionError, SeedError where it cannot join, OSError where nobody can listen there.
        """
        token = checked_token(token)
        check_host(host, token, parse_switch(insecure, "insecure"))
        parse_port(port, "port")
        self.most_readers, self._followers = parse_count(readers, "readers"), list[Follower]()
        join_timeout = parse_seconds(join_timeout, "join_timeout")
        self._model, self._named = model, named_tensors(model)
        self._offering, self._places = offer(self._named), places(self._named)
        self._changed, self._is_ending = threading.Condition(), False
        self._memory = Holding(self._named, self._changed, self._reading)
        settle(self._named)
        self.token, self.key, self._weights = token, checked_key(key), checked_weights(weights)
        encrypted = seed_context(tls)
        self._scheme = "http" if encrypted is None else "https"
        self.ranks, front = RankTable(self.key), client_of_front(join, token, ca)
        self.instance, self._process = secrets.token_hex(16), os.getpid()
        self._leases = Leases(self.most_readers, _LONGEST_LEASE)
        gpu, rank, kinds = gpu_of(self._named), self.key.tp[0], SERVED if transports is None else transports
        ways = ways_of(kinds, devices, protocol, limit, rank=rank, gpu=gpu, host=host)
        told = functools.partial(talk, seed=self, known=lambda: self._http.known())
        self._http: Listener = Listener(host, port, told, _MOST_TALKS, encrypted)
        try:
            self._served = self._serve(host, ways)
            self._begin(digests, front, join_timeout)
        except BaseException:
            self.close()
            raise

    def _begin(
        self, digests: bool | Mapping[str, str], front: SeedClient | None, join_timeout: float
    ) -> None:
        """Answers from now on, here and behind the front."""
        self._makes_digests, known = digests is True, checked_digests(digests, self._offering)
        self._publish(made_digests(self._offering) if self._makes_digests else known)
        self._http.start()
        if front is not None:
            self._joined = Joined(front, JoinRequest(self.instance, self.key, self.url), join_timeout)

    @property
    def url(self) -> str:
        """Where forks ask."""
        return f"{self._scheme}://{self._http.address}"

    @property
    def weights(self) -> str:
        """The version of the weights now."""
        return self._weights

    def follow(self, follower: Follower) -> None:
        """Told of every change from now on, and closed with the seed."""
        self._followers.append(follower)

    def _tell(self) -> None:
        for follower in self._followers:
            follower.changed()

    def _serve(self, host: str, ways: Ways) -> Served:
        return Served(
            self._offering.memories, self._is_live, host=host, token=self.token, limit=ways.rate,
            transports=ways.kinds, wiring=ways.wiring, owner=self._named,
        )  # fmt: skip

    @property
    def transports(self) -> tuple[str, ...]:
        """Those that it can be read by; none where all that were asked for are ``off``."""
        return tuple(offer.kind for offer in self._served.offers)

    @property
    def off(self) -> dict[str, str]:
        """Transports that were asked for and are not there, each with the reason."""
        return self._served.off

    def sglang(self, rank: int) -> dict[str, Any] | str | None:
        """What SGLang is told of a rank; the URL of who knows; None where nobody does. LeaseRefusedError."""
        for other in self.ranks.ranks(time.monotonic()):
            if other.key == msgspec.structs.replace(self.key, tp=(rank, self.key.tp[1])) and other.url:
                return other.url
        address = self._served.mooncake(_REGISTERING_SECONDS) if rank == self.key.tp[0] else None
        if address is None:
            return None
        self.grant(_LONGEST_LEASE)
        return info(rank, address, self._offering.tensors, self._offering.memories)

    def _publish(self, digests: Mapping[str, str]) -> None:
        offering = self._offering
        manifest = Manifest(
            instance=self.instance, epoch=self._leases.epoch, weights=self._weights, key=self.key,
            layout=layout_digest(offering.tensors), transports=self._served.offers, off=self.off,
            regions=offering.regions, tensors=offering.tensors, digests=dict(digests),
        )  # fmt: skip
        self._manifest = encode(manifest)

    def manifest(self) -> bytes:
        """Of this epoch, compressed."""
        with self._asked():
            return self._manifest

    def state(self) -> StateAnswer:
        """Instance and epoch now."""
        with self._asked():
            return StateAnswer(self.instance, self._leases.epoch)

    def grant(self, seconds: float) -> LeaseAnswer:
        """A lease; LeaseRefusedError."""
        with self._asked():
            now = time.monotonic()
            lease = self._leases.grant(seconds, now)
            if moved := self._memory.hold():
                self._leases.release(lease.id)
                self._retire(moved)
                raise LeaseRefusedError("moved")
            self._memory.watch()
        self._tell()
        return _told(lease, now)

    def _retire(self, moved: str) -> None:
        """No fork is to get what is not the model's any more."""
        self._leases.close("moved")
        _log.warning(
            "%r gives no leases any more: %s got other memory outside of updating(), and what it offers is "
            "not the model's; begin another seed",
            self,
            quote(moved),
        )
        # Not by who is asked here: others may take their time to hear of it.
        with contextlib.suppress(RuntimeError):  # no more threads: they hear of it from those that they send
            threading.Thread(target=self._leave, name="tensorlift-seed-leave", daemon=True).start()

    def _reading(self) -> float:
        """Under the lock: seconds that somebody reads at least, with a lease or without; 0: nobody does."""
        now = time.monotonic()
        if self._leases.live(now):
            return self._leases.next_end(now) - now
        return _LINGER_SECONDS if self._served.stats()["connections"] else 0.0

    @contextlib.contextmanager
    def _asked(self) -> Iterator[None]:
        """The lock, for who is asked by others: not waited for in vain where a signal's handler ends this
        seed on the thread that has it. ConnectionAbortedError then.
        """
        while not self._changed.acquire(timeout=_LINGER_SECONDS):
            if self._is_ending:
                raise ConnectionAbortedError("the seed ends")
        try:
            yield
        finally:
            self._changed.release()

    def renew(self, id: str, seconds: float) -> LeaseAnswer:
        """The same for longer; LeaseRefusedError."""
        with self._asked():
            now = time.monotonic()
            return _told(self._leases.renew(id, seconds, now), now)

    def release(self, id: str) -> None:
        """A reader is through."""
        with self._asked():
            self._leases.release(id)
            self._changed.notify_all()
        self._tell()

    def _is_live(self, id: str) -> bool:
        with self._asked():
            return self._leases.holds(id, time.monotonic())

    @contextlib.contextmanager
    def updating(self, timeout: float = 30.0, weights: str = "") -> Iterator[None]:
        """Around a change of the weights: readers end or lapse first, or see afterwards that theirs are old.

        timeout: seconds to wait for them. weights: the version behind the change; without it one that no
        other seed has, so that no fork takes others for the same. Raises OptionError, and RequestError where
        an update is under way or the seed is closed, and behind an update that gave a tensor other memory,
        with which the seed ends.
        """
        timeout, weights = _checked_wait(timeout), checked_weights(weights)
        with self._changed:
            self._leases.begin_update()
        try:
            with self._changed:
                self._wait_for_readers(timeout)
                self._leases.move_on()
                if not self._reading():
                    self._memory.let_go()
                self._served.set_epoch(self._leases.epoch, False)
                self._weights = weights or f"{self.instance[:8]}, update {self._leases.epoch}"
                self._publish({})
            yield
        finally:
            if moved := self._moved():
                self.close()
            else:
                self._open()
        if moved:
            raise RequestError(
                f"{quote(moved)} has other memory than before the update, which is for changes in place "
                "(copy_(), load_into): what forks would read is not the model's any more. This seed has "
                "ended; begin another one"
            )

    def _moved(self) -> str:
        """The first tensor whose memory was freed or replaced; nothing of a closed seed.

        Also one that the model has another tensor for now. Derived ones come and go as its caches do.
        """
        before = dict(zip((named.name for named in self._named), self._places, strict=False))
        now = list(self._named)
        with contextlib.suppress(RequestError):  # a mapping that has something else in it by now
            now += [named for named in named_tensors(self._model) if named.kind != "derived"]
        found = zip(now, places(now), strict=True)
        return next((one.name for one, place in found if place != before.get(one.name, place)), "")

    def _open(self) -> None:
        """Behind an update."""
        # None where it was closed meanwhile: then the memory may be gone.
        named = self._named
        try:
            settle(named)
            if named and self._makes_digests:
                with self._changed:
                    self._publish(made_digests(self._offering))
        finally:
            # Whatever became of the digests: else the update would last for ever.
            with self._changed:
                self._served.set_epoch(self._leases.epoch, True)
                self._leases.end_update()
            self._tell()

    def _wait_for_readers(self, timeout: float) -> None:
        end = time.monotonic() + timeout
        while (now := time.monotonic()) < end and self._leases.live(now):
            self._changed.wait(min(end, self._leases.next_end(now)) - now)

    def stats(self) -> dict[str, int]:
        """epoch and readers now, leases granted and refused, and what transports count: Sender.stats()."""
        with self._asked():
            leases = {
                "epoch": self._leases.epoch,
                "readers": self._leases.live(time.monotonic()),
                "granted_leases": self._leases.granted,
                "refused_leases": self._leases.refused,
            }
        return leases | self._served.stats()

    def close(self, timeout: float = 0.0) -> None:
        """Ends all readers, at once or after as many seconds as they may have to end; frees the weights.

        Nothing in a child of the process that began it.
        """
        if os.getpid() != self._process:
            # A child has copies of sockets and of locks: to end what they are of is the parent's.
            return
        timeout, self._is_ending = _checked_wait(timeout), True
        with self._changed:
            # Before others hear of it, which may take a while.
            self._leases.close()
        self._leave()
        with self._changed:
            self._wait_for_readers(timeout)
        self._http.close()
        served = getattr(self, "_served", None)
        if served is not None:
            served.close()
        self._model, self._named = {}, []
        self._memory.close()

    def _leave(self) -> None:
        """Nobody sends forks here any more."""
        joined = getattr(self, "_joined", None)
        if joined is not None:
            joined.close()
        with contextlib.suppress(IndexError):  # another thread, or a signal's handler, does the same
            while True:
                self._followers.pop().close()

    def __repr__(self) -> str:
        """Which weights, and where."""
        return f"<Seed of {told_key(self.key)} at {self.url}>"

    def __enter__(self) -> Seed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _told(lease: Lease, now: float) -> LeaseAnswer:
    return LeaseAnswer(lease.id, lease.epoch, lease.until - now)
