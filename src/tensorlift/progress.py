"""How far a load is: what the caller asked to be told with."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

__all__ = ["Report", "bar", "reporter"]

# Columns that bar, bytes, speed and time need side by side; in fewer, the numbers go alone.
_NARROW = 60

Report = Callable[[int, int], object]
"""Called with (bytes done, bytes in all)."""


@contextlib.contextmanager
def reporter(progress: bool | Report | None) -> Iterator[Report | None]:
    """What to call: the caller's own function, a bar on stderr, or None."""
    if not isinstance(progress, bool):
        yield progress
    elif progress:
        with bar() as report:
            yield report
    else:
        yield None


def ticker(report: Report | None, done: Callable[[], int], total: int) -> Callable[[], object] | None:
    """What tells ``report`` of the bytes done, or None where nobody wants to know."""
    return None if report is None else lambda: report(min(done(), total), total)


def finished(report: Report | None, total: int) -> None:
    """Tells that all is done."""
    if report is not None:
        report(total, total)


@contextlib.contextmanager
def bar(force: bool = False, what: str = "loading") -> Iterator[Report]:
    """A bar in bytes on stderr, gone at the end; ``force``: drawn also where stderr is no terminal."""
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
            progress.TextColumn(what, markup=False, table_column=whole()),
            progress.BarColumn(),
            *columns,
            progress.TimeRemainingColumn(table_column=whole()),
        ]
    with progress.Progress(*columns, console=console, transient=True) as drawn:
        task = drawn.add_task("", total=None)

        def report(done: int, total: int) -> None:
            drawn.update(task, completed=done, total=total)

        yield report
