"""How far a load is: what the caller asked to be told with."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

__all__ = ["Report", "SourceReport", "bar", "by_source", "finished", "reporter", "ticker"]

# Columns that bar, bytes, speed and time need side by side; in fewer, the numbers go alone.
_NARROW = 60
# Columns for all but the bar itself, which takes what is left of them.
_BESIDE, _LONGEST_BAR = 75, 40

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

    What it yields takes bytes by source too: of several each has a line of its own, where there is room.
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
            progress.BarColumn(bar_width=max(1, min(_LONGEST_BAR, console.width - _BESIDE))),
            *columns,
            progress.TimeRemainingColumn(table_column=whole()),
        ]
    with progress.Progress(*columns, console=console, transient=True) as drawn:
        task = drawn.add_task(what, total=None)
        parts: dict[str, progress.TaskID] = {}

        def report(done: int, total: int, by_source: Mapping[str, int] | None = None) -> None:
            drawn.update(task, completed=done, total=total)
            if by_source is None or len(by_source) < 2 or console.width < _NARROW:
                return
            for name, nbytes in by_source.items():
                if name not in parts:
                    parts[name] = drawn.add_task(f"  {name}", total=total)
                drawn.update(parts[name], completed=nbytes, total=total)

        yield report
