"""What several ranks that load one checkpoint will take: bytes, memory and seconds of each way, on paper.

The ways
    all     each rank reads every tensor itself (``exchange="none"``)
    slices  each rank reads only what it keeps, with no exchange (``names=``, ``slices=``)
    gather  each rank reads 1/W of every arena, and an all-gather completes it on all (``exchange="gather"``)

The model
    Bytes pass through stages: storage or the host's page cache, the link to the device, and for a gather the
    ranks' own connection, between hosts also the network. All stages work at once, on different arenas, so
    the slowest sets the pace and the others cost nothing but the time that one arena takes through them:

        storage  | 1 | 2 | 3 | 4 | 5 |                  seconds = fixed costs + the slowest stage + the rest
        link         |1|  |2|  |3|  |4|  |5|                      of the first arena's way
        peer           |1|  |2|  |3|  |4|  |5|

    Cached and uncached bytes follow each other in long stretches, and what is read ahead is small beside
    those: storage rests while the cache is read. So the two are predicted one after the other and added,
    which is what half cached loads did (within 2 %, one H200).

Rates are bytes a second of the hardware. What software loses on the way (one thread that reads, a copy too
many, Python for each tensor) is not in it: docs/prediction.md compares it with figures of several loaders.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from tensorlift.errors import OptionError

__all__ = ["DEFAULT_RATES", "Costs", "Prediction", "Rates", "Work", "best", "predict"]

MIB, GIB = 1 << 20, 1 << 30


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes per second; None: not known, then that of DEFAULT_RATES is taken. ``math.inf``: no limit."""

    storage: float | None = None
    """Out of storage, for all ranks of all hosts together."""
    host: float | None = None
    """Out of the page cache of one host into pinned memory, for its ranks together."""
    link: float | None = None
    """From the host to one device."""
    peer: float | None = None
    """What one rank of an all-gather receives (the result's bytes times (W - 1) / W, over the time)."""
    network: float | None = None
    """Into a host from others, for each rank on it: a host of eight ranks receives eight times as much."""

    def __post_init__(self) -> None:
        for name, rate in self.given().items():
            if not rate > 0:
                raise OptionError(f"{name} is {rate!r}; expected a rate above 0, in bytes per second")

    def given(self) -> dict[str, float]:
        """Those that are known, by name."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: rate for name, rate in fields.items() if rate is not None}

    def assumed(self) -> dict[str, float]:
        """Those that are not known, with what is taken for them."""
        return {name: rate for name, rate in DEFAULT_RATES.items() if getattr(self, name) is None}

    def taken(self) -> dict[str, float]:
        """All, by name, in the order of DEFAULT_RATES."""
        return {**DEFAULT_RATES, **self.given()}


DEFAULT_RATES: Mapping[str, float] = {
    # The storage of the public figures, a fast one: where it is slower, reading by all loses by more, so a
    # gather that is chosen with this is right there too.
    "storage": 50e9,
    # Two H200 of one host read 55 to 70 GB/s in all, one process or two; eight ranks of a public figure 57.
    "host": 60e9,
    # PCIe 5 x16, pinned copies of 16 MiB: 54.8 to 55.5 GB/s on every H200 machine measured.
    "link": 55e9,
    # Two H200 with NV18: 8, 64 and 256 MiB were gathered at 128, 438 and 537 GB/s of the result, half of it
    # received; 300 GB/s and the cost of issuing one fit all three.
    "peer": 300e9,
    # An adapter of 400 Gb/s for each GPU, as such hosts usually have: by its name, never measured here.
    "network": 50e9,
}
"""What is taken for a rate that is not known; the comments say where each comes from."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Fixed costs in seconds, measured on H200 hosts."""

    start: float = 0.03
    """Headers, the ring, the last tensors: what loads of 9 to 61 GB took beyond the time of the link."""
    make_communicator: float = 0.19
    """A second group in a process that has one; public figure 0.5, the first of a process 1.4."""
    destroy_communicator: float = 0.37
    """Public figure 0.5."""
    gather: float = 40e-6
    """Issuing one all-gather: 37 to 45 us."""


