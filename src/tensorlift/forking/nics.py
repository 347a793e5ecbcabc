"""Which NICs one-sided transports take: those that are named, else the nearest one to the GPU of this rank.

In an engine eight ranks share a machine, and its NICs are not alike: some are on the other socket, some are
slow, some are others' (collectives, storage). All of them is a bad default: each is registered with, and the
far ones are waited for (docs/fork.md has figures).
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tensorlift.errors import OptionError
from tensorlift.forking import mooncake, nixl
from tensorlift.forking.fabrics import NAME, Wiring
from tensorlift.forking.manifest import ONE_SIDED
from tensorlift.forking.mooncake import DEVICE_VARIABLE, device_asked, protocol_asked
from tensorlift.forking.topology import Gpu, Link, Nic, Tree, tree_here
from tensorlift.format.quoting import plural, quote

__all__ = ["DEVICES_FORM", "Choice", "check_protocol", "choose", "chosen", "custom_topology"]

DEVICES_FORM = 'names of NICs, such as ["mlx5_8"], or all but some: ["^mlx5_0"]'
_CUSTOM = "MC_CUSTOM_TOPO_JSON"
_PROTOCOLS = {"mooncake": mooncake.PROTOCOLS, "nixl": nixl.PROTOCOLS}
_log = logging.getLogger("tensorlift")


@dataclass(frozen=True, slots=True)
class Choice:
    """NICs of one process."""

    nics: tuple[Nic, ...]
    """Empty: whatever the transport takes by itself."""
    reason: str
    """For people."""
    is_named: bool = False
    """By the caller."""

    @property
    def names(self) -> tuple[str, ...]:
        """As the kernel calls them; joined by commas they are Mooncake's ``device_name``."""
        return tuple(nic.name for nic in self.nics)

    @property
    def rate(self) -> int | None:
        """Bytes a second of all together; None where it is not known of each."""
        rates = [nic.rate for nic in self.nics if nic.rate is not None]
        return sum(rates) if rates and len(rates) == len(self.nics) else None

    @property
    def ucx(self) -> str:
        """As UCX_NET_DEVICES has them, which NIXL reads: "mlx5_1:1" is port 1, "eth0" an interface."""
        return ",".join(self._ports)

    @property
    def _ports(self) -> tuple[str, ...]:
        return tuple(f"{nic.name}:{nic.port}" if nic.port else nic.name for nic in self.nics)

    def wiring(self, protocol: str) -> Wiring:
        """What engines are told."""
        return Wiring(protocol, self._ports, self.is_named)


def choose(devices: Sequence[str] | None, rank: int, gpu: str | None, tree: Tree) -> Choice:
    """The NICs of one process.

    devices: names, which are taken as they are, or exclusions ("^mlx5_0") from the choice by nearness. rank:
    on its machine, for weights that are on no GPU: ranks take turns at the fastest. gpu: where the weights
    are, by address on the PCI bus or by name ("GPU0"). Of NICs that are equally near and fast, GPUs for which
    they are that take turns in the order of their numbers.

    Raises OptionError for a NIC that is not there or has no active port.
    """
    named, without = _checked(devices, tree)
    if named:
        return Choice(named, "named", is_named=True)
    usable = [nic for nic in tree.nics if nic.port is not None and nic.name not in without]
    if not usable:
        excluded = f", {', '.join(sorted(without))} left out" if without else ""
        return Choice((), f"no RDMA device with an active port is here{excluded}")
    if (card := tree.gpu(gpu)) is None:
        return _by_turns(usable, rank, gpu, tree)
    nearest = _nearest(usable, card, tree)
    # Those that have the same choice, and so have to share it out.
    alike = [other for other in tree.gpus if _nearest(usable, other, tree) == nearest]
    nic = nearest[alike.index(card) % len(nearest)]
    link = tree.links[card.name, nic.name]
    others = f", one of {len(nearest)} as near and as fast" if len(nearest) > 1 else ""
    return Choice((nic,), f"{link.name} to {card.name}{others}")


def _nearest(nics: Sequence[Nic], gpu: Gpu, tree: Tree) -> list[Nic]:
    """Of a GPU: the fastest of the nearest."""
    return _best(nics, [(tree.links[gpu.name, nic.name], -(nic.rate or 0)) for nic in nics])


def _by_turns(nics: Sequence[Nic], rank: int, gpu: str | None, tree: Tree) -> Choice:
    """One for host memory. A NIC that no GPU is near is somebody else's, where others are not so."""
    far = [
        all(tree.links[one.name, nic.name] == Link.SYS for one in tree.gpus) if tree.gpus else False
        for nic in nics
    ]
    fastest = _best(nics, [(is_far, -(nic.rate or 0)) for is_far, nic in zip(far, nics, strict=True)])
    why = "the weights are on no GPU" if gpu is None else f"nobody says where {quote(gpu)} is"
    return Choice(
        (fastest[rank % len(fastest)],), f"{why}; rank {rank} of {plural(len(fastest), 'fast NIC')}"
    )


