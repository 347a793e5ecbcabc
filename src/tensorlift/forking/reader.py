"""A fork at work: what it lacks is pulled from all seeds at once, each as fast as it is."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tensorlift.engine.abi_fork import Outcome
from tensorlift.errors import OutOfMemoryError, SeedError
from tensorlift.forking.chunks import ChunkQueue, checked
from tensorlift.forking.client import SeedClient
from tensorlift.forking.connection import NotHereError
from tensorlift.forking.fabrics import ANY, Wiring
from tensorlift.forking.manifest import Manifest
from tensorlift.forking.matching import Errand
from tensorlift.forking.pace import Held, Pace
from tensorlift.forking.throttle import Pacer
from tensorlift.forking.transports import FORKED, Connected, Connection, check_transports, connect
from tensorlift.format.quoting import plural

__all__ = ["Reader", "Source"]

_LEASE_SECONDS = 30.0
# For one that may not answer at all to prolong its lease, or to take it back.
_BRIEFLY_SECONDS = 1.0
_SHORTEST_WAIT, _LONGEST_WAIT = 0.05, 1.0
_UNCHECKED = 'it was built without digests, so that what comes cannot be checked; digests="off" takes it so'
_OUTCOMES = {
    Outcome.STALE: "its weights have changed",
    Outcome.CLOSED: "its weights are being changed",
    Outcome.RANGE: "it has no such bytes: its manifest is another seed's",
}


@dataclass(slots=True)
class Source:
    """A seed that is read from."""

    client: SeedClient
    manifest: Manifest
    lease: str = ""
    renew_at: float = 0.0
    gone: str = ""
    """Why nothing is read from it any more."""
    retry_seconds: float | None = None
    """When it may have room; None where that is not what it lacked."""
    stale: bool = False
    """Because it has other weights now."""
    transport: str = ""
    """What it was read by; see Connected."""
    connections: list[Connection] = field(default_factory=list)
    idle: int = 0
    """Connections that wait for something to do."""
    most: int = 0
    """Connections, without those that could not be had."""
    registering: float = 0.0
    """Seconds until memory was registered, of the connection that took longest."""
    closed_bytes: int = 0
    """What came over connections that are no more."""

    @property
    def name(self) -> str:
        """Its URL."""
        return self.client.url

    @property
    def moved(self) -> int:
        """Bytes that have come from it, right or wrong."""
        return self.closed_bytes + sum(connection.moved for connection in self.connections)


class Reader:
    """Brings all errands from some sources, whose manifests have the same regions."""

    def __init__(
        self,
        errands: Sequence[Errand],
        sources: Sequence[Source],
        token: str,
        connections: int,
        patience: float,
        digests: str,
        transports: Sequence[str] = FORKED,
        wiring: Wiring = ANY,
        pacer: Pacer | None = None,
    ) -> None:
        """``connections``: to each source; ``patience``: seconds that one may do nothing; see checked().
        ``pacer``: of all sources together; it is this reader's as long as that is at work.
        """
        self._wiring = wiring
        chunks = [errand.chunk for errand in errands]
        self.queue, self._checked = ChunkQueue(chunks), checked(chunks, digests)
        self._pace, self._pacer = Pace(patience), pacer or Pacer()
        self._errands, self._sources, self._token = errands, sources, token
        self._connections, self._patience, self._transports = connections, patience, transports
        self._state = threading.Condition()
        self._stopping = False
        self._working = 0
        self._failure: BaseException | None = None

    def run(self, tick: Callable[[Mapping[str, int]], object]) -> None:
        """Until all has come, or nobody is left who may bring the rest. ``tick``: told bytes by source."""
        threads: list[threading.Thread] = []
        try:
            threads += [
                threading.Thread(target=self._guarded, args=[source], name="tensorlift-fork", daemon=True)
                for source in self._leased()
                for _ in range(self._connections)
            ]
            self._working = len(threads)
            for source in self._sources:
                source.most = self._connections
            _start(threads)
            is_over = not threads
            # Told once at least, however soon all of them are through.
            while not is_over:
                with self._state:
                    is_over = self._state.wait_for(lambda: not self._working, 0.2)
                tick(self.queue.bytes_by_source())
                self._renew()
                self._watch()
        finally:
            self._end(threads)
        if self._failure is not None:
            raise self._failure

    def _leased(self) -> list[Source]:
        """Those that gave a lease. Those that have no room are asked again where no other gave one."""
        end = time.monotonic() + self._patience
        while True:
            full = [(one, why) for one in self._sources if not one.gone and (why := self._lease(one))]
            leased = [source for source in self._sources if source.lease and not source.gone]
            wait = min((why.retry_seconds or 0.0 for _, why in full), default=0.0)
            if leased or not full or time.monotonic() + wait > end:
                for source, why in full:
                    source.retry_seconds = why.retry_seconds
                    self._leave(source, self._said(source, why))
                return leased
            # It may have room long before it has to.
            time.sleep(min(max(wait, _SHORTEST_WAIT), _LONGEST_WAIT))

    def _lease(self, source: Source) -> SeedError | None:
        """Why it has no room now, if that is all: otherwise it has given a lease, or is gone."""
        # Of those before: the seeds that are asked behind them may take as long as they like.
        self._renew()
        try:
            answer = source.client.lease(_LEASE_SECONDS)
        except SeedError as error:
            if error.retry_seconds is not None:
                return error
            self._leave(source, self._said(source, error))
            return None
        source.lease, source.renew_at = answer.id, time.monotonic() + answer.seconds / 2
        if answer.epoch != source.manifest.epoch:
            self._leave(source, _OUTCOMES[Outcome.STALE], stale=True)
        return None

    @staticmethod
    def _said(source: Source, error: SeedError) -> str:
        return str(error).removeprefix(source.name).lstrip(": ")

    def _renew(self) -> None:
        for source in self._sources:
            if source.lease and not source.gone and time.monotonic() >= source.renew_at:
                # One that cannot be prolonged shows in what comes next: chunks say of which epoch they are.
                # A stopped one is not waited for: this thread watches the others too.
                source.renew_at = time.monotonic() + _LEASE_SECONDS / 6
                with contextlib.suppress(SeedError):
                    source.client.renew(source.lease, _LEASE_SECONDS, _BRIEFLY_SECONDS)
                    source.renew_at = time.monotonic() + _LEASE_SECONDS / 2

    def _watch(self) -> None:
        """Leaves those that are too slow; what they hold comes back when they no longer write it."""
        with self._state:
            idle = [source.name for source in self._sources if source.idle]
            held = [
                Held(
                    number, holder, self.queue.chunk(number).nbytes,
                    tuple(name for name in idle if name != holder and self.queue.may(number, name)),
                )
                for number, holder in self.queue.held()
            ]  # fmt: skip
            moved = {source.name: source.moved for source in self._sources}
            slow = self._pace.look(time.monotonic(), held, moved)
            for source in self._sources:
                if source.name in slow:
                    self._left(source, slow[source.name])
            self._state.notify_all()

    def _end(self, threads: Sequence[threading.Thread]) -> None:
        with self._state:
            self._stopping = True
            self._state.notify_all()
            for source in self._sources:
                for connection in source.connections:
                    connection.shutdown()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        for source in self._sources:
            if source.lease:
                with contextlib.suppress(SeedError):  # it lapses
                    source.client.release(source.lease, _BRIEFLY_SECONDS if source.gone else None)

    def _guarded(self, source: Source) -> None:
        try:
            self._pull(source)
        except ConnectionRefusedError as error:
            # A lease is of no use either once the weights have changed.
            self._leave(source, str(error), stale=self._has_moved_on(source))
        except OSError as error:
            self._leave(source, f"the connection is lost: {error}")
        except BaseException as error:  # noqa: BLE001 - for the thread that waits
            self._failure = error
            self._leave(source, str(error))
        finally:
            with self._state:
                self._working -= 1
                self._state.notify_all()

    def _has_moved_on(self, source: Source) -> bool:
        try:
            now = source.client.state()
        except SeedError:
            return False
        return (now.instance, now.epoch) != (source.manifest.instance, source.manifest.epoch)

    def _pull(self, source: Source) -> None:
        offered, kinds, passed = source.manifest.transports, self._transports, list[str]()
        while True:
            try:
                made = connect(offered, self._token, source.lease, self._patience, kinds, self._wiring)
            except OSError as error:
                if self._has_others(source):
                    return
                # Its kind says what becomes of the seed.
                raise type(error)("; ".join([str(error), *passed])) from error
            made = made._replace(passed=[*passed, *made.passed])
            try:
                self._pull_by(made, source)
                return
            except NotHereError as error:
                # What begins can turn out not to be of use: on with those that come behind it.
                passed = [*made.passed, f"not {made.kind}: {error}"]
            ordered = check_transports(kinds)
            behind = ordered[ordered.index(made.kind) + 1 :]
            kinds = [offer.kind for offer in offered if offer.kind in behind]
            if not kinds:
                raise ConnectionRefusedError(f"no transport can be had: {'; '.join(passed)}")

    def _has_others(self, source: Source) -> bool:
        """Without a connection that cannot be had: they may fare better, and know if the seed is there."""
        with self._state:
            source.most -= 1
            return source.most > 0

    def _pull_by(self, made: Connected, source: Source) -> None:
        connection = made.connection
        try:
            with self._state:
                source.connections.append(connection)
            while (number := self._next(source)) is not None:
                self._bring(source, connection, number)
        finally:
            with self._state:
                # Some know only by a chunk in which way they bring them.
                if connection.moved:
                    source.transport = made.transport
                source.registering = max(source.registering, connection.registering)
                if connection in source.connections:
                    source.closed_bytes += connection.moved
                    source.connections.remove(connection)
            connection.close()

    def _next(self, source: Source) -> int | None:
        """A chunk to bring; waits while others hold what may come back."""
        with self._state:
            while not (self._stopping or source.gone or self.queue.is_done):
                # Nothing is held meanwhile, so that others may bring it.
                if wait := self._pacer.wait():
                    self._state.wait(min(wait, 0.2))
                    continue
                number = self.queue.take(source.name)
                if number is not None:
                    self._pacer.asked(self.queue.chunk(number).nbytes)
                    return number
                source.idle += 1
                self._state.wait(0.2)
                source.idle -= 1
            return None

    def _bring(self, source: Source, connection: Connection, number: int) -> None:
        chunk, places, device = self._errands[number]
        begin, is_checked = time.monotonic(), number in self._checked
        before = connection.moved
        try:
            came = connection.fetch(chunk, source.manifest.epoch, places, digest=is_checked, device=device)
        except BaseException:
            with self._state:
                self.queue.give_back(number, source.name, connection.moved - before)
            raise
        with self._state:
            # What is right is kept, also from a source that is gone by now: its epoch was the wanted one.
            if came.outcome == Outcome.OK and (came.verified or not is_checked):
                self._pace.brought(source.name, chunk.nbytes, time.monotonic() - begin)
                self.queue.done(number, source.name)
            elif came.outcome == Outcome.WRONG:
                if self.queue.wrong(number, source.name):
                    self._left(source, "what it sends does not have the digest that comes with it")
            else:
                self.queue.give_back(number, source.name)
                if came.outcome == Outcome.OK:
                    self._left(source, _UNCHECKED)
                else:
                    self._left(source, _OUTCOMES[came.outcome], stale=came.outcome != Outcome.RANGE)
            self._state.notify_all()

    def _leave(self, source: Source, why: str, stale: bool = False) -> None:
        with self._state:
            self._left(source, why, stale)
            self._state.notify_all()

    def _left(self, source: Source, why: str, stale: bool = False) -> None:
        """Under the lock: the first reason counts."""
        if not source.gone and not self._stopping:
            source.gone, source.stale = why, stale
            self.queue.leave(source.name)
            for connection in source.connections:
                connection.shutdown()


def _start(threads: Sequence[threading.Thread]) -> None:
    for started, thread in enumerate(threads):
        try:
            thread.start()
        except RuntimeError as error:
            raise OutOfMemoryError(
                f"a fork wants {plural(len(threads), 'thread')}, one for each connection, and {started} "
                f"could be started: {error}; lower connections, or raise the limit of processes (ulimit -u)"
            ) from error
