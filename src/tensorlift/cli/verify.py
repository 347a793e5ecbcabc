"""``tensorlift verify``: compares a checkpoint with its digests."""

from __future__ import annotations

import dataclasses
import json

import typer

from tensorlift.cli.console import guarded, matching, named
from tensorlift.cli.digest import make

__all__ = ["command"]

_SHOWN = 50


@guarded
def command(
    paths: list[str] = typer.Argument(
        metavar="PATH", help="A file, files, a folder or a Hub id in the cache."
    ),
    digests: str | None = typer.Option(
        None, metavar="FILE", help="The digests; else those that 'digest' wrote beside the files."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Read every tensor, compare it with its digest, and list all differences; 1 if there are any."""
    from tensorlift import sources
    from tensorlift.errors import DigestError
    from tensorlift.format.comparing import Scope, differences
    from tensorlift.format.quoting import clean, plural
    from tensorlift.sources.sidecars import find_sidecar, is_of_all, read_sidecar

    checkpoint = sources.read_headers(sources.find(named(paths)))
    path = find_sidecar(checkpoint) if digests is None else digests
    expected = read_sidecar(path)
    made = make(checkpoint)
    found = differences(
        expected, made.sidecar, Scope.of(expected, checkpoint, is_of_all(path, expected, checkpoint))
    )
    if as_json:
        listed = [dataclasses.asdict(one) for one in found]
        print(json.dumps({"digests": path, **made.facts, "differences": listed}, indent=2))
    else:
        for one in found[:_SHOWN]:
            print(f"{one.kind}: {one}")
        if len(found) > _SHOWN:
            print(f"... and {len(found) - _SHOWN:,} more; --json lists them all")
        if not found:
            print(matching(made.tensors, path))
        print(made)
    if found:
        raise DigestError(
            f"{clean(checkpoint.where)} is not what {clean(path)} says: {plural(len(found), 'difference')}, "
            f"the first: {found[0]}"
        )
