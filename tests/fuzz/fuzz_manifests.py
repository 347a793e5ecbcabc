"""What comes from other processes as Python reads it: manifests, both sides of the handshake, what a registry
is told. A program for atheris, with libFuzzer's arguments.
"""

from __future__ import annotations

import contextlib
import gzip
import socket
import sys

import atheris
import msgspec
from watching import watch

from tensorlift.errors import ManifestError, RequestError, SeedError
from tensorlift.fleet import choosing, contract, table
from tensorlift.fleet.contract import Announcement, ForkReport, Load, Wanted
from tensorlift.fleet.store import Store
from tensorlift.forking import handshake, keys, manifest, urls
from tensorlift.forking.manifest import ITEM_BYTES, NOWHERE, Manifest, decode

LEASE = "0123456789abcdef" * 2
KINDS = (Announcement, Load, Wanted, ForkReport)


def whole_manifest(text: bytes) -> None:
    """What is taken agrees with itself, and is the same once more."""
    # A digest that no fuzzer finds is put in its place.
    try:
        draft = msgspec.json.decode(text, type=Manifest)
        text = text.replace(draft.layout.encode(), manifest.layout_digest(draft.tensors).encode())
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError):
        pass
    try:
        found = decode(gzip.compress(text, 1), "seed")
    except ManifestError:
        return
    names = set()
    for tensor in found.tensors:
        assert tensor.name not in names
        names.add(tensor.name)
        assert tensor.dtype in ITEM_BYTES
        span = manifest.span_bytes(tensor.dtype, tensor.shape, tensor.stride)
        assert (tensor.region == NOWHERE) == (span == 0)
        assert span == 0 or 0 <= tensor.offset <= found.regions[tensor.region].nbytes - span
    assert decode(manifest.encode(found), "seed") == found


def packed(raw: bytes) -> None:
    """The same, from what came."""
    with contextlib.suppress(ManifestError):
        decode(raw, "seed")


def shake_hands(said: bytes, seed: bool) -> None:
    """Nobody is let in who does not know the token, and nobody is believed to know it."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(10)
        theirs.sendall(said[:4096])
        theirs.shutdown(socket.SHUT_WR)
        if seed:
            with contextlib.suppress(OSError):
                assert handshake.welcome(ours, "token", lambda lease: True) is None
            return
        try:
            handshake.introduce(ours, "token", LEASE)
        except OSError:
            return
        raise AssertionError("it was believed")


def told(kind: int, body: bytes) -> None:
    """What a registry takes it can tell again, and it keeps working."""
    try:
        found = msgspec.json.decode(body, type=KINDS[kind])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return
    registry = table.Table(Store(None))
    try:
        if isinstance(found, Announcement):
            contract.check_announcement(found)
            registry.announce(found)
            registry.renew(found.instance, found.load)
            assert registry.candidates(found.key, found.near) == [found.url]
        elif isinstance(found, ForkReport):
            contract.check_report(found)
            registry.report(found)
        elif isinstance(found, Wanted):
            registry.candidates(found.key, found.near, found.count, found.without)
        msgspec.json.encode(found)
        registry.view()
    except (RequestError, SeedError):
        pass
    finally:
        registry.close()


def url(text: str) -> None:
    """URLs that others name."""
    for ask in (
        lambda: urls.placed(text, "http://10.0.0.1:80", "10.0.0.2", False),
        lambda: urls.followed(text, "http://10.0.0.1:80"),
        lambda: urls.reached(text, "10.0.0.1"),
    ):
        with contextlib.suppress(RequestError):
            ask()


def one_input(content: bytes) -> None:
    kind, rest = content[:1], content[1:]
    if kind == b"m":
        whole_manifest(rest)
    elif kind == b"z":
        packed(rest)
    elif kind in (b"s", b"f"):
        shake_hands(rest, kind == b"s")
    elif kind and kind in b"0123":
        told(int(kind), rest)
    elif kind == b"u":
        url(rest.decode("utf-8", "surrogateescape"))


if __name__ == "__main__":
    watch(choosing, contract, table, handshake, keys, manifest, urls)
    # A merge starts the program anew, by its name alone.
    atheris.Setup([f"{sys.executable} {sys.argv[0]}", *sys.argv[1:]], one_input)
    atheris.Fuzz()
