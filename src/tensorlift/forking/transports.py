"""What carries bytes from a seed to a fork: one contract, several transports, and which of them is taken.

A seed offers all that it can (Served); a fork takes the best one that works between the two (connect).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from tensorlift.engine import abi, abi_fork
from tensorlift.errors import OptionError
from tensorlift.forking.chunks import Chunk
from tensorlift.forking.connection import NotHereError
from tensorlift.forking.fabrics import ANY, FabricError, Wiring
from tensorlift.forking.keys import checked_texts
from tensorlift.forking.manifest import ONE_SIDED, Offer
from tensorlift.forking.memory import MemoryConnection, MemoryServer
from tensorlift.forking.one_sided import OneSidedConnection, OneSidedServer, check_there
from tensorlift.forking.sender import Sender
from tensorlift.forking.shm import ShmConnection, ShmServer
from tensorlift.forking.tcp import TcpConnection, TcpServer
from tensorlift.format.quoting import quote, shown, some_of

__all__ = [
    "FORKED",
    "SERVED",
    "TRANSPORTS",
    "Connected",
    "Connection",
    "Served",
    "Server",
    "check_transports",
    "connect",
]

_log = logging.getLogger("tensorlift")
_SHOWN = 8

TRANSPORTS = ("memory", "shm", *ONE_SIDED, "tcp")
"""The best first. memory is for tests: both in one process."""
SERVED, FORKED = ("shm", "tcp"), ("memory", "shm", "tcp")
"""What a seed offers and a fork takes where nothing is said: those that need nothing else."""


class Server(Protocol):
    """One transport of a seed. Epochs, limit and counters are the Sender's, which all of them share."""

    @property
    def offer(self) -> Offer:
        """What the manifest says of it."""

    def close(self) -> None:
        """Lets nobody in any more; who is in is the sender's to end."""


class Connection(Protocol):
    """One connection of a fork. Chunks come one after another, by one thread."""

    @property
    def how(self) -> str:
        """What a transport with several ways has taken so far."""

    @property
    def moved(self) -> int:
        """Bytes that have come so far, also while another thread is in fetch()."""

    @property
    def registering(self) -> float:
        """Seconds that went by until memory was registered, here and there."""

    def fetch(
        self,
        chunk: Chunk,
        epoch: int,
        places: abi_fork.Places,
        digest: bool,
        device: tuple[int, int] = (abi.DEVICE_CPU, 0),
    ) -> abi_fork.Chunk:
        """Writes a chunk to its places. ``outcome`` OK: the bytes are there, and all are of this epoch;
        STALE, CLOSED, RANGE: the seed has others, gives none now, or has no such ones; WRONG: they do not
        have the digest that the seed has made. ``verified``: they were compared with one. ``device``: kind
        and index of the one that all places are on.

        Raises ConnectionError where the connection is of no use any more, DeviceError where the device is.
        """

    def shutdown(self) -> None:
        """Ends a fetch() of another thread with an error."""

    def close(self) -> None:
        """No other thread may be in fetch()."""


_SERVERS: Mapping[str, Callable[[Sender, str], Server]] = {
    "memory": lambda sender, host: MemoryServer(sender),
    "shm": lambda sender, host: ShmServer(sender),
    "tcp": TcpServer,
}
_CONNECTIONS: Mapping[str, Callable[[str, str, str, float], Connection]] = {
    "memory": MemoryConnection,
    "shm": ShmConnection,
    "tcp": TcpConnection,
}


def check_transports(kinds: Sequence[str]) -> tuple[str, ...]:
    """These, the best first. Raises OptionError for one that there is not, for none, and for one whose engine
    is not installed.
    """
    expected = f"some of {', '.join(TRANSPORTS)}"
    asked = checked_texts(kinds, "transports", expected)
    if not asked or set(asked) - set(TRANSPORTS):
        raise OptionError(f"transports is {shown(kinds)}; expected {expected}, in a list")
    for kind in ONE_SIDED:
        if kind in asked:
            check_there(kind)
    return tuple(kind for kind in TRANSPORTS if kind in asked)


