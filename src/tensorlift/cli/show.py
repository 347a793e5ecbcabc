"""``tensorlift show``: what a checkpoint holds, from its headers alone."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table

from tensorlift.cli.console import data_console, guarded, named
from tensorlift.format.quoting import clean, plural
from tensorlift.stats import human_bytes

if TYPE_CHECKING:
    from tensorlift.format.checkpoint import Checkpoint

__all__ = ["command", "describe"]


@guarded
def command(
    paths: list[str] = typer.Argument(metavar="PATH", help="A file, files, a folder or a Hub id."),
    depth: int = typer.Option(
        4, "--depth", min=1, metavar="NUMBER", help="How many parts of a name make a prefix."
    ),
    tensors: bool = typer.Option(False, "--tensors", help="List every tensor."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Show files, dtypes, bytes by prefix and tensors of a checkpoint; reads headers only."""
    from tensorlift import sources  # numpy and msgspec only when needed

    checkpoint = sources.read_headers(sources.find(named(paths), download=False))
    facts = describe(checkpoint, depth, tensors)
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        _print(facts)


def describe(checkpoint: Checkpoint, depth: int, tensors: bool) -> dict[str, Any]:
    """Plain facts of a checkpoint. Sizes are bytes; a number inside a name becomes ``*`` in its prefix."""
    from tensorlift.format import dtypes

    sizes = checkpoint.sizes.tolist()
    codes = [dtypes.ALL[i].code for i in checkpoint.dtypes.tolist()]
    prefixes = [_prefix(name, depth) for name in checkpoint.names]
    facts: dict[str, Any] = {
        "tensors": len(sizes),
        "bytes": sum(sizes),
        "metadata": checkpoint.metadata,
        "files": [
            {"path": shard.path, "bytes": shard.nbytes, "tensors": len(shard.header.names)}
            for shard in checkpoint.shards
        ],
        "dtypes": _summed(codes, sizes),
        "prefixes": _summed(prefixes, sizes),
    }
    if tensors:
        facts["list"] = [
            {
                "name": name,
                "dtype": code,
                "shape": list(shape),
                "bytes": size,
                "file": checkpoint.shards[shard].path,
                "offset": start,
            }
            for name, code, shape, size, shard, start in zip(
                checkpoint.names,
                codes,
                checkpoint.shapes,
                sizes,
                checkpoint.shard_of.tolist(),
                checkpoint.starts.tolist(),
                strict=True,
            )
        ]
    return facts


def _prefix(name: str, depth: int) -> str:
    parts = name.split(".")
    shown = ["*" if part.isdigit() else part for part in parts[:depth]]
    return ".".join(shown) + (".…" if len(parts) > depth else "")


def _summed(keys: list[str], sizes: list[int]) -> dict[str, dict[str, int]]:
    """Tensors and bytes by key, the largest first."""
    sums: dict[str, dict[str, int]] = {}
    for key, size in zip(keys, sizes, strict=True):
        entry = sums.setdefault(key, {"tensors": 0, "bytes": 0})
        entry["tensors"] += 1
        entry["bytes"] += size
    return dict(sorted(sums.items(), key=lambda item: -item[1]["bytes"]))


def _print(facts: dict[str, Any]) -> None:
    console = data_console()
    total = facts["bytes"]
    console.print(
        f"{plural(facts['tensors'], 'tensor')}, {human_bytes(total)}, {plural(len(facts['files']), 'file')}"
    )
    for key, value in (facts["metadata"] or {}).items():
        console.print(f"metadata {clean(key)}: {clean(value)}")
    console.print(_files_table(facts["files"]))
    for title, key in (("dtype", "dtypes"), ("prefix", "prefixes")):
        table = _table(title, "tensors", "bytes", "share")
        for name, entry in facts[key].items():
            share = f"{100 * entry['bytes'] / total:.1f} %" if total else "-"
            table.add_row(clean(name), str(entry["tensors"]), human_bytes(entry["bytes"]), share)
        console.print(table)
    if "list" in facts:
        table = _table("tensor", "dtype", "shape", "bytes")
        for row in facts["list"]:
            shape = "×".join(map(str, row["shape"])) or "scalar"
            table.add_row(clean(row["name"]), row["dtype"], shape, human_bytes(row["bytes"]))
        console.print(table)


def _files_table(files: list[dict[str, Any]]) -> Table:
    table = _table("file", "tensors", "bytes")
    for file in files:
        name = clean(os.path.basename(file["path"]))
        table.add_row(name, str(file["tensors"]), human_bytes(file["bytes"]))
    return table


def _table(first: str, *rest: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(first, overflow="fold")
    for name in rest:
        table.add_column(name, justify="right", no_wrap=True)
    return table
