"""What a seed says to an SGLang that wants its weights by SGLang's own protocol: see sglang_protocol.py.

SGLang takes no lease, so one is held for it, for as long as one lasts. An update waits for that no longer
than its timeout, and an SGLang that reads on behind it gets some of the old weights and some of the new,
without an error: the protocol has nothing to tell it by.
"""

from __future__ import annotations

import math
import urllib.parse
from collections.abc import Sequence
from typing import Any

from tensorlift.engine.abi_fork import Memory
from tensorlift.forking.manifest import ITEM_BYTES, NOWHERE, Tensor, span_bytes

__all__ = ["PATHS", "info", "rank_of"]

PATHS = ("/get_remote_instance_transfer_engine_info", "/remote_instance_transfer_engine_info")
"""As it was called first, and as newer ones call it."""


def rank_of(path: str) -> int | None:
    """The rank that is asked for; None for another path, -1 for none that is one."""
    base, _, query = path.partition("?")
    if base not in PATHS:
        return None
    text = (urllib.parse.parse_qs(query).get("rank") or [""])[0]
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else -1


def info(rank: int, session: str, tensors: Sequence[Tensor], memories: Sequence[Memory]) -> dict[str, Any]:
    """The answer: every tensor whose bytes lie in one piece."""
    places: dict[str, tuple[int, int, int]] = {}
    for tensor in tensors:
        if tensor.region == NOWHERE:
            continue
        item, span = ITEM_BYTES[tensor.dtype], span_bytes(tensor.dtype, tensor.shape, tensor.stride)
        items = math.prod(tensor.shape)
        if span == items * item:
            places[tensor.name] = (memories[tensor.region].address + tensor.offset, items, item)
    return {"rank": rank, "remote_instance_transfer_engine_info": [session, places]}