class Served:
    """Regions of memory, by all transports that work here."""

    def __init__(
        self,
        regions: Sequence[abi_fork.Memory],
        is_live: Callable[[str], bool],
        *,
        host: str = "127.0.0.1",
        token: str = "",
        limit: int | None = None,
        transports: Sequence[str] = SERVED,
        wiring: Wiring = ANY,
        owner: object = None,
    ) -> None:
        """Begins. ``regions`` stay until close(); ``is_live``: whether it is a lease; ``limit``: bytes/s, of
        all transports together; ``owner``: keeps regions that can be read behind close(). A transport whose
        engine does not begin is ``off``.

        Raises OSError where it cannot listen on host, or by no transport; OptionError; RequestError
        for a device that cannot be read.
        """
        kinds = check_transports(transports)
        self._servers: list[Server] = []
        self._one_sided: dict[str, OneSidedServer] = {}
        self._off: dict[str, str] = {}
        self._sender = Sender(regions, is_live, token, limit)
        try:
            for kind in kinds:
                try:
                    if kind in ONE_SIDED:
                        self._one_sided[kind] = OneSidedServer(kind, self._sender, host, wiring, owner)
                        self._servers.append(self._one_sided[kind])
                    else:
                        self._servers.append(_SERVERS[kind](self._sender, host))
                except FabricError as error:
                    # Whoever serves goes on serving.
                    self._off[kind] = str(error)
                    _log.warning("a seed does without %s: %s", kind, error)
                except OSError:
                    # What is only faster need not work everywhere.
                    if kind == kinds[-1]:
                        raise
        except BaseException:
            self.close()
            raise

    @property
    def offers(self) -> tuple[Offer, ...]:
        """What the manifest says of them, the best first."""
        return tuple(server.offer for server in self._servers)

    @property
    def off(self) -> dict[str, str]:
        """Transports that were wanted and are not there, each with the reason."""
        broken = {kind: server.registration.problem for kind, server in self._one_sided.items()}
        return self._off | {kind: why for kind, why in broken.items() if why}

    def mooncake(self, seconds: float) -> str | None:
        """Where Mooncake's engine listens, once it knows all; None where it is not there or does not."""
        server = self._one_sided.get("mooncake")
        return None if server is None else server.address(seconds)

    def set_epoch(self, epoch: int, is_open: bool) -> None:
        """What is asked for with another epoch, or while it is not open, is refused from now on."""
        self._sender.set_epoch(epoch, is_open)

    def stats(self) -> dict[str, int]:
        """See Sender.stats(); and transports_off, registered_bytes, and planning and registering in
        microseconds, of all engines.
        """
        known = [server.registration for server in self._one_sided.values()]
        return self._sender.stats() | {
            "transports_off": len(self.off),
            "registered_bytes": sum(one.nbytes for one in known),
            "planning_us": int(1e6 * sum(one.planning_seconds for one in known)),
            "registering_us": int(1e6 * sum(one.seconds for one in known)),
        }

    def close(self) -> None:
        """Ends every connection; after it no byte of a region is read by this process."""
        for server in self._servers:
            server.close()
        self._sender.close()


class Connected(NamedTuple):
    """A connection, and how it came to be this one."""

    connection: Connection
    kind: str
    passed: Sequence[str]

    @property
    def transport(self) -> str:
        """For a report: which one it is, and why none that is better."""
        how = self.connection.how
        return "; ".join([f"{self.kind} ({how})" if how else self.kind, *self.passed])


def connect(
    offers: Iterable[Offer],
    token: str,
    lease: str,
    seconds: float,
    transports: Sequence[str] = FORKED,
    wiring: Wiring = ANY,
) -> Connected:
    """By the best transport that is offered and can be had here. ``seconds``: the seed may do nothing for.

    Raises ConnectionRefusedError where the seed does not take token or lease, or no transport can be had;
    TimeoutError where it did nothing for so long.
    """
    addresses = {offer.kind: offer.address for offer in offers}
    passed = []
    for kind in check_transports(transports):
        if kind not in addresses:
            if kind in ONE_SIDED:
                passed.append(f"not {kind}: the seed does not offer it")
            continue
        try:
            if kind in ONE_SIDED:
                made: Connection = OneSidedConnection(kind, addresses[kind], token, lease, seconds, wiring)
            else:
                made = _CONNECTIONS[kind](addresses[kind], token, lease, seconds)
        # A seed that refuses, or does nothing for so long, does so by any transport.
        except TimeoutError as error:
            raise TimeoutError("; ".join([str(error), *passed])) from error
        except (NotHereError, OSError) as error:
            # The kernel's word has a number: that nobody listens there.
            if isinstance(error, ConnectionRefusedError) and error.errno is None:
                raise
            passed.append(f"not {kind}: {error}")
            continue
        return Connected(made, kind, passed)
    offered = some_of([quote(kind)[1:-1] for kind in addresses], _SHOWN) or "none"
    why = "; ".join(passed) or f"the seed offers {offered}"
    raise ConnectionRefusedError(f"no transport can be had: {why}")
