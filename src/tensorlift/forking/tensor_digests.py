"""Digests of whole tensors: those that a seed was given or has made, and whether a fork has the same bytes.

Digests of chunks say that bytes came as they were sent; these say that they are the right tensor's. They are
XXH3-128 of the digests of blocks of 1 MiB, as ``tensorlift digest`` writes them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

from tensorlift.engine import abi
from tensorlift.engine.abi_fork import tensor_digest
from tensorlift.engine.digesting import check_built
from tensorlift.errors import OptionError
from tensorlift.forking.manifest import ITEM_BYTES, NOWHERE, Tensor, span_bytes
from tensorlift.forking.offering import Offering
from tensorlift.format.quoting import plural, quote, some_of

__all__ = ["checked_digests", "made_digests", "unlike"]

_DIGEST = re.compile("[0-9a-f]{32}")
_SHOWN = 20


def checked_digests(given: object, offering: Offering) -> dict[str, str]:
    """What a caller knows: 32 hexadecimal digits by name; none for True and False. Raises OptionError."""
    if isinstance(given, bool):
        return {}
    if not isinstance(given, Mapping):
        raise OptionError(f"digests is {quote(given)}; expected True, False or digests by name")
    names = {one.name for one in offering.tensors}
    for name, digest in given.items():
        if name not in names:
            raise OptionError(f"digests has {quote(name)}, which the model does not have")
        if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            raise OptionError(
                f"digests has {quote(digest)} for {quote(name)}; expected 32 hexadecimal digits"
            )
    return dict(given)


def made_digests(offering: Offering) -> dict[str, str]:
    """Of all tensors in host memory that have no holes. Raises BackendError where there are no digests."""
    check_built()
    return {one.name: tensor_digest(*place).hex() for one, place in _places(offering)}


def unlike(wanted: Mapping[str, str], ours: Offering) -> str:
    """Those of our tensors in host memory that have other digests, for a message; "" where none has."""
    wrong = [
        one.name
        for one, place in _places(ours)
        if one.name in wanted and tensor_digest(*place).hex() != wanted[one.name]
    ]
    return f"{plural(len(wrong), 'tensor')}: {some_of(wrong, _SHOWN, quote)}" if wrong else ""


def _places(offering: Offering) -> Iterator[tuple[Tensor, tuple[int, int]]]:
    for one in offering.tensors:
        if one.region == NOWHERE:
            continue
        memory, nbytes = offering.memories[one.region], span_bytes(one.dtype, one.shape, one.stride)
        if memory.device_kind == abi.DEVICE_CPU and nbytes == math.prod(one.shape) * ITEM_BYTES[one.dtype]:
            yield one, (memory.address + one.offset, nbytes)
