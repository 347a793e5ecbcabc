"""Hosts that are network namespaces, joined by links of a given rate, for ranks that are far from each other.

They have no names: the process that makes them gets a network of its own, with a bridge in it, and they last
as long as a process or a descriptor of it. So nothing can be left behind, and nothing meets what the machine
has. The kernel and its process ids are still the same.
"""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
from pathlib import Path

from support import child

_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
INTERFACE = "eth0"
"""Of each host."""
STORE = "10.9.0.254"
"""An address that all hosts reach: of the process that has made them."""


def make(count: int, rate: str) -> list[int]:
    """A descriptor for each host, to be entered; each sends at most at ``rate``, as tc writes it."""
    _libc("unshare", _NEW_NETWORK)
    _run("ip link set lo up")
    _run("ip link add bridge type bridge")
    _run(f"ip address add {STORE}/24 dev bridge")
    _run("ip link set bridge up")
    return [_host(number, rate) for number in range(count)]


def enter(host: int) -> None:
    """This process, which has one thread, is on that host from now on."""
    _libc("setns", host, _NEW_NETWORK)


def move(host: int) -> None:
    """As enter(), for the process that made the hosts: without a descriptor, the bridge would go with it."""
    os.open("/proc/self/ns/net", os.O_RDONLY)  # until the process ends
    enter(host)


def cut() -> None:
    """Cuts the link of the host that this process is on."""
    _run(f"ip link set {INTERFACE} down")


def slow(host: int, rate: str) -> None:
    """That host sends at most at ``rate`` from now on."""
    _run(f"tc qdisc replace dev {INTERFACE} root tbf rate {rate} burst 32kb latency 400ms", host)


def lossy(host: int, percent: int) -> None:
    """Of what that host sends, so many packets of a hundred are lost, at random."""
    for command in (
        "nft add table inet lossy",
        "nft add chain inet lossy out { type filter hook output priority 0 ; }",
        f"nft add rule inet lossy out numgen random mod 100 < {percent} drop",
    ):
        _run(command, host)


def received() -> int:
    """Bytes that came to this host from others since it was made."""
    for line in Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == INTERFACE:
            return int(counts.split()[0])
    raise AssertionError(f"no {INTERFACE}")


@functools.cache
def why_not() -> str:
    """Why there can be no hosts here; "" where there can."""
    answer: str = child.call(_try)
    return answer


@functools.cache
def why_not_lossy() -> str:
    """Why no packet can be lost here; "" where one can."""
    answer: str = why_not() or child.call(_try_lossy)
    return answer


def _try() -> str:
    try:
        for host in make(2, "100mbit"):
            os.close(host)
    except OSError as error:
        return f"hosts need network namespaces, ip and tc: {error}"
    return ""


def _try_lossy() -> str:
    (host,) = make(1, "100mbit")
    try:
        lossy(host, 1)
    except OSError as error:
        return f"a lossy link needs nft and numgen: {error}"
    finally:
        os.close(host)
    return ""


def _host(number: int, rate: str) -> int:
    ready, done = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        # Is the host, until its link is there and somebody else holds it.
        try:
            _libc("unshare", _NEW_NETWORK)
            os.write(ready[1], b"1")
            os.read(done[0], 1)
        finally:
            os._exit(0)
    try:
        os.read(ready[0], 1)
        host = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
        _run(f"ip link add tl{number} type veth peer name {INTERFACE} netns {pid}")
        _run(f"ip link set tl{number} master bridge up")
        for command in (
            "ip link set lo up",
            f"ip address add 10.9.0.{number + 1}/24 dev {INTERFACE}",
            f"ip link set {INTERFACE} up",
            f"tc qdisc add dev {INTERFACE} root tbf rate {rate} burst 256kb latency 100ms",
        ):
            _run(command, host)
    finally:
        os.write(done[1], b"1")
        os.waitpid(pid, 0)
        for end in (*ready, *done):
            os.close(end)
    return host


def _run(command: str, host: int | None = None) -> None:
    inside = None if host is None else functools.partial(enter, host)
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False, preexec_fn=inside)
    if done.returncode:
        raise OSError(f"{command}: {done.stderr.strip()}")


def _libc(name: str, *arguments: int) -> None:
    # os.unshare and os.setns came with Python 3.12.
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
