"""What was acknowledged is there: behind a killed process, and on a disk that is full."""

from __future__ import annotations

import collections
import signal
import sqlite3
from pathlib import Path

import pytest

from support.file_systems import small
from support.registries import KEY, announced, serving
from support.serving import command
from tensorlift.errors import FileError, MachineError, SeedError
from tensorlift.fleet.contract import ForkReport, Load, Near
from tensorlift.fleet.registry_client import RegistryClient
from tensorlift.fleet.store import NotWrittenError, Store


def ended(number: int) -> ForkReport:
    return ForkReport(fork=f"{number:032x}", key=KEY, state="done")


def test_a_killed_registry_has_lost_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a registry.db"
    with command("registry", "--database", path, "--port", 0) as (child, said):
        assert said["database"] == str(path)
        client = RegistryClient(said["url"])
        for number in range(20):
            client.announce(announced(number))
        client.withdraw(announced(0).instance)
        client.report(ended(1))
        child.send_signal(signal.SIGKILL)
        child.wait()
        with pytest.raises(SeedError, match=r"cannot be reached.*look whether the registry runs"):
            client.candidates(KEY, Near())
    port = said["url"].rpartition(":")[2]
    with command("registry", "--database", path, "--port", port) as (child, said):
        again = RegistryClient(said["url"])
        assert sorted(again.candidates(KEY, Near(), 64)) == sorted(announced(n).url for n in range(1, 20))
        assert again.renew(announced(1).instance, Load()) == 15
        assert again.renew(announced(0).instance, Load()) is None
        child.send_signal(signal.SIGTERM)
        assert child.wait(60) == 0
    store = Store(str(path))
    assert (len(store.seeds()), store.ended()) == (19, {(KEY, "done"): 1})
    store.close()


def test_a_full_disk(tmp_path: Path) -> None:
    with small(tmp_path / "small", 1 << 20) as folder:
        path = folder / "registry.db"
        with serving(path) as server:
            client, known = RegistryClient(server.url), 0

            def announce() -> None:
                nonlocal known
                client.announce(announced(known, weights="w" * 2000))
                known += 1

            with pytest.raises(SeedError, match=r"there is no room for the registry's database: .*full"):
                collections.deque(iter(announce, 0), 0)
            assert known > 20
            # Old answers stay, and seeds stay known.
            assert len(client.candidates(KEY, Near(), 64)) == min(known, 64)
            assert client.renew(announced(0).instance, Load(1)) == 15
            with pytest.raises(SeedError, match="there is no room"):
                announce()
        # What was acknowledged is what is there, with the disk still full.
        with serving(path) as server:
            assert {seed.instance for seed in server_seeds(server)} == {
                announced(n).instance for n in range(known)
            }


def server_seeds(server: object) -> list[object]:
    return list(server._registry.view().seeds)  # type: ignore[attr-defined]


def test_the_state_of_a_full_disk_over_http(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import http.client

    import msgspec

    def asked(full: bool) -> int:
        def refuse(*_: object) -> None:
            raise NotWrittenError("why", full)

        monkeypatch.setattr(Store, "put", refuse)
        connection = http.client.HTTPConnection(*server.url.removeprefix("http://").split(":"), timeout=60)
        body, headers = msgspec.json.encode(announced(1)), {"Content-Type": "application/json"}
        connection.request("POST", "/v1/seeds", body, headers)
        answer = connection.getresponse()
        assert msgspec.json.decode(answer.read()) == {"reason": "why", "retry_seconds": None}
        connection.close()
        return answer.status

    with serving() as server:
        assert (asked(True), asked(False)) == (507, 503)


def test_files_that_are_no_databases_of_ours(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("not a database, but long enough to look like one of something " * 100)
    with pytest.raises(FileError, match=r"text' is no database; name another file"):
        Store(str(text))
    other = tmp_path / "other"
    with sqlite3.connect(other) as base:
        base.execute("CREATE TABLE t (x)")
    base.close()
    before = other.read_bytes()
    with pytest.raises(FileError, match=r"other' is no database of a registry of this version"):
        Store(str(other))
    assert other.read_bytes() == before
    with pytest.raises(MachineError, match=r"nowhere/x' cannot be had: .*look at the folder"):
        Store(str(tmp_path / "nowhere" / "x"))
    path = str(tmp_path / "rows")
    Store(path).close()
    with sqlite3.connect(path) as base:
        base.execute("INSERT INTO seeds VALUES ('a', x'7b7d')")
    base.close()
    store = Store(path)
    with pytest.raises(FileError, match="has what is no Announcement"):
        store.seeds()
    store.close()


def test_paths_that_sqlite_takes_for_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MachineError, match=r"'' cannot be had: "):
        Store("")
    store = Store(":memory:")
    store.put(announced(1))
    store.close()
    assert [path.name for path in tmp_path.iterdir()] == [":memory:"]


def test_one_registry_a_file(tmp_path: Path) -> None:
    path = str(tmp_path / "registry")
    first = Store(path)
    with pytest.raises(MachineError, match="is used by another registry"):
        Store(path)
    first.put(announced(1))
    first.close()
    second = Store(path)
    assert [seed.instance for seed in second.seeds()] == [announced(1).instance]
    second.close()


def test_a_file_that_cannot_be_written_any_more(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "registry"))
    store._base.execute("PRAGMA query_only=ON")
    with pytest.raises(NotWrittenError, match="the database cannot be written: ") as refused:
        store.put(announced(1))
    assert not refused.value.full
    store.close()
