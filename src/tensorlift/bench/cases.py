"""Synthetic checkpoints with the geometry of real models: names, shapes, dtypes, shards, seeded content.

The bytes come from one random block that is laid down again and again from different places, so that writing
is as fast as the file system and two tensors of one size still differ.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

__all__ = ["Case", "Spec", "nvfp4_moe", "qwen3_moe", "write_shards"]

_BITS = {"BF16": 16, "F32": 32, "U8": 8, "F8_E4M3": 8}
_BLOCK_BYTES = 64 << 20
_WRITE_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Spec:
    """One tensor to write."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return math.prod(self.shape) * _BITS[self.dtype] // 8


@dataclass(frozen=True, slots=True)
class Case:
    """A checkpoint that was written."""

    folder: Path
    files: tuple[Path, ...]
    tensors: int
    nbytes: int  # data only, headers left out

    @property
    def file_bytes(self) -> int:
        """Bytes of its files, headers included."""
        return sum(file.stat().st_size for file in self.files)


def qwen3_moe(folder: Path, layers: int, shards: int) -> Case:
    """Qwen3-30B-A3B's geometry in bf16, cut to some layers: 1.22 GB a layer and 1.24 GB of embeddings.

    hidden 2048, 128 experts of 768, vocabulary 151,936, 32 heads and 4 key-value heads of 128: the figures of
    the model's own config.json.
    """
    return write_shards(folder, _split(list(_qwen3_specs(layers)), shards))


def nvfp4_moe(
    folder: Path,
    groups: int,
    shards: int,
    weight: tuple[int, int] = (768, 1024),
    scale: tuple[int, int] = (768, 128),
) -> Case:
    """Experts in NVFP4: for each group a packed weight, its block scales and two scalars of 4 bytes."""
    kinds = (
        ("input_scale", "F32", ()),
        ("weight_scale_2", "F32", ()),
        ("weight", "U8", weight),
        ("weight_scale", "F8_E4M3", scale),
    )
    parts = []
    for shard in range(shards):
        inside = range(shard * groups // shards, (shard + 1) * groups // shards)
        parts.append(
            [Spec(_expert(i) + suffix, kind, shape) for suffix, kind, shape in kinds for i in inside]
        )
    return write_shards(folder, parts)


def write_shards(folder: Path, shards: list[list[Spec]]) -> Case:
    """Writes one file a list of tensors, and an index when there is more than one.

    Args:
        folder: made if it is not there; files of the same names are overwritten.
        shards: the tensors of each file, in file order.
    """
    folder.mkdir(parents=True, exist_ok=True)
    block = _block()
    count = len(shards)
    names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    if count == 1:
        names = ["model.safetensors"]
    with ThreadPoolExecutor(min(16, len(os.sched_getaffinity(0)))) as pool:
        for number, (name, specs) in enumerate(zip(names, shards, strict=True)):
            _write_file(folder / name, specs, block, number, pool)
    every = [spec for specs in shards for spec in specs]
    total = sum(spec.nbytes for spec in every)
    if count > 1:
        weight_map = {spec.name: name for name, specs in zip(names, shards, strict=True) for spec in specs}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return Case(folder, tuple(folder / name for name in names), len(every), total)


def _qwen3_specs(layers: int) -> Iterator[Spec]:
    hidden, experts, inner, vocabulary = 2048, 128, 768, 151936
    small = (
        ("input_layernorm.weight", (hidden,)),
        ("post_attention_layernorm.weight", (hidden,)),
        ("self_attn.q_proj.weight", (4096, hidden)),
        ("self_attn.k_proj.weight", (512, hidden)),
        ("self_attn.v_proj.weight", (512, hidden)),
        ("self_attn.o_proj.weight", (hidden, 4096)),
        ("self_attn.q_norm.weight", (128,)),
        ("self_attn.k_norm.weight", (128,)),
        ("mlp.gate.weight", (experts, hidden)),
    )
    each = (("gate_proj", (inner, hidden)), ("up_proj", (inner, hidden)), ("down_proj", (hidden, inner)))
    yield Spec("model.embed_tokens.weight", "BF16", (vocabulary, hidden))
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        for name, shape in small:
            yield Spec(prefix + name, "BF16", shape)
        for expert in range(experts):
            for name, shape in each:
                yield Spec(f"{prefix}mlp.experts.{expert}.{name}.weight", "BF16", shape)
    yield Spec("model.norm.weight", "BF16", (hidden,))
    yield Spec("lm_head.weight", "BF16", (vocabulary, hidden))


def _expert(i: int) -> str:
    return f"model.layers.{i // 384}.mlp.experts.{i % 384 // 3}.{('gate', 'up', 'down')[i % 3]}_proj."


def _split(specs: list[Spec], shards: int) -> list[list[Spec]]:
    """Cuts the list into shards of about the same bytes, in order."""
    share = sum(spec.nbytes for spec in specs) / shards
    parts: list[list[Spec]] = [[]]
    held = 0
    for spec in specs:
        if held >= share and len(parts) < shards:
            parts.append([])
            held = 0
        parts[-1].append(spec)
        held += spec.nbytes
    return parts


def _block() -> bytes:
    # Clearing one bit of the exponent keeps every bf16 finite.
    words = np.random.default_rng(0).integers(0, 2**16, _BLOCK_BYTES // 2, dtype=np.uint16)
    return bytes((words & np.uint16(0xBFFF)).data)


def _header(specs: list[Spec]) -> tuple[bytes, int]:
    """The file's beginning (length field and JSON), and the bytes of data that follow it."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in specs:
        end = offset + spec.nbytes
        entries[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, offset


def _write_file(file: Path, specs: list[Spec], block: bytes, number: int, pool: ThreadPoolExecutor) -> None:
    header, data = _header(specs)
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        os.ftruncate(fd, len(header) + data)
        os.pwrite(fd, header, 0)

        def write(start: int) -> None:
            nbytes = min(_WRITE_BYTES, data - start)
            _write_part(fd, len(header) + start, nbytes, block, number * 7919 + start)

        list(pool.map(write, range(0, data, _WRITE_BYTES)))
    finally:
        os.close(fd)


def _write_part(fd: int, offset: int, nbytes: int, block: bytes, key: int) -> None:
    view = memoryview(block)
    # An odd multiplier spreads the starting places; even ones keep bf16 values whole.
    source = key * 2654435761 % len(block) & ~1
    while nbytes:
        step = os.pwrite(fd, view[source : source + nbytes], offset)
        offset, nbytes, source = offset + step, nbytes - step, (source + step) % len(block)
