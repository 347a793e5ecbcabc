"""A fork: the weights of a running instance, into a model that is there."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tensorlift.engine.abi_fork import Places
from tensorlift.errors import ForkError, OptionError, RequestError, SeedError
from tensorlift.forking.chunks import DIGESTS, ChunkQueue
from tensorlift.forking.client import SeedClient, clients_of
from tensorlift.forking.encryption import Ca, fork_context
from tensorlift.forking.fallback import FILES, Fallback, stood_in
from tensorlift.forking.keys import checked_key, checked_token
from tensorlift.forking.manifest import Manifest, ModelKey
from tensorlift.forking.matching import Errand, copies_of, errands
from tensorlift.forking.offering import Named, Offering, check_writable, gpu_of, named_tensors, offer, settle
from tensorlift.forking.reader import Reader, Source
from tensorlift.forking.same_weights import Wanted, sources_of
from tensorlift.forking.tensor_digests import unlike
from tensorlift.forking.throttle import Pacer
from tensorlift.forking.transports import FORKED
from tensorlift.forking.ways import ways_of
from tensorlift.format.quoting import plural, shown
from tensorlift.options import parse_count, parse_seconds, parse_size
from tensorlift.progress import Report, SourceReport, by_source

__all__ = ["Forked", "fork_into"]

# Large enough that asking costs nothing, small enough that a lost one is no loss.
_CHUNK_BYTES = 16 << 20
# To one seed, each a thread there and here: more bring nothing.
_MOST_CONNECTIONS = 64
# Weights that change faster than they can be read are no source.
_ATTEMPTS = 5

Find = Callable[[ForkError | None], Sequence[str]]
"""URLs of seeds to read from: at first, and for the error that came of those before; raises a ForkError where
there are no others.
"""


@dataclass(frozen=True, slots=True)
class Forked:
    """What a fork did."""

    bytes: int
    seconds: float
    planning_seconds: float
    """Of them, until the first byte was asked for: manifests, what goes where."""
    registering_seconds: float
    """Of them, until an engine knew the memory to read from and to, while other chunks may have come: of the
    connection that took longest, 0 for transports that need none.
    """
    by_source: Mapping[str, int]
    """Bytes that came from each seed and were kept, by its URL, and from "files"."""
    moved_bytes: int
    """All that came, with what was thrown away."""
    key: ModelKey | None
    """Which weights these are; where files were, those that were wanted, if any."""
    weights: str
    """The version that was taken; "" where files were."""
    transports: Mapping[str, str]
    """By which transport each seed was read, and why not by a better one."""
    left: tuple[str, ...] = ()
    """Seeds that were left behind, each with the reason."""
    own: tuple[str, ...] = ()
    """Where files stood in: buffers that the model does not save, which are as they were before."""


def fork_into(
    model: object,
    urls: str | Sequence[str] | Find,
    *,
    token: str | None = None,
    key: ModelKey | str | None = None,
    ca: Ca | None = None,
    connections: int = 2,
    patience: float = 10.0,
    chunk_bytes: int | str = _CHUNK_BYTES,
    progress: Report | SourceReport | None = None,
    transports: Sequence[str] | None = None,
    devices: Sequence[str] | None = None,
    protocol: str = "",
    limit: str | None = None,
    fallback: Any = None,
    digests: str = "full",
    part_of: Mapping[str, Manifest] | None = None,
    pacer: Pacer | None = None,
    unwanted: Callable[[str], str] = lambda _: "",
) -> Forked:
    """Fills the tensors of a model from one seed or several that offer the same weights.

    urls: one, several, or what finds them, and others where those fail. key: which weights are wanted, of the
    seed or of another rank behind its URL; without it those of the first seed. ca: a file of certificates
    (PEM) that https:// seeds are trusted by. connections: to each seed, at most 64. patience: seconds that a
    seed may do nothing, or keep a fork waiting (see pace.py). chunk_bytes: or "16MiB". transports: those that
    may be taken; devices, protocol: see Seed. limit: "2GB/s" to ask for, of all seeds together, or "25%" of
    the NICs' rate. Names, dtypes, shapes and strides are compared before a byte is written. digests: "full",
    each chunk is compared with its digest; "sample", some are (see chunks.checked); "off", none is. With the
    first two, whole tensors in host memory are compared too, where the seed publishes their digests. Epochs
    always are. part_of: what each seed was seen to have, by its URL, and has still; the model is a part.
    pacer: that of several forks. unwanted: why a version will not do, or "". progress: see tensorlift.fork().

    fallback: a checkpoint (what load_into takes) that stands in where seeds cannot bring all. The outcome is
    then its version, never a mixture: tensors that came whole from seeds stay if they have the digests that
    ``tensorlift digest`` wrote beside the files; all others are read. What the model does not save is as it
    was before; a derived tensor is in no file, which is an error. Or a function that loads all of the model.
    Raises ForkError, SeedError, ManifestError, RequestError, OptionError, and with ``fallback`` what
    load_into or the function does; after an error the tensors' contents are undefined.
    """
    begin = time.monotonic()
    connections, patience, chunk_bytes = _checked(connections, patience, chunk_bytes, digests, unwanted)
    named, ours = _places(model)
    secret, wanted = checked_token(token), None if key is None else checked_key(key)
    rank = 0 if wanted is None else wanted.tp[0]
    asked = FORKED if transports is None else transports
    kinds, wiring, rate = ways_of(asked, devices, protocol, limit, rank=rank, gpu=gpu_of(named))
    paced = pacer or Pacer(rate or 0)
    find = _finder(urls, secret, patience, ca)
    files = None if fallback is None else Fallback(fallback, model, named, ours)
    # The copies wait for no stream, and memory that was just freed may still be in use on one.
    settle(named)
    fork = _Fork(
        find, Wanted(wanted, ours, kinds, part_of, digests != "off", unwanted), chunk_bytes,
        by_source(progress), lambda work, sources: Reader(
            work, sources, secret, connections, patience, digests, kinds, wiring, paced),
    )  # fmt: skip
    (taken, weights), came, own = _filled(fork, files)
    return fork.told(time.monotonic() - begin, came, taken or wanted, weights, own)


def _places(model: object) -> tuple[list[Named], Offering]:
    """The tensors to fill. Raises RequestError for one that cannot be."""
    named = named_tensors(model)
    ours = offer(named)
    check_writable(named)
    return named, ours


def _checked(
    connections: int, patience: float, chunk_bytes: int | str, digests: str, unwanted: object
) -> tuple[int, float, int]:
    if not callable(unwanted):
        raise OptionError(f"unwanted is {shown(unwanted)}; expected a function of a version of the weights")
    if not isinstance(digests, str) or digests not in DIGESTS:
        raise OptionError(f"digests is {shown(digests)}; expected one of {', '.join(map(repr, DIGESTS))}")
    return (
        parse_count(connections, "connections", _MOST_CONNECTIONS),
        parse_seconds(patience, "patience"),
        parse_size(chunk_bytes, "chunk_bytes"),
    )


_Clients = Callable[[ForkError | None, dict[str, str]], list[SeedClient]]
"""Also given the seeds that are left, with the reasons, for more of them."""


def _finder(urls: str | Sequence[str] | Find, token: str, patience: float, ca: Ca | None) -> _Clients:
    """Raises RequestError, OptionError at once for URLs that are none."""
    # What is wrong with it is no seed's fault.
    trusted = None if ca is None else fork_context(ca)

    def client(url: str) -> SeedClient:
        return SeedClient(url, token, patience, trusted)

    if callable(urls):
        asked = urls

        def found(error: ForkError | None, left: dict[str, str]) -> list[SeedClient]:
            while True:
                others = asked(error)
                try:
                    return clients_of(others, client, left)
                except SeedError as problem:
                    error = problem

        return found
    # One that is named twice is one: it would wait for room that it has taken itself.
    clients = list({one.url: one for one in map(client, _urls_of(urls))}.values())
    if not clients:
        raise RequestError("there is no seed to fork from; name one: http://host:port")

    def named(error: ForkError | None, left: dict[str, str]) -> list[SeedClient]:
        if error is not None:
            raise error
        return clients

    return named


def _urls_of(urls: object) -> Sequence[str]:
    """Whether they are URLs is for the clients to say."""
    if isinstance(urls, str):
        return [urls]
    if not isinstance(urls, Iterable) or isinstance(urls, (bytes, bytearray, Mapping)):
        raise RequestError(f"{shown(urls)} is no URL of a seed, http://host:port, and no list of them")
    return list(urls)


def _filled(
    fork: _Fork, files: Fallback | None
) -> tuple[tuple[ModelKey | None, str], dict[str, int], tuple[str, ...]]:
    """((key, version), bytes by source, buffers that no file has): from seeds, else from files."""
    try:
        return fork.run(), fork.kept_bytes(), ()
    except ForkError as error:
        return (None, ""), *stood_in(files, error, fork.brought(), fork.progress)


class _Fork:
    """The attempts of one fork at its seeds, and what has come of them."""

    def __init__(
        self,
        find: _Clients,
        wanted: Wanted,
        chunk_bytes: int,
        progress: SourceReport | None,
        reader: Callable[[Sequence[Errand], Sequence[Source]], Reader],
    ) -> None:
        self._find, self._wanted, self._reader_of = find, wanted, reader
        self.transports: dict[str, str] = {}
        self._chunk_bytes, self.progress = chunk_bytes, progress
        self._work: Sequence[Errand] = ()
        self._queue = ChunkQueue(())
        self.left: dict[str, str] = {}
        self.moved = 0
        self.planning_seconds = self.registering_seconds = 0.0

    def run(self) -> tuple[ModelKey, str]:
        """Key and version of the weights, once all have come; ForkError, SeedError, ManifestError."""
        error: ForkError | None = None
        while True:
            clients = self._find(error, self.left)
            try:
                return self._read(clients)
            except ForkError as problem:
                error = problem

    def _read(self, clients: Sequence[SeedClient]) -> tuple[ModelKey, str]:
        ours, part_of = self._wanted.ours, self._wanted.part_of
        attempts = _ATTEMPTS if part_of is None else 1
        for _ in range(attempts):
            begin = time.monotonic()
            sources = sources_of(clients, self._wanted, self.left)
            manifest = sources[0].manifest
            copies = copies_of(manifest.tensors, ours.tensors, ours.memories)
            self._work = errands(copies, self._chunk_bytes)
            total = sum(errand.chunk.nbytes for errand in self._work)
            reader = self._reader_of(self._work, sources)
            self._queue = reader.queue
            self.planning_seconds += time.monotonic() - begin
            reader.run(functools.partial(_tell, self.progress, total))
            self.registering_seconds += max((one.registering for one in sources), default=0.0)
            self.moved += sum(self._queue.moved_bytes.values())
            self.transports |= {one.name: one.transport for one in sources if one.transport}
            self.left |= {source.name: source.gone for source in sources if source.gone}
            if self._queue.is_done:
                if self._wanted.digests and (other := unlike(manifest.digests, ours)):
                    raise ForkError(
                        f"{sources[0].name}: what came does not have the digests that it publishes: {other}; "
                        "the seed's weights were changed outside of updating(), or it is not what it says"
                    )
                return manifest.key, manifest.weights
            if not any(source.stale for source in sources):
                raise _incomplete(total - sum(self.kept_bytes().values()), total, sources)
        raise ForkError(
            f"{clients[0].url}: the weights have changed {plural(attempts, 'time')} while they were "
            "read; fork when they rest, or load from files"
        )

    def told(
        self,
        seconds: float,
        by_source: Mapping[str, int],
        key: ModelKey | None,
        weights: str,
        own: tuple[str, ...],
    ) -> Forked:
        """What was done in all."""
        return Forked(
            bytes=sum(by_source.values()),
            seconds=seconds,
            planning_seconds=self.planning_seconds,
            registering_seconds=self.registering_seconds,
            by_source=by_source,
            moved_bytes=self.moved + by_source.get(FILES, 0),
            key=key,
            weights=weights,
            transports=self.transports,
            left=tuple(f"{name}: {why}" for name, why in self.left.items()),
            own=own,
        )

    def kept_bytes(self) -> dict[str, int]:
        """Of chunks, by who brought them."""
        return self._queue.bytes_by_source()

    def brought(self) -> dict[str, list[Places]]:
        """Where the bytes of each seed went."""
        found: dict[str, list[Places]] = {}
        for number, source in self._queue.kept():
            found.setdefault(source, []).append(self._work[number].places)
        return found


def _tell(progress: SourceReport | None, total: int, came: Mapping[str, int]) -> None:
    if progress is not None:
        progress(sum(came.values()), total, by_source=came)


def _incomplete(lacking: int, total: int, sources: Sequence[Source]) -> ForkError:
    why = "; ".join(f"{source.name}: {source.gone}" for source in sources if source.gone)
    text = (
        f"{lacking:,} of {total:,} bytes could not be had: {why or 'no seed was left'}; "
        "the tensors here are not complete: fork again, or load from files"
    )
    waits = [source.retry_seconds for source in sources if source.retry_seconds is not None]
    # Nothing is wrong with seeds that have no room now.
    return SeedError(text, min(waits)) if len(waits) == len(sources) else ForkError(text)
