"""Engines change: which version a load format was shown with, and what to say about another."""

from __future__ import annotations

import logging

from tensorlift.integrations.settings import LOAD_FORMAT

__all__ = ["check_version"]

_told: set[tuple[str, str]] = set()


def check_version(
    engine: str,
    found: str,
    proven: str,
    log: logging.Logger,
    what: str = f"load format {LOAD_FORMAT}",
    without: str = "leave --load-format out",
) -> None:
    """Says once a process where the engine has not the proven version; it is tried nevertheless.

    ``what``: is shown with it; ``without``: how to do without that. What follows "+" is the build
    (``0.32.0+cpu``), which changes no interface.
    """
    if found.partition("+")[0] != proven and (engine, found) not in _told:
        _told.add((engine, found))
        log.warning(
            "%s was shown with %s %s, and this is %s: trying it. If loading fails, %s, or install %s %s",
            what,
            engine,
            proven,
            found,
            without,
            engine,
            proven,
        )