def _best(nics: Sequence[Nic], costs: Sequence[tuple[int, int]]) -> list[Nic]:
    least = min(costs)
    return [nic for nic, cost in zip(nics, costs, strict=True) if cost == least]


def _checked(devices: Sequence[str] | None, tree: Tree) -> tuple[tuple[Nic, ...], frozenset[str]]:
    """(NICs that were named, names to leave out)."""
    if not devices:
        return (), frozenset()
    if isinstance(devices, str) or not all(
        isinstance(name, str) and NAME.fullmatch(name.removeprefix("^")) for name in devices
    ):
        raise OptionError(f"devices is {devices!r}; expected {DEVICES_FORM}, in a list")
    without = frozenset(name[1:] for name in devices if name.startswith("^"))
    if without and len(without) < len(set(devices)):
        raise OptionError(
            f"devices is {list(devices)!r}, which has names and exclusions; expected {DEVICES_FORM}"
        )
    there = {nic.name: nic for nic in (*tree.interfaces, *tree.nics)}
    known = {nic.name for nic in tree.nics} if without else set(there)
    names = list(dict.fromkeys(without or devices))
    if missing := [name for name in names if name not in known]:
        raise OptionError(
            f"devices has {', '.join(map(quote, sorted(missing)))}, which this machine does not have; there "
            f"is {', '.join(sorted(known)) or 'none'}"
        )
    if without:
        return (), without
    for name in names:
        if there[name].port is None:
            raise OptionError(
                f"devices has {quote(name)}, which has no active port ({there[name].state}); name another, "
                "or bring it up"
            )
    return tuple(there[name] for name in names), without


def check_protocol(transports: Sequence[str], protocol: str) -> None:
    """Raises OptionError for what none of these transports can be told to move bytes by."""
    known = {kind: names for kind, names in _PROTOCOLS.items() if kind in transports}
    if protocol and not any(protocol in names for names in known.values()):
        expected = "; ".join(f"{', '.join(names)} ({kind})" for kind, names in known.items())
        raise OptionError(f"protocol is {quote(protocol)}; expected one of {expected}")


def chosen(
    devices: Sequence[str] | None,
    transports: Sequence[str],
    rank: int,
    gpu: str | None,
    protocol: str = "",
    environ: Mapping[str, str] | None = None,
) -> Choice:
    """The NICs of this process, for these transports: what its caller says, else MOONCAKE_DEVICE, else the
    nearest.

    protocol: what the caller wants bytes moved by; for Mooncake what the environment says where it is empty.
    None are taken over tcp, where no transport is told of any, and where Mooncake has a tree of its user's
    (MC_CUSTOM_TOPO_JSON), which goes before all that it is told. Raises OptionError.
    """
    environ = os.environ if environ is None else environ
    used = [name for name in ONE_SIDED if name in transports]
    if not used:
        for name, given, what in (("devices", devices, "NICs"), ("protocol", protocol, "one")):
            if given:
                raise OptionError(
                    f"{name} is {given!r}, but no transport here takes {what} ({', '.join(transports)}); "
                    f"name one that does ({', '.join(ONE_SIDED)}) in transports, or leave {name} out"
                )
        return Choice((), "no transport takes NICs")
    check_protocol(used, protocol)
    if "mooncake" in used and environ.get(_CUSTOM):
        if devices:
            raise OptionError(
                f"devices is {devices!r}, but {_CUSTOM} is set, and Mooncake takes what that file says and "
                "looks at no devices; leave one of both out"
            )
        return Choice((), f"{_CUSTOM} says which")
    if not devices:
        if used == ["mooncake"]:
            protocol = protocol_asked(protocol, environ)
        if protocol == "tcp":
            return Choice((), "over tcp none is chosen")
        if "mooncake" in used and (given := device_asked(environ)):
            try:
                found = choose([name.strip() for name in given.split(",")], rank, gpu, tree_here())
            except OptionError as error:
                raise OptionError(f"{DEVICE_VARIABLE} is {given!r}: {error}") from None
            return Choice(found.nics, f"{DEVICE_VARIABLE} says so")
    found = choose(devices, rank, gpu, tree_here())
    _log.info("%s: %s (%s)", " and ".join(used), ", ".join(found.names) or "no NIC", found.reason)
    return found


def custom_topology(devices: Sequence[str] | None, tree: Tree) -> str:
    """A file for MC_CUSTOM_TOPO_JSON: for each GPU the NIC that it takes, then the others that it may.

    GPUs are numbered as nvidia-smi does, which is how CUDA does with CUDA_DEVICE_ORDER=PCI_BUS_ID.
    """
    named, without = _checked(devices, tree)
    allowed = named or tuple(nic for nic in tree.nics if nic.port is not None and nic.name not in without)
    found = {}
    for number, gpu in enumerate(tree.gpus):
        first = choose(devices, number, gpu.name, tree).names
        found[f"cuda:{number}"] = [list(first), [nic.name for nic in allowed if nic.name not in first]]
    return json.dumps(found, indent=2)
