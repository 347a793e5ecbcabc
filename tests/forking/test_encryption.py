"""TLS around what is asked over HTTP."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path

import pytest
import torch
import trustme

import tensorlift
from support import leaks
from tensorlift.errors import OptionError, RequestError, SeedError
from tensorlift.forking.client import SeedClient
from tensorlift.forking.encryption import fork_context, seed_context
from tensorlift.forking.fork import fork_into
from tensorlift.forking.manifest import ModelKey
from tensorlift.forking.remote import url_of
from tensorlift.forking.seed import Seed


def key(rank: int) -> ModelKey:
    return ModelKey(model="m", tp=(rank, 2))


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def files(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """(certificates, their key, who signed them)."""
    folder = tmp_path_factory.mktemp("tls")
    made = authority.issue_cert("127.0.0.1")
    chain, secret, ca = (folder / name for name in ("chain.pem", "key.pem", "ca.pem"))
    chain.write_bytes(b"".join(blob.bytes() for blob in made.cert_chain_pems))
    made.private_key_pem.write_to_path(secret)
    authority.cert_pem.write_to_path(ca)
    return chain, secret, ca


def test_two_ranks_under_tls(files: tuple[Path, Path, Path]) -> None:
    chain, secret, ca = files
    tls = (chain, secret)
    with (
        leaks.nothing_left(),
        Seed({"a": torch.ones(9)}, key(0), token="hush", tls=tls) as front,
        Seed({"a": torch.ones(9)}, key(1), token="hush", tls=tls, join=front.url, ca=ca) as rank,
    ):
        assert front.url.startswith("https://127.0.0.1:")
        into = {"a": torch.zeros(9)}
        result = fork_into(into, front.url, token="hush", key=key(1), ca=ca)
        assert (into["a"] == 1).all()
        assert set(result.by_source) == {rank.url}
        with pytest.raises(SeedError, match="does not take this token"):
            fork_into(into, front.url, token="wrong", ca=fork_context(ca))


def test_a_certificate_that_is_not_trusted(files: tuple[Path, Path, Path]) -> None:
    chain, secret, ca = files
    with Seed({"a": torch.ones(9)}, "m", tls=(chain, secret)) as seed:
        with pytest.raises(SeedError, match=r"a certificate that is not trusted here: .*give the file"):
            SeedClient(seed.url).state()
        with pytest.raises(SeedError, match=r"a certificate that is not trusted here: .*'localhost'"):
            SeedClient(seed.url.replace("127.0.0.1", "localhost"), ca=ca).state()


def test_a_seed_under_tls_as_a_path(files: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    chain, secret, ca = files
    with Seed({"a": torch.ones(9)}, ModelKey(model="m", processed=False), tls=(chain, secret)) as seed:
        url = url_of(seed.url, "m")
        with pytest.raises(SeedError, match=r"is not trusted here: .*SSL_CERT_FILE"):
            tensorlift.load(url)
        monkeypatch.setenv("SSL_CERT_FILE", str(ca))
        assert (tensorlift.load(url)["a"] == 1).all()
        into = {"a": torch.zeros(9)}
        tensorlift.load_into(into, url)
        assert (into["a"] == 1).all()
        with pytest.raises(RequestError, match="a seed is no file: load, open and load_into take one"):
            tensorlift.load([url])
        with pytest.raises(SeedError, match=r"cannot be reached: .* and answers at http://, not https://"):
            tensorlift.load(url.replace("+https", ""))


def test_who_does_not_speak_tls(files: tuple[Path, Path, Path]) -> None:
    chain, secret, ca = files
    seed = Seed({"a": torch.ones(9)}, "m", tls=(chain, secret))
    with leaks.nothing_left():
        with pytest.raises(SeedError, match="cannot be reached"):
            SeedClient(seed.url.replace("https", "http")).state()
        address = ("127.0.0.1", int(seed.url.rpartition(":")[2]))
        # Nothing is said below TLS, and who says nothing does not hold the end up.
        with socket.create_connection(address) as silent:
            SeedClient(seed.url, ca=ca).state()
            seed.close()
            assert silent.recv(1) == b""
    with Seed({"a": torch.ones(9)}, "m") as plain, pytest.raises(SeedError, match="cannot be reached"):
        SeedClient(plain.url.replace("http", "https"), ca=ca).state()


def test_an_idle_connection_does_not_hold_the_end_up(files: tuple[Path, Path, Path]) -> None:
    chain, secret, ca = files
    seed = Seed({"a": torch.ones(9)}, "m", tls=(chain, secret))
    address = ("127.0.0.1", int(seed.url.rpartition(":")[2]))
    with fork_context(ca).wrap_socket(socket.create_connection(address), server_hostname="127.0.0.1") as idle:
        seed.close()
        assert idle.recv(1) == b""


def test_what_is_no_tls(files: tuple[Path, Path, Path], tmp_path: Path) -> None:
    chain, secret, ca = files
    context = seed_context((chain, secret))
    assert seed_context(context) is context
    assert seed_context(None) is None
    trusting = ssl.create_default_context(cafile=ca)
    assert fork_context(trusting) is trusting
    other = tmp_path / "other.pem"
    trustme.CA().issue_cert("127.0.0.1").private_key_pem.write_to_path(other)
    for bad in [(chain, other), (chain,), (chain, chain), ("no", "files"), 5]:
        with pytest.raises(OptionError, match=r"tls is .*; expected"):
            seed_context(bad)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"tls is .*No such file or directory: 'files'"):
        seed_context((chain, "files"))
    # "" too, which ssl takes for no file, and trusts whom the system trusts.
    for nothing in ("nowhere", secret, 5, ""):
        with pytest.raises(OptionError, match=r"ca is .*; expected a file of certificates"):
            fork_context(nothing)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="tls is a context for clients"):
        seed_context(trusting)
    with pytest.raises(OptionError, match="ca is a context for servers"):
        fork_context(context)
    with pytest.raises(OptionError, match=r"ca is for https://, and http://a:1 is read without TLS"):
        SeedClient("http://a:1", ca=ca)
