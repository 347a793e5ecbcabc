"""What happened when, by thread: the phases of Python and the stages of the engine, as a file for Perfetto.

The file is in the Trace Event format, which ui.perfetto.dev and chrome://tracing open: complete events ("X")
with times in microseconds from the load's begin, and metadata events ("M") that name the tracks. Events of
one track must not overlap unless one holds the other, so what a thread has in flight at once is spread over
as many tracks as it needs.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from tensorlift.engine.abi import PATH_NAMES
from tensorlift.engine.engine import Engine
from tensorlift.engine.events import STAGE_NAMES
from tensorlift.errors import MachineError
from tensorlift.format.quoting import clean
from tensorlift.outputs import Kind, check_output, write_output

__all__ = ["MOST_EVENTS", "Span", "Trace", "traced", "tracks"]

MOST_EVENTS = 1 << 20
"""What an engine keeps (tl_engine_trace)."""

# Linux gives out no higher thread id (PID_MAX_LIMIT, see proc(5)), so these are free for tracks without one.
_FIRST_FREE_TRACK = 1 << 22
_READ, _COPY = STAGE_NAMES.index("READ"), STAGE_NAMES.index("COPY")
_BLOCK = 1 << 14
_BEGIN = b'{"displayTimeUnit":"ms","otherData":'
_TRACE = Kind("a trace", _BEGIN, b'"program":"tensorlift"')

_log = logging.getLogger("tensorlift")


@dataclass(frozen=True, slots=True)
class Span:
    """One event: nanoseconds of CLOCK_MONOTONIC, the kernel's id of its thread, and what it was about."""

    name: str
    begin_ns: int
    end_ns: int
    thread: int
    args: Mapping[str, Any] = field(default_factory=dict)


class Trace:
    """Collects the events of one load; a context manager, whose end writes them, after an error too.

    For several threads. An instance is made only where a trace is wanted.
    """

    def __init__(self, path: str) -> None:
        """``{pid}`` in the path becomes the id of this process. Raises OptionError and MachineError where no
        trace can be written; a file is only replaced if it is a trace, so never one that is loaded.
        """
        self.path = path.replace("{pid}", str(os.getpid()))
        check_output(self.path, _TRACE, "trace")
        self._spans: list[Span] = []
        self._threads: dict[int, str] = {}
        self._engines: list[tuple[npt.NDArray[Any], list[str]]] = []
        self._begin = time.perf_counter_ns()

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: object) -> None:
        self.keep("load", self._begin, {} if error is None else {"error": type(error).__name__})
        try:
            self.write()
        except MachineError as failed:
            if error is None:
                raise
            # The load's own error is the one to come out.
            _log.warning("%s", failed)

    def keep(self, name: str, begin_ns: int, args: Mapping[str, Any]) -> None:
        """An event on the caller's thread, from ``begin_ns`` (of time.perf_counter_ns) until now."""
        thread = threading.get_native_id()
        self._threads.setdefault(thread, threading.current_thread().name)
        self._spans.append(Span(name, begin_ns, time.perf_counter_ns(), thread, args))

    def take(self, engine: Engine) -> None:
        """What an engine has kept; call it once, before the engine is closed."""
        # A path need not be text, and JSON has nothing else.
        self._engines.append((engine.trace(), [clean(shard.path) for shard in engine.shards]))

    def write(self) -> None:
        """Writes all events so far, replacing the file once they are on disk. Raises MachineError."""
        head = {
            "program": "tensorlift",
            "command": list(map(clean, sys.argv)),
            "clock": "CLOCK_MONOTONIC",
            "begin_ns": self._begin,
            "engine_events_were_cut": any(len(events) >= MOST_EVENTS for events, _ in self._engines),
        }
        with write_output(self.path, "the trace") as file:
            file.write(_BEGIN + msgspec.json.encode(head))
            file.write(b',"traceEvents":[')
            before = b"\n"
            for block in _blocks(self._events()):
                # A list's own brackets go: the file holds one list of all blocks.
                file.write(before + msgspec.json.encode(block)[1:-1].replace(b'},{"name"', b'},\n{"name"'))
                before = b",\n"
            file.write(b"\n]}\n")

    def _events(self) -> Iterator[dict[str, Any]]:
        process = os.getpid()
        yield _named("process_name", process, process, {"name": f"tensorlift {process}"})
        order = 0
        for thread, name in self._threads.items():
            yield from _track(process, thread, f"Python {name}", order)
            order += 1
        for span in list(self._spans):
            yield _complete(process, span, span.thread, "python", self._begin)
        free, readers = _FIRST_FREE_TRACK, 0
        for events, paths in self._engines:
            threads = np.unique(events["thread"]).tolist()
            # In stream order, whichever thread saw their end.
            copies = events["stage"] == _COPY
            groups = [(thread, f"reader {readers + at + 1}") for at, thread in enumerate(threads)]
            readers += len(threads)
            for thread, title in [*groups, (-1, "copies to the device")]:
                own = events[copies] if thread < 0 else events[~copies & (events["thread"] == thread)]
                own = own[np.lexsort((own["end_ns"], own["begin_ns"]))]
                lanes = tracks(own["begin_ns"].tolist(), own["end_ns"].tolist())
                ids = [thread] if thread >= 0 else []
                while len(ids) <= max(lanes, default=-1):
                    ids.append(free)
                    free += 1
                for lane in range(max(lanes, default=-1) + 1):
                    more = f", {lane + 1}" if lane else ""
                    yield from _track(process, ids[lane], title + more, order)
                    order += 1
                for span, lane in zip(_spans_of(own, paths), lanes, strict=True):
                    yield _complete(process, span, ids[lane], "engine", self._begin)


