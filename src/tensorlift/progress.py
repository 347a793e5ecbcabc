"""How far a load is: what the caller asked to be told with."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from tensorlift.stats import human_bytes

__all__ = ["Report", "SourceReport", "bar", "by_source", "reporter"]

# Columns that bar, bytes, speed and time need side by side; in fewer, the numbers go alone.
_NARROW = 60
# Columns that all but the description take.
_BESIDE = 90

Report = Callable[[int, int], object]
"""Called with (bytes done, bytes in all)."""


class SourceReport(Protocol):
    """The same, where bytes come from several sources."""

    def __call__(self, done: int, total: int, /, *, by_source: Mapping[str, int]) -> object:
        """``by_source``: their bytes, by name."""


@contextlib.contextmanager
def reporter(progress: bool | Report | SourceReport | None) -> Iterator[Report | None]:
    """What to call: the caller's own function, a bar on stderr, or None."""
    if not isinstance(progress, bool):
        yield progress  # type: ignore[misc]
    elif progress:
        with bar() as report:
            yield report
    else:
        yield None


def by_source(report: Report | SourceReport | None) -> SourceReport | None:
    """What to tell of bytes by source too; a function without a parameter of this name hears of all alone."""
    if report is None or _has_sources(report):
        return report  # type: ignore[return-value]
    return lambda done, total, *, by_source: report(done, total)  # type: ignore[call-arg]


def _has_sources(report: Callable[..., object]) -> bool:
    try:
        return "by_source" in inspect.signature(report).parameters
    except (TypeError, ValueError):  # one in C that does not say
        return False


def ticker(report: Report | None, done: Callable[[], int], total: int) -> Callable[[], object] | None:
    """What tells ``report`` of the bytes done, or None where nobody wants to know."""
    return None if report is None else lambda: report(min(done(), total), total)


def finished(report: Report | None, total: int) -> None:
    """Tells that all is done."""
    if report is not None:
        report(total, total)


@contextlib.contextmanager
def bar(force: bool = False, what: str = "loading") -> Iterator[Report]:
    """A bar in bytes on stderr, gone at the end; ``force``: drawn also where stderr is no terminal.

    What it yields takes bytes by source too, which are named where they are several.
    """
    # Only here: importing rich takes longer than loading a small model.
    from rich import progress
    from rich.console import Console
    from rich.table import Column

    def whole() -> Column:
        return Column(no_wrap=True)

    console = Console(stderr=True, force_terminal=force or None)
    columns: list[progress.ProgressColumn] = [
        progress.DownloadColumn(table_column=whole()),
        progress.TransferSpeedColumn(table_column=whole()),
    ]
    if console.width >= _NARROW:
        columns = [
            progress.TextColumn("{task.description}", markup=False, table_column=whole()),
            progress.BarColumn(),
            *columns,
            progress.TimeRemainingColumn(table_column=whole()),
        ]
    with progress.Progress(*columns, console=console, transient=True) as drawn:
        task = drawn.add_task(what, total=None)

        def report(done: int, total: int, by_source: Mapping[str, int] | None = None) -> None:
            came = by_source or {}
            parts = [f"{name} {human_bytes(nbytes)}" for name, nbytes in came.items()]
            said = f"{what} ({', '.join(parts)})"
            fits = len(parts) > 1 and len(said) <= console.width - _BESIDE
            drawn.update(task, completed=done, total=total, description=said if fits else what)

        yield report
