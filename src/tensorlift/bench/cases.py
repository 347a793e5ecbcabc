"""Synthetic checkpoints with the geometry of real models, written at the speed of the file system.

The bytes come from one random block that is laid down again and again from different places, so that writing
takes no time for making them and two tensors of one size still differ.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from tensorlift.bench.geometry import MODELS
from tensorlift.engine.machine import usable_cpus
from tensorlift.errors import RequestError
from tensorlift.format.listing import USUAL_INDEX
from tensorlift.sources.writing import Case, Spec, header_of, in_order, in_shards, write_checkpoint

__all__ = [
    "Case",
    "Spec",
    "in_shards",
    "nvfp4_moe",
    "qwen3_moe",
    "remove",
    "write_holes",
    "write_model",
    "write_shards",
]

# Odd, so that no power of two of a file's bytes meets the same place of the block again.
_BLOCK_BYTES = (64 << 20) + 4099
_WRITE_BYTES = 32 << 20


def write_model(
    folder: Path,
    model: str,
    layers: int | None = None,
    shards: int | None = None,
    seed: int = 0,
    force: bool = False,
) -> Case:
    """Writes a checkpoint like a published one of the model.

    Args:
        folder: made if it is not there.
        model: a name in ``geometry.MODELS``.
        layers: how many of the first layers; all where None.
        shards: files of about the same size; None cuts at SHARD_BYTES.
        seed: the same seed gives the same bytes.
        force: replace a checkpoint that is there.

    Raises:
        RequestError: an unknown model, too many layers or shards, or files that would be overwritten.
        MachineError: there is not enough room, or writing failed.
    """
    specs = _ordered(model, layers, shards)
    return write_shards(folder, specs, seed, keep=not force)


def qwen3_moe(folder: Path, layers: int, shards: int) -> Case:
    """Qwen3-30B-A3B's geometry in bf16, cut to some layers: 1.22 GB a layer and 1.24 GB of embeddings."""
    return write_shards(folder, in_shards(MODELS["qwen3-30b-a3b"].specs(layers), shards))


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


def write_shards(folder: Path, shards: Sequence[Sequence[Spec]], seed: int = 0, keep: bool = True) -> Case:
    """Writes random bytes, of a seed; see write_checkpoint(). What is there may be somebody's weights."""
    block = functools.lru_cache(_block)
    with ThreadPoolExecutor(min(16, usable_cpus())) as pool:

        def write(file: Path, specs: Sequence[Spec], number: int) -> None:
            _write_file(file, specs, block(seed), number, pool)

        return write_checkpoint(folder, shards, write, keep)


def write_holes(folder: Path, shards: Sequence[Sequence[Spec]]) -> Case:
    """Files with the right headers and nothing but holes behind them: for what only headers decide."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for number, specs in enumerate(shards):
        header, data = header_of(specs)
        files.append(folder / f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors")
        files[-1].write_bytes(header)
        os.truncate(files[-1], len(header) + data)
    total = sum(spec.nbytes for specs in shards for spec in specs)
    return Case(folder, tuple(files), sum(map(len, shards)), total)


def remove(case: Case) -> None:
    """Takes a case's files away, and its folder where nothing else is in it."""
    with contextlib.suppress(OSError):
        for path in (*case.files, case.folder / USUAL_INDEX):
            path.unlink(missing_ok=True)
        case.folder.rmdir()


def _ordered(name: str, layers: int | None, shards: int | None) -> list[list[Spec]]:
    """The tensors of each shard in the order in which the safetensors library writes them."""
    model = MODELS.get(name)
    if model is None:
        raise RequestError(f"no geometry is called {name!r}; there are {', '.join(MODELS)}")
    if layers is not None and not 1 <= layers <= model.layers:
        raise RequestError(f"{name} has {model.layers} layers, {layers} were asked for")
    specs = model.specs(layers)
    if shards is not None and not 1 <= shards <= len(specs):
        raise RequestError(f"{shards} shards cannot be made of {len(specs)} tensors")
    return in_order(in_shards(specs, shards))


def _expert(i: int) -> str:
    return f"model.layers.{i // 384}.mlp.experts.{i % 384 // 3}.{('gate', 'up', 'down')[i % 3]}_proj."


def _block(seed: int) -> bytes:
    # Bit 6 is the top bit of the exponent in the last byte of bf16 and f32 and in every byte of f8_e4m3:
    # cleared in all bytes, every value is finite wherever its tensor begins.
    raw = np.random.default_rng(seed).integers(0, 256, _BLOCK_BYTES, dtype=np.uint8)
    return bytes((raw & np.uint8(0xBF)).data)


def _write_file(
    file: Path, specs: Sequence[Spec], block: bytes, number: int, pool: ThreadPoolExecutor
) -> None:
    header, data = header_of(specs)
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        os.ftruncate(fd, len(header) + data)
        os.pwrite(fd, header, 0)

        def write(start: int) -> None:
            nbytes = min(_WRITE_BYTES, data - start)
            _write_part(fd, len(header) + start, nbytes, block, _place(number, start, len(block)))

        list(pool.map(write, range(0, data, _WRITE_BYTES)))
    finally:
        os.close(fd)


def _place(file: int, start: int, length: int) -> int:
    """Where in the block a part of a file begins: spread over all of it (Knuth's multiplicative hashing)."""
    return (((file << 40) + start) * 0x9E3779B97F4A7C15 % (1 << 64) >> 16) % length


def _write_part(fd: int, offset: int, nbytes: int, block: bytes, source: int) -> None:
    view = memoryview(block)
    while nbytes:
        step = os.pwrite(fd, view[source : source + nbytes], offset)
        offset, nbytes, source = offset + step, nbytes - step, (source + step) % len(block)
