"""This machine's ceilings: bare loops in C, compiled when first wanted, and the page cache's state."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from tensorlift.errors import MachineError

__all__ = ["Ceilings", "drop_cache", "fill_cache"]

_SOURCE = Path(__file__).with_name("ceiling.c")
# A page or two around a file's end may be cached at any time.
_TOLERANCE = 0.002


class Ceilings:
    """The compiled program of ceiling.c, in a temporary folder: a context manager."""

    def __init__(self, program: Path | None = None) -> None:
        """``program``: one that was compiled elsewhere, for a machine without a compiler."""
        self._folder = tempfile.TemporaryDirectory(prefix="tensorlift-bench-")
        if program is not None:
            self._program = program.resolve()
            return
        self._program = Path(self._folder.name, "ceiling")
        command = ["cc", "-std=c11", "-O2", "-pthread", "-o", str(self._program), str(_SOURCE)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            self._folder.cleanup()
            said = getattr(error, "stderr", None) or error
            raise MachineError(f"the ceilings need a C compiler (cc), which did not work: {said}") from error

    def __enter__(self) -> Ceilings:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Removes the program; not one that was compiled elsewhere."""
        self._folder.cleanup()

    def read_seconds(
        self,
        files: Sequence[Path],
        *,
        memory: str,
        how: str,
        threads: int,
        chunk_bytes: int,
        limit_bytes: int = 0,
    ) -> float:
        """Time of the bare loop over all files.

        Args:
            files: read from their first to their last byte.
            memory: ``prepared`` (written to before the clock starts), ``fresh`` (mapped inside the time) or
                ``ring`` (prepared, 128 MiB that are read into again and again: they stay in the caches).
            how: ``buffered`` or ``direct``.
            threads: threads, and so reads in flight.
            chunk_bytes: one read; a multiple of 4096.
            limit_bytes: no more than the first so many bytes, in whole chunks; 0 for all.
        """
        settings = [memory, how, str(threads), str(chunk_bytes), str(limit_bytes)]
        return float(self._run("read", *settings, *map(str, files))["seconds"])

    def copy_seconds(self, threads: int, nbytes: int) -> float:
        """Time of copying memory to memory, both there already: the fastest of five times."""
        return float(self._run("copy", str(threads), str(nbytes))["seconds"])

    def bring(self, files: Sequence[Path], share: float) -> float:
        """Brings the first share of each file into the page cache and the rest out of it.

        Returns the share that is cached then, by mincore; MachineError where that is not what was wanted.
        """
        if share < 1:
            drop_cache(files)
        fill_cache(files, share)
        if 0 < share < 1:
            drop_cache(files, share)
        seen = self.cached_share(files)
        if not _is_near(seen, share):
            raise MachineError(
                f"{files[0].parent}: {seen:.4f} of the bytes are cached, {share} were wanted; is memory "
                "short, or are the files in a tmpfs or in use elsewhere?"
            )
        return seen

    def keep(self, files: Sequence[Path], share: float) -> float:
        """The same as bring, but only where the cache is no longer so: otherwise it costs milliseconds."""
        seen = self.cached_share(files)
        return seen if _is_near(seen, share) else self.bring(files, share)

    def cached_share(self, files: Sequence[Path]) -> float:
        """Share of the files' bytes that are in the page cache, from 0 to 1, as mincore says."""
        answer = self._run("cached", *map(str, files))
        return float(answer["cached"] / max(1, answer["bytes"]))

    def _run(self, *arguments: str) -> dict[str, Any]:
        done = subprocess.run([self._program, *arguments], capture_output=True, text=True)
        if done.returncode:
            raise MachineError(f"the ceiling's program failed: {done.stderr.strip()}")
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer


def _is_near(seen: float, share: float) -> bool:
    return abs(seen - share) <= (_TOLERANCE if share in (0, 1) else 0.05)


def drop_cache(files: Iterable[Path], start_share: float = 0.0) -> None:
    """Drops the files' pages from the cache, from a share of each file on; dirty ones are written first."""
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        try:
            os.fsync(fd)
            # Whole huge pages only: a cached folio that the range cuts through may stay.
            start = int(os.fstat(fd).st_size * start_share) >> 21 << 21
            os.posix_fadvise(fd, start, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def fill_cache(files: Iterable[Path], share: float = 1.0) -> None:
    """Reads the first share of each file, so that it is in the page cache."""
    buffer = bytearray(8 << 20)
    for file in files:
        with open(file, "rb", buffering=0) as stream:
            if share < 1:
                # No readahead, which would bring in more than the share.
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            left = int(file.stat().st_size * share) >> 21 << 21 if share < 1 else file.stat().st_size
            while left > 0 and (got := stream.readinto(memoryview(buffer)[: min(left, len(buffer))])):
                left -= got
