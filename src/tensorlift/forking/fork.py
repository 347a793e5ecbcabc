"""A fork: the weights of a running instance, into a model that is there."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tensorlift.errors import ForkError, RequestError, SeedError
from tensorlift.forking.client import SeedClient
from tensorlift.forking.encryption import Ca
from tensorlift.forking.keys import checked_key, checked_token, told_key
from tensorlift.forking.manifest import Layout, Manifest, ModelKey, differences
from tensorlift.forking.matching import copies_of, errands
from tensorlift.forking.offering import Offering, named_tensors, offer, settle
from tensorlift.forking.reader import Reader, Source, failed, told
from tensorlift.forking.transports import TRANSPORTS, check_transports
from tensorlift.progress import Report as Progress

__all__ = ["Forked", "fork_into"]

# Large enough that asking costs nothing, small enough that a lost one is no loss.
_CHUNK_BYTES = 16 << 20
# Weights that change faster than they can be read are no source.
_ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class Forked:
    """What a fork did."""

    bytes: int
    seconds: float
    by_source: Mapping[str, int]
    """Bytes that came from each seed and were kept."""
    moved_bytes: int
    """All that came, with what was thrown away."""
    key: ModelKey
    """Which weights these are; the model is a seed of the same ones now."""
    weights: str
    """The version that was taken."""
    transports: Mapping[str, str]
    """By which transport each seed was read, and why not by a better one."""
    left: tuple[str, ...] = ()
    """Seeds that were left behind, each with the reason."""


def fork_into(
    model: object,
    urls: str | Sequence[str],
    *,
    token: str | None = None,
    key: ModelKey | str | None = None,
    ca: Ca | None = None,
    connections: int = 2,
    patience: float = 10.0,
    chunk_bytes: int = _CHUNK_BYTES,
    progress: Progress | None = None,
    transports: Sequence[str] = TRANSPORTS,
) -> Forked:
    """Fills the tensors of a model from one seed or several that offer the same weights.

    key: which weights are wanted, of the seed or of another rank behind its URL; without it those of the
    first seed. ca: a file of certificates (PEM) that https:// seeds are trusted by. connections: to each
    seed. patience: seconds that a seed may do nothing, or keep a fork waiting. transports: those that may be
    taken. Names, dtypes, shapes and strides are compared before a byte is written; each chunk with its digest
    and its epoch. Raises ForkError, SeedError, ManifestError, RequestError, OptionError; after an error the
    tensors' contents are undefined.
    """
    begin = time.monotonic()
    kinds = check_transports(transports)
    named = named_tensors(model)
    ours = offer(named)
    # The copies wait for no stream, and memory that was just freed may still be in use on one.
    settle(named)
    secret, wanted = checked_token(token), None if key is None else checked_key(key)
    clients = [SeedClient(url, secret, patience, ca) for url in ([urls] if isinstance(urls, str) else urls)]
    if not clients:
        raise RequestError("there is no seed to fork from; name one: http://host:port")
    left: dict[str, str] = {}
    moved = 0
    for _ in range(_ATTEMPTS):
        sources = _sources(clients, wanted, ours, kinds, left)
        work = errands(copies_of(sources[0].manifest.tensors, ours.tensors, ours.memories), chunk_bytes)
        total = sum(errand.chunk.nbytes for errand in work)
        reader = Reader(work, sources, secret, connections, patience, kinds)
        reader.run(functools.partial(_tell, progress, total))
        moved += sum(reader.queue.moved_bytes.values())
        left |= {source.name: source.gone for source in sources if source.gone}
        by_source = reader.queue.bytes_by_source()
        if reader.queue.is_done:
            return Forked(
                bytes=total,
                seconds=time.monotonic() - begin,
                by_source=by_source,
                moved_bytes=moved,
                key=sources[0].manifest.key,
                weights=sources[0].manifest.weights,
                transports={source.name: source.transport for source in sources if source.transport},
                left=tuple(f"{name}: {why}" for name, why in left.items()),
            )
        if not any(source.stale for source in sources):
            raise failed(total - sum(by_source.values()), total, told(sources))
    raise ForkError(
        f"{clients[0].url}: the weights have changed {_ATTEMPTS} times while they were read; fork when they "
        "rest, or load from files"
    )


def _tell(progress: Progress | None, total: int, done: int) -> None:
    if progress is not None:
        progress(done, total)


def _sources(
    clients: Sequence[SeedClient],
    key: ModelKey | None,
    ours: Offering,
    kinds: Sequence[str],
    left: dict[str, str],
) -> list[Source]:
    """The seeds that offer what is wanted, in the same regions; raises why there is none."""
    layouts = [Layout(one.name, one.dtype, one.shape, one.stride) for one in ours.tensors]
    found: list[Source] = []
    first: ForkError | None = None
    for client in clients:
        try:
            if key is not None:
                client = client.peer(key)
            manifest = client.manifest()
            _check(client, manifest, key, layouts, kinds)
        except ForkError as error:
            first = first or error
            left[client.url] = str(error).removeprefix(client.url).lstrip(": ")
            continue
        if found and not _alike(found[0].manifest, manifest):
            left[client.url] = "it has other weights than the first seed, or has them in other regions"
        else:
            left.pop(client.url, None)
            found.append(Source(client, manifest))
    if not found:
        raise first or SeedError("no seed has answered")
    return found


def _check(
    client: SeedClient,
    manifest: Manifest,
    key: ModelKey | None,
    layouts: Sequence[Layout],
    kinds: Sequence[str],
) -> None:
    if key is not None and manifest.key != key:
        raise ForkError(
            f"{client.url} has {told_key(manifest.key)}, wanted is {told_key(key)}; name a seed of the same "
            "model and ranks"
        )
    if unlike := differences(manifest, layouts):
        raise ForkError(f"{client.url} has other weights than the model here: " + "; ".join(unlike))
    if not any(offer.kind in kinds for offer in manifest.transports):
        raise ForkError(f"{client.url} offers no transport that this fork takes: {', '.join(kinds)}")


def _alike(one: Manifest, other: Manifest) -> bool:
    return (one.key, one.weights, one.regions, one.tensors) == (
        other.key,
        other.weights,
        other.regions,
        other.tensors,
    )
