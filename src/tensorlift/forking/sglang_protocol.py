"""SGLang's own protocol between its instances: where the parameters of a rank lie, for Mooncake to read them.

    GET /get_remote_instance_transfer_engine_info?rank=N
    {"rank": N, "remote_instance_transfer_engine_info": ["host:port", {name: [address, items, bytes each]}]}

A seed of ours answers it, and a fork reads from an SGLang server that does. It has neither
epochs nor digests nor leases: a fork asks again behind its reads, and takes what came if the answer is the
same. That is the same behind an update in place too, so that of a seed of ours its epoch is asked instead.
"""

from __future__ import annotations

import dataclasses
import socket
import time
import urllib.parse
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from tensorlift.engine.abi_fork import Memory
from tensorlift.errors import ForkError, OptionError, SeedError
from tensorlift.forking.client import SeedClient
from tensorlift.forking.control import StateAnswer
from tensorlift.forking.encryption import Ca
from tensorlift.forking.fabrics import MOST_ENTRIES, FabricError, Part, Shared, Wiring
from tensorlift.forking.fallback import Fallback, stood_in
from tensorlift.forking.fork import Forked
from tensorlift.forking.keys import checked_key, checked_texts, checked_token
from tensorlift.forking.manifest import ITEM_BYTES, NOWHERE, ModelKey, Tensor, span_bytes
from tensorlift.forking.mooncake import Mooncake
from tensorlift.forking.offering import Named, Offering, check_writable, gpu_of, named_tensors, offer, settle
from tensorlift.forking.sglang_protocol_answer import PATHS
from tensorlift.forking.throttle import Pacer
from tensorlift.forking.urls import split_url
from tensorlift.forking.ways import ways_of
from tensorlift.format.bounds import MOST_PARTS, Count, is_too_much
from tensorlift.format.quoting import plural, quote, shown, some_of
from tensorlift.options import parse_seconds
from tensorlift.progress import Report, SourceReport, by_source
from tensorlift.tensors.destinations import tensors_of

__all__ = ["fork_from_sglang", "is_sglang"]

_SCHEME = "sglang+"
_ROOM_BYTES = 16 << 20
_LONGEST_ANSWER = 200_000_000
_SHOWN = 4


class _Answer(msgspec.Struct):
    """What a server says of a rank."""

    remote_instance_transfer_engine_info: tuple[str, dict[str, tuple[Count, Count, Count]]]


class _Wanted(NamedTuple):
    """Bytes of a tensor here, and where they are there."""

    remote: int
    nbytes: int
    flat: torch.Tensor
    """Them, as bytes in the order of memory."""


def is_sglang(source: object) -> bool:
    """Whether this is the URL of an SGLang server: sglang+http://host:port."""
    return isinstance(source, str) and source.startswith(_SCHEME)


def fork_from_sglang(
    model: object,
    url: str,
    *,
    token: str | None = None,
    key: ModelKey | str | None = None,
    ca: Ca | None = None,
    patience: float = 10.0,
    progress: Report | SourceReport | None = None,
    transports: Sequence[str] | None = None,
    devices: Sequence[str] | None = None,
    protocol: str = "",
    limit: str | None = None,
    fallback: Any = None,
) -> Forked:
    """Fills a model's parameters from an SGLang server that was started with
    --remote-instance-weight-loader-start-seed-via-transfer-engine. See fork_into().

    key: whose rank in tp is read, else 0. patience: seconds that a read may take. Buffers that are not saved
    are left as they are, and named in ``own``; a tensor that the server does not name is a ForkError.
    """
    begin = time.monotonic()
    if transports is not None and "mooncake" not in checked_texts(transports, "transports", "mooncake"):
        raise OptionError(f"transports is {shown(transports)}; SGLang's protocol has mooncake alone")
    patience, told = parse_seconds(patience, "patience"), by_source(progress)
    wanted = None if key is None else checked_key(key)
    client = SeedClient(url.removeprefix(_SCHEME), checked_token(token), patience, ca)
    ours = offer(named := named_tensors(model))
    check_writable(named)
    rank = 0 if wanted is None else wanted.tp[0]
    _, wiring, rate = ways_of(["mooncake"], devices, protocol, limit, rank=rank, gpu=gpu_of(named))
    reading = _Reading(client.url, patience, told, rate or 0)
    files = None if fallback is None else Fallback(fallback, model, named, ours)
    settle(named)
    try:
        came = _read_by(client, wanted, model, named, ours, reading, wiring)
    except ForkError as error:
        read, own = stood_in(files, error, {}, told)
        nbytes = sum(read.values())
        came = Forked(
            bytes=nbytes, seconds=0.0, planning_seconds=0.0, registering_seconds=0.0, by_source=read,
            moved_bytes=nbytes, key=wanted, weights="", transports={}, left=(str(error),), own=own,
        )  # fmt: skip
    settle(named)
    return dataclasses.replace(came, seconds=time.monotonic() - begin)


