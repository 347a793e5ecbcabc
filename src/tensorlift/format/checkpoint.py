"""Many headers as one table of tensors, each name once.

The rules where files overlap
  - With an index, a tensor that it lists comes from the shard it names, and from nowhere else. A shard that
    lacks it is an error.
  - A tensor that a shard holds and the index does not list is loaded too, unless another shard holds it as
    well: then, as without an index, a name in two files is an error that names both.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from tensorlift.errors import CheckpointError, RequestError, TensorNotFoundError
from tensorlift.format.header import Header
from tensorlift.format.nearest import nearest
from tensorlift.format.quoting import clean, plural, quote

_Scalar = TypeVar("_Scalar", bound=np.generic)

__all__ = ["Checkpoint", "NameFilter", "Names", "Shard", "check_together", "filters_of", "join", "join_some"]

NameFilter: TypeAlias = "str | re.Pattern[str] | Callable[[str], bool]"
"""One exact name, glob (with * ? or [), compiled regular expression (of the whole name), or predicate."""

Names: TypeAlias = "NameFilter | Iterable[NameFilter] | None"
"""What a caller may give as `names=`; a list takes whatever any of its filters takes."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One file whose header has been read."""

    path: str
    """As the caller gave it, for messages."""
    absolute: bytes
    """For the kernel."""
    nbytes: int
    device: int
    inode: int
    header: Header
    written_ns: int = 0
    """When it was last written to, as seen before its header was read; 0: not known."""


class Checkpoint:
    """Files and the table of their tensors: rows in the order of the shards, then of the bytes in each."""

    def __init__(
        self,
        shards: Sequence[Shard],
        names: list[str],
        shard_of: npt.NDArray[np.int32],
        dtypes: npt.NDArray[np.uint8],
        starts: npt.NDArray[np.int64],
        sizes: npt.NDArray[np.int64],
        shapes: list[tuple[int, ...]],
        where: str,
    ) -> None:
        self.shards: tuple[Shard, ...] = tuple(shards)
        self.names = names
        self.shard_of = shard_of
        self.dtypes = dtypes
        self.starts = starts
        """First byte of each tensor, from the start of its file."""
        self.sizes = sizes
        """Bytes of each tensor."""
        self.shapes = shapes
        self.where = where
        """What the caller asked for, for messages."""
        self._rows: dict[str, int] | None = None

    @property
    def metadata(self) -> dict[str, str] | None:
        """The metadata of the first shard that has any."""
        return next((s.header.metadata for s in self.shards if s.header.metadata is not None), None)

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self._table()

    def _table(self) -> dict[str, int]:
        if self._rows is None:
            self._rows = dict(zip(self.names, range(len(self.names)), strict=True))
        return self._rows

    def index(self, name: str) -> int:
        """The row of a tensor; raises TensorNotFoundError with the names that come close."""
        row = self._table().get(name) if isinstance(name, str) else None
        if row is None:
            raise TensorNotFoundError(
                f"{clean(self.where)}: no tensor {quote(name)} among {len(self.names):,}"
                f"{_hint(name, self.names)}"
            )
        return row

    def select(self, names: Names = None) -> npt.NDArray[np.int64]:
        """Rows of the wanted tensors, ascending, each once.

        `names` is None (all), a filter or an iterable of filters. A string that is the name of a tensor means
        that tensor; one with * ? or [ is a glob over whole names, and case counts. Raises TensorNotFoundError
        for a name, glob or regular expression that matches nothing; a predicate may refuse everything.
        """
        if names is None:
            return np.arange(len(self.names), dtype=np.int64)
        filters = filters_of(names)
        rows: set[int] = set()
        exact = [f for f in filters if isinstance(f, str) and (f in self or not _is_glob(f))]
        rows.update(self.index(name) for name in exact)
        taken = set(exact)
        for wanted in filters:
            if not isinstance(wanted, str):
                rows.update(self._matching(wanted))
            elif wanted not in taken:
                rows.update(self._matching(re.compile(fnmatch.translate(wanted)), wanted))
        return np.array(sorted(rows), dtype=np.int64)

    def _matching(self, wanted: NameFilter, glob: str | None = None) -> list[int]:
        if isinstance(wanted, re.Pattern):
            found = [i for i, name in enumerate(self.names) if wanted.fullmatch(name)]
            if not found:
                what = "regular expression" if glob is None else "glob"
                example = f"; the first name is {quote(self.names[0])}" if self.names else ""
                raise TensorNotFoundError(
                    f"{clean(self.where)}: the {what} {quote(glob or wanted.pattern)} matches none of "
                    f"{plural(len(self.names), 'tensor')}{example} "
                    "(whole names are compared, and case counts)"
                )
            return found
        assert not isinstance(wanted, str)
        return [i for i, name in enumerate(self.names) if wanted(name)]


def filters_of(names: object) -> list[NameFilter]:
    """One filter or several as a list. Raises RequestError for what is none."""
    if isinstance(names, (str, re.Pattern)) or callable(names):
        names = [names]
    if not isinstance(names, Iterable) or isinstance(names, (bytes, bytearray)):
        raise RequestError(
            "names: wanted None, a str, a compiled regular expression, a callable or a list of these, found "
            f"{type(names).__name__}"
        )
    filters = list(names)
    for one in filters:
        if isinstance(one, re.Pattern) and not isinstance(one.pattern, str):
            raise RequestError("names: a regular expression has to be compiled from str, found bytes")
        if not isinstance(one, (str, re.Pattern)) and not callable(one):
            raise RequestError(
                "names: wanted a str, a compiled regular expression or a callable in the list, found "
                f"{type(one).__name__}"
            )
    return filters


def _is_glob(text: str) -> bool:
    return any(c in text for c in "*?[")


def _hint(name: object, names: list[str]) -> str:
    close = nearest(name, names) if isinstance(name, str) else []
    if close:
        return f"; did you mean {' or '.join(map(quote, close))}?"
    inside = [other for other in names if name in other] if isinstance(name, str) and name else []
    if not inside:
        return ""
    return f"; whole names are compared, and {len(inside):,} have this as a part, such as {quote(inside[0])}"


def join(
    shards: Sequence[Shard],
    where: str,
    weight_map: Mapping[str, str] | None = None,
    members: Sequence[str] | None = None,
) -> Checkpoint:
    """One checkpoint from shards whose headers are read, in their order.

    `weight_map` is the index's, `members` the name of each shard in it. Raises CheckpointError naming tensor
    and files where a shard lacks what the index says, or two files hold the same name.
    """
    if weight_map is None or members is None:
        shards = _distinct(shards)
        weight_map, members = None, [""] * len(shards)
    checkpoint = join_some(shards, where, weight_map, members)
    check_together([checkpoint], where, weight_map, members)
    return checkpoint


def check_together(
    parts: Sequence[Checkpoint], where: str, weight_map: Mapping[str, str] | None, members: Sequence[str]
) -> None:
    """What concerns several files, of all parts of a checkpoint in their order; raises as join()."""
    shards = [shard for part in parts for shard in part.shards]
    if weight_map is not None:
        listed = sum(_listed_in(s, weight_map, member) for s, member in zip(shards, members, strict=True))
        if listed != len(weight_map):
            _refuse_unlisted(shards, where, weight_map, members)
        if listed == sum(len(part.names) for part in parts):
            return  # each is listed, and so is in one file only
    if len(shards) > 1:
        names = list(chain.from_iterable(part.names for part in parts))
        if len(set(names)) != len(names):
            _refuse_double(parts, where)


def join_some(
    shards: Sequence[Shard], where: str, weight_map: Mapping[str, str] | None, members: Sequence[str]
) -> Checkpoint:
    """The same of some of the shards, of which nothing is checked that concerns the others."""
    columns = [
        shard.header if weight_map is None else _rows_of(shard.header, _kept(shard, weight_map, member))
        for shard, member in zip(shards, members, strict=True)
    ]
    return Checkpoint(
        shards,
        list(chain.from_iterable(c.names for c in columns)),
        np.repeat(np.arange(len(shards), dtype=np.int32), [len(c.names) for c in columns]),
        _concatenated([c.dtypes for c in columns], np.uint8),
        _concatenated([c.starts for c in columns], np.int64),
        _concatenated([c.sizes for c in columns], np.int64),
        list(chain.from_iterable(c.shapes for c in columns)),
        where,
    )


def _distinct(shards: Sequence[Shard]) -> list[Shard]:
    """The shards without those that are one file under two names (a link, or a list that has it twice)."""
    first: dict[tuple[int, int], Shard] = {}
    for shard in shards:
        first.setdefault((shard.device, shard.inode), shard)
    return list(first.values())


def _listed_in(shard: Shard, weight_map: Mapping[str, str], member: str) -> int:
    """How many of a shard's tensors the index gives to it."""
    return list(map(weight_map.get, shard.header.names)).count(member)


def _refuse_unlisted(
    shards: Sequence[Shard], where: str, weight_map: Mapping[str, str], members: Sequence[str]
) -> None:
    """Each tensor of the index has to be in the shard that the index names."""
    held = {member: set(shard.header.names) for member, shard in zip(members, shards, strict=True)}
    lacking = [name for name, member in weight_map.items() if name not in held[member]]
    if lacking:
        name = lacking[0]
        count = len(lacking) - 1
        more = f" (and {plural(count, 'more tensor')} {_are(count)} missing)" if count else ""
        path = next(s.path for s, member in zip(shards, members, strict=True) if member == weight_map[name])
        elsewhere = next((member for member in members if name in held[member]), None)
        there = f"; {clean(elsewhere)} holds it" if elsewhere is not None else ""
        raise CheckpointError(
            f"{clean(where)}: the index says that tensor {quote(name)} is in {clean(path)}, but it is "
            f"not{there}{more}. Index and shards are not of the same checkpoint: download or copy them again"
        )


def _kept(shard: Shard, weight_map: Mapping[str, str], member: str) -> list[int] | None:
    """Rows of a shard that the index does not give to another one; None for all."""
    names = shard.header.names
    if _listed_in(shard, weight_map, member) == len(names):
        return None
    rows = [i for i, name in enumerate(names) if weight_map.get(name, member) == member]
    return None if len(rows) == len(names) else rows


def _rows_of(header: Header, rows: list[int] | None) -> Header:
    if rows is None:
        return header
    index = np.array(rows, dtype=np.int64)
    return Header(
        header.metadata,
        [header.names[i] for i in rows],
        header.dtypes[index],
        [header.shapes[i] for i in rows],
        header.starts[index],
        header.sizes[index],
    )


def _concatenated(columns: list[npt.NDArray[_Scalar]], dtype: type[_Scalar]) -> npt.NDArray[_Scalar]:
    # Not by np.concatenate, which gives the GIL away for each of them.
    return (
        columns[0]
        if len(columns) == 1
        else np.frombuffer(bytearray().join(column.data for column in columns), dtype)
    )


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


def _refuse_double(parts: Sequence[Checkpoint], where: str) -> None:
    held: dict[str, list[str]] = {}
    for part in parts:
        for name, shard in zip(part.names, part.shard_of.tolist(), strict=True):
            held.setdefault(name, []).append(part.shards[shard].path)
    doubles = [name for name, paths in held.items() if len(paths) > 1]
    first, second = held[doubles[0]][:2]
    count = len(doubles) - 1
    more = f" (and {count:,} more {_are(count)})" if count else ""
    raise CheckpointError(
        f"{clean(where)}: tensor {quote(doubles[0])} is in both {clean(first)} and {clean(second)}{more}, "
        "and no index says which one holds; give the files that are meant as a list"
    )
