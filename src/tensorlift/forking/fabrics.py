"""Engines of others that read the memory of another process: what is wanted of one, and one for a process.

They are one-sided: the process that is read does nothing. So nobody may use memory that such an engine may
still be writing to: where a read has failed, its destination stays with the engine until that is gone, and
whoever needs one next gets a fresh one.
"""

from __future__ import annotations

import importlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType, ModuleType
from typing import ClassVar, NamedTuple, Protocol

from tensorlift.engine.abi_fork import Memory
from tensorlift.errors import OptionError

__all__ = [
    "ANY",
    "MOST_ENTRIES",
    "NAME",
    "Fabric",
    "FabricError",
    "Packages",
    "Part",
    "Shared",
    "Wiring",
    "batches",
    "ended",
    "surroundings",
]

MOST_ENTRIES = 1024
"""Parts of one call: Mooncake refuses more than 2,048 to one peer, which it is of no use for after that."""
NAME = re.compile(r"[\w.:-]{1,64}")
"""Of a NIC."""
_SHORTEST_NAP, _LONGEST_NAP = 50e-6, 1e-3


class FabricError(Exception):
    """An engine cannot be had, or could not do it, for this reason."""


class Wiring(NamedTuple):
    """What a caller wants of an engine; empty is what the environment says, or else what the machine has."""

    protocol: str = ""
    devices: tuple[str, ...] = ()
    """NICs as UCX has them: "mlx5_1:1" is port 1 of one for RDMA, "eth0" an interface."""
    is_named: bool = False
    """Somebody has named the devices: an engine that has no use for them says so. Others are left out."""

    @property
    def names(self) -> tuple[str, ...]:
        """The NICs without their ports; the kernel gives none a name with a colon in it."""
        return tuple(device.partition(":")[0] for device in self.devices)


ANY = Wiring()


class Part(NamedTuple):
    """Bytes to read: the address there and here, and which device they are on there."""

    remote: int
    local: int
    nbytes: int
    device_kind: int = 0
    device_index: int = 0


class Fabric(Protocol):
    """One engine. All its methods may be called by any thread; FabricError is what they raise."""

    how: str
    """What it moves bytes by, as it is installed."""
    lasts: bool
    """It costs nothing while nobody uses it, and ending it does: it stays until the process ends."""
    revokes: bool
    """Nobody reads memory any more that is not registered any more."""

    def register(self, memories: Sequence[Memory]) -> None:
        """Others may read these, and it may write to them."""

    def unregister(self, memories: Sequence[Memory]) -> None:
        """They are as before."""

    def session(self) -> str:
        """What another engine has to know to read what is registered now."""

    def meet(self, session: str) -> None:
        """Before the first read of that session, and where it has become another one. FabricError where it is
        taken for one that was known before: only a fresh engine reads it.
        """

    def part(self, session: str) -> None:
        """Behind the last."""

    def read(self, session: str, parts: Sequence[Part], go_on: Callable[[], None]) -> None:
        """Brings all of them; they are of one kind of device. ``go_on`` is asked again and again, and raises
        OSError where nobody waits any more.
        """

    def close(self) -> None:
        """Nothing is read or written by it behind this."""


class Packages(NamedTuple):
    """Where an engine comes from."""

    modules: tuple[str, ...]
    """The first that is there is taken."""
    remedy: str
    wanted: Mapping[str, str] = MappingProxyType({})
    """Variables that are read when a module is imported."""

    def load(self) -> ModuleType:
        """The module. Raises FabricError where there is none that can be imported."""
        problems = []
        for name in self.modules:
            try:
                with surroundings({}, self.wanted):
                    return importlib.import_module(name)
            except ImportError as error:
                problems.append(str(error))
        raise FabricError(f"it is not there ({'; '.join(dict.fromkeys(problems))}); {self.remedy}")

    def check(self, kind: str) -> None:
        """OptionError where it is not there."""
        try:
            self.load()
        except FabricError as error:
            raise OptionError(f"transports has {kind!r}, and {error}") from None


class Shared:
    """An engine, for all seeds and forks of this process that want the same of one."""

    _known: ClassVar[dict[tuple[object, ...], Shared]] = {}
    _lock = threading.Lock()

    def __init__(self, key: tuple[object, ...], fabric: Fabric) -> None:
        """See borrow()."""
        self.fabric = fabric
        self._key, self._users, self.is_spoilt = key, 0, False
        self._held: list[object] = []

    @classmethod
    def borrow(cls, make: Callable[[Wiring, str], Fabric], wiring: Wiring, host: str) -> Shared:
        """The one that is there, or a new one; ``host``: the address that others reach this process by.

        Raises FabricError.
        """
        key = (os.getpid(), make, wiring, host)
        with cls._lock:
            found = cls._known.get(key)
            if found is None:
                found = cls._known[key] = Shared(key, make(wiring, host))
            found._users += 1
            return found

    def hold(self, what: object) -> None:
        """Keeps it as long as the engine."""
        self._held.append(what)

    def spoil(self, destination: object) -> None:
        """A read has failed, and may go on writing there: nobody else gets this engine."""
        with self._lock:
            self.hold(destination)
            self.is_spoilt = True
            self._forget()

    def give_back(self) -> None:
        """One user less; behind the last one the engine ends, and lets go of what it held."""
        with self._lock:
            self._users -= 1
            if self._users or (self.fabric.lasts and not self.is_spoilt):
                return
            self._forget()
        self.fabric.close()
        self._held.clear()

    def _forget(self) -> None:
        if self._known.get(self._key) is self:
            del self._known[self._key]


def ended(is_done: Callable[[], bool], go_on: Callable[[], None]) -> None:
    """Waits with little of the processor; ``go_on`` raises where nobody waits any more."""
    nap = _SHORTEST_NAP
    while not is_done():
        go_on()
        time.sleep(nap)
        nap = min(2 * nap, _LONGEST_NAP)


@contextmanager
def surroundings(forced: Mapping[str, str], wanted: Mapping[str, str]) -> Iterator[None]:
    """Variables of the environment while an engine reads them: they are the process's, and others read them
    too. What the user has set stays, unless it is ``forced``; an empty one is none.
    """
    before = {name: os.environ.get(name) for name in (*forced, *wanted)}
    os.environ.update({name: text for name, text in wanted.items() if before[name] is None})
    for name, text in forced.items():
        _put(name, text or None)
    try:
        yield
    finally:
        for name, old in before.items():
            _put(name, old)


def _put(name: str, text: str | None) -> None:
    if text is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = text


def batches(parts: Sequence[Part]) -> Iterable[Sequence[Part]]:
    """So many at a time as one call may have."""
    return (parts[at : at + MOST_ENTRIES] for at in range(0, len(parts), MOST_ENTRIES))
