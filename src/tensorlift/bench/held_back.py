"""What an arena holds back: bytes beyond those of the tensors that are kept, computed from headers alone."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table as Lines

from tensorlift import sources
from tensorlift.bench.cases import in_shards, write_holes
from tensorlift.bench.geometry import MODELS
from tensorlift.plan.arenas import Rules, Wanted, lay_out

__all__ = ["ARENA_SIZES", "HeldBack", "held_back", "held_back_of_model", "show_held_back"]

MIB = 1 << 20
ARENA_SIZES = tuple(size * MIB for size in (16, 32, 64, 128, 256, 258))
"""What is compared; the last is the automatic choice on a device."""
EVERY = 50


@dataclass(frozen=True, slots=True)
class HeldBack:
    """What is kept of one checkpoint, by the size of an arena. Sizes are bytes."""

    arena_size: int
    arenas: int
    arena_bytes: int
    tensors_kept: int
    bytes_kept: int
    arenas_held: int
    bytes_held: int

    @property
    def beyond(self) -> int:
        """Held beyond what the kept tensors need."""
        return self.bytes_held - self.bytes_kept

    def record(self) -> dict[str, Any]:
        """Plain values for the file."""
        return {name: getattr(self, name) for name in (*self.__slots__, "beyond")}


def held_back(path: str | Path, arena_size: int, every: int = EVERY) -> HeldBack:
    """Of a load() to a device of which each ``every``-th tensor is kept and the others dropped."""
    from tensorlift.tensors.views import Table  # torch only now

    rules = Rules(arena_size, device=True)
    seen = arenas = arena_bytes = tensors_kept = bytes_kept = arenas_held = bytes_held = 0
    # load() lays the files out in the same parts.
    for part in sources.read_headers_in_parts(sources.find(str(path))):
        table = Table(part, part.select())
        layout = lay_out(Wanted(table.files, table.starts, table.sizes, table.alignments), rules)
        kept = (seen + np.arange(len(table.sizes))) % every == 0
        held = np.unique(layout.arenas[kept & (layout.arenas >= 0)])
        seen += len(table.sizes)
        arenas += len(layout.arena_nbytes)
        arena_bytes += int(layout.arena_nbytes.sum())
        tensors_kept += int(kept.sum())
        bytes_kept += int(table.sizes[kept].sum())
        arenas_held += len(held)
        bytes_held += int(layout.arena_nbytes[held].sum())
    return HeldBack(arena_size, arenas, arena_bytes, tensors_kept, bytes_kept, arenas_held, bytes_held)


def held_back_of_model(
    layers: int, shards: int, sizes: Sequence[int] = ARENA_SIZES, every: int = EVERY
) -> list[HeldBack]:
    """The same for Qwen3-30B-A3B cut to some layers, whose files are written as headers and holes."""
    parts = in_shards(MODELS["qwen3-30b-a3b"].specs(layers), shards)
    with tempfile.TemporaryDirectory() as folder:
        write_holes(Path(folder), parts)
        return [held_back(folder, size, every) for size in sizes]


def show_held_back(found: Sequence[HeldBack]) -> None:
    """Prints the table on stdout, in the form of the documents."""
    table = Lines(box=None, pad_edge=False, header_style="bold")
    for column in ("arena_size MiB", "arenas", "kept tensors", "kept GB", "held GB", "held beyond GB"):
        table.add_column(column, justify="right")
    for one in found:
        table.add_row(
            f"{one.arena_size // MIB}",
            f"{one.arenas}",
            f"{one.tensors_kept}",
            f"{one.bytes_kept / 1e9:.2f}",
            f"{one.bytes_held / 1e9:.2f}",
            f"{one.beyond / 1e9:.2f}",
        )
    Console(width=110, highlight=False, markup=False).print(table)
