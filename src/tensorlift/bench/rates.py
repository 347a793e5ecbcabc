"""The rates that no loader on this machine can exceed: memory, page cache, storage, the device's link."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tensorlift.bench.ceilings import Ceilings
from tensorlift.engine.machine import usable_cpus
from tensorlift.engine.sizing import EngineSize
from tensorlift.errors import MachineError

__all__ = ["Rate", "ceiling_for", "measure"]

_SAMPLES = 3
_COPY_BYTES = 1 << 30


@dataclass(slots=True)
class Rate:
    """One ceiling."""

    name: str
    kind: str
    """``memory``, ``cache``, ``direct`` or ``link``."""
    threads: int = 0
    """Threads, and for direct reads so many reads in flight."""
    samples: list[float] = field(default_factory=list)
    """Bytes per second."""
    refused: str | None = None
    """Why there is no rate."""

    @property
    def rate(self) -> float:
        """The best sample: a ceiling is what was reached."""
        return max(self.samples, default=0.0)

    def record(self) -> dict[str, Any]:
        """Plain values for the file."""
        return {
            "name": self.name,
            "kind": self.kind,
            "threads": self.threads,
            "rate": self.rate,
            "median": statistics.median(self.samples) if self.samples else None,
            "samples": self.samples,
            "refused": self.refused,
        }


def measure(
    ceilings: Ceilings,
    files: Sequence[Path],
    size: EngineSize,
    link: Callable[[], float] | None,
    limit_bytes: int = 4 << 30,
) -> list[Rate]:
    """Measures memory copies, the page cache by threads, direct reads, and the link where there is one.

    Args:
        ceilings: the bare loops.
        files: what is read; left in the page cache.
        size: threads, depth and chunk of our own loads.
        link: measures bytes per second of a pinned copy to the device; None for a load to a CPU.
        limit_bytes: of the files; enough to tell the rate.
    """
    nbytes = min(limit_bytes, sum(file.stat().st_size for file in files))
    # Tensors on a CPU are fresh memory; a pinned ring is there already.
    memory = "fresh" if link is None else "prepared"

    def read(how: str, threads: int) -> Callable[[], float]:
        return lambda: (
            nbytes
            / ceilings.read_seconds(
                files,
                memory=memory,
                how=how,
                threads=threads,
                chunk_bytes=size.chunk_size,
                limit_bytes=limit_bytes,
            )
        )

    cpus = usable_cpus()
    found = [
        _sampled(
            Rate(f"memory copy, {_threads(cpus)}", "memory", cpus),
            lambda: _COPY_BYTES / ceilings.copy_seconds(cpus, _COPY_BYTES),
        )
    ]
    # Once without counting: what is not cached yet would be read from storage.
    read("buffered", cpus)()
    for threads in _steps(max(cpus, size.threads)):
        rate = Rate(f"page cache to {memory} memory, {_threads(threads)}", "cache", threads)
        found.append(_sampled(rate, read("buffered", threads)))
    found.append(
        _sampled(
            Rate(f"direct reads, {size.io_depth} in flight", "direct", size.io_depth),
            read("direct", size.io_depth),
        )
    )
    if link is not None:
        found.append(_sampled(Rate("pinned memory to the device", "link"), link))
    return found


def ceiling_for(rates: Sequence[Rate], cached: float) -> float:
    """Bytes per second that a load can reach when this share of its files is cached; 0 if unknown."""
    best = {kind: max((rate.rate for rate in rates if rate.kind == kind), default=0.0) for kind in _KINDS}
    if (cached > 0 and not best["cache"]) or (cached < 1 and not best["direct"]):
        return 0.0
    seconds = 0.0
    if cached > 0:
        seconds += cached / best["cache"]
    if cached < 1:
        seconds += (1 - cached) / best["direct"]
    return min(1 / seconds, best["link"] or float("inf"))


_KINDS = ("memory", "cache", "direct", "link")


def _threads(count: int) -> str:
    return f"{count} thread{'s' * (count != 1)}"


def _steps(most: int) -> list[int]:
    """1, 2, 4 and so on, and the most."""
    return sorted({1 << i for i in range(most.bit_length()) if 1 << i <= most} | {most})


def _sampled(rate: Rate, once: Callable[[], float]) -> Rate:
    try:
        for _ in range(_SAMPLES):
            rate.samples.append(once())
    except MachineError as error:
        rate.refused = str(error)
    return rate
