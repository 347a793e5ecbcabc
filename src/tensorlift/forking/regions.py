"""Regions of memory that a seed lets others read: few of them, and nothing in them that is not the model's.

Registering memory for one-sided reads costs by the region, so that which lies together becomes one region:
on the host, and where another allocator than torch's native one serves a device, what one storage holds; on
a device what lies in adjacent blocks of one segment of torch's allocator. A block in between that holds
nothing of the model ends a region.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tensorlift.errors import RequestError
from tensorlift.format.quoting import quote
from tensorlift.plan.extents import Extents

__all__ = ["Blocks", "Placed", "Regions", "regions_by_block", "regions_by_storage"]

Ints = npt.NDArray[np.int64]


class Placed(NamedTuple):
    """Tensors that have bytes, as addresses in memory."""

    names: Sequence[str]
    extents: Extents
    """From the first byte of each to its last."""
    storages: Ints
    """The address of each one's storage."""


class Blocks(NamedTuple):
    """Active blocks of torch's allocator on one device, in the order of their addresses."""

    extents: Extents
    segments: Ints
    """The address of the segment that each lies in."""


class Regions(NamedTuple):
    """What is offered, and in which of it each tensor lies."""

    extents: Extents
    region_of: Ints
    offsets: Ints
    """Bytes from the region's first to the tensor's."""


def regions_by_storage(tensors: Placed) -> Regions:
    """One region a storage, from the first byte that a tensor has in it to the last."""
    _, group_of = np.unique(tensors.storages, return_inverse=True)
    return _grouped(tensors.extents, group_of)


def regions_by_block(tensors: Placed, blocks: Blocks) -> Regions:
    """One region for adjacent blocks of a segment that hold tensors.

    Raises RequestError for a tensor that no block holds.
    """
    starts, stops = tensors.extents
    at = np.searchsorted(blocks.extents.starts, starts, side="right") - 1
    outside = at < 0
    outside[~outside] = stops[~outside] > blocks.extents.stops[at[~outside]]
    if outside.any():
        first = int(np.argmax(outside))
        raise RequestError(
            f"{quote(tensors.names[first])} ({stops[first] - starts[first]:,} bytes) lies in no block of "
            "torch's allocator, so nothing is known of the memory around it: a memory saver or another "
            "allocator made it; copy it into a tensor of torch's, or offer a model without it"
        )
    used = np.unique(at)
    follows = (blocks.extents.starts[used[1:]] == blocks.extents.stops[used[:-1]]) & (
        blocks.segments[used[1:]] == blocks.segments[used[:-1]]
    )
    group_of_block = np.concatenate(([0], np.cumsum(~follows))) if len(used) else np.zeros(0, np.int64)
    return _grouped(tensors.extents, group_of_block[np.searchsorted(used, at)])


def _grouped(extents: Extents, group_of: Ints) -> Regions:
    """A region for each group, in the order of their first tensors: addresses differ between two instances of
    one model, and their regions should not.
    """
    count = int(group_of.max()) + 1 if len(group_of) else 0
    starts, stops = np.full(count, np.iinfo(np.int64).max), np.zeros(count, np.int64)
    np.minimum.at(starts, group_of, extents.starts)
    np.maximum.at(stops, group_of, extents.stops)
    order = np.argsort(np.unique(group_of, return_index=True)[1], kind="stable")
    number = np.empty(count, np.int64)
    number[order] = np.arange(count)
    region_of = number[group_of]
    starts, stops = starts[order], stops[order]
    return Regions(Extents(starts, stops), region_of, extents.starts - starts[region_of])
