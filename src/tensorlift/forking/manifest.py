"""What a seed publishes: its model, its regions of memory, and where in them each tensor lies.

    {"format": "tensorlift.manifest", "version": 1, "instance": "32 hexadecimal digits", "epoch": 0,
     "weights": "", "key": {"model": "...", "revision": "", "role": "target", "tp": [0, 1], ...},
     "layout": "64 hexadecimal digits", "transports": [{"kind": "tcp", "address": "host:port"}],
     "regions": [[nbytes, "cuda:0"], ...],
     "tensors": [[name, dtype, shape, stride, region, offset, kind, alias], ...]}

JSON, sent compressed (gzip). A manifest comes from another process, maybe on another host: all that is said
in it is checked against bounds before it is believed, and nothing in it is an address. A tensor of no bytes
has region -1: it is made, not sent.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Sequence
from typing import Annotated, Literal, NamedTuple

import msgspec

from tensorlift.errors import ManifestError
from tensorlift.format.bounds import LARGEST, MOST_PARTS, Count, is_too_much
from tensorlift.format.quoting import clean, plural, quote

__all__ = [
    "ITEM_BYTES",
    "LONGEST_MANIFEST",
    "LONGEST_NAME",
    "NOWHERE",
    "ONE_SIDED",
    "SPLITS",
    "Layout",
    "Manifest",
    "ModelKey",
    "Offer",
    "Region",
    "Tensor",
    "decode",
    "differences",
    "encode",
    "is_sendable",
    "layout_digest",
    "place_of",
    "rank_problem",
    "span_bytes",
]

LONGEST_MANIFEST = 200_000_000
"""Bytes of its JSON, decompressed: ten times what 100,000 tensors with names of 60 characters take."""
LONGEST_NAME = 4096
"""Characters of a tensor's name, and of any other text."""
NOWHERE = -1
"""The region of a tensor that has no bytes."""
SPLITS = ("tp", "pp", "ep")
"""What of a ModelKey is a rank and a size."""

_FORMAT, _VERSION = "tensorlift.manifest", 1
_MOST_DIMENSIONS = 64
_SHOWN = 20
# torch's names; quantised dtypes are left out, for their scales are no part of the bytes.
ITEM_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e4m3fnuz": 1, "float8_e5m2": 1,
    "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1, "float4_e2m1fn_x2": 1, "uint16": 2, "int16": 2, "float16": 2,
    "bfloat16": 2, "uint32": 4, "int32": 4, "float32": 4, "complex32": 4, "uint64": 8, "int64": 8,
    "float64": 8, "complex64": 8, "complex128": 16,
}  # fmt: skip
"""Bytes of an element, by dtype as torch calls it without its "torch."."""

_Text = Annotated[str, msgspec.Meta(max_length=LONGEST_NAME)]
_Sizes = Annotated[tuple[Count, ...], msgspec.Meta(max_length=_MOST_DIMENSIONS)]
_Share = tuple[Count, Annotated[int, msgspec.Meta(ge=1, le=2**31)]]
_Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$", max_length=32)]
Kind = Literal["parameter", "buffer", "derived"]


class ModelKey(msgspec.Struct, frozen=True, kw_only=True):
    """Which weights these are: a fork takes them from a seed of the same key. tp, pp, ep: (rank, size)."""

    model: _Text
    revision: _Text = ""
    role: _Text = "target"
    """target or draft, or what its users agree on."""
    dtype: _Text = ""
    quantization: _Text = ""
    tp: _Share = (0, 1)
    pp: _Share = (0, 1)
    ep: _Share = (0, 1)
    processed: bool = True
    """After what the engine does to weights behind their load, rather than before."""
    engine: _Text = ""
    """What has made the tensors out of the checkpoint: its version, and for which kind of device."""


def rank_problem(key: ModelKey) -> str | None:
    """What its bounds alone do not say: a rank that is not below the size."""
    for name in SPLITS:
        rank, size = getattr(key, name)
        if rank >= size:
            return f"rank {rank} of {size} in {name}"
    return None


