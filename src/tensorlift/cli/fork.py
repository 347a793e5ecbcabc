"""``tensorlift fork``: writes the tensors of a running instance as a checkpoint."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import typer

from tensorlift.cli.console import guarded, told
from tensorlift.cli.interrupts import at_once
from tensorlift.forking.tokens import token_of
from tensorlift.format.quoting import clean, plural
from tensorlift.progress import reporter
from tensorlift.stats import human_bytes

__all__ = ["command"]

# Of tensors that are forked together: enough that asking costs nothing.
_TOGETHER_BYTES = 256 << 20


@guarded
def command(
    url: str = typer.Argument(
        metavar="URL", help="Of a seed: http(s)://host:port, or tensorlift://host:port/key to be sure which."
    ),
    out: Path = typer.Option(..., metavar="DIR", help="The folder to write to; made if it is not there."),
    token_file: str | None = typer.Option(
        None, metavar="FILE", help="A file with the token of the seed. [TENSORLIFT_TOKEN]"
    ),
    ca: Path | None = typer.Option(
        None,
        metavar="FILE",
        help="Certificates (PEM) that a seed under TLS is trusted by; else the system's.",
    ),
    force: bool = typer.Option(False, "--force", help="Replace a checkpoint that is there."),
    progress: bool | None = typer.Option(
        None, "--progress/--no-progress", help="A bar on stderr; without either, on a terminal only."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Take the tensors of a running instance and write them as safetensors files."""
    token = token_of(token_file)
    with at_once():
        from tensorlift.forking.remote import SeedCheckpoint, source_of
        from tensorlift.format import dtypes
        from tensorlift.sources.writing import Spec, write_tensors

    begin = time.perf_counter()
    seed = SeedCheckpoint(source_of(url), token, ca=ca, as_it_is=True)
    specs = [
        Spec(name, dtypes.ALL[kind].code, shape)
        for name, kind, shape in zip(seed.names, seed.dtypes.tolist(), seed.shapes, strict=True)
    ]
    total = int(seed.sizes.sum())
    done = 0
    with told(progress, f"from {seed.client.url}") as bar, reporter(bar) as report:

        def read(names: Sequence[str]) -> Iterator[memoryview]:
            nonlocal done
            before = done
            for part in seed.stream(
                names, _TOGETHER_BYTES, lambda came: report and report(before + came, total)
            ):
                done += part.nbytes
                yield part

        case = write_tensors(out, specs, read, keep=not force)
    _print(
        {
            "folder": str(out),
            "url": seed.client.url,
            "key": seed.manifest.key.model,
            "weights": seed.manifest.weights,
            "tensors": case.tensors,
            "bytes": case.nbytes,
            "by_source": {seed.client.url: case.nbytes},
            "files": [file.name for file in case.files],
            "seconds": time.perf_counter() - begin,
        },
        as_json,
    )


def _print(facts: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    nbytes, seconds = facts["bytes"], facts["seconds"]
    print(
        f"{facts['folder']}: {plural(facts['tensors'], 'tensor')} of {clean(facts['key'])}, "
        f"{human_bytes(nbytes)}, {plural(len(facts['files']), 'file')}\n"
        f"{human_bytes(nbytes)} from {facts['url']} in {seconds:.2f} s: {human_bytes(nbytes / seconds)}/s"
    )
