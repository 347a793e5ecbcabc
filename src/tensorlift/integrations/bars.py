"""Progress in bytes, drawn as the engines draw theirs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from tensorlift.progress import Report

__all__ = ["byte_bar"]


@contextlib.contextmanager
def byte_bar(title: str, **settings: Any) -> Iterator[Report]:
    """A tqdm bar, which every engine brings; ``settings`` are tqdm's own.

    Its lines stay in a log, where those of our own bar, which redraws itself, would be noise.
    """
    # Not a dependency of ours, and only wanted where an engine runs.
    from tqdm.auto import tqdm

    options = {"unit": "B", "unit_scale": True, "unit_divisor": 1024, "mininterval": 1.0} | settings
    with tqdm(desc=title, total=None, **options) as bar:

        def report(done: int, total: int) -> None:
            if bar.total != total:
                bar.reset(total)
            bar.update(done - bar.n)

        yield report
