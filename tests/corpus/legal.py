"""Legal but unusual files: they have to load exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from corpus.oracle import many_rule
from corpus.writer import (
    LOAD,
    Book,
    Entry,
    case,
    mix,
    simple,
    sparse,
)
from support.checkpoints import BITS


def seeded(rows: list[tuple[str, str, list[int]]]) -> list[Entry]:
    return [Entry(name, dtype, shape, i) for i, (name, dtype, shape) in enumerate(rows)]


@case
def a_space_padded(book: Book, cid: str) -> None:
    fills: dict[str, dict[str, int]] = {"to4096": {"align": 4096}, "plus1MiB": {"length": 1 << 20}, "to8": {}}
    fills |= {f"len{n}": {"length": n} for n in (4088, 4089, 65528, 99993, 99994, 100_000)}
    tensors = {book.folder(cid) / f"{label}.safetensors": mix() for label in fills}
    for (file, entries), fill in zip(tensors.items(), fills.values(), strict=True):
        simple(file, entries, **fill)
    right = (
        "spaces after the JSON are part of the header; lengths just around a first-read size (4 KiB, 64 "
        "KiB, 100,000) "
        "are no special case; values by the oracle"
    )
    reports = ["safetensors/safetensors#235", "huggingface/huggingface_hub#4602"]
    book.add(cid, "header", reports, LOAD, "load", right, tensors, tensors)


@case
def a_misaligned_inside(book: Book, cid: str) -> None:
    rows = [("u3", "U8", [3]), ("f", "F32", [1025]), ("u1", "U8", [1]), ("d", "F64", [513])]
    rows += [("bf", "BF16", [4099]), ("u5", "U8", [5]), ("i", "I64", [3]), ("tail", "F16", [1])]
    file, entries = book.folder(cid) / "m.safetensors", seeded(rows)
    simple(file, entries)
    right = "each tensor sits at an offset that is no multiple of its item size; values by the oracle"
    reports = ["Comfy-Org/ComfyUI#12266", "osaurus-ai/vmlx-swift#377"]
    book.add(cid, "alignment", reports, LOAD, "load", right, [file], {file: entries})


@case
def a_metadata_shapes(book: Book, cid: str) -> None:
    maps: dict[str, dict[str, str] | None] = {"none": None, "empty": {}, "pt": {"format": "pt"}}
    maps |= {"long": {"k": "v" * 70000}, "unicode": {"\u00e9\U0001f4a9": '\n"\\'}}
    tensors = {book.folder(cid) / f"{label}.safetensors": mix() for label in maps}
    for (file, entries), metadata in zip(tensors.items(), maps.values(), strict=True):
        simple(file, entries, metadata)
    right = "__metadata__ absent, empty or long: tensors load, __metadata__ is never taken for a tensor"
    reports = ["foundation-model-stack/fastsafetensors#88", "foundation-model-stack/fastsafetensors#89"]
    reports += ["huggingface/diffusers#10863"]
    book.add(cid, "header", reports, LOAD, "load", right, tensors, tensors)


@case
def a_zero_size(book: Book, cid: str) -> None:
    sets = {"only": [("z", "F32", [0])], "two": [("z1", "F32", [0]), ("z2", "I64", [2, 0, 3])]}
    sets["first_middle_last"] = [("z1", "F8_E4M3", [0]), ("a", "F32", [4]), ("z2", "BF16", [0, 7])]
    sets["first_middle_last"] += [("b", "U8", [3]), ("z3", "F64", [1, 0])]
    tensors = {book.folder(cid) / f"{label}.safetensors": seeded(rows) for label, rows in sets.items()}
    for file, entries in tensors.items():
        simple(file, entries)
    right = (
        "tensors with a zero dimension come back with dtype and shape; zero-byte pieces are skipped in I/O"
    )
    reports = ["safetensors/safetensors#221", "safetensors/safetensors#226", "sgl-project/sglang#20818"]
    reports += ["promptfoo/modelaudit#1607"]
    book.add(cid, "shape", reports, LOAD, "load", right, tensors, tensors)


@case
def a_scalars(book: Book, cid: str) -> None:
    file = book.folder(cid) / "s.safetensors"
    entries = seeded([(f"s.{dtype}", dtype, []) for dtype in ("F32", "BF16", "I64", "BOOL", "U8", "F64")])
    simple(file, entries)
    reports = ["vllm-project/vllm#1696", "safetensors/safetensors#208", "safetensors/safetensors#380"]
    book.add(cid, "shape", reports, LOAD, "load", "shape [] stays 0-d (not [1])", [file], {file: entries})


@case
def a_dtypes(book: Book, cid: str) -> None:
    tensors = {}
    for dtype in BITS:
        file = book.folder(cid) / f"{dtype}.safetensors"
        tensors[file] = [Entry("w", dtype, [4, 8], 2), Entry("w1", dtype, [8], 3)]
        simple(file, tensors[file])
    right = (
        "bit patterns kept, no cast; F4 comes as torch.float4_e2m1fn_x2 with the last dimension halved; a "
        "dtype that "
        "this torch lacks (F6_*) is refused, with its name and the tensor's name, when that tensor is wanted"
    )
    reports = ["foundation-model-stack/fastsafetensors#79", "safetensors/safetensors#839"]
    reports += [
        "huggingface/huggingface_hub#4901",
        "coreweave/tensorizer#206",
        "run-ai/runai-model-streamer#10",
    ]
    refused = ["F6_E2M3", "F6_E3M2"]
    book.add(
        cid,
        "dtype",
        reports,
        LOAD + "; one file a dtype",
        "load",
        right,
        tensors,
        tensors,
        may_refuse=refused,
    )


@case
def a_many(book: Book, cid: str) -> None:
    count = 222_747 if book.big else 20_000
    file = book.folder(cid) / "many.safetensors"
    simple(file, [Entry(*many_rule(i)) for i in range(count)])
    do = LOAD + "; time it for 1/4, 1/2 and all of the count"
    right = (
        f"{count} tensors of 1 to 28 bytes; time grows linearly, no descriptor or event a tensor left over"
    )
    reports = ["vllm-project/vllm#54230", "huggingface/transformers#37887", "safetensors/safetensors#361"]
    reports += ["safetensors/safetensors#668"]
    book.add(cid, "scale", reports, do, "load", right, [file], {file: {"rule": "many", "count": count}})


@case
def a_large_single(book: Book, cid: str) -> None:
    tensors: dict[Path, Any] = {}
    file, n = book.folder(cid) / "t300MiB.safetensors", 300 << 20
    marks = [(0, 1), ((16 << 20) - 32, 2), ((256 << 20) - 32, 3), (n - 64, 4)]
    tensors[file] = sparse(
        file, [("small0", "U8", [100], []), ("big", "U8", [n], marks), ("small1", "U8", [100], [(0, 5)])]
    )
    if book.big:
        file, n = book.folder(cid) / "t2GiB.safetensors", (1 << 31) + 4099
        # 0x7ffff000 bytes are the most that one read() of Linux moves.
        marks = [(0, 1), (0x7FFFF000 - 32, 2), ((1 << 31) - 32, 3), (n - 64, 4)]
        tensors[file] = sparse(
            file, [("odd", "U8", [3], []), ("big", "U8", [n], marks), ("after", "F32", [32], [(0, 5)])]
        )
        file, n = book.folder(cid) / "t4GiB.safetensors", (1 << 32) + 4099
        marks = [((1 << 32) - 32, 6), (n - 64, 7)]
        tensors[file] = sparse(file, [("big", "U8", [n], marks), ("after", "U8", [64], [(0, 8)])])
    do = LOAD + "; also with the loader's buffer set smaller than the tensor"
    right = (
        "one tensor larger than the pipeline's buffer, and with --big larger than one read call may "
        "return and than "
        "4 GiB: marks at 16 MiB, 256 MiB, 0x7ffff000, 2 GiB and 4 GiB are right, all else is zero"
    )
    reports = [
        "foundation-model-stack/fastsafetensors#38",
        "ggml-org/llama.cpp#18504",
        "pytorch/pytorch#185098",
    ]
    reports += ["scitix/InstantTensor#13"]
    book.add(cid, "size", reports, do, "load", right, tensors, tensors)
