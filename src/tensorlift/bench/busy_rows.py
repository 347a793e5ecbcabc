"""Rows beside a Python thread that never rests: whatever gives the GIL away waits up to 5 ms to get it back.

load() and load_into() are compared with themselves without that thread. Streaming hands tensors over one by
one, so some of its time is that of the consumer's loop: iterating and dropping. What it is compared with is
therefore the time of a load() without that thread and of the same loop over tensors that are there already
(the dict of a load(), popped and dropped one by one) beside it.
"""

from __future__ import annotations

from typing import Any

from tensorlift.bench.device_bench import DeviceBench
from tensorlift.bench.device_rows import loading
from tensorlift.bench.report import Row, Series
from tensorlift.bench.samples import Contender, busy_thread

__all__ = ["busy_rows"]


def _consume(state: dict[str, Any]) -> None:
    """The loop of a consumer that keeps nothing."""
    for name in list(state):
        tensor = state.pop(name)
        del tensor


def busy_rows(bench: DeviceBench) -> list[Row]:
    """All of them, in turn."""
    from tensorlift.loading import load, load_into
    from tensorlift.loading import open as open_weights

    case, device = bench.cases.get("large"), bench.device
    parameters: dict[str, Any] = dict(load(case.folder, device))
    ready: dict[str, Any] = {}

    def stream() -> None:
        with open_weights(case.folder, device) as weights:
            for _, tensor in weights:
                del tensor

    def prepare() -> dict[str, Any]:
        ready.update(load(case.folder, device))
        return {}

    def series(name: str) -> Series:
        return Series(name, case.nbytes)

    quiet = loading(bench, case, "load")
    busy = loading(bench, case, "load, busy")
    busy.beside = busy_thread
    into = Contender(series("load_into"), lambda: load_into(parameters, case.folder))
    into_busy = Contender(
        series("load_into, busy"), lambda: load_into(parameters, case.folder), beside=busy_thread
    )
    streamed = Contender(series("open and drop, busy"), stream, beside=busy_thread)
    # Slow, and not ours: a few samples do.
    loop = Contender(
        series("loop over ready tensors, busy"), lambda: _consume(ready), prepare, busy_thread, rival=True
    )
    bench.sampler.take_turns(quiet, busy, into, into_busy, streamed, loop)
    apart = quiet.series.median + loop.series.median
    return [
        _share("load, busy thread", quiet, busy),
        _share("load_into, busy thread", into, into_busy),
        Row(
            "open, busy thread",
            f"time, of load without it plus the loop with it: {apart:.3f} s",
            streamed.series.median / apart,
            1.0,
            False,
            [streamed.series, quiet.series, loop.series],
        ),
    ]


def _share(name: str, without: Contender, beside: Contender) -> Row:
    ratio = without.series.median / beside.series.median
    return Row(name, "rate, of the same without it", ratio, 0.85, True, [without.series, beside.series])
