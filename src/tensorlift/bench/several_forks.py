"""Rows of the table of several devices: a rank that dies, and weights that leave a rank that decodes."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tensorlift.bench import member_forks, member_links
from tensorlift.bench.crew import Crew, Outcome
from tensorlift.bench.report import Row, Series
from tensorlift.bench.samples import say
from tensorlift.bench.several_bench import SeveralBench
from tensorlift.distributed.ranks import PEER_TIMEOUT
from tensorlift.errors import MachineError, MismatchError
from tensorlift.options import LoadOptions

__all__ = ["DEATHS", "Decoding", "death_rows", "fork_rows"]

MIB = 1 << 20

# The automatic arena; where that would be one for everything, a smaller one.
_ARENA = 256 << 20
_WITHIN = 1.02


DEATHS = {"a group for the load": "world", "the caller's group": "own"}
"""Through which group a rank that dies was gathering."""


def death_rows(bench: SeveralBench, ranks: int, name: str) -> list[Row]:
    """The last rank is killed in the middle of a gather: when the others end, and that they say why."""
    if ranks == 1:
        bench.drop("a rank that is killed: there is no other")
        return []
    survivors = _death(bench, ranks, DEATHS[name])
    bench.notes[f"death, {name}, {ranks} ranks"] = survivors
    slowest = max(one["seconds"] for one in survivors)
    what = f"seconds until the last of {len(survivors)} raised PeerError: {survivors[0]['message'][:90]}"
    limit = LoadOptions.resolve().peer_timeout or PEER_TIMEOUT
    rows = [Row(f"a rank killed, {name}, {ranks} ranks", what, slowest, limit, False, [])]
    left = [one["device_left"] for one in survivors if one["device_left"] is not None]
    if left:
        what = "MiB of device memory that are gone afterwards, on the worst rank"
        rows.append(Row(f"a rank killed, {name}, {ranks} ranks", what, max(left) / MIB, None, False, []))
    return rows


def _death(bench: SeveralBench, ranks: int, group: str) -> list[dict[str, Any]]:
    case = bench.case("memory")
    crew, victim = bench.crew(ranks), ranks - 1
    arena = case.nbytes // 16
    options = {} if arena > _ARENA else {"arena_size": arena, "buffer_size": 2 * arena}
    for rank in range(ranks):
        crew.send(
            rank,
            member_links.load_until_death,
            files=[str(file) for file in case.files],
            group=group,
            victim=victim,
            at_tensor=case.tensors // 2,
            options=options,
        )
    *survivors, dead = crew.receive(range(ranks), bench.patience(60))
    # Their group is broken, and they lack one.
    bench.dismiss()
    if not dead.told or "SIGKILL" not in dead.error:
        raise MachineError(f"rank {victim} was to kill itself: {dead.error or 'it went on'}")
    killed_at = dead.told[0]["at"]
    for rank, one in enumerate(survivors):
        if not one.told:
            raise MachineError(f"rank {victim} was killed, and rank {rank}: {one.error}")
    return [
        {
            "seconds": one.told[0]["at"] - killed_at,
            "message": one.told[0]["message"],
            "device_left": one.value,
            "error_afterwards": one.error,
        }
        for one in survivors
    ]


@dataclass(slots=True)
class Decoding:
    """How long, and what of, the model that decodes."""

    layers: int
    hidden: int | None
    """None: 4096."""
    tokens: int
    """Of a round."""
    rounds: int
    limit: str
    """Of one of the ways, such as 2GB/s."""


@dataclass(slots=True)
class _Way:
    """What goes on while the first rank decodes."""

    name: str
    tokens: list[list[float]] = field(default_factory=list)
    """Seconds of each, by round."""
    copies: list[list[float]] = field(default_factory=list)
    """Seconds of each copy of all weights, by round."""

    def percentile(self, share: float) -> float:
        return float(np.percentile([one for seconds in self.tokens for one in seconds], share))

    @property
    def count(self) -> int:
        return sum(map(len, self.copies))

    def lost(self, without: _Way) -> float:
        """Seconds that decoding came later by, for each copy of all weights."""
        total = sum(map(sum, self.tokens)) / len(self.tokens) - sum(map(sum, without.tokens)) / len(
            without.tokens
        )
        return total * len(self.tokens) / max(1, self.count)


def fork_rows(bench: SeveralBench, decoding: Decoding) -> list[Row]:
    """Forks of the first device's weights to the second while the first decodes, in turn with broadcasts."""
    # With one device both are on it; of that NCCL makes no group.
    devices = [bench.devices[0], bench.devices[1 % len(bench.devices)]]
    crew = bench.crew(2, devices)
    offered = _offered(bench, crew, decoding)
    ways = _ways(bench, crew, offered)
    found = {name: _Way(name) for name in ways}
    for number in range(decoding.rounds):
        begin = time.monotonic()
        for name, way in ways.items():
            _round(bench, crew, found[name], way)
        took = time.monotonic() - begin
        if number + 1 < decoding.rounds and 1.2 * took > bench.left():
            bench.drop(f"forks beside decoding: {number + 1} of {decoding.rounds} rounds")
            break
    bench.notes["forks"] = {
        "bytes": offered["bytes"],
        "devices": devices,
        "transports": offered["transports"],
        "tokens": {way.name: way.tokens for way in found.values()},
        "copies": {way.name: way.copies for way in found.values()},
    }
    crew.ask(member_forks.forget, bench.patience())
    return _rows(list(found.values()), offered["bytes"], decoding.limit)