def _read_by(
    client: SeedClient,
    key: ModelKey | None,
    model: object,
    named: Sequence[Named],
    ours: Offering,
    reading: _Reading,
    wiring: Wiring,
) -> Forked:
    """What was done, but for the seconds of all. Raises ForkError."""
    begin, rank = time.monotonic(), 0 if key is None else key.tp[0]
    # Before the answer, which no seed gives in an update: so that every update behind it shows.
    state = _state(client)
    answer = _asked(client, rank)
    wanted, own = _matched(client.url, answer, model, named, ours)
    planned = time.monotonic()
    shared = _borrowed(client.url, wiring)
    try:
        registering = reading.run(shared, answer.remote_instance_transfer_engine_info[0], wanted)
    finally:
        shared.give_back()
    _check_same(client, rank, state, answer)
    nbytes = sum(one.nbytes for one in wanted)
    lacks = "neither digests nor epochs" if state is None else "no digests"
    how = f"mooncake ({shared.fabric.how}); SGLang's protocol, which has {lacks}"
    return Forked(
        bytes=nbytes, seconds=0.0, planning_seconds=planned - begin, registering_seconds=registering,
        by_source={client.url: nbytes}, moved_bytes=nbytes, key=key, weights="",
        transports={client.url: how}, own=own,
    )  # fmt: skip


def _state(client: SeedClient) -> StateAnswer | None:
    """None of a server of SGLang's own, which has no such thing. Raises SeedError where nobody answers."""
    try:
        return client.state()
    except SeedError as error:
        if not error.answered:
            raise
        return None


def _check_same(client: SeedClient, rank: int, state: StateAnswer | None, answer: _Answer) -> None:
    """Raises ForkError where what was read may be of several versions."""
    if state is not None:
        # Another answer would be another lease.
        if _state(client) == state:
            return
        changed = "its weights were updated while they were read, or it was restarted"
    else:
        if _asked(client, rank) == answer:
            return
        changed = (
            "the server says something else of its memory than before it was read: it was restarted, or has "
            "loaded other weights"
        )
    raise ForkError(f"{client.url}: {changed}; the tensors here are of no one version: fork again")


def _asked(client: SeedClient, rank: int) -> _Answer:
    try:
        said = client.ask(
            "GET", f"{PATHS[0]}?{urllib.parse.urlencode({'rank': rank})}", longest=_LONGEST_ANSWER
        )
        if is_too_much(said):
            raise msgspec.ValidationError(f"more than {MOST_PARTS:,} lists, objects and keys")
        return msgspec.json.decode(said, type=_Answer)
    except SeedError as error:
        if error.retry_seconds is not None:
            raise
        raise SeedError(
            f"{client.url} says nothing of rank {rank}: {error}; start the server with "
            "--remote-instance-weight-loader-start-seed-via-transfer-engine"
        ) from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise SeedError(f"{client.url} answers what no SGLang server answers: {quote(said[:60])}") from None


def _matched(
    url: str, answer: _Answer, model: object, named: Sequence[Named], ours: Offering
) -> tuple[list[_Wanted], tuple[str, ...]]:
    """What to read; and buffers that nobody saves, and the server does not say. Raises ForkError."""
    theirs = answer.remote_instance_transfer_engine_info[1]
    saved, found, own, lacking = tensors_of(model), list[_Wanted](), list[str](), list[str]()
    for one, tensor in zip(named, ours.tensors, strict=True):
        there = theirs.get(tensor.name)
        if tensor.region == NOWHERE or (tensor.alias in theirs and there is None):
            continue
        if there is None:
            if one.kind == "buffer" and one.name not in saved:
                own.append(one.name)
            else:
                lacking.append(quote(one.name))
            continue
        found.append(_one(url, one, tensor, there))
    if lacking:
        raise ForkError(
            f"{url} does not say where {plural(len(lacking), 'tensor')} of the model are: "
            f"{some_of(lacking, _SHOWN)}; SGLang's protocol has parameters alone: fork from a seed "
            "of tensorlift, or load from files"
        )
    return found, tuple(own)


