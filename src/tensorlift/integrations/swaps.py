"""Attributes of another package that are replaced for a while."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

__all__ = ["Swap", "Swaps"]


class Swap(NamedTuple):
    """One attribute; ``make`` gives its replacement for the function that it was."""

    holder: Any
    name: str
    make: Callable[[Callable[..., Any]], Callable[..., Any]]


class Swaps:
    """Attributes that are replaced together while anybody is inside; thread-safe, and may be nested.

    Every thread of the process sees the replacements. They have to ask themselves whom they serve.
    """

    def __init__(self) -> None:
        """Nothing is replaced yet."""
        self._lock = threading.Lock()
        self._users = 0
        self._replaced: list[tuple[Swap, Any, Any]] = []

    @contextmanager
    def made(self, find: Callable[[], Sequence[Swap]]) -> Iterator[None]:
        """Replaced inside; ``find`` says what, and is called by the first user alone."""
        with self._lock:
            if not self._users:
                try:
                    self._replace(find())
                except BaseException:
                    self._restore()  # what was replaced before it failed
                    raise
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._restore()

    def _replace(self, swaps: Sequence[Swap]) -> None:
        for swap in swaps:
            # As it lies in the holder: a static method is another object than what it gives.
            original = vars(swap.holder)[swap.name]
            new: Any = swap.make(getattr(swap.holder, swap.name))
            if isinstance(original, staticmethod):
                new = staticmethod(new)
            setattr(swap.holder, swap.name, new)
            self._replaced.append((swap, original, new))

    def _restore(self) -> None:
        while self._replaced:
            swap, original, new = self._replaced.pop()
            # Whoever has replaced ours meanwhile calls it still; it passes on to the original by itself.
            if vars(swap.holder).get(swap.name) is new:
                setattr(swap.holder, swap.name, original)
