"""Layout: which arena each wanted tensor goes to, and where in it. Vectorised, linear in the number of
tensors.

Theory of operation
    A *run* is a stretch of tensors that follow each other in one file and keep their distances in memory, so
    that one piece moves all of them. Inside a run, memory address minus file offset is one constant, the
    run's *shift*. A new run begins where wanted bytes are not adjacent, at the edge of an arena, and where a
    tensor's alignment asks for another *residue* of the shift modulo 16. Residues are chosen so that this
    happens seldom:

        file     |hdr 8n+8|  a: F32 x 1000  | b: U8 x 3 | c: F32 x 8 | d: F32 x 8 |
        shift            8                          8         9            9            (modulo 16)
        arena             [a...............][b..]..[c.........][d.........]
                                                 one gap, where the residue changes

    Tensors that demand most choose first (16 bytes, then 8, 4, 2); the others take the residue of the tensor
    before them, or behind them, if their own alignment allows, else their own. On a CPU the shift of long
    runs is a multiple of 4096 wherever dtypes allow it, so that direct reads land in place.

    Stretches of many small tensors go to arenas of their own: a scalar that is kept does not hold a large
    arena back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["PAGE", "Layout", "Rules", "Wanted", "lay_out"]

Ints = npt.NDArray[np.int64]

PAGE = 4096
# Widest alignment that a tensor needs: vector loads of a GPU and of AVX are happy with it, and torch's
# allocators promise more for whole blocks.
WIDE = 16
# On a CPU, tensors from this size on insist on a shift that is a multiple of a page, and runs get that shift:
# direct reads of less are not worth padding of up to a page.
LONG = 64 << 10
SMALL = 4 << 10
SMALL_STRETCH = 8
SMALL_ARENA = 1 << 20
_STRETCH, _OTHER = b"\1" * SMALL_STRETCH, b"\0"  # of booleans that say which are small


class Wanted(NamedTuple):
    """Tensors to place, in order of hand-out: arrays of one element a tensor; starts are offsets in a file.

    Any order is right; in file order runs are the longest.
    """

    files: npt.NDArray[np.int32]
    starts: Ints
    sizes: Ints
    alignments: Ints
    """Powers of two up to 16: what the dtype needs."""
    alone: npt.NDArray[np.bool_] | None = None
    """Tensors whose bytes are no range of their file: each is a run. None: there are none."""


@dataclass(frozen=True, slots=True)
class Rules:
    """How to place: ``capacity`` of an arena in bytes; ``device``: tensors of 16 bytes and more at multiples
    of 16, else (a CPU) arena offset and file offset agree modulo 4096 wherever dtypes allow; ``uniform``:
    arenas that hold several tensors have exactly the capacity, so that blocks can be used again.
    """

    capacity: int
    device: bool = False
    uniform: bool = False
    grid: int = 1
    """Arenas that are exchanged have a multiple of so many bytes."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where tensors go. Batches are consecutive tensors of one arena; they are read and handed out in turn.

    tensor i: ``arenas[i]`` (-1: it has no bytes), ``offsets[i]`` in the arena, ``batches[i]``
    arena a: ``arena_nbytes[a]``, numbered in the order of first use; ``arena_used[a]`` without the spare end;
    ``arena_exchanged[a]``: other ranks have the same one
    run r: ``run_file``, ``run_start`` (file offset), ``run_nbytes``, ``run_arena``, ``run_offset``,
    ``run_batch``, ``run_first`` (its first tensor)
    """

    arenas: npt.NDArray[np.int32]
    offsets: Ints
    batches: npt.NDArray[np.int32]
    arena_nbytes: Ints
    arena_used: Ints
    arena_exchanged: npt.NDArray[np.bool_]
    run_file: npt.NDArray[np.int32]
    run_start: Ints
    run_nbytes: Ints
    run_arena: npt.NDArray[np.int32]
    run_offset: Ints
    run_batch: npt.NDArray[np.int32]
    run_first: Ints
    batch_count: int


class _Placed(NamedTuple):
    arenas: Ints
    offsets: Ints
    breaks: npt.NDArray[np.bool_]
    sizes: Ints
    used: Ints


def lay_out(wanted: Wanted, rules: Rules, exchanged: npt.NDArray[np.bool_] | None = None) -> Layout:
    """Places every wanted tensor that has bytes exactly once; see the top of this module for the rules.

    ``exchanged``: the tensors that other ranks want as well, in arenas that depend on nothing but these, the
    capacity and the grid.
    """
    count = len(wanted.starts)
    if count and exchanged is None and wanted.sizes.min() > 0 and not _has_small_stretches(wanted):
        # The usual case by itself: numpy gives the GIL away for each operation on more than 500 elements.
        return _assemble_plain(wanted, _place(wanted, rules, rules.capacity))
    some = np.flatnonzero(wanted.sizes > 0)
    body = _take(wanted, some)
    arena, offset = np.empty(len(some), np.int64), np.empty(len(some), np.int64)
    fresh, sizes, used, shared = np.zeros(len(some), bool), [], [], []
    made = 0
    for rows, capacity, together in _classes(body, rules, None if exchanged is None else exchanged[some]):
        placed = _place(_take(body, rows), rules, capacity)
        arena[rows], offset[rows], fresh[rows] = placed.arenas + made, placed.offsets, placed.breaks
        sizes.append(-(-placed.sizes // rules.grid) * rules.grid if together else placed.sizes)
        used.append(placed.used)
        shared.append(np.full(len(placed.sizes), together, np.int64))
        made += len(placed.sizes)
    # A stretch of small tensors among others ends the run on both sides.
    fresh[1:] |= arena[1:] != arena[:-1]
    renumbered, columns = _by_first_use(arena, [sizes, used, shared])
    return _assemble(count, some, body, renumbered, offset, fresh, columns)


def _classes(
    body: Wanted, rules: Rules, exchanged: npt.NDArray[np.bool_] | None
) -> Iterator[tuple[Ints, int, bool]]:
    """Tensors that share arenas: their rows, the capacity, whether other ranks have the same arenas.

    Those that are exchanged are looked at without the others, which differ from rank to rank.
    """
    parts = (
        [(None, False)]
        if exchanged is None
        else [(np.flatnonzero(~exchanged), False), (np.flatnonzero(exchanged), True)]
    )
    for part, together in parts:
        small = _small_stretches(body if part is None else _take(body, part))
        for chosen, capacity in ((~small, rules.capacity), (small, min(SMALL_ARENA, rules.capacity))):
            rows = np.flatnonzero(chosen)
            if len(rows):
                yield rows if part is None else part[rows], capacity, together


def _take(wanted: Wanted, rows: Ints) -> Wanted:
    alone = None if wanted.alone is None else wanted.alone[rows]
    return Wanted(wanted.files[rows], wanted.starts[rows], wanted.sizes[rows], wanted.alignments[rows], alone)


def _has_small_stretches(body: Wanted) -> bool:
    """Whether any tensor is packed apart: see _small_stretches()."""
    small = (body.sizes < SMALL).tobytes()
    return _STRETCH in small and (_OTHER in small or int(body.sizes.sum()) > SMALL_ARENA)


def _small_stretches(body: Wanted) -> npt.NDArray[np.bool_]:
    """Which tensors are packed apart: those in stretches of many small ones."""
    small = body.sizes < SMALL
    if not small.any() or (small.all() and int(body.sizes.sum()) <= SMALL_ARENA):
        return np.zeros(len(small), bool)
    edges = np.flatnonzero(np.concatenate(([True], small[1:] != small[:-1])))
    lengths = np.diff(np.concatenate((edges, [len(small)])))
    return np.repeat(small[edges] & (lengths >= SMALL_STRETCH), lengths)


def _place(body: Wanted, rules: Rules, capacity: int) -> _Placed:
    """Arena, offset and run breaks of tensors that all have bytes, in the order given."""
    files, starts, sizes, _, alone = body
    ends = starts + sizes
    apart = np.ones(len(starts), bool)
    apart[1:] = starts[1:] != ends[:-1]
    # As bytes, which keeps the GIL. First and last alone would not do: tensors may come in any order.
    if files.tobytes() != files[:1].tobytes() * len(files):
        apart[1:] |= files[1:] != files[:-1]
    if alone is not None:
        apart[1:] |= alone[1:] | alone[:-1]
    residues = _residues(body, apart, rules)
    breaks = apart.copy()
    breaks[1:] |= residues[1:] != residues[:-1]

    first = np.flatnonzero(breaks)
    last = np.concatenate((first[1:], [len(starts)])) - 1
    length = ends[last] - starts[first]
    # Positions in one endless arena. Run r starts at a position that agrees with its file offset plus residue
    # modulo `step`; modulo a page that costs up to a page, so only long runs get it.
    step = np.where(length >= LONG, PAGE, WIDE)
    target = (starts[first] + residues[first]) % step
    position = _positions(length, step, target)
    shift = np.repeat(position - starts[first], np.diff(np.concatenate((first, [len(starts)]))))
    begin = starts + shift
    return _cut(begin, begin + sizes, breaks, rules, capacity)


def _residues(body: Wanted, apart: npt.NDArray[np.bool_], rules: Rules) -> Ints:
    """The shift of each tensor modulo 16; ``apart`` says where a tensor does not follow the one before it."""
    count = len(body.starts)
    if rules.device and body.sizes.min(initial=WIDE) >= WIDE:
        return -body.starts & (WIDE - 1)  # all demand the most, and so settle it
    index = np.arange(count)
    edges = np.flatnonzero(apart)
    stretch = np.cumsum(apart) - 1
    opens, closes = edges[stretch], np.concatenate((edges[1:], [count]))[stretch]

    demand = np.where(body.sizes >= WIDE, WIDE, body.alignments) if rules.device else body.alignments
    needs = -body.starts % demand
    residues = np.zeros(count, np.int64)
    settled = np.zeros(count, bool) if rules.device else (body.sizes >= LONG) & (needs == 0)
    for level in (WIDE, 8, 4, 2, 1):
        rows = np.flatnonzero((demand == level) & ~settled)
        if not len(rows):
            continue
        before = np.maximum.accumulate(np.where(settled, index, -1))[rows]
        behind = np.minimum.accumulate(np.where(settled, index, count)[::-1])[::-1][rows]
        choice = needs[rows]
        own = choice.copy()
        # The last assignment wins: the tensor before, else the one behind, else what the tensor itself needs.
        for near, there in ((behind, behind < closes[rows]), (before, before >= opens[rows])):
            theirs = residues[np.where(there, near, 0)]
            choice = np.where(there & ((theirs - own) % level == 0), theirs, choice)
        residues[rows] = choice
        settled[rows] = True
    return residues


def _positions(length: Ints, step: Ints, target: Ints) -> Ints:
    """Least positions, run after run, with position % step == target."""
    position = []
    at = 0
    for size, modulus, wants in zip(length.tolist(), step.tolist(), target.tolist(), strict=True):
        at += (wants - at) % modulus
        position.append(at)
        at += size
    return np.array(position, np.int64)


def _cut(begin: Ints, end: Ints, breaks: npt.NDArray[np.bool_], rules: Rules, capacity: int) -> _Placed:
    """Cuts the endless arena into arenas: as many tensors as fit, at least one."""
    firsts, bases = [], []
    at = 0
    while at < len(begin):
        # Whole pages, so that cutting keeps residues.
        base = int(begin[at]) // PAGE * PAGE
        firsts.append(at)
        bases.append(base)
        at = max(int(np.searchsorted(end, base + capacity, side="right")), at + 1)
    edges = np.array(firsts, np.int64)
    base_of, counts = np.array(bases, np.int64), np.diff(np.concatenate((edges, [len(begin)])))
    breaks[edges] = True
    used = end[edges + counts - 1] - base_of
    spare = rules.uniform and len(edges) > 1
    sizes = np.where(used <= capacity, capacity, used) if spare else used
    return _Placed(
        np.repeat(np.arange(len(edges)), counts), begin - np.repeat(base_of, counts), breaks, sizes, used
    )


def _by_first_use(arena: Ints, columns: list[list[Ints]]) -> tuple[Ints, list[Ints]]:
    """Arenas numbered in the order in which tensors reach them, and so their columns."""
    if not columns[0]:
        return arena, [np.zeros(0, np.int64) for _ in columns]
    old, first = np.unique(arena, return_index=True)
    order = old[np.argsort(first)]
    new_of = np.empty(len(order), np.int64)
    new_of[order] = np.arange(len(order))
    return new_of[arena], [np.concatenate(column)[order] for column in columns]


def _assemble_plain(wanted: Wanted, placed: _Placed) -> Layout:
    """Where all tensors have bytes and none is packed apart: arenas come in order, and are the batches."""
    arenas, first = placed.arenas.astype(np.int32), np.flatnonzero(placed.breaks)
    return Layout(
        arenas=arenas,
        offsets=placed.offsets,
        batches=arenas,
        arena_nbytes=placed.sizes,
        arena_used=placed.used,
        arena_exchanged=np.zeros(len(placed.used), bool),
        run_file=wanted.files[first],
        run_start=wanted.starts[first],
        run_nbytes=np.add.reduceat(wanted.sizes, first),
        run_arena=arenas[first],
        run_offset=placed.offsets[first],
        run_batch=arenas[first],
        run_first=first,
        batch_count=len(placed.sizes),
    )


def _assemble(
    count: int,
    some: Ints,
    body: Wanted,
    arena: Ints,
    offset: Ints,
    fresh: npt.NDArray[np.bool_],
    columns: list[Ints],
) -> Layout:
    arenas, offsets = np.full(count, -1, np.int32), np.zeros(count, np.int64)
    arenas[some], offsets[some] = arena, offset
    # Tensors without bytes go with the batch before them, or with the first one.
    turn = np.zeros(count, np.int32)
    turn[some[1:]] = arena[1:] != arena[:-1]
    batches = np.cumsum(turn, dtype=np.int32)
    first = np.flatnonzero(fresh)
    return Layout(
        arenas=arenas,
        offsets=offsets,
        batches=batches,
        arena_nbytes=columns[0],
        arena_used=columns[1],
        arena_exchanged=columns[2] > 0,
        run_file=body.files[first],
        run_start=body.starts[first],
        run_nbytes=np.add.reduceat(body.sizes, first) if len(first) else np.zeros(0, np.int64),
        run_arena=arena[first].astype(np.int32),
        run_offset=offset[first],
        run_batch=batches[some][first],
        run_first=some[first],
        batch_count=int(batches[-1]) + 1 if count else 0,
    )
