"""One run on several devices: what its rows share, and loaders in turn on the same ranks."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tensorlift.bench import member_links, member_loads
from tensorlift.bench.cases import Case, remove
from tensorlift.bench.ceilings import Ceilings
from tensorlift.bench.crew import Crew
from tensorlift.bench.member_loads import LOADERS
from tensorlift.bench.report import Series
from tensorlift.bench.samples import SLOW_SAMPLES, say
from tensorlift.errors import MachineError
from tensorlift.plan.tensor_parallel import WAYS, tensor_parallel_portion
from tensorlift.sources import find, read_headers

__all__ = ["Loads", "SeveralBench", "host_cpu_seconds"]

# Between two orders, for the second to have come everywhere.
_SOON = 0.05
# What takes longer is run fewer times.
_SLOW_SECONDS = 3.0
_DISK_RUNS = 3


@dataclass(slots=True)
class Loads:
    """A loader on all ranks, and what came of it. Seconds are those until the last rank had all it wanted."""

    name: str
    series: Series
    failed: str = ""
    memory: list[dict[str, Any]] = field(default_factory=list)
    """Of each rank, in one load that was watched."""
    took: float = 0.0
    """Seconds of the last sample with all that belongs to it."""

    @property
    def ok(self) -> bool:
        """There is a sample that counts."""
        return bool(self.series.seconds) and not self.failed

    @property
    def is_done(self) -> bool:
        """It has failed, or is slow and has run often enough."""
        seconds = self.series.seconds
        return bool(self.failed) or (len(seconds) >= SLOW_SAMPLES and min(seconds) > _SLOW_SECONDS)

    @property
    def cpu_seconds(self) -> float:
        """Of all CPUs of the host for a load, without what it does by itself: the mean."""
        notes = self.series.notes
        return sum(float(note["host_cpu_seconds"]) for note in notes) / len(notes)

    @property
    def read_bytes(self) -> int:
        """What the rank that read most had system calls read: that of each sample is the same."""
        return min(int(max(note["call_bytes"])) for note in self.series.notes)

    def record(self) -> dict[str, Any]:
        """Plain values for the file."""
        series = self.series.record() if self.series.seconds else {}
        return {"name": self.name, "failed": self.failed, "memory": self.memory, "series": series}


class SeveralBench:
    """Checkpoints, ranks, and the time that is left; a context manager."""

    def __init__(
        self,
        devices: Sequence[str],
        makers: Mapping[str, Callable[[], Case]],
        ceilings: Ceilings | None,
        seconds: float,
        runs: int,
        patience: float,
    ) -> None:
        """devices: one a rank. seconds: for everything. runs: samples that count. patience: seconds for one
        order to the ranks.
        """
        self.devices, self.ceilings, self.runs = tuple(devices), ceilings, runs
        self.is_cuda = devices[0] != "cpu"
        self.until = self.deadline = time.monotonic() + seconds
        """Until when the row that is measured may take."""
        self.facts: dict[str, Any] = {}
        """What the first rank says of its device."""
        self.notes: dict[str, Any] = {}
        """What is no ratio, by row."""
        self.dropped: list[str] = []
        """What there was no time or no way for, with the reason."""
        self._makers, self._patience = makers, patience
        self._cases: dict[str, Case] = {}
        self._crew: Crew | None = None

    def __enter__(self) -> SeveralBench:
        """Itself."""
        return self

    def __exit__(self, *exc: object) -> None:
        self.dismiss()
        for case in self._cases.values():
            remove(case)

    def case(self, name: str) -> Case:
        """A checkpoint, written when it is first wanted."""
        if name not in self._cases:
            begin = time.monotonic()
            case = self._cases[name] = self._makers[name]()
            size = f"{case.nbytes / 1e9:.2f} GB in {case.tensors} tensors"
            say(f"{case.folder}: {size}, written in {time.monotonic() - begin:.1f} s")
        return self._cases[name]

    def crew(self, ranks: int, devices: Sequence[str] | None = None) -> Crew:
        """So many ranks, each on a device of its own, running; those that there were before end.

        ``devices``: other ones; of one device for several ranks NCCL makes no group.
        """
        devices = tuple(devices or self.devices[:ranks])
        if self._crew is None or self._crew.devices != devices:
            self.dismiss()
            apart = len(set(devices)) == len(devices)
            self._crew = Crew(devices, "nccl" if self.is_cuda and apart else "gloo")
        begin, starts = time.monotonic(), self._crew.starts
        self._crew.start(self.patience(180))
        if self._crew.starts != starts:
            say(f"{len(devices)} ranks, {self._crew.backend}: started in {time.monotonic() - begin:.1f} s")
        self.facts = self.facts or self._crew.ask(member_links.facts, self.patience())[0]
        return self._crew

    def dismiss(self) -> None:
        """Ends the ranks."""
        if self._crew is not None:
            self._crew.close()
            self._crew = None

    def left(self) -> float:
        """Seconds for the row."""
        return self.until - time.monotonic()

    def patience(self, seconds: float | None = None) -> float:
        """Seconds for one order; never beyond the end of everything."""
        return max(0.1, min(seconds or self._patience, self.deadline - time.monotonic()))

    def drop(self, what: str) -> None:
        """Says what is not measured."""
        self.dropped.append(what)
        say(f"dropped: {what}")

    def race(
        self, where: str, ranks: int, names: Iterable[str], case: Case, share: float | None = None
    ) -> dict[str, Loads]:
        """Loaders in turn on the same ranks, by name: first all bytes are compared, then memory is watched,
        then samples count.

        share: of the files that is cached before each load; None for files in memory. From a disk fewer
        samples count, for the disk decides, and memory is that of files in memory.
        """
        racing = {
            name: Loads(name, Series(name, self._wanted(name, case, ranks), warm_up=0)) for name in names
        }
        for loads in racing.values():
            loads.failed = self._obstacle(loads.name)
        self.notes.setdefault("loads", {})[where] = found = []
        numbers = range(self.runs + 2) if share is None else (0, *range(2, min(self.runs, _DISK_RUNS) + 2))
        for number in numbers:
            for loads in racing.values():
                if loads.is_done:
                    continue
                if 1.3 * loads.took + 1 > self.left():
                    self.drop(f"{where}: no time for sample {number} of {loads.name} and what follows")
                    break
                self._once(loads, ranks, case, share, number)
            else:
                self._forget_reference(number, ranks)
                continue
            break
        found += [loads.record() for loads in racing.values()]
        return racing

    def _wanted(self, name: str, case: Case, ranks: int) -> int:
        """Bytes of the tensors of which a loader loads at least a part."""
        ways = LOADERS[name].ways
        if ways is None or ways == WAYS or ranks == 1:
            return case.nbytes
        checkpoint = read_headers(find([str(file) for file in case.files]))
        return tensor_parallel_portion(checkpoint, ranks, ways).own * ranks

    def _forget_reference(self, number: int, ranks: int) -> None:
        if number == 0:
            self.crew(ranks).ask(member_loads.drop_reference, self.patience())

    def _once(self, loads: Loads, ranks: int, case: Case, share: float | None, number: int) -> None:
        begin = time.monotonic()
        files = [str(file) for file in case.files]
        try:
            crew = self.crew(ranks)
            crew.ask(member_loads.settle, self.patience())
            if share is not None and self.ceilings is not None:
                self.ceilings.bring(case.files, share)
            used = host_cpu_seconds()
            answers = crew.ask(
                member_loads.sample,
                self.patience(),
                loader=loads.name,
                files=files,
                at=time.monotonic() + _SOON,
                check=number == 0,
                watch=number == 1,
            )
            used = host_cpu_seconds() - used
        except MachineError as error:
            loads.failed = str(error)
            say(f"{loads.name}: FAILED: {error}")
            return
        loads.took = time.monotonic() - begin
        seconds = max(one["seconds"] for one in answers)
        say(f"{loads.name}, {number - 1 if number > 1 else ('compared', 'watched')[number]}: {seconds:.3f} s")
        if number == 1:
            loads.memory = [one["memory"] for one in answers]
        if number > 1:
            loads.series.seconds.append(seconds)
            slowest = max(answers, key=lambda one: float(one["seconds"]))
            loads.series.notes.append(
                {
                    "host_cpu_seconds": used,
                    "ranks": [one["seconds"] for one in answers],
                    "rank_cpu_seconds": [one["cpu_seconds"] for one in answers],
                    "late": max(one["late"] for one in answers),
                    "phases": slowest.get("phases", {}),
                    "readers": [one.get("readers", {}) for one in answers],
                    "received_bytes": [one.get("received_bytes", 0) for one in answers],
                    "fallbacks": slowest.get("fallbacks", []),
                    "call_bytes": [one["call_bytes"] for one in answers],
                    "disk_bytes": [one["disk_bytes"] for one in answers],
                }
            )

    def _obstacle(self, name: str) -> str:
        loader = LOADERS[name]
        kind = self.devices[0].partition(":")[0]
        if kind not in loader.devices:
            return f"loads to {' and '.join(loader.devices)} only"
        if importlib.util.find_spec(loader.module) is None:
            return f"not installed: {loader.module}"
        return ""


def host_cpu_seconds() -> float:
    """What all CPUs of this host have worked so far, interrupts and the kernel's own threads included."""
    with open("/proc/stat", encoding="ascii") as file:
        user, nice, system, _, _, irq, softirq, *_ = map(int, file.readline().split()[1:])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")
