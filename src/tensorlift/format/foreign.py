"""Recognising what is no safetensors file from its first bytes, so that an error can name it."""

from __future__ import annotations

from tensorlift.format.quoting import quote

__all__ = ["PREFIX_BYTES", "recognise"]

PREFIX_BYTES = 512
"""Bytes from the start of a file that are enough for every kind below (a tar header is one block of 512)."""

_PULL = "run 'git lfs pull' in its repository, or download the file itself"
_CONVERT = "convert it to safetensors first"

# (where, first bytes, what it is, what to do). Signatures: file(1)'s magic, and the specifications that are
# named.
_SIGNATURES: tuple[tuple[int, bytes, str, str], ...] = (
    (0, b"version https://git-lfs.github.com/spec/", "a Git LFS pointer, not the file it stands for", _PULL),
    (
        0,
        b"version https://hawser.github.com/spec/",
        "an old Git LFS pointer, not the file it stands for",
        _PULL,
    ),
    (0, b"# xet version", "a Xet pointer, not the file it stands for", "download the file itself"),
    (0, b"/annex/objects/", "a git-annex pointer, not the file it stands for", "run 'git annex get' on it"),
    (0, b"PK\x03\x04", "a zip archive (perhaps a checkpoint of torch.save)", _CONVERT),
    (0, b"PK\x05\x06", "an empty zip archive", _CONVERT),
    (0, b"\x80\x02", "a Python pickle (perhaps an old checkpoint of torch.save)", _CONVERT),
    (0, b"\x80\x03", "a Python pickle", _CONVERT),
    (0, b"\x80\x04", "a Python pickle", _CONVERT),
    (0, b"\x80\x05", "a Python pickle", _CONVERT),
    (0, b"GGUF", "a GGUF file", "load it with llama.cpp or another reader of GGUF"),
    (0, b"\x89HDF\r\n\x1a\n", "an HDF5 file", _CONVERT),
    (0, b"\x93NUMPY", "a NumPy array", _CONVERT),
    (0, b"\xff\xd8\xff", "a JPEG picture", "check the path"),
    (0, b"\x89PNG\r\n\x1a\n", "a PNG picture", "check the path"),
    (0, b"GIF8", "a GIF picture", "check the path"),
    (0, b"%PDF-", "a PDF document", "check the path"),
    (0, b"\x1f\x8b", "a gzip file", "unpack it first"),
    (0, b"BZh", "a bzip2 file", "unpack it first"),
    (0, b"\xfd7zXZ\x00", "an xz file", "unpack it first"),
    (0, b"\x28\xb5\x2f\xfd", "a zstd file", "unpack it first"),
    (0, b"7z\xbc\xaf\x27\x1c", "a 7-Zip archive", "unpack it first"),
    (0, b"Rar!", "a RAR archive", "unpack it first"),
    (257, b"ustar", "a tar archive", "unpack it first"),
    (0, b"\x7fELF", "an ELF program or library", "check the path"),
    (
        0,
        b"\x00\x05\x16\x07",
        "an AppleDouble file of macOS ('._' beside the real file)",
        "take the real file",
    ),
)

_DOWNLOAD_AGAIN = "download it again; the address or the access rights may be wrong"


def recognise(prefix: bytes) -> tuple[str, str] | None:
    """What a file is, judged by its first bytes, and a hint; None where they tell nothing.

    Only meant for a file that is already known to be no safetensors file: a good one can look like some of
    these.
    """
    for at, magic, kind, hint in _SIGNATURES:
        if prefix[at : at + len(magic)] == magic:
            return kind, hint
    if not prefix.strip(b"\0"):
        return "a file of zeros", "a download or copy was not finished; repeat it"
    start = prefix.lstrip(b"\xef\xbb\xbf \t\r\n")
    lower = start[:64].lower()
    if lower.startswith((b"<!doctype html", b"<html", b"<head")):
        return "a web page", _DOWNLOAD_AGAIN
    if start.startswith(b"<"):
        return "an XML or HTML text", _DOWNLOAD_AGAIN
    if start.startswith((b"{", b"[")) and _is_text(prefix):
        return "a JSON text without the length field of a safetensors file", "check the path"
    if len(start) > 8 and _is_text(prefix):
        return f"a text that starts with {quote(start[:60].decode('utf-8', 'replace'))}", _DOWNLOAD_AGAIN
    return None


def _is_text(prefix: bytes) -> bool:
    return all(byte >= 32 or byte in b"\t\r\n" for byte in prefix)
