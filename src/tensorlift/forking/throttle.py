"""How fast a seed lets itself be read, as its owner says it."""

from __future__ import annotations

import re
from collections.abc import Callable

from tensorlift.errors import OptionError
from tensorlift.options import parse_rate

__all__ = ["parse_limit"]

_PERCENT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")


def parse_limit(value: object, name: str, device_rate: Callable[[], float | None]) -> int | None:
    """Bytes a second of ``"2GB/s"``, or of ``"25%"`` of the device's rate; None for None, which is no limit.

    device_rate: asked for a share alone; None where it is not known. Raises OptionError.
    """
    if value is None:
        return None
    if isinstance(value, str) and (match := _PERCENT.fullmatch(value)):
        share = float(match[1])
        if not 0 < share <= 100:
            raise OptionError(f"{name} is {value!r}; expected more than 0 % and at most 100 %")
        whole = device_rate()
        if whole is None:
            raise OptionError(
                f"{name} is {value!r}, but the kernel does not tell how fast the network here is (it does "
                'not for loopback); give a size a second, such as "2GB/s"'
            )
        return max(1, int(whole * share / 100))
    try:
        return parse_rate(value, name)
    except OptionError:
        raise OptionError(
            f'{name} is {value!r}; expected a size a second, such as "2GB/s", or a share of the network\'s '
            'rate, such as "25%"'
        ) from None
