"""``tensorlift digest``: writes the digests of a checkpoint's tensors."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, NamedTuple

import typer

from tensorlift.cli.console import guarded, named
from tensorlift.format.quoting import clean, plural
from tensorlift.stats import human_bytes

if TYPE_CHECKING:
    from tensorlift.format.checkpoint import Checkpoint
    from tensorlift.format.digests import Sidecar

__all__ = ["Made", "command", "make"]


class Made(NamedTuple):
    """Digests that were just made, and what that took."""

    sidecar: Sidecar
    tensors: int
    nbytes: int
    seconds: float

    @property
    def facts(self) -> dict[str, float]:
        """For JSON."""
        return {"tensors": self.tensors, "bytes": self.nbytes, "seconds": self.seconds}

    def __str__(self) -> str:
        """For people."""
        rate = human_bytes(self.nbytes / self.seconds) if self.seconds else "-"
        return (
            f"{plural(self.tensors, 'tensor')}, {human_bytes(self.nbytes)} in {self.seconds:.3f} s ({rate}/s)"
        )


def make(checkpoint: Checkpoint) -> Made:
    """Reads all tensors once and digests them; settings come from the environment."""
    from tensorlift.engine.digesting import digest_checkpoint
    from tensorlift.format.digests import describe
    from tensorlift.options import LoadOptions
    from tensorlift.progress import reporter

    begin = time.perf_counter()
    options = LoadOptions.resolve()
    with reporter(options.progress) as report:
        digests = digest_checkpoint(checkpoint, options, report)
    seconds = time.perf_counter() - begin
    return Made(describe(checkpoint, digests), len(checkpoint), int(checkpoint.sizes.sum()), seconds)


@guarded
def command(
    paths: list[str] = typer.Argument(
        metavar="PATH", help="A file, files, a folder or a Hub id in the cache."
    ),
    out: str | None = typer.Option(
        None,
        metavar="FILE",
        help="Where to; else tensorlift.digests.json in the folder, or PATH.digests.json for one file.",
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Write the digest of every tensor; 'verify' and load(verify=True) compare with them."""
    from tensorlift import sources
    from tensorlift.sources.sidecars import check_place, sidecar_to_write, write_sidecar

    checkpoint = sources.read_headers(sources.find(named(paths)))
    path = sidecar_to_write(checkpoint) if out is None else out
    check_place(
        path, checkpoint, "--out" if out is not None else "the place of the digests (--out names another)"
    )
    made = make(checkpoint)
    write_sidecar(path, made.sidecar)
    if as_json:
        print(json.dumps({"digests": path, **made.facts}, indent=2))
    else:
        print(f"{clean(path)}: {made}")
