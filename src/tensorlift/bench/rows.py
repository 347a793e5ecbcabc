"""The rows of the CPU table: each measures ours and its ceiling in turn, from a page cache that is proven."""

from __future__ import annotations

import gc
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensorlift.bench.cases import Case, nvfp4_moe
from tensorlift.bench.ceilings import Ceilings
from tensorlift.bench.report import Row, Series
from tensorlift.bench.worker import disk_bytes
from tensorlift.engine.sizing import EngineSize

__all__ = ["Bench", "Timed"]

Timed = Callable[[], float]


@dataclass(slots=True)
class Bench:
    """What the rows share."""

    ceilings: Ceilings
    size: EngineSize
    runs: int
    """Samples that count, for each series; one more comes first."""

    def load_into_row(self, case: Case, name: str) -> Row:
        """Warm, into memory that is there, against pread into prepared memory with the same threads."""
        from tensorlift.loading import load, load_into

        state = dict(load(case.folder, device="cpu"))
        ours = Series("load_into", case.nbytes)
        loop = Series("pread into prepared memory", case.nbytes)
        self._turns(
            case,
            1.0,
            (ours, lambda: _timed(lambda: load_into(state, case.folder))),
            (loop, self._loop(case, "prepared", "buffered", self.size.threads)),
        )
        return Row(name, "rate, of the bare loop", loop.median / ours.median, 0.9, True, [ours, loop])

    def load_row(self, case: Case) -> list[Row]:
        """Warm, owned tensors: against pread into fresh memory, and against safetensors with a clone each."""
        ours = Series("load", case.nbytes)
        loop = Series("pread into fresh huge pages", case.nbytes)
        plain = Series("safetensors load_file + clone", case.nbytes)
        self._turns(
            case,
            1.0,
            (ours, lambda: _load(case.folder)),
            (loop, self._loop(case, "fresh", "buffered", self.size.threads)),
            (plain, lambda: _load_plainly(case.files)),
        )
        return [
            Row("load, warm", "rate, of the bare loop", loop.median / ours.median, 0.9, True, [ours, loop]),
            Row(
                "load, warm, against safetensors",
                "times as fast",
                plain.median / ours.median,
                1.0,
                True,
                [ours, plain],
            ),
        ]

    def cold_rows(self, case: Case, warm: Series) -> list[Row]:
        """Cold against a bare direct loop at the same depth; half cached against the rates' prediction."""
        ours = Series("load, cold", case.nbytes)
        loop = Series("direct pread into fresh huge pages", case.nbytes)
        half = Series("load, half cached", case.nbytes)
        self._turns(
            case,
            0.0,
            (ours, lambda: _load(case.folder)),
            (loop, self._loop(case, "fresh", "direct", self.size.io_depth)),
        )
        self._turns(case, 0.5, (half, lambda: _load(case.folder)))
        # The share that was cached in fact is in the notes; its mean goes into the prediction.
        share = sum(note["cached_before"] for note in half.notes) / len(half.notes)
        predicted = share * warm.median + (1 - share) * ours.median
        return [
            Row("load, cold", "rate, of the bare loop", loop.median / ours.median, 0.95, True, [ours, loop]),
            Row(
                "load, half cached",
                f"time, of the {predicted:.3f} s predicted",
                half.median / predicted,
                1.1,
                False,
                [half],
            ),
        ]

    def opening_row(self, case: Case) -> Row:
        """Opening one file of very many tensors, all checks included, against safetensors."""
        import safetensors

        from tensorlift.compat import safe_open

        file = str(case.files[0])
        ours = Series("safe_open", 0)
        plain = Series("safetensors.safe_open", 0)
        self._turns(
            case,
            1.0,
            (ours, lambda: _opened(safe_open, file)),
            (plain, lambda: _opened(safetensors.safe_open, file)),
        )
        return Row(
            f"opening {case.tensors} tensors",
            "times as long",
            ours.median / plain.median,
            1.3,
            False,
            [ours, plain],
        )

    def linear_row(self, cases: Sequence[Case]) -> Row:
        """Loading a quarter, a half and all of the tensors: the cost of one must not grow."""
        series = [Series(f"load, {case.tensors} tensors", case.nbytes) for case in cases]
        for _ in range(self.runs + 1):
            for one, case in zip(series, cases, strict=True):
                self._sample(case, 1.0, one, lambda case=case: _load_in_new_process(case.folder))  # type: ignore[misc]
        first, last = cases[0], cases[-1]
        grown = (series[-1].median / last.tensors) / (series[0].median / first.tensors)
        return Row("cost of a tensor, most against fewest", "times as long", grown, 1.2, False, series)

    def _loop(self, case: Case, memory: str, how: str, threads: int) -> Timed:
        return lambda: self.ceilings.read_seconds(
            case.files, memory=memory, how=how, threads=threads, chunk_bytes=self.size.chunk_size
        )

    def _turns(self, case: Case, share: float, *turns: tuple[Series, Timed]) -> None:
        """Samples the series in turn, so that what drifts on the machine meets all of them."""
        for _ in range(self.runs + 1):
            for series, timed in turns:
                self._sample(case, share, series, timed)

    def _sample(self, case: Case, share: float, series: Series, timed: Timed) -> None:
        """Brings a share of each file into the cache and the rest out of it, proves it, measures once.

        The work runs once before, uncounted: a virtual machine gives memory that has been free for some
        seconds back to its host, and the first touch then measures the host. What the run before has just
        freed is still there.
        """
        self.ceilings.bring(case.files, share)
        gc.collect()
        timed()
        gc.collect()
        seen = self.ceilings.keep(case.files, share)
        before = disk_bytes()
        series.seconds.append(timed())
        series.notes.append({"cached_before": seen, "disk_bytes": disk_bytes() - before})


def _timed(work: Callable[[], object]) -> float:
    """Seconds until the result is there; dropping it is not counted."""
    start = time.perf_counter()
    result = work()
    seconds = time.perf_counter() - start
    del result
    return seconds


def _load(folder: Path) -> float:
    from tensorlift.loading import load

    return _timed(lambda: load(folder, device="cpu"))


_NEW_PROCESS = """
import sys, time, tensorlift
first = tensorlift.load(sys.argv[2])  # what is imported and made once
start = time.perf_counter()
state = tensorlift.load(sys.argv[1])
print(time.perf_counter() - start)
"""


def _load_in_new_process(folder: Path) -> float:
    """The same where the allocator has nothing from before: it keeps what a small load gave back and not what
    a large one did, so that in a process that loads again and again a small one finds its pages made.
    """
    with tempfile.TemporaryDirectory() as first:
        case = nvfp4_moe(Path(first), 1, 1)
        command = [sys.executable, "-c", _NEW_PROCESS, str(folder), str(case.folder)]
        return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def _load_plainly(files: Sequence[Path]) -> float:
    from safetensors.torch import load_file

    def work() -> Mapping[str, Any]:
        return {name: tensor.clone() for file in files for name, tensor in load_file(file).items()}

    return _timed(work)


def _opened(opener: Callable[..., Any], file: str) -> float:
    start = time.perf_counter()
    with opener(file, framework="pt"):
        return time.perf_counter() - start