@contextlib.contextmanager
def traced(path: str | None) -> Iterator[Trace | None]:
    """A trace for what is done inside, written at its end; None where no path is given."""
    if path is None:
        yield None
        return
    with Trace(path) as trace:
        yield trace


def tracks(begins: Iterable[int], ends: Iterable[int]) -> list[int]:
    """For events in the order of their begins, the lowest track on which each is alone."""
    free_at: list[int] = []
    chosen = []
    for begin, end in zip(begins, ends, strict=True):
        lane = next((at for at, free in enumerate(free_at) if free <= begin), len(free_at))
        if lane == len(free_at):
            free_at.append(end)
        else:
            free_at[lane] = end
        chosen.append(lane)
    return chosen


def _spans_of(events: npt.NDArray[Any], paths: list[str]) -> Iterator[Span]:
    for begin, end, offset, nbytes, file, thread, stage, path in events.tolist():
        args: dict[str, Any] = {}
        if 0 <= file < len(paths):
            args = {"file": paths[file], "offset": offset, "bytes": nbytes}
        elif nbytes:
            args = {"bytes": nbytes}
        name = STAGE_NAMES[stage].lower() if stage < len(STAGE_NAMES) else f"stage {stage}"
        if stage == _READ:
            args["path"] = PATH_NAMES[path] if path < len(PATH_NAMES) else str(path)
        yield Span(name, begin, end, thread, args)


def _complete(process: int, span: Span, track: int, category: str, origin: int) -> dict[str, Any]:
    return {
        "name": span.name,
        "cat": category,
        "ph": "X",
        "ts": (span.begin_ns - origin) / 1000,
        "dur": max(0, span.end_ns - span.begin_ns) / 1000,
        "pid": process,
        "tid": track,
        "args": dict(span.args),
    }


def _named(kind: str, process: int, track: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": track, "args": args}


def _track(process: int, track: int, name: str, order: int) -> Iterator[dict[str, Any]]:
    yield _named("thread_name", process, track, {"name": name})
    yield _named("thread_sort_index", process, track, {"sort_index": order})


def _blocks(events: Iterator[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Lists of some events each, so that a large trace is never in memory twice."""
    block: list[dict[str, Any]] = []
    for event in events:
        block.append(event)
        if len(block) == _BLOCK:
            yield block
            block = []
    if block:
        yield block
