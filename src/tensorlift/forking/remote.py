"""A seed as a checkpoint: ``tensorlift://host:port/key`` where a path may stand; ``tensorlift+https://`` for
one under TLS.

Its tensors are a table like that of files, so that names, dtypes and shapes are asked for, compared and
refused alike; their bytes come by forks of some tensors at a time. All are of one epoch of one instance: what
has changed meanwhile is an error, never a mixture.
"""

from __future__ import annotations

import dataclasses
import math
import os
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from tensorlift.errors import ForkError, ManifestError, OptionError, OutOfMemoryError, RequestError
from tensorlift.forking.client import SeedClient
from tensorlift.forking.encryption import Ca
from tensorlift.forking.fork import fork_into
from tensorlift.forking.manifest import SPLITS, Manifest, ModelKey, Tensor, span_bytes
from tensorlift.forking.same_weights import alike, check_key
from tensorlift.forking.throttle import Pacer
from tensorlift.forking.tokens import TOKEN_VARIABLE, token_of
from tensorlift.forking.transports import FORKED
from tensorlift.forking.urls import split_url
from tensorlift.forking.ways import ways_of
from tensorlift.format import dtypes
from tensorlift.format.checkpoint import Checkpoint, Shard
from tensorlift.format.entries import METADATA_KEY
from tensorlift.format.header import Header
from tensorlift.format.quoting import clean, quote, without_secrets
from tensorlift.options import LoadOptions
from tensorlift.tensors.filling import copy_into

__all__ = [
    "SeedCheckpoint",
    "allocated",
    "check_options",
    "is_seed",
    "source_of",
    "url_of",
]

# As a path, and as what is asked.
_SCHEMES = {"tensorlift://": "http://", "tensorlift+https://": "https://"}

_MOST_BYTES = 1 << 62
# What a tensor may take whose elements share memory (expanded ones): a seed need not have so much.
_MOST_EXPANDED_BYTES = 64 << 20
# What says how files are read, or who else reads them, means nothing here, and must not be passed over.
_FITTING = ("progress", "buffer_size", "trace", "verify")
_REFUSED = {field.name for field in dataclasses.fields(LoadOptions)}.difference(_FITTING) | {
    "slices",
    "process_group",
}
_BY_NAME = {dtype.torch_name: dtype for dtype in dtypes.ALL if dtype.torch_name is not None}

Told = Callable[[int], object]
"""Called with the bytes that are there."""


def is_seed(path: object) -> bool:
    """Whether a path is the URL of a seed."""
    return isinstance(path, str) and path.startswith(tuple(_SCHEMES))


def url_of(url: str, model: str) -> str:
    """How load(), open() and load_into() call a seed: from its http://host:port and its key's model."""
    return f"{source_of(url)}/{urllib.parse.quote(model)}"


def source_of(url: str) -> str:
    """A seed's URL as it stands where a path may: that of http:// or https://; any other text as it is."""
    for ours, asked in _SCHEMES.items():
        if url.startswith(asked):
            return ours + url.removeprefix(asked)
    return url


def check_options(path: object, **given: object) -> None:
    """Refuses what makes no sense where ``path`` is a seed: OptionError that names the option."""
    if not is_seed(path):
        return
    wrong = [name for name, value in given.items() if name in _REFUSED and value is not None]
    if LoadOptions.resolve(verify=given.get("verify")).verify not in (None, False):
        wrong.append("verify" if given.get("verify") is not None else LoadOptions.variable("verify"))
    if wrong:
        raise OptionError(
            f"{', '.join(wrong)}: not for {clean(without_secrets(str(path)))}, which is a seed and no file; "
            "leave it out (what comes from a seed is compared with digests always)"
        )


