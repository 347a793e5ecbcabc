"""Folders, indexes, links, names; and the good files of the cases about surroundings."""

from __future__ import annotations

import hashlib
import os

from corpus.actions import ACTIONS
from corpus.writer import (
    Book,
    Entry,
    case,
    model_folder,
    shard_set,
    simple,
)
from support.checkpoints import write_index


@case
def c_missing_shard(book: Book, cid: str) -> None:
    missing = "model-00002-of-00003.safetensors"
    tensors = model_folder(book.folder(cid), shard_set(3), leave_out=[missing])
    right = "refused before any weight is read; never a model with some weights left at their initial values"
    reports = [
        "sgl-project/sglang#32279",
        "noonghunna/club-3090#1042",
        "Neph0s/CoSER#3",
        "Blaizzy/mlx-vlm#1827",
    ]
    book.add(
        cid,
        "index",
        reports,
        "load the folder",
        "error",
        right,
        tensors,
        tensors,
        error_names=[missing],
        unit="directory",
    )


@case
def c_consolidated(book: Book, cid: str) -> None:
    folder, shards = book.folder(cid), shard_set(2)
    tensors = model_folder(folder, shards)
    all_entries = [e for entries in shards.values() for e in entries]
    extra, stray = folder / "consolidated.safetensors", folder / "model.safetensors"
    simple(extra, [Entry("other." + e.name, e.dtype, e.shape, e.seed + 100) for e in all_entries])
    simple(stray, [Entry(e.name, e.dtype, e.shape, e.seed + 200) for e in all_entries])
    right = "only the two shards named by the index are read; each tensor comes once, with the shards' values"
    reports = ["vllm-project/vllm#40765", "sgl-project/sglang#35107", "NVIDIA/TensorRT-LLM#7225"]
    reports += ["Blaizzy/mlx-vlm#1464"]
    book.add(cid, "index", reports, "load the folder", "action", right, [*tensors, extra, stray], tensors)


@case
def c_hub_cache(book: Book, cid: str) -> None:
    folder = book.folder(cid) / "models--org--name"
    blobs, snapshot = folder / "blobs", folder / "snapshots" / ("c0ffee" * 6 + "abcd")
    blobs.mkdir(parents=True, exist_ok=True)
    snapshot.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, entries in shard_set(2).items():
        plain, link = blobs / "tmp", snapshot / name
        simple(plain, entries)
        digest = hashlib.sha256(plain.read_bytes()).hexdigest()
        plain.replace(blobs / digest)
        link.unlink(missing_ok=True)
        link.symlink_to(os.path.join("..", "..", "blobs", digest))
        tensors[link] = entries
    write_index(snapshot, {e.name: file.name for file, entries in tensors.items() for e in entries})
    outer = book.folder(cid) / "linked_dir"
    if not outer.is_symlink():
        outer.symlink_to(os.path.relpath(snapshot, book.folder(cid)))
    do = (
        "load through snapshots/<commit>/ (relative links to blobs that have no extension) and through "
        "linked_dir; "
        "with absolute and relative paths and another working directory"
    )
    right = "same tensors as for plain files; names in errors are the path the caller gave"
    reports = [
        "huggingface/huggingface_hub#1388",
        "huggingface/huggingface_hub#4550",
        "Layr-Labs/d-inference#260",
    ]
    book.add(cid, "symlinks", reports, do, "load", right, tensors, tensors)


@case
def c_paths(book: Book, cid: str) -> None:
    folder = book.folder(cid)
    names = [
        "with space & 100%.safetensors",
        "\u00fcn\u00ef \u4e2d\U0001f4a9.safetensors",
        "-dash.safetensors",
    ]
    names += ["[glob]*?.safetensors", "no_extension", "UPPER.SAFETENSORS", "new\nline.safetensors"]
    names += ["semi;colon|pipe$HOME.safetensors", os.fsdecode(b"raw_\xff\xfe.safetensors")]
    names += [os.path.join(*["d" * 200] * 8, "deep.safetensors")]
    tensors = {folder / name: [Entry("w", "F32", [10], i)] for i, name in enumerate(names)}
    for file, entries in tensors.items():
        simple(file, entries)
    do = (
        "open each as str, bytes, pathlib.Path and an os.PathLike object; as a list, a tuple and a "
        "generator of paths; "
        "absolute and relative"
    )
    right = (
        "every form that open() takes is taken, or refused with TypeError naming the type; a name that is "
        "not UTF-8 "
        "loads, or is refused saying so (stock safe_open 0.8.0 refuses it)"
    )
    reports = ["qwopqwop200/GPTQ-for-LLaMa#20", "torchfont/torchfont#277", "pytorch/pytorch#99453"]
    reports += ["ollama/ollama#16999"]
    book.add(cid, "paths", reports, do, "load", right, tensors, tensors)


@case
def d_good(book: Book, cid: str) -> None:
    folder = book.folder(cid)
    tensors = model_folder(folder, shard_set(4, per=6, elements=600_000))
    model_folder(folder / "many_shards", shard_set(200, per=1, elements=2000))
    for name, reports, do, right in ACTIONS:
        book.add(f"d_{name}", "surroundings", reports, do, "action", right, tensors, tensors)
