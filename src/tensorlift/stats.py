"""Frozen records of what a load did."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

__all__ = ["LoadStats", "human_bytes", "merged", "timed"]


def human_bytes(nbytes: float) -> str:
    """Bytes with a decimal unit: ``1.50 GB``."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(nbytes) < 1000 or unit == "TB":
            break
        nbytes /= 1000
    return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.2f} {unit}"


@dataclasses.dataclass(frozen=True, slots=True)
class LoadStats:
    """What a load did. Sizes are bytes, times seconds of the wall clock.

    ``seconds`` has the phases ``headers`` (finding files, reading headers), ``plan`` (selecting, laying out),
    ``allocate`` (arenas), ``submit`` (in load_into: handing pieces to the engine), ``read`` (waiting for
    bytes), ``hand_out`` (making tensors, copies into parameters), ``close`` and ``total``. Reading goes on
    behind all phases after the first ``allocate`` or ``submit``; ``total`` is the whole load, without the
    time in which a consumer held the iterator. With a process group there are ``agree`` (waiting for the
    other ranks, comparing what they have), ``make_group`` and ``destroy_group`` (a temporary one).
    """

    bytes: int = 0
    tensors: int = 0
    files: int = 0
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    readers: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Bytes delivered by each path that was taken: PREAD_BUFFERED, PREAD_DIRECT, URING_DIRECT, MMAP."""
    reads: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """System calls or ring entries by path."""
    direct_bytes: int = 0
    """Asked of storage by direct reads, block padding included."""
    bounced_bytes: int = 0
    """Of direct reads, moved once more by a CPU."""
    residency: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Files by the way in which the kernel told what is cached: cachestat, mincore, memory, unknown."""
    fallbacks: tuple[str, ...] = ()
    """What was refused and why; each text once, with the first file and how many more."""
    threads: int = 0
    pinned_peak_bytes: int = 0
    pinned_reused_bytes: int = 0
    """Of these, kept from a load before (see the setting keep_pinned)."""
    device_peak_bytes: int = 0
    """The most that arenas of this load held at once on the device (host arenas of a CPU load count too)."""
    arenas: int = 0
    copies: int = 0
    """Copies issued to the device."""
    slot_wait_seconds: float = 0.0
    """Summed over threads: no slot was free, so the device was the limit."""
    verified: int = 0
    """Tensors that were compared with their digests, and are right."""
    ranks: int = 1
    """Ranks that loaded together."""
    exchange: str = "none"
    """gather: ranks read a share each, and had the rest from each other."""
    exchange_reason: str = ""
    """Why ranks exchanged, or did not; for people."""
    prediction: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """What exchange="auto" rested on: its inputs, and the seconds that it expected of each way."""
    received_bytes: int = 0
    """Of arenas, from other ranks."""

    @property
    def rate(self) -> float:
        """Bytes per second over the whole load; 0 where no time was measured."""
        total = self.seconds.get("total", 0.0)
        return self.bytes / total if total > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        record: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            record[field.name] = dict(value) if isinstance(value, Mapping) else value
        record["fallbacks"] = list(self.fallbacks)
        record["rate"] = self.rate
        return record

    def summary(self) -> str:
        """A few lines for people: size and rate, seconds by phase, readers, fallbacks."""
        total = self.seconds.get("total", 0.0)
        lines = [
            f"{human_bytes(self.bytes)}, {_count(self.tensors, 'tensor')}, {_count(self.files, 'file')} "
            f"in {total:.3f} s: {human_bytes(self.rate)}/s"
        ]
        phases = [f"{name} {took:.3f}" for name, took in self.seconds.items() if name != "total"]
        if phases:
            lines.append(f"seconds: {', '.join(phases)}")
        readers = [f"{name} {human_bytes(nbytes)}" for name, nbytes in self.readers.items()]
        lines.append(f"read by: {', '.join(readers) or 'nothing'}; threads {self.threads}")
        if self.ranks > 1:
            why = f" ({self.exchange_reason})" if self.exchange_reason else ""
            received = human_bytes(self.received_bytes)
            lines.append(f"ranks: {self.ranks}, exchange {self.exchange}{why}, received {received}")
        kept = (
            f" ({self.pinned_reused_bytes / 2**20:.1f} MiB from before)" if self.pinned_reused_bytes else ""
        )
        lines.append(
            f"memory: pinned {self.pinned_peak_bytes / 2**20:.1f} MiB at most{kept}, "
            f"arenas {self.device_peak_bytes / 2**20:.1f} MiB at most"
        )
        lines += [f"fallback: {text}" for text in self.fallbacks]
        return "\n".join(lines)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def merged(parts: list[LoadStats], **changes: Any) -> LoadStats:
    """One record of several engines that worked for one load; ``changes`` replace fields of the sum."""
    total: dict[str, Any] = {}
    for field in dataclasses.fields(LoadStats):
        values = [getattr(part, field.name) for part in parts]
        if not values:
            continue
        if isinstance(values[0], Mapping):
            keys = dict.fromkeys(key for value in values for key in value)
            total[field.name] = {key: sum(value.get(key, 0) for value in values) for key in keys}
        elif isinstance(values[0], str):
            total[field.name] = values[0]
        elif isinstance(values[0], tuple):
            total[field.name] = tuple(dict.fromkeys(text for v in values for text in v))
        else:
            total[field.name] = max(values) if field.name == "ranks" else sum(values)
    return LoadStats(**(total | changes))


def timed(stats: LoadStats, total: float) -> LoadStats:
    """The same with the seconds of the whole."""
    return dataclasses.replace(stats, seconds={**stats.seconds, "total": total})