class SeedCheckpoint(Checkpoint):
    """What a seed offers, in one epoch, as the table of a checkpoint's tensors; nothing is read yet."""

    def __init__(
        self,
        source: str | Sequence[str],
        token: str | None = None,
        *,
        ca: Ca | None = None,
        as_it_is: bool = False,
        key: ModelKey | None = None,
        **ways: Any,
    ) -> None:
        """Asks the seed, or several of the same weights. ``token``: TENSORLIFT_TOKEN where it is None.
        ``ca``: whom one under TLS is trusted by, else whom the system trusts (and SSL_CERT_FILE).
        ``as_it_is``: also for what is no whole checkpoint. ``key``: which weights are wanted, of these seeds
        or of others behind their URLs. ``ways``: transports, devices, protocol, limit: see fork_into().

        Raises RequestError for what is no such URL, SeedError, ManifestError, and ForkError where the seed
        has another model, or weights that are not those of a checkpoint; of several the others go on.
        """
        urls = [source] if isinstance(source, str) else list(source)
        token = token_of() if token is None else token
        named = {SeedClient(_parsed(url)[0], token, ca=ca): url for url in urls}

        def look(client: SeedClient) -> Manifest:
            found = client.manifest()
            check_key(client, found, key)
            _check_is_wanted(found.key, named.get(client) or source_of(client.url), as_it_is)
            return found

        self.left: dict[str, str] = {}
        """Seeds that are not read any more, by URL, and why."""
        self.transports: dict[str, str] = {}
        """By which transport each seed was read, by URL, and why not by a better one."""
        seeds = alike(list(named), key, look, self.left)
        self._seen = {seed.name: seed.manifest for seed in seeds}
        self.client, self.token, self._ca, self._ways = seeds[0].client, token, ca, ways
        # One for all parts: else nobody would wait for the time of the last chunk of each.
        self._pacer = Pacer(ways_of(**{"transports": FORKED, **ways}).rate or 0)
        self.manifest = seeds[0].manifest
        url = named.get(self.client) or source_of(self.client.url)
        self._came: dict[str, int] = {}
        self._coming: Mapping[str, int] = {}
        header = _header(self.manifest, url)
        shard = Shard(url, os.fsencode(url), int(header.sizes.sum()), 0, 0, header)
        super().__init__(
            [shard], header.names, np.zeros(len(header.names), np.int32), header.dtypes, header.starts,
            header.sizes, header.shapes, url,
        )  # fmt: skip
        self._entries = {tensor.name: tensor for tensor in self.manifest.tensors}

    @property
    def by_source(self) -> dict[str, int]:
        """Bytes that have come so far, by URL."""
        names = dict.fromkeys((*self._came, *self._coming))
        return {name: self._came.get(name, 0) + self._coming.get(name, 0) for name in names}

    def batches(self, names: Sequence[str], limit: int) -> Iterator[list[str]]:
        """The names in parts of at most so many bytes, or of one tensor."""
        part: list[str] = []
        held = 0
        for name in names:
            nbytes = self._nbytes([name])
            if part and held + nbytes > limit:
                yield part
                part, held = [], 0
            part.append(name)
            held += nbytes
        if part:
            yield part

    def bring(self, tensors: Mapping[str, torch.Tensor], limit: int, told: Told) -> None:
        """Fills tensors of this checkpoint's names and shapes, wherever they are and of whatever layout.

        What a fork cannot write to goes through host memory, ``limit`` bytes at a time. Raises what
        fork_into() does; then their contents are undefined.
        """
        straight = {name: tensor for name, tensor in tensors.items() if self._takes(name, tensor)}
        self._fork(straight, 0, told)
        done = self._nbytes(straight)
        for names in self.batches([name for name in tensors if name not in straight], limit):
            room = {name: self._room(name) for name in names}
            self._fork(room, done, told)
            for name, tensor in room.items():
                copy_into(tensors[name], tensor, name)
            done += self._nbytes(names)
        told(done)

    def stream(self, names: Sequence[str], limit: int, told: Told) -> Iterator[memoryview]:
        """The bytes of one tensor after another, as files have them; no more than ``limit``, or one tensor,
        are held beside what the consumer keeps.
        """
        done = 0
        for part in self.batches(names, limit):
            room = {name: self._room(name) for name in part}
            self._fork(room, done, told)
            done += self._nbytes(part)
            for name in part:
                yield room.pop(name).contiguous().reshape(-1).view(torch.uint8).numpy().data
        told(done)

    def _takes(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether a fork writes into a tensor as it is, wherever it is; the only place that knows."""
        entry = self._entries[name]
        return (str(tensor.dtype), tensor.stride()) == (f"torch.{entry.dtype}", entry.stride)

    def _room(self, name: str) -> torch.Tensor:
        """Host memory with the seed's own layout."""
        entry = self._entries[name]
        dtype = getattr(torch, entry.dtype)
        return allocated(
            lambda: torch.empty_strided(entry.shape, entry.stride, dtype=dtype, device="cpu"), name
        )

    def _fork(self, tensors: Mapping[str, torch.Tensor], before: int, told: Told) -> None:
        nbytes = self._nbytes(tensors)
        told(before)
        if not tensors:
            return

        def tell(done: int, total: int, *, by_source: Mapping[str, int]) -> None:
            self._coming = by_source
            # What comes has gaps between tensors too, and what is one under two names comes once.
            told(before + done * nbytes // max(total, 1))

        asked = [url for url in self._seen if url not in self.left]
        came = fork_into(
            tensors, asked, token=self.token or None, ca=self._ca, part_of=self._seen, progress=tell,
            pacer=self._pacer, **self._ways,
        )  # fmt: skip
        self._coming = came.by_source
        self._came, self._coming = self.by_source, {}
        self.transports |= came.transports
        gone = dict(text.split(": ", 1) for text in came.left)
        if len(gone) < len(asked):
            # They are not asked again for each part, where somebody else is there.
            self.left |= gone

    def _nbytes(self, names: Sequence[str] | Mapping[str, object]) -> int:
        return sum(int(self.sizes[self.index(name)]) for name in names)


def _parsed(url: str) -> tuple[str, str]:
    """(http://host:port, model) of a seed's URL."""
    ours = next((one for one in _SCHEMES if url.startswith(one)), "")
    scheme = _SCHEMES.get(ours)
    address, _, model = url.removeprefix(ours).partition("/")
    try:
        place = None if scheme is None else split_url(f"{scheme}{address}")
    except RequestError:
        place = None
    if place is None or {*"?#"} & {*model}:
        raise RequestError(
            f"{quote(without_secrets(url), 300)} is no seed; it looks like tensorlift://host:port/key, "
            "under TLS tensorlift+https://host:port/key, where the key is quoted as in any URL and may be "
            "left out ('tensorlift fork' takes http://host:port and https://host:port too); a token is "
            f"given by {TOKEN_VARIABLE}"
        )
    return place.url, urllib.parse.unquote(model)


def _check_is_wanted(key: ModelKey, url: str, as_it_is: bool) -> None:
    model = _parsed(url)[1]
    if model and model != key.model:
        raise ForkError(
            f"{clean(url)}: the seed has {quote(key.model)}, not {quote(model)}; name that one, or none to "
            "take what is there"
        )
    if as_it_is:
        return
    if key.processed:
        raise ForkError(
            f"{clean(url)}: the seed has weights as an instance keeps them behind its load, which need not "
            "be those of the checkpoint; fork them into the same model, or write them with 'tensorlift fork'"
        )
    for name in SPLITS:
        rank, size = getattr(key, name)
        if size > 1:
            raise ForkError(
                f"{clean(url)}: the seed has the part of rank {rank} of {size} in {name}, and no whole "
                "checkpoint; fork it into the same rank of another instance"
            )


def _header(manifest: Manifest, url: str) -> Header:
    """The tensors as a file's header would have them."""
    kinds = [_BY_NAME.get(tensor.dtype) for tensor in manifest.tensors]
    shapes: list[tuple[int, ...]] = []
    sizes: list[int] = []
    for tensor, kind in zip(manifest.tensors, kinds, strict=True):
        if tensor.name == METADATA_KEY:
            raise ForkError(
                f"{clean(url)}: a tensor is called {METADATA_KEY!r}, which no checkpoint can have: headers "
                "of files keep that name for themselves; fork it into the same model"
            )
        if kind is None or (kind.elements > 1 and not tensor.shape):
            raise ForkError(
                f"{clean(url)}: {quote(tensor.name)} has dtype {tensor.dtype} and shape "
                f"{list(tensor.shape)}, which no checkpoint has; fork it into the same model"
            )
        shapes.append(_shape(tensor, kind))
        sizes.append(math.prod(shapes[-1]) * kind.bits // 8)
        span = span_bytes(tensor.dtype, tensor.shape, tensor.stride)
        if sizes[-1] > max(span, _MOST_EXPANDED_BYTES):
            raise ManifestError(
                f"{clean(url)}: {quote(tensor.name)} would take {sizes[-1]:,} bytes, and the seed has "
                f"{span:,} of it, which its elements share: fork it into the same model"
            )
    if sum(sizes) > _MOST_BYTES:
        raise ManifestError(f"{clean(url)}: the manifest has tensors of {sum(sizes):,} bytes")
    return Header(
        None,
        [tensor.name for tensor in manifest.tensors],
        np.array([kind.id for kind in kinds if kind is not None], np.uint8),
        shapes,
        np.zeros(len(sizes), np.int64),
        np.array(sizes, np.int64),
    )


def _shape(tensor: Tensor, kind: dtypes.Dtype) -> tuple[int, ...]:
    """As in a file: F4 counts half bytes."""
    if kind.elements == 1:
        return tensor.shape
    return (*tensor.shape[:-1], tensor.shape[-1] * kind.elements)


def allocated(make: Callable[[], torch.Tensor], name: str) -> torch.Tensor:
    """What ``make`` makes for a tensor; OutOfMemoryError."""
    try:
        with torch.inference_mode(False):
            return make()
    except RuntimeError as error:  # torch's own word for no memory, on a host
        raise OutOfMemoryError(f"memory for {quote(name)} could not be had: {error}") from None
