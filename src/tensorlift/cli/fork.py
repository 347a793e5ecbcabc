"""``tensorlift fork``: writes the tensors of a running instance as a checkpoint."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tensorlift.cli.console import guarded, told
from tensorlift.cli.interrupts import at_once
from tensorlift.forking.tokens import token_of
from tensorlift.format.quoting import clean, plural
from tensorlift.progress import SourceReport, by_source, reporter
from tensorlift.stats import human_bytes

if TYPE_CHECKING:
    from tensorlift.forking.remote import SeedCheckpoint
    from tensorlift.sources.writing import Case

__all__ = ["command"]

# Of tensors that are forked together: enough that asking costs nothing.
_TOGETHER_BYTES = 256 << 20


@guarded
def command(
    urls: list[str] = typer.Argument(
        metavar="URL...",
        help="Of a seed, or of several with the same weights: http(s)://host:port, or "
        "tensorlift://host:port/key to be sure which.",
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
    """Take the tensors of a running instance, or of several alike, and write them as safetensors files."""
    token = token_of(token_file)
    with at_once():
        from tensorlift.forking.remote import SeedCheckpoint, source_of

    begin = time.perf_counter()
    seed = SeedCheckpoint([source_of(url) for url in urls], token, ca=ca, as_it_is=True)
    what = f"from {seed.client.url}" if len(urls) == 1 else f"from {len(urls)} seeds"
    with told(progress, what) as bar, reporter(bar) as report:
        case = _written(seed, out, by_source(report), keep=not force)
    _print(
        {
            "folder": str(out),
            "key": seed.manifest.key.model,
            "weights": seed.manifest.weights,
            "tensors": case.tensors,
            "bytes": case.nbytes,
            "by_source": seed.by_source,
            "left": [f"{url}: {why}" for url, why in seed.left.items()],
            "files": [file.name for file in case.files],
            "seconds": time.perf_counter() - begin,
        },
        as_json,
    )


def _written(seed: SeedCheckpoint, out: Path, tell: SourceReport | None, keep: bool) -> Case:
    """All tensors of the seed as files."""
    from tensorlift.format import dtypes
    from tensorlift.sources.writing import Spec, write_tensors

    specs = [
        Spec(name, dtypes.ALL[kind].code, shape)
        for name, kind, shape in zip(seed.names, seed.dtypes.tolist(), seed.shapes, strict=True)
    ]
    total = int(seed.sizes.sum())
    done = 0

    def read(names: Sequence[str]) -> Iterator[memoryview]:
        nonlocal done
        before = done
        for part in seed.stream(
            names,
            _TOGETHER_BYTES,
            lambda came: tell and tell(before + came, total, by_source=seed.by_source),
        ):
            done += part.nbytes
            yield part

    return write_tensors(out, specs, read, keep=keep)


def _print(facts: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    nbytes, seconds = facts["bytes"], facts["seconds"]
    came = (
        ", ".join(f"{human_bytes(part)} from {url}" for url, part in facts["by_source"].items()) or "nothing"
    )
    print(
        f"{facts['folder']}: {plural(facts['tensors'], 'tensor')} of {clean(facts['key'])}, "
        f"{human_bytes(nbytes)}, {plural(len(facts['files']), 'file')}\n"
        f"{came} in {seconds:.2f} s: {human_bytes(nbytes / seconds)}/s"
    )
    for text in facts["left"]:
        print(f"left behind: {clean(text)}")
