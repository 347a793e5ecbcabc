"""How fast a seed lets itself be read, and a fork reads: as their owners say it, and kept by chunk."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from tensorlift.errors import OptionError
from tensorlift.format.quoting import shown
from tensorlift.options import parse_rate

__all__ = ["Pacer", "parse_limit"]

_PERCENT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")


def parse_limit(
    value: object,
    name: str,
    device_rate: Callable[[], float | None],
    unknown: str = "the kernel does not tell how fast the network here is (it does not for loopback)",
) -> int | None:
    """Bytes a second of ``"2GB/s"``, or of ``"25%"`` of the device's rate; None for None, which is no limit.

    device_rate: asked for a share alone; None where it is not known, for the reason ``unknown``. Raises
    OptionError.
    """
    if value is None:
        return None
    if isinstance(value, str) and (match := _PERCENT.fullmatch(value)):
        share = float(match[1])
        if not 0 < share <= 100:
            raise OptionError(f"{name} is {shown(value)}; expected more than 0 % and at most 100 %")
        whole = device_rate()
        if whole is None:
            raise OptionError(
                f'{name} is {shown(value)}, but {unknown}; give a size a second, such as "2GB/s"'
            )
        return max(1, int(whole * share / 100))
    try:
        return parse_rate(value, name)
    except OptionError:
        raise OptionError(
            f'{name} is {shown(value)}; expected a size a second, such as "2GB/s", or a share of the '
            'network\'s rate, such as "25%"'
        ) from None


class Pacer:
    """When the next chunk may be asked for, to keep to so many bytes a second. No lock of its own.

    It goes by what was asked for: a chunk comes as fast as it can, be it that the fork reads by itself, and
    the next one waits until its time is over.
    """

    def __init__(self, rate: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        """``rate``: bytes a second, 0 for any number; it may be changed."""
        self.rate, self._clock = rate, clock
        self._since, self._owed = clock(), 0.0

    def wait(self) -> float:
        """Seconds until the next chunk may be asked for."""
        if not self.rate:
            return 0.0
        now = self._clock()
        self._owed = max(0.0, self._owed - (now - self._since) * self.rate)
        self._since = now
        return self._owed / self.rate

    def asked(self, nbytes: int) -> None:
        """A chunk is on its way."""
        self.wait()
        self._owed = self._owed + nbytes if self.rate else 0.0
