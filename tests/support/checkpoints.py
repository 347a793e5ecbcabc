"""Checkpoints for tests, written byte by byte: no other writer stands between a test and its file."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

# Written down here again, so that the package's table is tested against it.
_CODES_BY_BITS = {
    4: "F4",
    6: "F6_E2M3 F6_E3M2",
    8: "BOOL U8 I8 F8_E5M2 F8_E4M3 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ",
    16: "I16 U16 F16 BF16",
    32: "I32 U32 F32",
    64: "C64 F64 I64 U64",
}
BITS: Mapping[str, int] = {code: bits for bits, codes in _CODES_BY_BITS.items() for code in codes.split()}
"""Bits of one element by the code in the file."""

TORCH_CODES = tuple(code for code in BITS if not code.startswith("F6"))
"""Dtypes that torch can express."""

Row = tuple[str, Sequence[int], bytes]
"""One tensor: dtype code, shape, bytes."""


def nbytes_of(code: str, shape: Iterable[int]) -> int:
    """Bytes that a tensor takes in the file."""
    count = 1
    for extent in shape:
        count *= extent
    if count * BITS[code] % 8:
        raise ValueError(f"{code} {list(shape)} does not fill whole bytes")
    return count * BITS[code] // 8


def random_bytes(code: str, nbytes: int, seed: int = 0) -> bytes:
    """Any bytes that are legal for the dtype: 0 and 1 for BOOL, everything for the others."""
    raw = np.random.default_rng(seed).integers(0, 2 if code == "BOOL" else 256, nbytes, dtype=np.uint8)
    return raw.tobytes()


def random_row(code: str, shape: Sequence[int], seed: int = 0) -> Row:
    """A tensor with bytes that depend on the seed alone."""
    return code, tuple(shape), random_bytes(code, nbytes_of(code, shape), seed)


def header_bytes(
    tensors: Mapping[str, Row],
    metadata: Mapping[str, str] | None = None,
    align: int = 8,
    length: int | None = None,
) -> bytes:
    """The JSON header, filled with spaces to a multiple of `align`, or to exactly `length` bytes."""
    head: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    at = 0
    for name, (code, shape, raw) in tensors.items():
        head[name] = {"dtype": code, "shape": list(shape), "data_offsets": [at, at + len(raw)]}
        at += len(raw)
    text = json.dumps(head, separators=(",", ":"), ensure_ascii=False).encode()
    wanted = length if length is not None else -(-len(text) // align) * align
    if wanted < len(text):
        raise ValueError("the header is longer than asked")
    return text + b" " * (wanted - len(text))


def write_raw(path: Path, header: bytes | object, data: bytes = b"", claim: int | None = None) -> Path:
    """A file of any header bytes (or an object, written as JSON) and data; `claim` replaces the length."""
    raw = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(raw) if claim is None else claim) + raw + data)
    return path


def write_safetensors(
    path: Path,
    tensors: Mapping[str, Row],
    metadata: Mapping[str, str] | None = None,
    align: int = 8,
    length: int | None = None,
) -> Path:
    """A good file with the tensors in the order of the mapping.

    `align` is what the header is filled to: 1 lets the data start at any offset.
    """
    data = b"".join(raw for _, _, raw in tensors.values())
    return write_raw(path, header_bytes(tensors, metadata, align, length), data)


def write_index(
    folder: Path, weight_map: Mapping[str, str], name: str = "model.safetensors.index.json"
) -> Path:
    """An index file that assigns each tensor name to a shard."""
    path = folder / name
    path.write_text(json.dumps({"metadata": {}, "weight_map": dict(weight_map)}))
    return path


def write_sharded(folder: Path, shards: Mapping[str, Mapping[str, Row]], index: bool = True) -> Path:
    """A folder of shards, with an index that lists all of their tensors unless told otherwise."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, tensors in shards.items():
        write_safetensors(folder / name, tensors)
    if index:
        write_index(folder, {tensor: name for name, tensors in shards.items() for tensor in tensors})
    return folder


@dataclass(frozen=True)
class Written:
    """A checkpoint on disk and what it holds."""

    path: Path
    tensors: dict[str, Row]
    files: tuple[Path, ...]


def random_checkpoint(
    folder: Path,
    shards: int = 1,
    tensors: int = 8,
    seed: int = 0,
    elements: int = 1000,
    codes: Sequence[str] = TORCH_CODES,
    index: bool = True,
) -> Written:
    """A folder with `shards` files of `tensors` tensors each, of at most about `elements` elements a tensor.

    Shapes have 0 to 3 dimensions (at least one for F4), a few of them with an extent of 0.
    Several shards get an index unless `index` is off.
    """
    rng = np.random.default_rng(seed)
    files: dict[str, dict[str, Row]] = {}
    for shard in range(shards):
        name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors" if shards > 1 else "model.safetensors"
        rows: dict[str, Row] = {}
        for k in range(tensors):
            code = codes[int(rng.integers(len(codes)))]
            ndim = int(rng.integers(1 if code == "F4" else 0, 4))
            top = max(2, int(elements ** (1 / max(ndim, 1))))
            shape = [int(rng.integers(1, top + 1)) for _ in range(ndim)]
            if ndim and rng.integers(16) == 0:
                shape[0] = 0
            if code == "F4":
                shape[-1] += shape[-1] % 2
            rows[f"layers.{shard}.{k}.{code.lower()}"] = random_row(code, shape, int(rng.integers(1 << 30)))
        files[name] = rows
    write_sharded(folder, files, index=index and shards > 1)
    everything = {name: row for rows in files.values() for name, row in rows.items()}
    return Written(folder, everything, tuple(folder / name for name in files))
