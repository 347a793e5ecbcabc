"""What an engine did, taken from its counters before it is closed."""

from __future__ import annotations

import logging

from tensorlift.engine.abi import PATH_NAMES
from tensorlift.engine.engine import Engine
from tensorlift.format.quoting import clean, plural
from tensorlift.stats import LoadStats

__all__ = ["report_of"]

_log = logging.getLogger("tensorlift")
_logged: set[str] = set()


def report_of(engine: Engine, *, log: bool = False) -> LoadStats:
    """The counters now, as far as the engine knows of its load; ``bytes``: delivered, by all paths.

    ``log``: fallbacks go to the log, each reason once a process, with its first file.
    """
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
    readers = {PATH_NAMES[at]: int(stats.bytes_by_path[at]) for at in used}
    return LoadStats(
        bytes=sum(readers.values()),
        readers=readers,
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
