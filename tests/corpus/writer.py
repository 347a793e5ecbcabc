"""Writes the files of the cases, and the book of what is in them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from corpus.oracle import MARK_BYTES, payload
from support.checkpoints import nbytes_of, write_raw


class Entry:
    """One tensor of a case."""

    def __init__(self, name: str, dtype: str, shape: Sequence[int], seed: int) -> None:
        self.name, self.dtype, self.shape, self.seed = name, dtype, list(shape), seed
        self.nbytes = nbytes_of(dtype, shape)

    def doc(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("name", "dtype", "shape", "seed", "nbytes")}


def header_of(entries: Iterable[Entry], metadata: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The header as an object; the data lie in the order of the entries."""
    head: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    at = 0
    for e in entries:
        head[e.name] = {"dtype": e.dtype, "shape": e.shape, "data_offsets": [at, at + e.nbytes]}
        at += e.nbytes
    return head


def encode(head: dict[str, Any], align: int = 8, length: int | None = None) -> bytes:
    """JSON bytes, filled with spaces to a multiple of `align`, or to exactly `length`."""
    raw = json.dumps(head, separators=(",", ":"), ensure_ascii=False).encode()
    wanted = length if length is not None else -(-len(raw) // align) * align
    if wanted < len(raw):
        raise ValueError("the header is longer than asked")
    return raw + b" " * (wanted - len(raw))


def data_of(entries: Iterable[Entry]) -> bytes:
    return b"".join(payload(e.seed, e.nbytes, e.dtype) for e in entries)


def simple(
    path: Path, entries: Sequence[Entry], metadata: Mapping[str, str] | None = None, **fill: int
) -> None:
    """A good file."""
    if path.is_symlink():
        path.unlink()
    write_raw(path, encode(header_of(entries, metadata), **fill), data_of(entries))


def sparse(path: Path, rows: Sequence[tuple[str, str, list[int], list[tuple[int, int]]]]) -> dict[str, Any]:
    """A file of holes with marks; rows: (name, dtype, shape, [(offset of a mark, its seed)])."""
    at, head, marks, entries = 0, {}, [], []
    for name, dtype, shape, placed in rows:
        nbytes = nbytes_of(dtype, shape)
        head[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + nbytes]}
        marks += [(at + offset, seed) for offset, seed in placed]
        entries.append(
            {
                "name": name,
                "dtype": dtype,
                "shape": shape,
                "nbytes": nbytes,
                "marks": [list(m) for m in placed],
            }
        )
        at += nbytes
    raw = encode(head)
    write_raw(path, raw)
    with open(path, "r+b") as file:
        file.truncate(8 + len(raw) + at)
        for offset, seed in marks:
            file.seek(8 + len(raw) + offset)
            file.write(payload(seed, MARK_BYTES))
    return {"rule": "sparse", "entries": entries}


def model_folder(
    folder: Path, shards: Mapping[str, list[Entry]], leave_out: Sequence[str] = ()
) -> dict[Path, list[Entry]]:
    """Writes shards and an index over all of them; gives those that were written."""
    weights: dict[str, str] = {}
    for name, entries in shards.items():
        if name not in leave_out:
            simple(folder / name, entries, metadata={"format": "pt"})
        weights.update({e.name: name for e in entries})
    total = sum(e.nbytes for entries in shards.values() for e in entries)
    index = {"metadata": {"total_size": total}, "weight_map": weights}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return {folder / name: entries for name, entries in shards.items() if name not in leave_out}


def shard_set(count: int, per: int = 3, elements: int = 1000) -> dict[str, list[Entry]]:
    """Entries of `count` shards with `per` tensors each."""
    return {
        f"model-{i + 1:05d}-of-{count:05d}.safetensors": [
            Entry(f"layers.{i}.w{k}", ("BF16", "F32", "U8")[k % 3], [elements + k], i * per + k)
            for k in range(per)
        ]
        for i in range(count)
    }


class Book:
    """The cases that were written."""

    def __init__(self, out: Path, big: bool) -> None:
        self.out, self.big = out, big
        self.cases: list[dict[str, Any]] = []

    def folder(self, case: str) -> Path:
        path = self.out / case
        path.mkdir(parents=True, exist_ok=True)
        return path

    def relative(self, path: Path) -> str:
        return os.path.relpath(path, self.out)

    def add(
        self,
        case: str,
        kind: str,
        reports: list[str],
        do: str,
        outcome: str,
        right: str,
        files: Iterable[Path],
        tensors: Mapping[Path, Any] | None = None,
        **more: Any,
    ) -> None:
        row: dict[str, Any] = {"id": case, "kind": kind, "reports": reports, "do": do, "outcome": outcome}
        row |= {"right": right, "files": [self.relative(f) for f in files], "unit": "file"}
        if tensors is not None:
            row["tensors"] = {
                self.relative(f): [e.doc() for e in t] if isinstance(t, list) else t
                for f, t in tensors.items()
            }
        self.cases.append(row | more)


Maker = Callable[[Book, str], None]
CASES: dict[str, Maker] = {}
"""Every case by its id, in the order of the modules that define them."""

LOAD = "open each file by itself, read every tensor to CPU (then to a GPU where there is one)"
OPEN = "open each file by itself and try to read every tensor"
MIX = [
    ("a.weight", "F32", [5, 3]),
    ("b.scale", "F64", [3]),
    ("c.idx", "I64", [2]),
    ("d.bf", "BF16", [7]),
    ("e.flag", "BOOL", [3]),
    ("f.byte", "U8", [1]),
    ("g.half", "F16", [2, 2]),
]


def mix() -> list[Entry]:
    return [Entry(name, dtype, shape, 1 + i) for i, (name, dtype, shape) in enumerate(MIX)]


def case(maker: Maker) -> Maker:
    """Registers the function as the case of its name."""
    CASES[maker.__name__] = maker
    return maker
