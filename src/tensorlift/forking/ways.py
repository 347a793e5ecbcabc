"""By which transports, over which NICs and how fast a seed is read: what its two sides are told alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tensorlift.errors import OptionError
from tensorlift.forking.fabrics import Wiring
from tensorlift.forking.keys import checked_texts
from tensorlift.forking.network_rate import link_rate
from tensorlift.forking.nics import DEVICES_FORM, chosen
from tensorlift.forking.throttle import parse_limit
from tensorlift.forking.transports import check_transports
from tensorlift.format.quoting import shown

__all__ = ["Ways", "ways_of"]


class Ways(NamedTuple):
    """What is wanted, checked."""

    kinds: tuple[str, ...]
    """Transports, the best first."""
    wiring: Wiring
    rate: int | None
    """Bytes a second at most; None for any number."""


def ways_of(
    transports: Sequence[str],
    devices: Sequence[str] | None = None,
    protocol: str = "",
    limit: str | None = None,
    *,
    rank: int = 0,
    gpu: str | None = None,
    host: str | None = None,
) -> Ways:
    """See chosen(). host: where a seed listens: a share of no NICs is one of that network; None for a fork.

    Raises OptionError.
    """
    kinds = check_transports(transports)
    devices = None if devices is None else checked_texts(devices, "devices", DEVICES_FORM)
    if not isinstance(protocol, str):
        raise OptionError(f'protocol is {shown(protocol)}; expected the name of one, such as "rdma"')
    nics = chosen(devices, kinds, rank, gpu, protocol)
    if host is None:
        rate = parse_limit(limit, "limit", lambda: nics.rate, f"a fork's share is of its NICs: {nics.reason}")
    else:
        rate = parse_limit(limit, "limit", lambda: nics.rate or link_rate(host))
    return Ways(kinds, nics.wiring(protocol), rate)
