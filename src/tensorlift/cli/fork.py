"""``tensorlift fork``: writes the tensors of a running instance as a checkpoint."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import typer

from tensorlift.cli.console import guarded, told
from tensorlift.cli.interrupts import at_once
from tensorlift.cli.options import (
    AS_JSON,
    DEVICES,
    PLACE,
    PROGRESS,
    PROTOCOL,
    TOKEN_FILE,
    TRANSPORTS,
    a_path,
    words,
)
from tensorlift.errors import ForkError, OptionError, SeedError
from tensorlift.fleet.contract import WAIT_SECONDS
from tensorlift.forking.tokens import token_of
from tensorlift.format.quoting import clean, plural
from tensorlift.progress import SourceReport, by_source, reporter
from tensorlift.stats import human_bytes

if TYPE_CHECKING:
    from ssl import SSLContext

    from tensorlift.fleet.finding_seeds import SeedFinder
    from tensorlift.forking.manifest import ModelKey
    from tensorlift.forking.remote import SeedCheckpoint
    from tensorlift.sources.writing import Case

__all__ = ["command"]

# Of tensors that are forked together: enough that asking costs nothing.
_TOGETHER_BYTES = 256 << 20

_URLS = typer.Argument(
    None,
    metavar="[URL...]",
    help="Of a seed, or of several with the same weights: http(s)://host:port, or "
    "tensorlift://host:port/key to be sure which.",
)
_CA = typer.Option(
    None,
    metavar="FILE",
    help="Certificates (PEM) that seeds and a registry under TLS are trusted by; else the system's.",
)
_REGISTRY = typer.Option(
    None,
    metavar="REGISTRY",
    help="Instead of a URL, who knows seeds: http(s)://host:port, redis://host:port, file:/path.json, "
    "dns://name:port.",
)
_KEY = typer.Option(
    None,
    metavar="MODEL",
    help="Which weights, of those behind a URL or that a registry knows: the name of a model, or a whole key "
    'as JSON, such as {"model": "org/model", "tp": [0, 2]}.',
)
_WAIT = typer.Option(
    WAIT_SECONDS, metavar="SECONDS", help="How long one with room is waited for, of a registry."
)
_LIMIT = typer.Option(
    None, metavar="RATE", help='The most that it reads: "2GB/s", or "25%" of its NICs; else all.'
)


@guarded
def command(
    urls: list[str] | None = _URLS,
    out: Path = typer.Option(
        ..., metavar="DIR", parser=a_path, help="The folder to write to; made if it is not there."
    ),
    token_file: str | None = TOKEN_FILE,
    ca: Path | None = _CA,
    registry: str | None = _REGISTRY,
    key: str | None = _KEY,
    place: str | None = PLACE,
    seeds: int = typer.Option(1, help="How many seeds of a registry are read at once."),
    wait: float = _WAIT,
    transports: list[str] | None = TRANSPORTS,
    devices: list[str] | None = DEVICES,
    protocol: str = PROTOCOL,
    limit: str | None = _LIMIT,
    force: bool = typer.Option(False, "--force", help="Replace a checkpoint that is there."),
    progress: bool | None = PROGRESS,
    as_json: bool = AS_JSON,
) -> None:
    """Take the tensors of a running instance, or of several alike, and write them as safetensors files."""
    token = token_of(token_file)
    with at_once():
        from tensorlift.forking.encryption import fork_context
        from tensorlift.forking.transports import FORKED
        from tensorlift.forking.ways import ways_of
        from tensorlift.instances import finder_of

    ways: dict[str, Any] = {
        "transports": words(transports) or FORKED, "devices": words(devices), "protocol": protocol,
        "limit": limit,
    }  # fmt: skip
    # What can be wrong with them, before anybody is asked.
    ways_of(**ways)
    begin = time.perf_counter()
    trusted = None if ca is None else fork_context(ca)
    keys = None if key is None else _keys(key)
    asked = finder_of(urls or None, registry, keys, token, trusted, place, seeds, wait)
    taking, left = _Taking(out, not force, token, trusted, progress, ways), dict[str, str]()
    if asked is None:
        seed, case = taking.all_of(urls or (), keys or [None])
    else:
        with asked:
            seed, case = _of_whom_it_names(asked, taking, left)
    left |= seed.left
    _print(
        {
            "folder": str(out),
            "key": seed.manifest.key.model,
            "weights": seed.manifest.weights,
            "tensors": case.tensors,
            "bytes": case.nbytes,
            "by_source": seed.by_source,
            "transports": seed.transports,
            "left": [f"{url}: {why}" for url, why in left.items()],
            "files": [file.name for file in case.files],
            "seconds": time.perf_counter() - begin,
        },
        as_json,
    )


@dataclass(frozen=True)
class _Taking:
    """How all tensors of some seeds become files."""

    out: Path
    keep: bool
    token: str
    ca: SSLContext | None
    progress: bool | None
    ways: dict[str, Any]

    def all_of(
        self, urls: Sequence[str], keys: Sequence[ModelKey | None], asked: SeedFinder | None = None
    ) -> tuple[SeedCheckpoint, Case]:
        """From these seeds, or others behind them, that have the first of the keys that is there; whole or
        not at all. ``asked`` is told how far it is. Raises ForkError.
        """
        seed = self._seed(urls, keys)
        what = f"from {len(urls)} seeds" if len(urls) > 1 else f"from {seed.client.url}"
        with told(self.progress, what) as bar, reporter(bar) as report:
            tell = by_source(report) if asked is None else asked.progress(by_source(report))
            return seed, _written(seed, self.out, tell, self.keep)

    def _seed(self, urls: Sequence[str], keys: Sequence[ModelKey | None]) -> SeedCheckpoint:
        from tensorlift.forking.remote import SeedCheckpoint, source_of

        sources, first = [source_of(url) for url in urls], None
        for key in keys:
            try:
                return SeedCheckpoint(sources, self.token, ca=self.ca, as_it_is=True, key=key, **self.ways)
            except SeedError:
                raise
            except ForkError as error:
                # It names all that is there.
                first = first or error
        assert first is not None
        raise first


def _of_whom_it_names(
    asked: SeedFinder, taking: _Taking, left: dict[str, str]
) -> tuple[SeedCheckpoint, Case]:
    """Of the first seeds that a registry names and that bring all; who does not is ``left``."""
    from tensorlift.forking.client import SeedClient, clients_of

    error: ForkError | None = None
    while True:
        found = asked.seeds(error)
        try:
            clients = clients_of(found, lambda url: SeedClient(url, ca=taking.ca), left)
            return taking.all_of([client.url for client in clients], [asked.key], asked)
        except ForkError as problem:
            error = problem
            left |= {url: str(problem).removeprefix(url).lstrip(": ") for url in found}


def _keys(text: str) -> list[ModelKey]:
    """A name is that of a checkpoint's weights, else of those that an engine holds. Raises OptionError."""
    from tensorlift.forking.keys import checked_key, key_of
    from tensorlift.forking.manifest import ModelKey

    if not text:
        raise OptionError("--key is empty; leave it out, or name a model (is a variable not set?)")
    if not text.lstrip().startswith("{"):
        return [checked_key(ModelKey(model=text, processed=False)), checked_key(text)]
    try:
        return [key_of(msgspec.json.decode(text, type=dict[str, Any]))]
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise OptionError(f"--key is no key in JSON: {clean(str(error))}") from None


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
        f"{clean(facts['folder'])}: {plural(facts['tensors'], 'tensor')} of {clean(facts['key'])}, "
        f"{human_bytes(nbytes)}, {plural(len(facts['files']), 'file')}\n"
        f"{came} in {seconds:.2f} s: {human_bytes(nbytes / seconds)}/s"
    )
    for url, how in facts["transports"].items():
        print(f"{url}: by {clean(how)}")
    for text in facts["left"]:
        print(f"left behind: {clean(text)}")
