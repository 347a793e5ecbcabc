"""``tensorlift fork``: writes the tensors of a running instance as a checkpoint."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tensorlift.cli.console import guarded, told
from tensorlift.cli.interrupts import at_once
from tensorlift.errors import OptionError, SeedError
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
    urls: list[str] | None = typer.Argument(
        None,
        metavar="[URL...]",
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
    registry: str | None = typer.Option(
        None,
        metavar="REGISTRY",
        help="Instead of a URL, who knows seeds: http(s)://host:port, redis://host:port, file:/path.json, "
        "dns://name:port.",
    ),
    key: str | None = typer.Option(None, metavar="MODEL", help="What a registry is asked for."),
    place: str | None = typer.Option(None, help="Where this is: zone-1/rack-12. [TENSORLIFT_PLACE]"),
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

    if bool(urls) == (registry is not None):
        raise OptionError("expected either the URL of a seed or --registry, with --key")
    begin = time.perf_counter()
    if registry is None:
        seed = SeedCheckpoint([source_of(url) for url in urls or ()], token, ca=ca, as_it_is=True)
    else:
        seed = _found(registry, key, token, ca, place)
    what = f"from {len(urls)} seeds" if urls and len(urls) > 1 else f"from {seed.client.url}"
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


def _found(
    registry: str, model: str | None, token: str, ca: Path | None, place: str | None
) -> SeedCheckpoint:
    """A seed of the model that answers: as a checkpoint, else as an engine holds it. Raises SeedError."""
    from tensorlift.fleet.contract import near_of
    from tensorlift.fleet.naming import registry_of
    from tensorlift.forking.keys import checked_key
    from tensorlift.forking.manifest import ModelKey
    from tensorlift.forking.remote import SeedCheckpoint, url_of

    if model is None:
        raise OptionError("a registry is asked by a key: --key MODEL, as the seed calls it")
    near, left = near_of(place), list[str]()
    problems: list[SeedError] = []
    with contextlib.closing(registry_of(registry, token, ca)) as known:
        for key in (checked_key(ModelKey(model=model, processed=False)), checked_key(model)):
            try:
                while True:
                    left += known.candidates(key, near, 1, left)
                    try:
                        return SeedCheckpoint([url_of(left[-1], model)], token, ca=ca, as_it_is=True)
                    except SeedError as error:
                        problems.append(error)
            except SeedError as error:
                problems.append(error)
    raise SeedError("; ".join(map(str, problems)))


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
