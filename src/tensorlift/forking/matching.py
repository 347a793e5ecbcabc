"""Which bytes of a seed's regions go where in a fork: tensors in pairs, as runs of bytes, cut into chunks."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tensorlift.engine.abi_fork import Memory
from tensorlift.errors import ForkError
from tensorlift.forking.chunks import Chunk, cut
from tensorlift.forking.manifest import ITEM_BYTES, NOWHERE, Tensor, span_bytes
from tensorlift.format.quoting import quote
from tensorlift.plan.extents import Extents, merge_extents

__all__ = ["Copies", "Errand", "copies_of", "errands"]

Ints = npt.NDArray[np.int64]

# Bytes between two wanted runs that are moved and dropped rather than asked around: padding, alignment.
_GAP_BYTES = 64 << 10
# Each takes some 200 bytes while a fork is planned, and that a tensor has so many may be a seed's word alone.
_MOST_RUNS = 4 << 20
_SHOWN = 4


class Copies(NamedTuple):
    """Runs of bytes: [offset, offset + nbytes) of a region to an address; each wanted byte once."""

    regions: Ints
    offsets: Ints
    nbytes: Ints
    addresses: Ints
    devices: Ints
    """As _number() has them."""


class Errand(NamedTuple):
    """A chunk, and where its bytes go: (n, 3) of bytes from its first, bytes, address; see fetch_chunk()."""

    chunk: Chunk
    places: npt.NDArray[np.uint64]
    device: tuple[int, int]
    """Kind and index of the device that all places are on."""


_DEVICES = 1 << 16


def _number(memory: Memory) -> int:
    return memory.device_kind * _DEVICES + memory.device_index


def copies_of(theirs: Sequence[Tensor], ours: Sequence[Tensor], memories: Sequence[Memory]) -> Copies:
    """What to copy so that our tensors are as theirs of the same names, which have the same layout.

    memories: our regions. Tensors with holes between their elements are copied run by run,
    so that what lies in the holes stays. Raises ForkError where two of our tensors share memory that those of
    the seed do not share in the same way: one of them would be wrong; and for more runs than can be planned.
    """
    here: Mapping[str, Tensor] = {tensor.name: tensor for tensor in ours}
    rows: list[tuple[Ints, ...]] = []
    dense: list[tuple[int, int, int, int, int]] = []
    devices = [_number(memory) for memory in memories]
    count = 0
    for tensor in theirs:
        mine = here.get(tensor.name)
        if mine is None or tensor.region == NOWHERE:
            continue
        address, device = memories[mine.region].address + mine.offset, devices[mine.region]
        nbytes, holes = _holes(tensor)
        count += math.prod(size for _, size in holes)
        if count > _MOST_RUNS:
            raise ForkError(
                f"{quote(tensor.name)}, of shape {quote(tensor.shape)} and stride {quote(tensor.stride)}, "
                f"lies in so many pieces that there are more than {_MOST_RUNS:,} in all; make it contiguous"
            )
        starts = _starts(holes)
        if len(starts) == 1:
            dense.append((tensor.region, tensor.offset, nbytes, address, device))
        else:
            full = np.full_like(starts, 1)
            offsets, places = tensor.offset + starts, address + starts
            rows.append((tensor.region * full, offsets, nbytes * full, places, device * full))
    columns = np.array(dense, np.int64).reshape(-1, 5).T
    parts = [tuple(columns), *rows]
    copies = _once(Copies(*(np.concatenate([part[at] for part in parts]) for at in range(5))))
    if (place := _written_twice(copies)) is not None:
        raise ForkError(
            f"tensors here share memory, and those of the seed do not share it alike: "
            f"{_names_at(place, ours, memories)}; the bytes of one would be written over those of another: "
            "tie or untie them as they are in the seed"
        )
    return copies


def _written_twice(copies: Copies) -> tuple[int, int] | None:
    """(address, device) of a byte that more than one run goes to, if there is one."""
    order = np.lexsort((copies.addresses, copies.devices))
    starts, devices = copies.addresses[order], copies.devices[order]
    stops = starts + copies.nbytes[order]
    # The first that overlaps any before it overlaps the one just before it.
    twice = np.flatnonzero((np.diff(devices) == 0) & (starts[1:] < stops[:-1]))
    return (int(starts[twice[0] + 1]), int(devices[twice[0] + 1])) if len(twice) else None


def _names_at(place: tuple[int, int], ours: Sequence[Tensor], memories: Sequence[Memory]) -> str:
    """Some of our tensors that lie around an address of a device."""
    address, device = place
    found = []
    for tensor in ours:
        if tensor.region == NOWHERE or _number(memories[tensor.region]) != device:
            continue
        begin = memories[tensor.region].address + tensor.offset
        if begin <= address < begin + span_bytes(tensor.dtype, tensor.shape, tensor.stride):
            found.append(quote(tensor.name))
    return ", ".join(found[:_SHOWN])


def _holes(tensor: Tensor) -> tuple[int, list[tuple[int, int]]]:
    """(bytes that lie in one run, (bytes to the next, how many) of each dimension of runs)."""
    item = ITEM_BYTES[tensor.dtype]
    # An expanded dimension is the same bytes again.
    pairs = zip(tensor.stride, tensor.shape, strict=True)
    dims = sorted((stride * item, size) for stride, size in pairs if size > 1 and stride > 0)
    block = item
    while dims and dims[0][0] == block:
        block *= dims.pop(0)[1]
    return block, dims


def _starts(holes: list[tuple[int, int]]) -> Ints:
    """First byte of each run, counted from the tensor's first."""
    starts = np.zeros(1, np.int64)
    for stride, size in reversed(holes):
        starts = (starts[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
    return starts


def _once(given: Copies) -> Copies:
    """Runs that lie side by side on both sides, or on one another, as one. In order of region and offset."""
    shift = given.addresses - given.offsets
    order = np.lexsort((given.offsets, shift, given.devices, given.regions))
    regions, offsets, nbytes, addresses, devices = (column[order] for column in given)
    if len(order) == 0:
        return given
    same = (np.diff(regions) == 0) & (np.diff(addresses - offsets) == 0) & (np.diff(devices) == 0)
    stops = offsets + nbytes
    reach = _reach(stops, np.concatenate(([True], ~same)))
    first = np.concatenate(([True], ~(same & (offsets[1:] <= reach[:-1]))))
    last = np.concatenate((first[1:], [True]))
    regions, offsets, addresses = regions[first], offsets[first], addresses[first]
    merged = Copies(regions, offsets, reach[last] - offsets, addresses, devices[first])
    order = np.lexsort((merged.offsets, merged.regions))
    return Copies(*(column[order] for column in merged))


def _reach(stops: Ints, begins: npt.NDArray[np.bool_]) -> Ints:
    """The greatest stop so far, counted anew where a group begins."""
    falls = np.flatnonzero((stops[1:] < stops[:-1]) & ~begins[1:])
    if len(falls) == 0:
        return stops
    reach: Ints = stops.copy()
    for at in range(int(falls[0]) + 1, len(stops)):
        if not begins[at]:
            reach[at] = max(reach[at], reach[at - 1])
    return reach


def errands(copies: Copies, chunk_bytes: int) -> list[Errand]:
    """Chunks of at most so many bytes that bring all of it."""
    found: list[Errand] = []
    for device in np.unique(copies.devices).tolist():
        for layer in _layers(_where(copies, copies.devices == device)):
            begins = np.flatnonzero(np.diff(layer.regions, prepend=-1)).tolist()
            for begin, end in itertools.pairwise([*begins, len(layer.regions)]):
                some = Copies(*(column[begin:end] for column in layer))
                found += _errands_of(int(some.regions[0]), some, chunk_bytes, device)
    return found


def _where(copies: Copies, mask: npt.NDArray[np.bool_]) -> Copies:
    return Copies(*(column[mask] for column in copies))


def _layers(copies: Copies) -> Iterator[Copies]:
    """Parts that share no byte of a region within themselves: one byte may go to two places."""
    stops = copies.offsets + copies.nbytes
    # Most models have none that overlap.
    if not ((np.diff(copies.regions) == 0) & (copies.offsets[1:] < stops[:-1])).any():
        yield copies
        return
    layers = np.zeros(len(stops), np.int64)
    region, ends = -1, list[tuple[int, int]]()  # of the region's layers: where each ends, and its number
    rows = zip(copies.regions.tolist(), copies.offsets.tolist(), stops.tolist(), strict=True)
    for at, (here, start, stop) in enumerate(rows):
        if here != region:
            region, ends = here, []
        if ends and ends[0][0] <= start:
            layers[at] = ends[0][1]
            heapq.heapreplace(ends, (stop, ends[0][1]))
        else:
            layers[at] = len(ends)
            heapq.heappush(ends, (stop, len(ends)))
    order = np.argsort(layers, kind="stable")
    for some in np.split(order, np.flatnonzero(np.diff(layers[order])) + 1):
        yield Copies(*(column[some] for column in copies))


def _errands_of(region: int, copies: Copies, chunk_bytes: int, device: int) -> Iterator[Errand]:
    starts, stops = copies.offsets, copies.offsets + copies.nbytes
    wanted = merge_extents(Extents(starts, stops), gap=_GAP_BYTES)
    for chunk in cut(region, wanted, chunk_bytes):
        end = chunk.offset + chunk.nbytes
        some = slice(
            np.searchsorted(stops, chunk.offset, side="right"), np.searchsorted(starts, end, side="left")
        )
        begin = np.maximum(starts[some], chunk.offset)
        stop = np.minimum(stops[some], end)
        address = copies.addresses[some] + (begin - starts[some])
        if len(begin):  # else a gap is as long as a chunk
            places = np.stack((begin - chunk.offset, stop - begin, address), axis=1).astype(np.uint64)
            yield Errand(chunk, places, divmod(device, _DEVICES))