def _offered(bench: SeveralBench, crew: Crew, decoding: Decoding) -> dict[str, Any]:
    crew.send(
        0,
        member_forks.offer,
        layers=decoding.layers,
        hidden=decoding.hidden,
        tokens=decoding.tokens,
        limit=decoding.limit,
    )
    offered: dict[str, Any] = _value(crew, 0, bench.patience())
    crew.send(1, member_forks.take, url=offered["url"], options=_SHM)
    offered["transports"] = _value(crew, 1, bench.patience())
    say(f"a fork of {offered['bytes'] / 1e9:.2f} GB: {offered['transports']}")
    theirs, ours = crew.ask(member_forks.hashes, bench.patience())
    wrong = [name for name in theirs if theirs[name] != ours.get(name)]
    if wrong or len(ours) != len(theirs):
        raise MismatchError(f"{len(wrong)} of {len(theirs)} tensors have other bytes in the fork")
    return offered


_SHM: dict[str, Any] = {"transports": ["shm"], "connections": 4}


def _ways(bench: SeveralBench, crew: Crew, offered: dict[str, Any]) -> dict[str, Any]:
    """Orders to both ranks by the name of a way."""
    url, limited = offered["url"], offered["limited"]
    decode = member_forks.decode
    ways: dict[str, Any] = {
        "without": (decode, None, {}),
        "fork": (decode, member_forks.forks, {"url": url, "options": _SHM}),
        "fork, no digests": (decode, member_forks.forks, {"url": url, "options": {**_SHM, "digests": "off"}}),
        "fork, limited": (decode, member_forks.forks, {"url": limited, "options": _SHM}),
    }
    if bench.is_cuda and crew.backend == "gloo":
        bench.drop("broadcasts beside decoding: NCCL makes no group of two ranks on one device")
    else:
        ways["broadcast"] = (member_forks.decode_and_broadcast, member_forks.broadcasts, {})
    return ways


def _round(bench: SeveralBench, crew: Crew, way: _Way, orders: Any) -> None:
    here, there, about = orders
    if there is not None:
        crew.send(1, there, **about)
        # The first bytes of a fork are under way when the first token is.
        time.sleep(0.05)
    crew.send(0, here)
    found = _value(crew, 0, bench.patience())
    way.tokens.append(found["token_seconds"])
    if there is not None:
        crew.stop(1)
        way.copies.append(_value(crew, 1, bench.patience()))
    if found["other_from"] is not None:
        say(f"{way.name}: other tokens from number {found['other_from']} on")
    copies = len(way.copies[-1]) if way.copies else 0
    say(f"{way.name}: {np.median(found['token_seconds']) * 1e3:.3f} ms a token, {copies} copies")


def _value(crew: Crew, rank: int, seconds: float) -> Any:
    outcome: Outcome = crew.receive([rank], seconds)[0]
    if outcome.error:
        crew.close()
        raise MachineError(f"rank {rank}: {outcome.error}")
    return outcome.value


def _rows(found: list[_Way], nbytes: int, limit: str) -> list[Row]:
    without, *others = found
    rows = []
    for way in others:
        copies = Series(way.name, nbytes, [one for some in way.copies for one in some], warm_up=0)
        bar = _WITHIN if way.name == "fork, limited" else None
        under = f" at {limit}" if bar else ""
        for name, share in (("median", 50.0), ("99th percentile", 99.0)):
            ratio = way.percentile(share) / without.percentile(share)
            what = f"time with {way.name}{under}, of without: {without.percentile(share) * 1e3:.3f} ms"
            rows.append(Row(f"a token, {name}, {way.name}", what, ratio, bar, False, [copies]))
        what = f"milliseconds that each of {way.count} copies of {nbytes / 1e9:.2f} GB held decoding up"
        rows.append(Row(f"decoding, {way.name}", what, way.lost(without) * 1e3, None, False, []))
    return rows
