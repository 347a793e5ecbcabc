"""Names that a mistaken name may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["nearest"]

# difflib compares about 100,000 characters a millisecond at best: enough names to find the right one, few
# enough that a caller who asks for names in vain, one after the other, does not wait.
_CANDIDATES = 500


def nearest(name: str, names: Iterable[str], count: int = 3) -> list[str]:
    """At most `count` of the names that come close, the best first.

    Names that have the other one's as a part, or begin or end alike, are looked at first.
    """
    if len(name) > 1000:  # no name of a tensor; comparing it would take long
        return []
    begin, end = name[:12], name[-12:]
    alike: list[str] = []
    others: list[str] = []
    for other in names:
        if name in other or other.startswith(begin) or other.endswith(end):
            alike.append(other)
            if len(alike) == _CANDIDATES:
                break
        elif len(others) < _CANDIDATES:
            others.append(other)
    suffixed = [other for other in alike if other.endswith("." + name) or name.endswith("." + other)]
    pool = (alike + others)[:_CANDIDATES]
    close = difflib.get_close_matches(name, pool, count, 0.7)
    return list(dict.fromkeys(suffixed[:count] + close))[:count]
