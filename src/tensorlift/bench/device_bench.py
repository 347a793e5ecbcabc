"""What the rows of a device's table share: checkpoints that are written when first wanted, links, notes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tensorlift.bench.cases import Case, remove
from tensorlift.bench.ceilings import Ceilings
from tensorlift.bench.parity import compare_bytes
from tensorlift.bench.report import Row, Series
from tensorlift.bench.samples import Contender, Link, Sampler, pair_ratios, say
from tensorlift.engine.sizing import EngineSize, size_engine
from tensorlift.options import LoadOptions

__all__ = ["Cases", "DeviceBench", "link_row", "medians_row", "pairs_row"]


class Cases:
    """Checkpoints by name; each is written and compared with the plain library when it is first asked for."""

    def __init__(self, makers: Mapping[str, Callable[[], Case]], device: str) -> None:
        self._makers, self._device = makers, device
        self._made: dict[str, Case] = {}
        self.compared: dict[str, int] = {}
        """Tensors that were compared, by case."""

    def get(self, name: str) -> Case:
        """The case, whose bytes are right."""
        if name not in self._made:
            say(f"writing {name}")
            case = self._made[name] = self._makers[name]()
            self.compared[name] = self._check(case)
            say(f"{name}: {case.tensors} tensors, {case.nbytes / 1e9:.2f} GB, same bytes as safetensors")
        return self._made[name]

    def _check(self, case: Case) -> int:
        from tensorlift.loading import load

        return compare_bytes(load(case.folder, device=self._device), case.files, self._device)

    def keep_only(self, names: Sequence[str]) -> None:
        """Removes the others, so that memory and disk have room for what comes."""
        for name in [name for name in self._made if name not in names]:
            remove(self._made.pop(name))


@dataclass(slots=True)
class DeviceBench:
    """One run on one device."""

    sampler: Sampler
    cases: Cases
    ceilings: Ceilings | None
    """None where there is no compiler: rows that need a bare loop say so."""
    rival: str | None
    """Why there is no InstantTensor to compare with; None where there is."""
    links: dict[str, Link] = field(default_factory=dict)
    """The link before and after the samples of a row."""
    notes: dict[str, Any] = field(default_factory=dict)
    """What a row found that is no ratio."""
    made: dict[str, Contender] = field(default_factory=dict)
    """Samples that a later row compares with."""

    @property
    def device(self) -> str:
        """Where tensors come to."""
        return self.sampler.device

    @contextmanager
    def link(self, name: str) -> Iterator[Link]:
        """Measures the link around the samples of a row, and keeps what was found."""
        with self.sampler.link() as link:
            self.links[name] = link
            yield link

    def rival_contender(self, name: str, nbytes: int, work: Callable[[], object]) -> list[Contender]:
        """InstantTensor as a contender; nothing where it is not there."""
        if self.rival is not None:
            return []
        return [Contender(Series(name, nbytes), work, rival=True)]

    def loop(
        self,
        case: Case,
        name: str,
        *,
        memory: str,
        how: str,
        threads: int,
        limit_bytes: int = 0,
        before: Callable[[], dict[str, Any]] | None = None,
    ) -> list[Contender]:
        """A bare loop over the case's files as a contender; nothing where there is no compiler."""
        ceilings = self.ceilings
        if ceilings is None:
            return []
        chunk_bytes = self.size(case).chunk_size
        nbytes = min(case.file_bytes, limit_bytes or case.file_bytes)

        def work() -> float:
            return ceilings.read_seconds(
                case.files,
                memory=memory,
                how=how,
                threads=threads,
                chunk_bytes=chunk_bytes,
                limit_bytes=limit_bytes,
            )

        return [Contender(Series(name, nbytes), work, before, tells=True)]

    def size(self, case: Case) -> EngineSize:
        """The engine that a load of the case gets."""
        return size_engine(LoadOptions.resolve(), case.nbytes, device=self.sampler.is_cuda)


def link_row(name: str, ours: Contender, link: Link, bar: float | None) -> Row:
    """Ours against the link."""
    what = f"rate, of a pinned copy: {link.rate / 1e9:.2f} GB/s"
    return Row(name, what, ours.series.rate / link.rate, bar, True, [ours.series])


def pairs_row(name: str, ours: Contender, theirs: Sequence[Contender]) -> list[Row]:
    """Ours faster in every pair; nothing where the rival was not there or failed."""
    rows = []
    for rival in theirs:
        if rival.ok:
            ratios = pair_ratios(ours.series, rival.series)
            times = rival.series.median / ours.series.median
            what = f"times as fast, the least of {len(ratios)} pairs; {times:.3f} by the medians"
            rows.append(Row(name, what, min(ratios), 1.0, True, [ours.series, rival.series]))
    return rows


def medians_row(name: str, ours: Contender, theirs: Sequence[Contender], bar: float) -> list[Row]:
    """Ours against a rival by the medians; nothing where that was not there or failed."""
    return [
        Row(
            name,
            f"times as fast; {min(pair_ratios(ours.series, rival.series)):.3f} in the least pair",
            rival.series.median / ours.series.median,
            bar,
            True,
            [ours.series, rival.series],
        )
        for rival in theirs
        if rival.ok
    ]
