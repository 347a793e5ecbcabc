"""Writes the tables of docs/prediction.md from the model; with --check says whether they are still true."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import ranks_rows
from ranks_rows import Row
from tensorlift.plan.prediction import DEFAULT_RATES, Costs, Prediction, Rates, Work, predict

PAGE = Path(__file__).resolve().parent.parent / "docs" / "prediction.md"
MIB = 1 << 20
# What storage is planned for at scale: as long as eight ranks take.
WANTED_SECONDS = 15


def predicted(row: Row) -> Prediction:
    return predict(row.work, row.rates)[row.way]


def ratio(row: Row) -> float:
    """Predicted over found: 1 where the model is right, far below where software is the limit."""
    return predicted(row).seconds / row.middle


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g}" if seconds < 100 else f"{seconds:,.0f}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _compared(rows: Iterable[Row], last: str) -> str:
    return _table(
        ("load", "way", "predicted, s", "found, s", "ratio", last),
        [
            (
                row.what,
                row.way,
                _seconds(predicted(row).seconds),
                " to ".join(map(_seconds, row.found)),
                f"{ratio(row):.2f}",
                row.why,
            )
            for row in rows
        ],
    )


def gather_seconds(mib: int) -> float:
    """One all-gather of two ranks, of so many MiB of the result."""
    work = Work(mib * MIB, 2, arena=mib * MIB)
    return predict(work)["gather"].stages["peer"]


def _gathers() -> str:
    rows = []
    for mib, rate in ranks_rows.GATHERS:
        found, model = mib * MIB / rate / 1e9, gather_seconds(mib)
        rows.append((f"{mib} MiB", f"{model * 1e6:.0f}", f"{found * 1e6:.0f}", f"{model / found:.2f}"))
    return _table(("all-gather of", "predicted, us", "found, us", "ratio"), rows)


def _scales() -> str:
    rows = []
    for scale in ranks_rows.SCALES:
        work = scale.work
        one = predict(work, scale.rates)[scale.way]
        group = min(work.group or work.ranks, work.ranks)
        hosts = -(-work.ranks // (work.ranks_per_host or work.ranks))
        rows.append(
            (
                f"{work.ranks:,} on {hosts:,}",
                scale.way,
                scale.what,
                f"{one.from_storage / 1e12:,.2f}",
                f"{one.seconds:,.1f}",
                f"{one.from_storage / WANTED_SECONDS / 1e9:,.0f}",
                f"{one.received / 1e9:.1f}",
                f"{one.stages['network']:.1f}",
                f"{work.arena / group / 1e6:.2f}" if scale.way == "gather" else "-",
            )
        )
    head = (
        "ranks, hosts", "way", "gathered", "storage gives, TB", f"seconds at {_of_storage()} GB/s",
        f"GB/s for {WANTED_SECONDS} s", "a rank receives, GB", "network, s", "a rank's part of an arena, MB",
    )  # fmt: skip
    return _table(head, rows)


def break_even(ranks: int, cached: float, storage: float) -> int:
    """The fewest bytes, to 0.1 GB, from which a gather by ranks of one host is faster than reading all."""
    low, high = 0, 10_000
    while high - low > 1:
        middle = (low + high) // 2
        ways = predict(Work(middle * 10**8, ranks, cached=cached), Rates(storage=storage))
        faster = ways["gather"].seconds < ways["all"].seconds
        low, high = (low, middle) if faster else (middle, high)
    return high * 10**8


def _break_even() -> str:
    sources = (
        ("the page cache", 1.0, 50e9),
        ("storage of 50 GB/s", 0.0, 50e9),
        ("storage of 5 GB/s", 0.0, 5e9),
    )
    rows = [
        (what, *(f"{break_even(ranks, cached, storage) / 1e9:.1f} GB" for ranks in (2, 4, 8)))
        for what, cached, storage in sources
    ]
    return _table(("from", "2 ranks", "4 ranks", "8 ranks"), rows)


def _of_storage() -> str:
    (rate,) = {scale.rates.storage for scale in ranks_rows.SCALES}
    assert rate is not None
    return f"{rate / 1e9:.0f}"


def _defaults() -> str:
    costs = Costs()
    rows = [(f"`{name}`", f"{rate / 1e9:.0f} GB/s") for name, rate in DEFAULT_RATES.items()]
    rows += [
        ("start of a load", f"{costs.start * 1e3:.0f} ms"),
        ("making a communicator", f"{costs.make_communicator} s"),
        ("destroying it", f"{costs.destroy_communicator} s"),
        ("issuing a gather", f"{costs.gather * 1e6:.0f} us"),
    ]
    return _table(("figure", "taken where nothing is known", "from"), [(*r, _SOURCES[r[0]]) for r in rows])


_SOURCES = {
    "`storage`": "the public figures below; where storage is slower, reading by all loses by more",
    "`host`": "two H200 of one host: 55 to 70 GB/s in all, however many processes read",
    "`link`": "pinned copies on H200 machines: 54.8 to 55.5 GB/s",
    "`peer`": "two H200 with NV18: fits the three all-gathers below; bytes received by a rank",
    "`network`": "the name of an adapter of 400 Gb/s for each GPU; **never measured**",
    "start of a load": "loads of 9 to 61 GB on one H200, beyond their time on the link: 28 to 55 ms",
    "making a communicator": "two H200, the second in a process; public figure 0.5 s, the first 1.4 s",
    "destroying it": "two H200; public figure 0.5 s",
    "issuing a gather": "two H200: 37 to 45 us",
}


TABLES: dict[str, Callable[[], str]] = {
    "defaults": _defaults,
    "gathers": _gathers,
    "explained": lambda: _compared(ranks_rows.EXPLAINED, "the limit"),
    "unexplained": lambda: _compared(ranks_rows.UNEXPLAINED, "what the limit is instead"),
    "break-even": _break_even,
    "scales": _scales,
}


def page(text: str) -> str:
    """The page with its tables as they are now; each stands between two comments with its name."""
    for name, make in TABLES.items():
        block = re.compile(rf"(<!-- table: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        if not block.search(text):
            raise SystemExit(f"{PAGE.name} has no place for the table {name}")
        table = make()
        text = block.sub(lambda found, table=table: f"{found[1]}\n{table}\n{found[2]}", text)  # type: ignore[misc]
    return text


def main(arguments: list[str]) -> int:
    old = PAGE.read_text(encoding="utf-8")
    new = page(old)
    if arguments == ["--check"]:
        if old != new:
            print("docs/prediction.md differs from the model: run make docs", file=sys.stderr)
            return 1
        print("ranks: the page agrees with the model")
        return 0
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
