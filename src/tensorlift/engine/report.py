"""What an engine did, taken from its counters before it is closed."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from tensorlift.engine.abi import PATH_NAMES
from tensorlift.engine.engine import Engine
from tensorlift.format.quoting import clean, plural
from tensorlift.stats import LoadStats

__all__ = ["EngineReport", "report_of"]

_log = logging.getLogger("tensorlift")
_logged: set[str] = set()


@dataclass(frozen=True, slots=True)
class EngineReport:
    """Counters of one engine, as plain values; sizes are bytes."""

    readers: Mapping[str, int] = field(default_factory=dict)
    reads: Mapping[str, int] = field(default_factory=dict)
    residency: Mapping[str, int] = field(default_factory=dict)
    fallbacks: tuple[str, ...] = ()
    direct_bytes: int = 0
    bounced_bytes: int = 0
    copies: int = 0
    pinned_peak_bytes: int = 0
    pinned_reused_bytes: int = 0
    threads: int = 0
    slot_wait_seconds: float = 0.0

    @property
    def nbytes(self) -> int:
        """Bytes delivered by all paths."""
        return sum(self.readers.values())

    def stats(
        self,
        *,
        nbytes: int,
        tensors: int,
        files: int,
        arenas: int,
        device_peak_bytes: int,
        seconds: Mapping[str, float],
        verified: int = 0,
    ) -> LoadStats:
        """The record of a load, with what the engine does not know."""
        return LoadStats(
            bytes=nbytes,
            tensors=tensors,
            files=files,
            seconds=seconds,
            readers=self.readers,
            reads=self.reads,
            direct_bytes=self.direct_bytes,
            bounced_bytes=self.bounced_bytes,
            residency=self.residency,
            fallbacks=self.fallbacks,
            threads=self.threads,
            pinned_peak_bytes=self.pinned_peak_bytes,
            pinned_reused_bytes=self.pinned_reused_bytes,
            device_peak_bytes=device_peak_bytes,
            arenas=arenas,
            copies=self.copies,
            slot_wait_seconds=self.slot_wait_seconds,
            verified=verified,
        )


def report_of(engine: Engine, *, log: bool = False) -> EngineReport:
    """The counters now. ``log``: fallbacks go to the log, each reason once a process, with its first file."""
    stats = engine.stats()
    used = [at for at in range(len(PATH_NAMES)) if stats.reads_by_path[at] or stats.bytes_by_path[at]]
    residency: dict[str, int] = {}
    refused: dict[str, list[str]] = {}
    for index, shard in enumerate(engine.shards):
        info = engine.file_info(index)
        way = bytes(info.residency).decode("utf-8", "replace")
        if way:
            residency[way] = residency.get(way, 0) + 1
        for line in bytes(info.fallback).decode("utf-8", "replace").splitlines():
            refused.setdefault(line, []).append(shard.path)
    texts = [line for line in bytes(stats.notes).decode("utf-8", "replace").splitlines() if line]
    reasons = [*texts, *refused]
    for line, paths in refused.items():
        more = f" and {plural(len(paths) - 1, 'more file')}" if len(paths) > 1 else ""
        texts.append(f"{line} ({clean(paths[0])}{more})")
    if log:
        for reason, text in zip(reasons, texts, strict=True):
            # Once: who asks for tensors one by one would have a line for each.
            if reason not in _logged:
                _logged.add(reason)
                _log.warning("%s", text)
    return EngineReport(
        readers={PATH_NAMES[at]: int(stats.bytes_by_path[at]) for at in used},
        reads={PATH_NAMES[at]: int(stats.reads_by_path[at]) for at in used},
        residency=residency,
        fallbacks=tuple(texts),
        direct_bytes=int(stats.direct_bytes_read),
        bounced_bytes=int(stats.bounced_bytes),
        copies=int(stats.copies),
        pinned_peak_bytes=int(stats.pinned_peak_bytes),
        pinned_reused_bytes=int(stats.pinned_reused_bytes),
        threads=int(stats.threads),
        slot_wait_seconds=stats.slot_wait_ns / 1e9,
    )
