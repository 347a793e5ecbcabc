"""NIXL as an engine of one-sided reads, by UCX (RDMA, NVLink, memory of the host, TCP) or libfabric (EFA).

Its traps, each with a test: a transfer has no end of its own; what was unregistered can still be read where
no NIC forbids it, so that memory stays as long as the engine; an agent of a name that is known already is
not taken for another one; regions that were registered later are seen only with new metadata.
"""

from __future__ import annotations

import base64
import contextlib
import logging
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tensorlift.engine import abi
from tensorlift.engine.abi_fork import Memory
from tensorlift.forking.fabrics import (
    FabricError,
    Packages,
    Part,
    Wiring,
    batches,
    ended,
    surroundings,
)
from tensorlift.forking.topology import has_nics

__all__ = ["PACKAGES", "PROTOCOLS", "Nixl"]

PACKAGES = Packages(
    ("nixl._api", "nixl_cu13._api", "nixl_cu12._api"),
    "pip install nixl (without CUDA pip install --no-deps nixl-cu12)",
)
# UCX takes what it finds best, also TCP, unless it is told.
_TLS = {"tcp": "tcp", "rdma": "ib,cuda"}
PROTOCOLS = (*_TLS, "efa")
"""What it can be told to move bytes by."""


class Nixl:
    """See Fabric."""

    lasts = False
    """Its thread polls while it is idle."""
    revokes = False

    def __init__(self, wiring: Wiring, host: str) -> None:
        """Begins. UCX finds the addresses by itself. Raises FabricError."""
        if wiring.protocol and wiring.protocol not in PROTOCOLS:
            raise FabricError(
                f"NIXL has no protocol {wiring.protocol!r} here; expected one of {', '.join(PROTOCOLS)}"
            )
        module = PACKAGES.load()
        if "NIXL_LOG_LEVEL" not in os.environ:
            # Its lines go to stdout, where somebody's output may be.
            logging.getLogger("nixl").setLevel(logging.WARNING)
        backend = "LIBFABRIC" if wiring.protocol == "efa" else "UCX"
        forced = {"UCX_TLS": _TLS[wiring.protocol]} if wiring.protocol in _TLS else {}
        if wiring.devices:
            forced["UCX_NET_DEVICES"] = ",".join(wiring.devices)
        self._lock, self._met = threading.Lock(), dict[str, int]()
        self._name = f"tensorlift-{secrets.token_hex(16)}"
        config = module.nixl_agent_config(
            backends=[backend], sync_mode=module.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        )
        asked = " ".join([backend, wiring.protocol, *wiring.devices])
        with _said(f"NIXL does not begin with {asked.strip()}"), surroundings(forced, _needless()):
            self._agent: Any = module.nixl_agent(self._name, config)
        if backend not in self._agent.backends:
            raise FabricError(f"NIXL has no {backend} here")
        self.how = f"{backend}, {wiring.protocol}" if wiring.protocol in _TLS else backend
        self._registered: dict[Memory, Any] = {}

    def register(self, memories: Sequence[Memory]) -> None:
        """See Fabric."""
        for memory in memories:
            with _said(f"NIXL does not register {memory.nbytes:,} bytes"):
                row = (memory.address, memory.nbytes, memory.device_index, "")
                self._registered[memory] = self._agent.register_memory([row], _segment(memory.device_kind))

    def unregister(self, memories: Sequence[Memory]) -> None:
        """See Fabric."""
        for memory in memories:
            with _said(f"NIXL does not let go of {memory.nbytes:,} bytes"):
                self._agent.deregister_memory(self._registered.pop(memory))

    def session(self) -> str:
        """Its name and metadata."""
        with _said("NIXL has no metadata"):
            return f"{self._name}:{base64.b64encode(self._agent.get_agent_metadata()).decode('ascii')}"

    def meet(self, session: str) -> None:
        """See Fabric. The metadata of an agent that is known is added to what is known of it."""
        name, metadata = _parted(session)
        with self._lock, _said(f"NIXL does not take the metadata of {name}"):
            if name != self._name:
                self._agent.add_remote_agent(metadata)
            self._met[name] = self._met.get(name, 0) + 1

    def part(self, session: str) -> None:
        """See Fabric. It would take another agent of that name for this one."""
        name, _ = _parted(session)
        with self._lock, _said(f"NIXL does not forget {name}"):
            self._met[name] -= 1
            if not self._met[name]:
                del self._met[name]
                if name != self._name:
                    self._agent.remove_remote_agent(name)

    def read(self, session: str, parts: Sequence[Part], go_on: Callable[[], None]) -> None:
        """See Fabric."""
        name, _ = _parted(session)
        for some in batches(parts):
            with _said("NIXL's read failed: the seed may be gone, or have changed"):
                self._read(name, some, go_on)

    def _read(self, name: str, parts: Sequence[Part], go_on: Callable[[], None]) -> None:
        agent = self._agent
        here = agent.get_xfer_descs(
            [(part.local, part.nbytes, 0) for part in parts], _segment(abi.DEVICE_CPU)
        )
        there = agent.get_xfer_descs(
            [(part.remote, part.nbytes, part.device_index) for part in parts], _segment(parts[0].device_kind)
        )
        transfer = agent.initialize_xfer("READ", here, there, name)
        state = agent.transfer(transfer)

        def is_done() -> bool:
            nonlocal state
            if state == "PROC":
                state = agent.check_xfer_state(transfer)
            return bool(state != "PROC")

        ended(is_done, go_on)
        agent.release_xfer_handle(transfer)
        if state != "DONE":
            raise FabricError(f"NIXL's read failed: {state}")

    def close(self) -> None:
        """See Fabric."""
        self._registered.clear()
        self._agent = None


def _needless() -> dict[str, str]:
    """Where there is no NIC for RDMA, UCX' module for one is left out: a library that comes with it in the
    packages of NIXL 1.5 ends the process with SIGSEGV when it exits.
    """
    return {} if has_nics() else {"UCX_MODULES": "^ib"}


def _segment(device_kind: int) -> str:
    return "DRAM" if device_kind == abi.DEVICE_CPU else "VRAM"


def _parted(session: str) -> tuple[str, bytes]:
    name, _, metadata = session.partition(":")
    try:
        return name, base64.b64decode(metadata, validate=True)
    except ValueError:
        raise FabricError("what the seed says is no metadata of NIXL") from None


@contextlib.contextmanager
def _said(what: str) -> Iterator[None]:
    """Its exceptions, which have no class in common, as one of ours."""
    try:
        yield
    except (FabricError, OSError):  # ours, and those of who does not wait any more
        raise
    except Exception as error:  # noqa: BLE001
        raise FabricError(f"{what}: {error!r}") from None
