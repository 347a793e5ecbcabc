"""Files that have to be refused cleanly."""

from __future__ import annotations

import struct
from typing import Any

from corpus.oracle import payload
from corpus.writer import (
    OPEN,
    Book,
    Entry,
    case,
    data_of,
    encode,
    header_of,
    mix,
)
from support.checkpoints import write_raw


@case
def b_truncated(book: Book, cid: str) -> None:
    entries = [Entry("first", "F32", [2048], 1), Entry("last", "F32", [2048], 2)]
    raw, data = encode(header_of(entries)), data_of(entries)
    whole = struct.pack("<Q", len(raw)) + raw + data
    cuts = {"0_empty": 0, "1_in_length": 4, "2_length_only": 8, "3_in_header": 8 + len(raw) // 2}
    cuts |= {"4_header_only": 8 + len(raw), "5_half_data": 8 + len(raw) + len(data) // 2}
    cuts |= {"6_one_byte_short": len(whole) - 1, "7_one_block_short": len(whole) - 4096}
    files = [book.folder(cid) / f"{label}.safetensors" for label in cuts]
    for file, nbytes in zip(files, cuts.values(), strict=True):
        file.write_bytes(whole[:nbytes])
    right = "refused at open, before any tensor is handed out; says the file is too short, by how much"
    reports = ["Comfy-Org/ComfyUI#14989", "Comfy-Org/ComfyUI#6744", "invoke-ai/InvokeAI#7009"]
    reports += ["sgl-project/sglang#16937", "run-ai/runai-model-streamer#121"]
    book.add(cid, "corrupt", reports, OPEN, "error", right, files, error_names=["the file's path"])


@case
def b_not_safetensors(book: Book, cid: str) -> None:
    folder = book.folder(cid)
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 123456789\n"
    (folder / "lfs_pointer.safetensors").write_bytes(pointer)
    (folder / "html.safetensors").write_bytes(b"<!DOCTYPE html><html><body>404</body></html>\n" * 20)
    (folder / "photo.jpg").write_bytes(b"\xff\xd8\xff\xe0\x00\x10JFIF\x00" + bytes(range(256)) * 4)
    (folder / "zip.safetensors").write_bytes(b"PK\x03\x04" + bytes(400))
    (folder / "zeros.safetensors").write_bytes(bytes(4096))
    (folder / "directory.safetensors").mkdir(exist_ok=True)
    right = (
        "an LFS pointer, a web page, a picture, a zip, zeros or a directory: says it is no safetensors "
        "file; no "
        "attempt to allocate the 'header length' read from text"
    )
    reports = [
        "haofanwang/Lora-for-Diffusers#3",
        "ShineChen1024/MagicClothing#19",
        "safetensors/safetensors#485",
    ]
    files = sorted(folder.iterdir())
    book.add(cid, "corrupt", reports, OPEN, "error", right, files, error_names=["the file's path"])


@case
def b_header_length(book: Book, cid: str) -> None:
    entries = mix()
    raw, data = encode(header_of(entries)), data_of(entries)
    claims = {"max_u64": 2**64 - 1, "max_i64": 2**63 - 1, "wraps_with_8": 2**64 - 8, "over_cap": 100_000_001}
    claims |= {"past_end": len(raw) + len(data) + 1, "zero": 0, "one": 1}
    files = [
        write_raw(book.folder(cid) / f"{k}.safetensors", raw, data, claim) for k, claim in claims.items()
    ]
    right = "length checked against the file's size and the 100,000,000 cap before anything is allocated"
    reports = ["safetensors/safetensors#668", "run-ai/runai-model-streamer#121"]
    reports += ["leejet/stable-diffusion.cpp#1754"]
    names = ["the file's path", "the length"]
    lengths = {book.relative(file): claim for file, claim in zip(files, claims.values(), strict=True)}
    book.add(cid, "corrupt", reports, OPEN, "error", right, files, error_names=names, lengths=lengths)


@case
def b_layout(book: Book, cid: str) -> None:
    def e(begin: int, end: int, shape: list[int] | None = None, dtype: str = "U8") -> dict[str, Any]:
        return {
            "dtype": dtype,
            "shape": [end - begin] if shape is None else shape,
            "data_offsets": [begin, end],
        }

    layouts: dict[str, tuple[dict[str, Any], int]] = {
        "overlap": ({"a": e(0, 64), "b": e(32, 96)}, 96),
        "alias": ({"a": e(0, 64), "b": e(0, 64)}, 64),
        "hole_front": ({"a": e(16, 64)}, 64),
        "hole_middle": ({"a": e(0, 16), "b": e(32, 64)}, 64),
        "trailing_bytes": ({"a": e(0, 64)}, 71),
        "past_end": ({"a": e(0, 64), "b": e(64, 4160)}, 128),
        "shape_larger": ({"a": e(0, 4, [1000, 1000], "F32")}, 4),
        "shape_smaller": ({"a": e(0, 4096, [1], "F32")}, 4096),
        "shape_product_wraps": ({"a": e(0, 64, [2**32, 2**32, 4])}, 64),
        "bytes_product_wraps": ({"a": e(0, 64, [2**61 + 8], "F64")}, 64),
        "zero_shape_with_bytes": ({"a": e(0, 64, [0])}, 64),
        "one_shape_no_bytes": ({"a": e(0, 0, [1])}, 0),
    }
    files = [
        write_raw(book.folder(cid) / f"{label}.safetensors", encode(head), payload(9, nbytes))
        for label, (head, nbytes) in layouts.items()
    ]
    right = "ranges must tile the data exactly and match shape times item size; refused at open"
    reports = ["ml-explore/mlx#3363", "ohdearquant/lattice#752", "antirez/h3.c#48", "Comfy-Org/ComfyUI#15602"]
    reports += ["antirez/ds4#543", "run-ai/runai-model-streamer#121"]
    names = ["the file's path", "the tensor's name"]
    book.add(cid, "corrupt", reports, OPEN, "error", right, files, error_names=names)


@case
def b_unknown_dtype(book: Book, cid: str) -> None:
    folder, dtypes = book.folder(cid), {}
    for dtype in ("F7", "f32", "FLOAT", "", "F8", "I4"):
        good = {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}
        odd = {"dtype": dtype, "shape": [8], "data_offsets": [8, 40]}
        head = encode({"ok": good, "odd": odd})
        dtypes[write_raw(folder / f"dtype_{dtype or 'empty'}.safetensors", head, payload(1, 40))] = dtype
    head = encode({"odd": {"dtype": "F4", "shape": [3], "data_offsets": [0, 2]}})
    dtypes[write_raw(folder / "F4_half_byte.safetensors", head, payload(1, 2))] = "F4"
    right = "an unknown dtype, or F4 that does not fill whole bytes, is refused at open"
    reports = ["kekzl/imp#1603", "foundation-model-stack/fastsafetensors#69"]
    reports += ["foundation-model-stack/fastsafetensors#79", "city96/ComfyUI-GGUF#21"]
    names = ["the file's path", "the tensor's name", "the dtype as written"]
    written = {book.relative(file): dtype for file, dtype in dtypes.items()}
    book.add(cid, "dtype", reports, OPEN, "error", right, dtypes, error_names=names, dtypes=written)
