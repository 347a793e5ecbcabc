"""Mooncake's TransferEngine as an engine of one-sided reads: RDMA, EFA, NVLink, or TCP.

Its traps, each with a test: the protocol that it is given is a wish, and without a NIC it takes TCP; a call
of too many entries is refused and spoils the engine; a descriptor of a peer that it has cached outlives the
peer; what it costs to register grows with the square of the count. See fabrics.py for failed reads.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import secrets
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

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
from tensorlift.forking.handshake import receive
from tensorlift.forking.topology import has_nics
from tensorlift.format.quoting import quote

__all__ = [
    "DEVICE_VARIABLE",
    "PACKAGES",
    "PROTOCOLS",
    "PROTOCOL_VARIABLE",
    "Mooncake",
    "device_asked",
    "protocol_asked",
    "protocol_of",
]

PROTOCOLS = (
    "tcp", "rdma", "efa", "nvlink", "nvlink_intra", "hip", "barex", "cxl", "ascend", "musa", "maca",
    "ubshmem", "sunrise_link",
)  # fmt: skip
"""What it can be told to move bytes by; each build has some of them."""
PROTOCOL_VARIABLE, DEVICE_VARIABLE = "MOONCAKE_PROTOCOL", "MOONCAKE_DEVICE"
# What its users write there to have it look by itself.
_BY_ITSELF = "auto-discovery"
_WITHOUT_CUDA = ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine-efa-non-cuda")
# The variables hold where nobody has imported it before. Descriptors of many regions are longer than the MiB
# that it takes. (MC_DISABLE_METACACHE would have each read wait for the peer, a stopped one for a minute.)
PACKAGES = Packages(
    ("mooncake.engine",),
    "pip install mooncake-transfer-engine (without CUDA mooncake-transfer-engine-non-cuda) and "
    "apt-get install libibverbs1",
    {
        "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
        "MC_HANDSHAKE_MAX_LENGTH": str(64 << 20),
    },
)
# What makes it sure: without them it takes what works.
_FORCED = {"tcp": "MC_FORCE_TCP", "rdma": "MC_FORCE_HCA"}
_LENGTH, _METADATA, _LONGEST_DESCRIPTOR = struct.Struct("<Q"), b"\1", 64 << 20
_BRIEFLY_SECONDS = 5.0
# What transfer_check_status() says.
_PENDING, _DONE = 0, 1


class _Descriptor(msgspec.Struct):
    protocol: str = ""


def device_asked(environ: Mapping[str, str]) -> str:
    """The NICs that the environment names, with commas between; "" for none."""
    asked = environ.get(DEVICE_VARIABLE, "").strip()
    return "" if asked == _BY_ITSELF else asked


def protocol_asked(protocol: str, environ: Mapping[str, str]) -> str:
    """That of the caller, else what the environment names, or forces; "" where nobody says."""
    if asked := protocol or environ.get(PROTOCOL_VARIABLE, "").strip().lower():
        return asked
    return next((name for name, variable in _FORCED.items() if environ.get(variable)), "")


def protocol_of(wiring: Wiring) -> str:
    """What is asked for: by the caller, by the environment, or by a NIC that is there."""
    if asked := protocol_asked(wiring.protocol, os.environ):
        return asked
    return "rdma" if wiring.devices or device_asked(os.environ) or has_nics() else "tcp"


class Mooncake:
    """See Fabric."""

    lasts = True
    """It takes a second to end, and keeps the GIL for it; while it is idle it costs nothing."""
    revokes = True

    def __init__(self, wiring: Wiring, host: str) -> None:
        """Begins, and looks which protocol was installed. Raises FabricError."""
        protocol = protocol_of(wiring)
        if protocol not in PROTOCOLS:
            raise FabricError(
                f"Mooncake has no protocol {quote(protocol)}; expected one of {', '.join(PROTOCOLS)} in "
                f"{PROTOCOL_VARIABLE}, or protocol"
            )
        names = wiring.names
        if protocol == "tcp" and names:
            if wiring.is_named:
                raise FabricError(
                    f"over tcp Mooncake lets nobody choose {', '.join(names)}: leave devices out, or ask for "
                    "rdma"
                )
            names = ()
        devices = ",".join(names) or device_asked(os.environ)
        module = PACKAGES.load()
        self._engine: Any = module.TransferEngine()
        forced = {name: "1" if name == _FORCED.get(protocol) else "" for name in _FORCED.values()}
        with surroundings(forced, {}):
            code = self._engine.initialize(host, "P2PHANDSHAKE", protocol, devices)
        if code != 0:
            raise FabricError(
                f"Mooncake does not begin with {protocol} {devices}".rstrip() + f" on {host} (code {code})"
            )
        self._name, self._met = secrets.token_hex(16), dict[str, str]()
        self._host = f"[{host}]" if ":" in host else host
        self.how = _installed(host, self._engine.get_rpc_port()) or (protocol if protocol in _FORCED else "")
        if self.how != protocol:
            raise FabricError(
                f"Mooncake was asked for {protocol} and has installed {self.how or 'what it does not say'}: "
                f"name that one ({PROTOCOL_VARIABLE}), or look why the NIC is not found"
            )

    def register(self, memories: Sequence[Memory]) -> None:
        """See Fabric."""
        if any(memory.device_kind != abi.DEVICE_CPU for memory in memories):
            _check_cuda()
        code = self._engine.batch_register_memory(
            [memory.address for memory in memories], [memory.nbytes for memory in memories]
        )
        if code != 0:
            raise FabricError(f"Mooncake does not register {_told(memories)} (code {code})")

    def unregister(self, memories: Sequence[Memory]) -> None:
        """See Fabric."""
        code = self._engine.batch_unregister_memory([memory.address for memory in memories])
        if code != 0:
            raise FabricError(f"Mooncake does not let go of {_told(memories)} (code {code})")

    def session(self) -> str:
        """host:port, and what no other engine has that listens there later."""
        return f"{self._host}:{self._engine.get_rpc_port()}/{self._name}"

    def meet(self, session: str) -> None:
        """See Fabric. It keeps what it has learned of an address, and cannot be told to forget it."""
        address, _, name = session.partition("/")
        if self._met.setdefault(address, name) != name:
            raise FabricError(f"Mooncake takes who listens at {address} for who did before")

    def part(self, session: str) -> None:
        """It forgets nothing."""

    def read(self, session: str, parts: Sequence[Part], go_on: Callable[[], None]) -> None:
        """See Fabric. The call that waits by itself spins, and ends by MC_TRANSFER_TIMEOUT (30 s) alone; what
        is said of one that does not wait is said of its first part, so that one with more cannot be asked.
        """
        session = session.partition("/")[0]
        for some in batches(parts):
            go_on()
            remote, local, sizes = ([part[at] for part in some] for at in range(3))
            if len(some) > 1:
                code = self._engine.batch_transfer_sync_read(session, local, remote, sizes)
            else:
                code = self._read_one(session, local, remote, sizes, go_on)
            if code != 0:
                raise FabricError(
                    f"Mooncake's read of {session} failed: it may be gone, or have changed (code {code})"
                )

    def _read_one(
        self, session: str, local: list[int], remote: list[int], sizes: list[int], go_on: Callable[[], None]
    ) -> int:
        batch: int = self._engine.batch_transfer_async_read(session, local, remote, sizes)
        if batch <= 0:
            return batch or -1
        state = _PENDING

        def is_done() -> bool:
            nonlocal state
            state = self._engine.transfer_check_status(batch)
            return bool(state != _PENDING)

        ended(is_done, go_on)
        return 0 if state == _DONE else state

    def close(self) -> None:
        """See Fabric."""
        self._engine = None


def _told(memories: Sequence[Memory]) -> str:
    return f"{len(memories)} regions of {sum(memory.nbytes for memory in memories):,} bytes"


def _check_cuda() -> None:
    for name in _WITHOUT_CUDA:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version(name)
            raise FabricError(
                f"{name} cannot read a device's memory: install mooncake-transfer-engine instead"
            )


def _installed(host: str, port: int) -> str:
    """The protocol that an engine tells others of, or "" where it does not say."""
    try:
        with socket.create_connection((host, port), _BRIEFLY_SECONDS) as peer:
            peer.sendall(_LENGTH.pack(len(_METADATA) + 2) + _METADATA + b"{}")
            (length,) = _LENGTH.unpack(receive(peer, _LENGTH.size))
            said = receive(peer, min(length, _LONGEST_DESCRIPTOR))
        return msgspec.json.decode(said[1:], type=_Descriptor).protocol
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return ""
