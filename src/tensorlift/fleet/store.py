"""What a registry must not lose, in a file of SQLite: seeds that have announced themselves, forks that ended.

A change is on the disk when its call returns: the log is written through (WAL, synchronous=FULL), so neither
a killed process nor a machine that goes down takes it back. A change that could not be written is an error,
and leaves what was there.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import msgspec

from tensorlift.errors import FileError, MachineError
from tensorlift.fleet.contract import Announcement
from tensorlift.forking.manifest import ModelKey
from tensorlift.format.quoting import clean, quote

__all__ = ["NotWrittenError", "Store"]

# "tlfr", so that no other program's database is taken for one.
_OURS, _VERSION = 0x746C6672, 1
_TABLES = (
    "CREATE TABLE seeds (instance TEXT PRIMARY KEY, announcement BLOB NOT NULL) WITHOUT ROWID",
    "CREATE TABLE ended (key BLOB NOT NULL, state TEXT NOT NULL, forks INTEGER NOT NULL, "
    "PRIMARY KEY (key, state)) WITHOUT ROWID",
)


_T = TypeVar("_T")


class NotWrittenError(Exception):
    """The change was not made; ``full``: for want of room."""

    def __init__(self, reason: str, full: bool) -> None:
        """``reason``: for who asked."""
        super().__init__(reason)
        self.full = full


class Store:
    """One file, used by one process. The caller locks around each call."""

    def __init__(self, path: str | None) -> None:
        """``path``: made if it is not there; None for memory, which ends with the process.

        Raises FileError for what is no database of a registry, MachineError where it cannot be had.
        """
        self._path = path
        try:
            self._base = sqlite3.connect(
                # Whole: of "" and ":memory:" SQLite would make what ends with the process.
                ":memory:" if path is None else os.path.abspath(path),
                timeout=0,
                isolation_level=None,
                check_same_thread=False,
            )
        except sqlite3.Error as error:
            raise self._refused(error) from None
        try:
            self._prepare()
        except sqlite3.Error as error:
            self.close()
            raise self._refused(error) from None
        except BaseException:
            self.close()
            raise

    def _prepare(self) -> None:
        # In one process: a second registry on this file would not see what the first one knows.
        self._base.execute("PRAGMA locking_mode=EXCLUSIVE")
        self._base.execute("PRAGMA synchronous=FULL")
        self._base.execute("BEGIN IMMEDIATE")
        found = tuple(
            self._base.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")
        )
        is_new = not self._base.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if is_new:
            for line in (
                *_TABLES,
                f"PRAGMA application_id={_OURS}",
                f"PRAGMA user_version={_VERSION}",
            ):
                self._base.execute(line)
        elif found != (_OURS, _VERSION):
            raise FileError(
                f"{quote(self._path, 300)} is no database of a registry of this version of tensorlift; name "
                "another file, or one that is not there yet"
            )
        self._base.execute("COMMIT")
        # Is kept in the file, and so is not asked of one that may be another program's.
        self._base.execute("PRAGMA journal_mode=WAL")

    def _refused(self, error: sqlite3.Error) -> FileError | MachineError:
        where = f"the registry's database {quote(self._path, 300)}"
        if "not a database" in str(error):
            return FileError(f"{where} is no database; name another file, or one that is not there yet")
        if "locked" in str(error):
            return MachineError(f"{where} is used by another registry; each wants a file of its own")
        return MachineError(f"{where} cannot be had: {clean(str(error))}; look at the folder and its rights")

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            full = "full" in str(error)
            what = (
                "there is no room for the registry's database" if full else "the database cannot be written"
            )
            raise NotWrittenError(f"{what}: {clean(str(error))}", full) from None

    def seeds(self) -> list[Announcement]:
        """All that were put and not dropped. Raises FileError."""
        rows = self._base.execute("SELECT announcement FROM seeds").fetchall()
        return [self._read(row[0], Announcement) for row in rows]

    def ended(self) -> dict[tuple[ModelKey, str], int]:
        """How many forks ended how. Raises FileError."""
        rows = self._base.execute("SELECT key, state, forks FROM ended").fetchall()
        return {(self._read(key, ModelKey), state): forks for key, state, forks in rows}

    def put(self, seed: Announcement) -> None:
        """Kept under its instance. Raises NotWrittenError."""
        with self._writing():
            self._base.execute(
                "INSERT OR REPLACE INTO seeds VALUES (?, ?)", (seed.instance, msgspec.json.encode(seed))
            )

    def drop(self, instance: str) -> None:
        """Not kept any more. Raises NotWrittenError."""
        with self._writing():
            self._base.execute("DELETE FROM seeds WHERE instance = ?", (instance,))

    def count(self, key: ModelKey, state: str) -> None:
        """One more fork that ended so. Raises NotWrittenError."""
        with self._writing():
            self._base.execute(
                "INSERT INTO ended VALUES (?, ?, 1) ON CONFLICT DO UPDATE SET forks = forks + 1",
                (msgspec.json.encode(key), state),
            )

    def close(self) -> None:
        """Nothing is written any more."""
        self._base.close()

    def _read(self, blob: bytes, kind: type[_T]) -> _T:
        try:
            return msgspec.json.decode(blob, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise FileError(
                f"the registry's database {quote(self._path, 300)} has what is no {kind.__name__}: {error}; "
                "name another file"
            ) from None
