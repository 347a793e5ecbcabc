"""Timed work on a device: settled before each sample, and in turn with what it is compared with."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from tensorlift.bench.report import Series

__all__ = ["Contender", "Link", "Sampler", "busy_thread", "pair_ratios", "say"]

# Device memory that was just given back to the driver is cleared in the background, and copies run at half
# the rate meanwhile: for 55 ms after 16 GB and for 80 ms after 26 GB (one H200). A load in a new process does
# not meet that, nor may one here meet it for the load before it.
SETTLE_SECONDS = 0.5
# What takes so long that its noise is small against it, and a run of many samples would take minutes.
SLOW_SECONDS = 5.0
SLOW_SAMPLES = 3
_COPY_BYTES = 64 << 20


def say(text: str) -> None:
    """Progress, on stderr."""
    print(text, file=sys.stderr, flush=True)


@dataclass(slots=True)
class Contender:
    """Something to time again and again."""

    series: Series
    work: Callable[[], object]
    before: Callable[[], dict[str, Any]] | None = None
    """Called before the device settles, outside the time; what it gives, or fills in until the sample ends,
    is noted with the sample."""
    beside: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
    """What goes on while it is timed."""
    tells: bool = False
    """``work`` gives the seconds, as the bare loops do, which have a clock of their own."""
    rival: bool = False
    """Not ours, another loader above all: its failure is noted and ends it alone, and it runs fewer times if
    it is slow."""
    failed: str = ""

    @property
    def ok(self) -> bool:
        """It has samples that count."""
        return not self.failed and len(self.series.seconds) > self.series.warm_up

    @property
    def is_done(self) -> bool:
        """It has failed, or is slow and has run often enough."""
        seconds = self.series.seconds
        slow = self.rival and len(seconds) > SLOW_SAMPLES and min(seconds) > SLOW_SECONDS
        return slow or bool(self.failed)


@dataclass(slots=True)
class Link:
    """The rate of the device's link around some samples: the higher of the two counts."""

    before: float
    after: float = field(default=0.0)

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return max(self.before, self.after)


class Sampler:
    """Times contenders on one device. On "cpu" there is nothing to settle: that is for trying a script."""

    def __init__(self, device: str, runs: int, settle_seconds: float = SETTLE_SECONDS) -> None:
        """``runs``: samples that count, of each; one more comes first."""
        self.device, self.runs, self.settle_seconds = device, runs, settle_seconds
        self.is_cuda = device != "cpu"

    def synchronize(self) -> None:
        """Waits for the device."""
        if self.is_cuda:
            import torch

            torch.cuda.synchronize(self.device)

    def settle(self, seconds: float | None = None) -> None:
        """Gives unused memory back and waits until the driver has cleared it."""
        gc.collect()
        if self.is_cuda:
            import torch

            torch.cuda.empty_cache()
            self.synchronize()
            time.sleep(self.settle_seconds if seconds is None else seconds)

    def take_turns(
        self, *contenders: Contender, runs: int | None = None, settle: float | None = None
    ) -> None:
        """Samples all in turn, so that what drifts on the machine meets all of them."""
        for _ in range((self.runs if runs is None else runs) + 1):
            for contender in contenders:
                if contender.is_done:
                    continue
                try:
                    self.once(contender, settle)
                except Exception as error:
                    if not contender.rival:
                        raise
                    # The text alone: the error's frames hold what was loaded.
                    contender.failed = f"{type(error).__name__}: {error}"
                    say(f"{contender.series.name}: {contender.failed}")

    def once(self, contender: Contender, settle: float | None = None) -> None:
        """One sample; its tensors are gone afterwards."""
        notes = contender.before() if contender.before is not None else {}
        self.settle(settle)
        with contender.beside():
            start = time.perf_counter()
            result: Any = contender.work()
            self.synchronize()
            seconds = time.perf_counter() - start
        if contender.tells:
            seconds = float(result)
        stats: Any = getattr(result, "stats", None)
        contender.series.seconds.append(seconds)
        contender.series.notes.append(notes | (stats.to_dict() if stats is not None else {}))
        say(f"{contender.series.name}: {contender.series.seconds[-1]:.4f} s")

    def link_rate(self) -> float:
        """Bytes per second of a pinned copy to the device; on a CPU, of a copy in memory."""
        self.settle()
        if self.is_cuda:
            from tensorlift.bench.pinned import pinned_copy_rate

            return pinned_copy_rate(self.device)
        import torch

        source, target = (torch.ones(_COPY_BYTES, dtype=torch.uint8) for _ in range(2))
        start = time.perf_counter()
        target.copy_(source)
        return _COPY_BYTES / (time.perf_counter() - start)

    @contextlib.contextmanager
    def link(self) -> Iterator[Link]:
        """Measures the link before and after what is done inside."""
        link = Link(self.link_rate())
        yield link
        link.after = self.link_rate()
        say(f"link: {link.before / 1e9:.2f} GB/s before, {link.after / 1e9:.2f} GB/s after")


def pair_ratios(ours: Series, theirs: Series) -> list[float]:
    """How many times as fast ours was, in each pair that counts."""
    pairs = list(zip(ours.seconds, theirs.seconds, strict=False))[max(ours.warm_up, theirs.warm_up) :]
    return [their / our for our, their in pairs]


@contextlib.contextmanager
def busy_thread() -> Iterator[None]:
    """A Python thread that never rests: whoever gives the GIL away waits up to 5 ms to get it back."""
    stop: list[None] = []

    def spin() -> None:
        while not stop:
            pass

    thread = threading.Thread(target=spin, name="busy", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.append(None)
        thread.join()
