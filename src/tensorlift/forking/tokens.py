"""Where a token comes from: a file or the environment, never an argument, which every user can read."""

from __future__ import annotations

import os

from tensorlift.errors import OptionError
from tensorlift.forking.keys import checked_token
from tensorlift.format.quoting import quote

__all__ = ["TOKEN_VARIABLE", "token_of"]

TOKEN_VARIABLE = "TENSORLIFT_TOKEN"

_LONGEST = 4096


def token_of(file: str | None = None) -> str:
    """The token in a file, else in TENSORLIFT_TOKEN; empty where there is none.

    White space around it is left out. Raises OptionError, without the token in its message.
    """
    if file is None:
        return _checked(os.environ.get(TOKEN_VARIABLE, ""), TOKEN_VARIABLE)
    try:
        with open(file, encoding="utf-8", errors="replace") as opened:
            token = _checked(opened.read(_LONGEST + 2), f"the token file {quote(file, 300)}")
    except OSError as error:
        raise OptionError(
            f"the token file {quote(file, 300)} cannot be read: {error.strerror or error}"
        ) from None
    if not token:
        raise OptionError(f"the token file {quote(file, 300)} is empty; expected a token")
    return token


def _checked(text: str, where: str) -> str:
    token = text.strip()
    if len(token) > _LONGEST:
        raise OptionError(f"{where}: this is no token; expected at most {_LONGEST} characters")
    try:
        return checked_token(token or None)
    except OptionError as error:
        raise OptionError(f"{where}: {error}") from None