@dataclass(frozen=True, slots=True)
class Work:
    """What is loaded by whom. Sizes are bytes."""

    nbytes: int
    """What the ranks want together, each byte once."""
    ranks: int = 1
    ranks_per_host: int | None = None
    """None: all are on one host."""
    own: int | None = None
    """What one rank keeps; None: everything."""
    own_read: int | None = None
    """What one rank reads to get just that, gaps below a page included; None: it cannot."""
    cached: float = 0.0
    """Share of the bytes that is in the page cache, on every host alike."""
    arena: int = 258 * MIB
    ahead: int = 1 * GIB
    """Arenas ahead of the consumer: ``buffer_size``."""
    group: int | None = None
    """Ranks that gather together, each group for itself; None: all."""

    def __post_init__(self) -> None:
        for name in ("ranks", "ranks_per_host", "group", "arena", "ahead"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise OptionError(f"{name} is {value!r}; expected 1 or more")
        if not 0 <= self.cached <= 1:
            raise OptionError(f"cached is {self.cached!r}; expected a share from 0 to 1")
        for name in ("nbytes", "own", "own_read"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= self.nbytes:
                raise OptionError(f"{name} is {value!r}; expected 0 to nbytes, {self.nbytes!r}")


@dataclass(frozen=True, slots=True)
class Prediction:
    """One way of loading. Sizes are bytes; times seconds."""

    way: str
    """all, slices or gather."""
    read: int
    """What a rank reads, from storage or cache."""
    received: int
    """What a rank receives from others."""
    held: int
    """The most a rank's device holds: what it keeps, and where that is only a part of what arrives, or
    parts of tensors, the arenas ahead of the consumer that copies it out."""
    from_storage: int
    """What all ranks together ask of storage."""
    stages: Mapping[str, float]
    """Seconds that each stage is busy: storage, host, link, peer, network."""
    fixed: Mapping[str, float]
    """Seconds of start, communicator and the first arena's way."""
    seconds: float
    limit: str
    """The term that takes most: the stage that sets the pace for longest, or one of ``fixed``."""


@dataclass(frozen=True, slots=True)
class _Way:
    """What a way moves, before rates: bytes."""

    name: str
    read: int
    received: int = 0
    into_host: float = 0.0
    """Received by a host from others."""
    gathers: bool = False


def predict(work: Work, rates: Rates | None = None, costs: Costs | None = None) -> dict[str, Prediction]:
    """Predictions by way: "all", "slices" (where ``own_read`` is given) and "gather", in this order."""
    rates, costs = rates or Rates(), costs or Costs()
    ways = [_Way("all", work.nbytes)]
    if work.own_read is not None:
        ways.append(_Way("slices", work.own_read))
    ways.append(_gather(work))
    return {way.name: _predicted(way, work, rates, costs) for way in ways}


def best(predictions: Mapping[str, Prediction]) -> Prediction:
    """The one of the fewest seconds; of equal ones the one that needs the others least."""
    return min(predictions.values(), key=lambda one: one.seconds)


def _gather(work: Work) -> _Way:
    group = _ranks_in_group(work)
    share = -(-work.nbytes // group)
    # Rings enter a host once for each group on it, and bring what its members do not have.
    on_host = _ranks_on_host(work)
    members = min(group, on_host)
    into_host = work.nbytes * (1 - members / group) * (on_host / members)
    return _Way("gather", share, work.nbytes - share, into_host, gathers=group > 1)


def _ranks_in_group(work: Work) -> int:
    return min(work.group or work.ranks, work.ranks)


def _ranks_on_host(work: Work) -> int:
    return min(work.ranks_per_host or work.ranks, work.ranks)


def _predicted(way: _Way, work: Work, rates: Rates, costs: Costs) -> Prediction:
    landed = way.read + way.received
    arenas = max(1, -(-landed // work.arena))
    from_storage = _from_storage(way, work)
    uncached, cached = 1 - work.cached, work.cached
    rate = rates.taken()
    # Of the whole load: what each stage would take if all bytes came one way.
    on_host = _ranks_on_host(work)
    stages = {
        "storage": from_storage / rate["storage"],
        "host": on_host * way.read * cached / rate["host"],
        "link": way.read / rate["link"],
        "peer": way.received / rate["peer"] + arenas * costs.gather * way.gathers,
        "network": way.into_host / (on_host * rate["network"]),
    }
    pace: dict[str, float] = {}
    for source, share in (("storage", uncached), ("host", cached)):
        parts = {name: stages[name] * share for name in ("link", "peer", "network")}
        slowest = max({source: stages[source], **parts}.items(), key=lambda item: item[1])
        pace[slowest[0]] = pace.get(slowest[0], 0.0) + slowest[1]
    fixed = {
        "start": costs.start,
        "communicator": (costs.make_communicator + costs.destroy_communicator) * way.gathers,
        "first arena": (sum(stages.values()) - sum(pace.values())) / arenas,
    }
    terms = {**pace, **fixed}
    limit = max(terms, key=lambda name: terms[name])
    held = _held(work, landed)
    seconds = sum(terms.values())
    return Prediction(way.name, way.read, way.received, held, from_storage, stages, fixed, seconds, limit)


def _from_storage(way: _Way, work: Work) -> int:
    if way.name == "gather":
        read_by_all = -(-work.ranks // _ranks_in_group(work)) * work.nbytes
    else:
        read_by_all = work.ranks * way.read
    return round(read_by_all * (1 - work.cached))


def _held(work: Work, landed: int) -> int:
    own = work.nbytes if work.own is None else work.own
    # Whole tensors that are all kept stay where they landed; of others the consumer copies its part out.
    return own if own >= landed else own + min(max(work.ahead, work.arena), landed)
