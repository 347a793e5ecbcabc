"""How fast the network is that a seed listens on: for limits that are a share of it."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

__all__ = ["link_rate"]

_SIOCGIFADDR = 0x8915
_INTERFACES, _INET6 = Path("/sys/class/net"), Path("/proc/net/if_inet6")


def link_rate(host: str) -> int | None:
    """Bytes a second of the interface with this address, of the fastest for one that means all; None where
    the kernel does not say (loopback, many virtual interfaces) or ``host`` is no address.
    """
    try:
        wanted = ipaddress.ip_address(host)
    except ValueError:
        return None
    rates = [
        rate
        for name, address in _addresses()
        if (wanted.is_unspecified or address == wanted) and (rate := _rate(name)) is not None
    ]
    return max(rates, default=None)


def _addresses() -> Iterator[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has none
                found = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                yield name, ipaddress.IPv4Address(found[20:24])
    with contextlib.suppress(OSError):  # no IPv6
        for line in _INET6.read_text(encoding="ascii").splitlines():
            digits, *_, name = line.split()
            yield name, ipaddress.IPv6Address(int(digits, 16))


def _rate(name: str) -> int | None:
    """The kernel has megabits a second, -1 or an error where it does not know."""
    try:
        speed = int((_INTERFACES / name / "speed").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return speed * 125_000 if speed > 0 else None