def _one(url: str, one: Named, tensor: Tensor, there: tuple[int, int, int]) -> _Wanted:
    address, items, item_bytes = there
    nbytes = span_bytes(tensor.dtype, tensor.shape, tensor.stride)
    if (one.tensor.numel(), ITEM_BYTES[tensor.dtype]) != (items, item_bytes):
        raise ForkError(
            f"{url} has other weights than the model here: {quote(one.name)} has "
            f"{one.tensor.numel():,} elements of {plural(ITEM_BYTES[tensor.dtype], 'byte')} here, {items:,} "
            f"of {item_bytes:,} there; make it as the server's was made"
        )
    if nbytes != items * item_bytes:
        raise ForkError(
            f"{quote(one.name)} has holes between its elements, which SGLang's protocol cannot say"
        )
    flat = torch.as_strided(one.tensor.detach(), (items,), (1,)).view(torch.uint8)
    return _Wanted(address, nbytes, flat)


def _borrowed(url: str, wiring: Wiring) -> Shared:
    place = split_url(url)
    try:
        with socket.create_connection((place.host, place.port), 10.0) as peer:
            host = peer.getsockname()[0]
        return Shared.borrow(Mooncake, wiring, host)
    except (OSError, FabricError) as error:
        raise SeedError(f"{url} cannot be read: {error}") from None


class _Reading:
    """Tensors through a place of our own, many small ones at a time."""

    def __init__(self, url: str, patience: float, progress: SourceReport | None, limit: int) -> None:
        self._url, self._patience, self._progress = url, patience, progress
        self._pacer = Pacer(limit)

    def run(self, shared: Shared, session: str, wanted: Sequence[_Wanted]) -> float:
        """Reads all. The seconds that registering took. Raises ForkError."""
        begin, room = time.monotonic(), np.empty(_ROOM_BYTES, np.uint8)
        mine = [Memory(room.ctypes.data, room.nbytes)]
        total, done = sum(one.nbytes for one in wanted), 0
        try:
            shared.fabric.register(mine)
            registering = time.monotonic() - begin
            for batch in _batches(wanted):
                time.sleep(self._pacer.wait())
                self._pacer.asked(sum(nbytes for _, _, nbytes in batch))
                done += self._bring(shared, session, batch, room)
                if self._progress is not None:
                    self._progress(done, total, by_source={self._url: done})
            shared.fabric.unregister(mine)
        except BaseException as error:
            # Nothing says that no read goes on.
            shared.spoil(room)
            if isinstance(error, FabricError | OSError):
                raise ForkError(
                    f"{self._url}: {error}; the tensors here are not complete: fork again, or load from files"
                ) from None
            raise
        return registering

    def _bring(
        self, shared: Shared, session: str, batch: Sequence[tuple[_Wanted, int, int]], room: Any
    ) -> int:
        end = time.monotonic() + self._patience

        def go_on() -> None:
            if time.monotonic() >= end:
                raise TimeoutError(f"the engine brings nothing for {self._patience:g} s")

        parts, at = [], 0
        for one, offset, nbytes in batch:
            parts.append(Part(one.remote + offset, room.ctypes.data + at, nbytes))
            at += nbytes
        shared.fabric.read(session, parts, go_on)
        bytes_here, at = torch.from_numpy(room), 0
        with torch.inference_mode():
            for one, offset, nbytes in batch:
                one.flat[offset : offset + nbytes].copy_(bytes_here[at : at + nbytes])
                at += nbytes
        return at


def _batches(wanted: Sequence[_Wanted]) -> Iterator[list[tuple[_Wanted, int, int]]]:
    """(tensor, offset, bytes): as many as there is room for, and as one call may have."""
    batch: list[tuple[_Wanted, int, int]] = []
    left = _ROOM_BYTES
    for one in wanted:
        offset = 0
        while offset < one.nbytes:
            nbytes = min(one.nbytes - offset, left)
            batch.append((one, offset, nbytes))
            offset, left = offset + nbytes, left - nbytes
            if not left or len(batch) == MOST_ENTRIES:
                yield batch
                batch, left = [], _ROOM_BYTES
    if batch:
        yield batch
