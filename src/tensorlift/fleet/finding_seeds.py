"""A fork that asks a registry: whom it reads from, whom it asks next, and what it tells meanwhile."""

from __future__ import annotations

import contextlib
import random
import secrets
import time
from collections.abc import Mapping, Sequence

from tensorlift.errors import ForkError, SeedError
from tensorlift.fleet.contract import ForkReport, Near, Registry, State
from tensorlift.fleet.heartbeat import Heartbeat
from tensorlift.forking.manifest import ModelKey
from tensorlift.format.quoting import clean
from tensorlift.progress import SourceReport

__all__ = ["SeedFinder"]

# For a registry that is not there: it may be beginning again.
_DOWN_SECONDS = 10.0
_DOWN_REST = 0.5
# For a seed that had no room when the registry thought it had.
_FULL_REST = 1.0
# However soon a registry, or a proxy before it, wants to be asked again.
_LEAST_REST = 0.1
_LONGEST_REASON = 1000


class SeedFinder:
    """One fork's dealings with a registry. A context manager: what ends with it is told as done or failed."""

    def __init__(
        self, registry: Registry, keys: Sequence[ModelKey], near: Near, count: int, wait: float
    ) -> None:
        """keys: that will do, each where nobody has those before it; count: seeds to read from at once;
        wait: seconds to look for some that have room and bring anything. Closes the registry.
        """
        self._registry, self._near, self._count = registry, near, count
        self._keys = list(keys)
        self._begin = time.monotonic()
        self._end = self._begin + wait
        self._id = secrets.token_hex(16)
        self._state: State = "waiting"
        self._bytes = 0, 0
        self._given: tuple[str, ...] = ()
        self._given_at = self._begin
        self._left: dict[str, None] = {}
        self._heartbeat: Heartbeat | None = None

    @property
    def key(self) -> ModelKey:
        """Of the seeds that were given last."""
        return self._keys[0]

    def seeds(self, error: ForkError | None = None) -> tuple[str, ...]:
        """URLs to read from, once there is room; ``error``: what came of those that were given before.

        Raises SeedError where there are none.
        """
        if error is not None:
            self._leave(error)
        down_end = time.monotonic() + _DOWN_SECONDS
        while True:
            try:
                found = self._registry.candidates(self.key, self._near, self._count, self._left)
            except SeedError as problem:
                if problem.answered and problem.retry_seconds is None and len(self._keys) > 1:
                    del self._keys[0]
                    self._left.clear()
                    continue
                if problem.answered:
                    self._tell("waiting")
                pause = None if problem.answered else _DOWN_REST
                if problem.retry_seconds is not None:
                    pause = max(problem.retry_seconds, _LEAST_REST)
                end = self._end if problem.answered else min(self._end, down_end)
                if pause is None or time.monotonic() + pause > end:
                    before = "" if error is None else f"{error}; and then "
                    raise SeedError(f"{before}{problem}", problem.retry_seconds) from error
                self._rest(pause)
            else:
                self._given, self._given_at, self._bytes = tuple(found), time.monotonic(), (0, 0)
                self._tell("reading")
                return self._given

    def _leave(self, error: ForkError) -> None:
        """Those that were given last are asked no more, or later where they had no room.

        Raises SeedError where there is no time left.
        """
        now, has_failed = time.monotonic(), getattr(error, "retry_seconds", None) is None
        if self._bytes[0]:
            # While bytes come, nobody waits.
            self._end += now - self._given_at
        if now + (0.0 if has_failed else _FULL_REST) > self._end:
            raise SeedError(f"{error}; it was waited for long enough") from error
        if has_failed:
            self._left |= dict.fromkeys(self._given)
        else:
            self._rest(_FULL_REST)
        self._tell("waiting")

    def _rest(self, seconds: float) -> None:
        # Not all alike: those that wait would ask at once again.
        time.sleep(seconds * random.uniform(0.75, 1.25))

    def progress(self, then: SourceReport | None) -> SourceReport:
        """For a fork's progress: told here, and to ``then``."""

        def report(done: int, total: int, /, *, by_source: Mapping[str, int]) -> None:
            self._bytes = done, total
            if then is not None:
                then(done, total, by_source=by_source)

        return report

    def _tell(self, state: State) -> None:
        """From the registry's first answer on: that it does not answer is what seeds() raises."""
        before, self._state = self._state, state
        if self._heartbeat is None:
            self._heartbeat = Heartbeat(
                lambda: self._registry.report(self._report(self._state)) / 3,
                "a registry is not told of a fork",
            )
        elif before != state:
            self._heartbeat.news()

    def _report(self, state: State, reason: str = "") -> ForkReport:
        done, total = self._bytes
        return ForkReport(
            fork=self._id, key=self.key, state=state, near=self._near, done_bytes=done, total_bytes=total,
            seconds=time.monotonic() - self._begin, seeds=self._given, reason=reason,
        )  # fmt: skip

    def __enter__(self) -> SeedFinder:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._heartbeat is None:
            self._registry.close()
            return
        reason = "" if error is None else clean(str(error) or type(error).__name__)[:_LONGEST_REASON]
        report = self._report("done" if error is None else "failed", reason)
        self._heartbeat.close(lambda: self._end_with(report))

    def _end_with(self, report: ForkReport) -> None:
        assert self._heartbeat is not None
        with contextlib.closing(self._registry):
            if self._heartbeat.was_heard is not False:
                self._registry.report(report)