class Region(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Memory in one piece that a seed lets others read."""

    nbytes: Count
    device: _Text = "cpu"


class Tensor(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One tensor; shape and stride in elements, offset in bytes from the region's first."""

    name: _Text
    dtype: _Text
    shape: _Sizes
    stride: _Sizes
    region: Annotated[int, msgspec.Meta(ge=NOWHERE, le=2**31)]
    offset: Count
    kind: Kind = "parameter"
    alias: _Text | None = None
    """An earlier tensor that is the same one under another name."""


ONE_SIDED = ("mooncake", "nixl")
"""The transports that have an engine read; it takes NICs, and is at host:port."""


class Offer(msgspec.Struct, frozen=True):
    """A transport, and where it listens."""

    kind: _Text
    address: _Text


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank of an instance offers in one epoch."""

    instance: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$", max_length=32)]
    """Made when a seed begins: an address can come back as another process."""
    epoch: Count
    weights: _Text = ""
    """The version of the weights, as the seed's owner counts them."""
    key: ModelKey
    layout: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$", max_length=64)]
    transports: tuple[Offer, ...] = ()
    off: dict[_Text, _Text] = {}
    """Transports that the seed was told to offer and does not, each with the reason."""
    regions: tuple[Region, ...]
    tensors: tuple[Tensor, ...]
    digests: dict[_Text, _Digest] = {}
    """Of whole tensors, where the seed knows them; see tensor_digests.py."""


class Layout(NamedTuple):
    """What two models must have in common for bytes of the one to be right in the other."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class _Head(msgspec.Struct):
    format: str = ""
    version: int = 0


def span_bytes(dtype: str, shape: Sequence[int], stride: Sequence[int]) -> int:
    """Bytes from the first of a strided tensor to its last; 0 where it has none."""
    last = 0
    for size, step in zip(shape, stride, strict=True):
        if size == 0:
            return 0
        last += (size - 1) * step
    return (last + 1) * ITEM_BYTES[dtype]


def layout_digest(layouts: Iterable[Layout | Tensor]) -> str:
    """SHA-256 of names, dtypes, shapes and strides, whatever their order and wherever the bytes lie."""
    rows = sorted((one.name, one.dtype, one.shape, one.stride) for one in layouts)
    return hashlib.sha256(msgspec.json.encode(rows)).hexdigest()


def is_sendable(text: str) -> bool:
    """Whether a manifest can have it: not too long, and no half of a character."""
    return len(text) <= LONGEST_NAME and not any("\ud800" <= c <= "\udfff" for c in text)


def encode(manifest: Manifest) -> bytes:
    """Compressed JSON."""
    head = msgspec.json.encode(_Head(_FORMAT, _VERSION))
    text = head[:-1] + b"," + msgspec.json.encode(manifest)[1:]
    # The fastest level: a fork waits for it, and the names compress well at any.
    packer = zlib.compressobj(1, wbits=31)
    return packer.compress(text) + packer.flush()


def decode(raw: bytes, where: str) -> Manifest:
    """The manifest that a seed sent; ``where`` names it. Raises ManifestError for whatever is wrong."""
    text = _decompressed(raw, where)
    if is_too_much(text):
        raise ManifestError(
            f"{clean(where)}: the manifest has more than {MOST_PARTS:,} lists, objects and keys: this is "
            "none of a model"
        )
    try:
        head = msgspec.json.decode(text, type=_Head)
        if (head.format, head.version) != (_FORMAT, _VERSION):
            raise ManifestError(
                f"{clean(where)}: wanted a manifest ({_FORMAT}, version {_VERSION}), found "
                f"{quote(head.format)}, version {quote(head.version)}; run one version of tensorlift on both "
                "sides"
            )
        manifest = msgspec.json.decode(text, type=Manifest)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ManifestError(f"{clean(where)}: this is no manifest: {quote(str(error), 300)[1:-1]}") from None
    _check(manifest, where)
    return manifest


def _decompressed(raw: bytes, where: str) -> bytes:
    unpacker = zlib.decompressobj(wbits=31)
    try:
        text = unpacker.decompress(raw, LONGEST_MANIFEST + 1)
    except zlib.error as error:
        raise ManifestError(f"{clean(where)}: the manifest does not decompress: {error}") from None
    if len(text) > LONGEST_MANIFEST:
        raise ManifestError(
            f"{clean(where)}: the manifest has more than {LONGEST_MANIFEST:,} bytes: this is none of a model"
        )
    if not unpacker.eof or unpacker.unused_data:
        raise ManifestError(
            f"{clean(where)}: the manifest is cut off or goes on behind its end: {plural(len(raw), 'byte')} "
            "came"
        )
    return text


def _check(manifest: Manifest, where: str) -> None:
    """Whether it agrees with itself: every byte inside its region, every name once, aliases that are ones."""

    def refuse(text: str) -> ManifestError:
        return ManifestError(f"{clean(where)}: the manifest contradicts itself: {text}")

    if problem := rank_problem(manifest.key):
        raise refuse(problem)
    sizes = [region.nbytes for region in manifest.regions]
    if sum(sizes) > LARGEST:
        raise refuse(f"its regions have {sum(sizes):,} bytes")
    known: dict[str, Tensor] = {}
    for tensor in manifest.tensors:
        if tensor.name in known:
            raise refuse(f"{quote(tensor.name)} is there twice")
        if problem := _problem(tensor, sizes):
            raise refuse(f"{quote(tensor.name)} {problem}")
        if tensor.alias is not None:
            first = known.get(tensor.alias)
            if first is None or place_of(first) != place_of(tensor):
                raise refuse(f"{quote(tensor.name)} is said to be {quote(tensor.alias)}, which it is not")
        known[tensor.name] = tensor
    if layout_digest(manifest.tensors) != manifest.layout:
        raise refuse("the digest of its layout is that of another one")


def place_of(tensor: Tensor) -> tuple[object, ...]:
    """Two tensors of one place are the same one."""
    return tensor.region, tensor.offset, tensor.dtype, tensor.shape, tensor.stride


def _problem(tensor: Tensor, sizes: Sequence[int]) -> str | None:
    if tensor.dtype not in ITEM_BYTES:
        return f"has dtype {quote(tensor.dtype)}, which is unknown here"
    if len(tensor.shape) != len(tensor.stride):
        return f"has {plural(len(tensor.shape), 'dimension')} and {plural(len(tensor.stride), 'stride')}"
    span = span_bytes(tensor.dtype, tensor.shape, tensor.stride)
    if tensor.region == NOWHERE:
        return None if span == 0 else f"has {plural(span, 'byte')}, and no region"
    if span == 0:
        # Whoever took it for one with bytes would write some that are another's.
        return f"has no bytes, and is in region {tensor.region}"
    if tensor.region >= len(sizes):
        return f"is in region {tensor.region} of {len(sizes)}"
    if tensor.offset + span > sizes[tensor.region]:
        return (
            f"ends at byte {quote(tensor.offset + span)} of region {tensor.region}, which has "
            f"{sizes[tensor.region]:,}"
        )
    return None


def differences(theirs: Manifest, ours: Sequence[Layout], *, part: bool = False) -> list[str]:
    """What keeps the bytes of a seed from being right here, a line each and some of many.

    ``part``: it may have more tensors.
    """
    if not part and layout_digest(ours) == theirs.layout:
        return []
    there = {tensor.name: tensor for tensor in theirs.tensors}
    found = []
    for mine in ours:
        other = there.pop(mine.name, None)
        if other is None:
            found.append(f"{quote(mine.name)} is not in the seed")
            continue
        for what in ("dtype", "shape", "stride"):
            wanted, offered = getattr(mine, what), getattr(other, what)
            if wanted != offered:
                found.append(f"{quote(mine.name)}: {what} {quote(wanted)} here, {quote(offered)} in the seed")
                break
    if not part:
        found += [f"{quote(name)} is in the seed only" for name in there]
    more = len(found) - _SHOWN
    return [*found[:_SHOWN], f"and {more:,} more"] if more > 0 else found
