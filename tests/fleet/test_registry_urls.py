"""A registry by its name, and what the names that are lists find."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from support.registries import KEY
from tensorlift.errors import OptionError, RequestError, SeedError
from tensorlift.fleet import lists
from tensorlift.fleet.contract import ForkReport, Load, Near
from tensorlift.fleet.registry_client import RegistryClient
from tensorlift.fleet.registry_urls import registry_of
from tensorlift.forking.manifest import ModelKey

URLS = [f"http://10.0.0.{number}:7000" for number in range(1, 6)]


def found(
    name: Any, near: Near | None = None, key: ModelKey = KEY, without: tuple[str, ...] = ()
) -> list[str]:
    return registry_of(name).candidates(key, near or Near(), 64, without)


def test_a_list_of_urls() -> None:
    assert sorted(found(URLS)) == URLS
    assert found(URLS, without=tuple(URLS[1:])) == URLS[:1]
    # Not all forks begin with the same one.
    assert len({registry_of(URLS).candidates(KEY, Near())[0] for _ in range(200)}) == len(URLS)
    with pytest.raises(
        SeedError, match=r"the list of seeds is no help: it knows no other than the 5 seeds that failed"
    ):
        found(URLS, without=tuple(URLS))
    for wrong, message in (([], "the list of seeds is empty"), (["x"], "is no URL of a seed")):
        with pytest.raises(RequestError, match=message):
            registry_of(wrong)


def test_a_list_takes_no_notice_of_seeds_and_forks() -> None:
    registry = registry_of(URLS)
    assert registry.renew("a" * 32, Load()) == 15
    registry.withdraw("a" * 32)
    assert registry.report(ForkReport(fork="a" * 32, key=KEY, state="done")) == 15
    registry.close()


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "seeds.json"
    registry = registry_of(f"file:{path}")
    with pytest.raises(SeedError, match=r"seeds.json' cannot be read: No such file"):
        registry.candidates(KEY, Near())
    rows: list[object] = [
        URLS[0],
        {"url": URLS[1], "place": "z/r1"},
        {"url": URLS[2], "key": {"model": "other"}},
        {"url": URLS[3], "key": msgspec.to_builtins(KEY)},
    ]
    path.write_text(json.dumps({"seeds": rows}))
    assert registry.candidates(KEY, Near("", "z/r1"), 64)[0] == URLS[1]
    assert sorted(registry.candidates(KEY, Near(), 64)) == [URLS[0], URLS[1], URLS[3]]
    assert sorted(found(f"file://{path}")) == [URLS[0], URLS[1], URLS[3]]
    before = path.stat()
    path.write_text(json.dumps({"seeds": [URLS[4]]}))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert registry.candidates(KEY, Near(), 64) == [URLS[4]]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"seeds": [7]}',
        '{"seeds": ["x"]}',
        '{"seeds": [{"url": "http://a:1", "nonsense": 1}]}',
        '{"seeds": [{"url": "http://a:1", "key": {"model": "m", "tpp": [0, 2]}}]}',
        '{"seeds": [{"url": "http://a:1", "key": {"model": "m", "tp": [2, 2]}}]}',
        '{"seeds": [{"url": "http://a:1", "key": {"tp": [0, 2]}}]}',
        '{"seeds": ["http://user:word@a:1"]}',
        "\xff",
    ],
)
def test_files_that_are_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "seeds.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(SeedError, match=r'is none: .*; expected \{"seeds": \["http://host:port", ...\]\}'):
        found(f"file:{path}")


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, why in (
        (tmp_path / "pipe", "it is no regular file"),
        ("/dev/zero", "it is no regular file"),
        (tmp_path, "Is a directory"),
        ("a\0b", "embedded null byte"),
        ("a\ud800b", "surrogates not allowed"),
        ("", "No such file"),
    ):
        with pytest.raises(SeedError, match=f"cannot be read: .*{why}"):
            found(f"file:{path}")


def test_a_file_that_is_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lists, "_LONGEST_FILE", 10)
    (tmp_path / "seeds").write_text(" " * 11)
    with pytest.raises(SeedError, match="has more than 10 bytes"):
        found(f"file:{tmp_path / 'seeds'}")


def test_a_name_in_dns(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def addresses(host: str, port: int, **more: Any) -> list[Any]:
        asked.append((host, port))
        four = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
        return [(*four, (one, port)) for one in ("10.0.0.1", "10.0.0.2", "10.0.0.1")] + [
            (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fd00::1", port, 0, 0))
        ]

    monkeypatch.setattr(socket, "getaddrinfo", addresses)
    assert sorted(found("dns://seeds.svc:7000")) == [
        "http://10.0.0.1:7000",
        "http://10.0.0.2:7000",
        "http://[fd00::1]:7000",
    ]
    assert found("dns+https://seeds.svc:7000")[0].startswith("https://")
    assert asked == [("seeds.svc", 7000)] * 2


def test_a_name_that_is_none() -> None:
    assert sorted(found("dns://localhost:7000"))[-1] in ("http://127.0.0.1:7000", "http://[::1]:7000")
    with pytest.raises(SeedError, match=r"^'no-such-name.invalid' has no address in DNS: ") as none:
        found("dns://no-such-name.invalid:7000")
    assert not none.value.answered


@pytest.mark.parametrize(
    "wrong", ["", "host:7000", "ftp://user:secret@host", 7, [7], b"http://a:1", "dns://name", "http://host"]
)
def test_names_of_nothing(wrong: Any) -> None:
    with pytest.raises(RequestError) as refused:
        registry_of(wrong)
    assert "secret" not in str(refused.value)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "tensorlift.fleet.on_redis", raising=False)
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(RequestError, match=r"not there \(redis\): pip install 'tensorlift\[fleet\]'"):
        registry_of("redis://127.0.0.1")
    assert isinstance(registry_of("http://127.0.0.1:1"), RegistryClient)


def test_an_option_error_shows_the_forms() -> None:
    with pytest.raises(OptionError, match=r"redis://host:port, file:/path.json, dns://name:port"):
        registry_of("nonsense")
