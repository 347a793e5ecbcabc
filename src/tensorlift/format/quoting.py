"""How names and texts out of files appear in messages: cut, and harmless to a terminal."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TypeVar

__all__ = ["clean", "kinds", "plural", "quote", "shown", "some_of", "without_secrets"]

Item = TypeVar("Item")

# Long enough for the names of real tensors, short enough for one line of a log.
_LONGEST = 100
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
# Also what is not one before an @, in texts that are URLs by half.
_BEHIND = re.compile(r"[?#&;]")


def clean(text: str) -> str:
    """The text on one line: control characters and what is not valid Unicode are written as escapes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def quote(value: object, longest: int = _LONGEST) -> str:
    """A value out of a file, as in Python source, of at most `longest` characters and an ellipsis."""
    if isinstance(value, str):
        text = clean(value[: longest + 1])
        return f"'{text[:longest]}…'" if len(text) > longest else f"'{text}'"
    text = clean(_short_repr(value))
    return text[:longest] + "…" if len(text) > longest else text


def shown(value: object, longest: int = _LONGEST) -> str:
    """A value that a caller gave, as in Python source and cut; whatever it is, showing it raises nothing."""
    if isinstance(value, str):
        return quote(value, longest)
    text = clean(_repr(value))
    return text[:longest] + "…" if len(text) > longest else text


def without_secrets(url: str) -> str:
    """Of a text that is a URL, or was meant for one, what may be shown: no user, no password, and nothing
    behind the path, where tokens and passwords stand too.
    """
    scheme = match[0] if (match := _SCHEME.match(url)) else ""
    rest = url.removeprefix(scheme)
    shown = _BEHIND.split(rest, maxsplit=1)[0]
    if "@" in rest[len(shown) :]:  # a password with such a character in it, or an @ behind the path
        return f"{scheme}..."
    return scheme + shown.rpartition("@")[2]


def kinds(value: object) -> str:
    """A list by the kinds of what is in it, for where a password may stand anywhere; of others the value."""
    if isinstance(value, (list, tuple)):
        return f"a list of {', '.join(sorted({type(one).__name__ for one in value})) or 'nothing'}"
    return quote(value)


def plural(count: int, noun: str) -> str:
    """A count with its noun: "1 byte", "4,096 bytes"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def some_of(items: Sequence[Item], most: int, shown: Callable[[Item], str] = str, between: str = ", ") -> str:
    """The first `most` of them as text, and how many more there are: "a, b and 3 more"."""
    more = f" and {len(items) - most:,} more" if len(items) > most else ""
    return between.join(map(shown, items[:most])) + more


def _short_repr(value: object, depth: int = 3) -> str:
    """repr() of a value of JSON, without writing out more of a large one than will be shown."""
    if isinstance(value, (list, tuple)):
        if value and not depth:
            return "[…]"
        items = [quote(v) if isinstance(v, str) else _short_repr(v, depth - 1) for v in value[:20]]
        return f"[{', '.join(items)}{', …' if len(value) > 20 else ''}]"
    if isinstance(value, dict):
        return "an object" if value else "{}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return _repr(value)


def _repr(value: object) -> str:
    """repr(), also of what has none."""
    if isinstance(value, int) and value.bit_length() > 256:
        # Turning a number of thousands of digits into text is slow, and Python refuses it from 4,300 digits
        # on.
        return f"an integer of {value.bit_length():,} bits"
    try:
        return repr(value)
    except Exception:  # noqa: BLE001 - it is what somebody else has written
        return f"an object of type {type(value).__name__}"
