"""Options: sizes, counts, names, and where a value comes from."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorlift import options
from tensorlift.errors import OptionError
from tensorlift.options import BACKENDS, LoadOptions, parse_rate, parse_size

SIZES = ["slot_size", "pinned_bytes", "arena_size", "buffer_size", "chunk_size"]
COUNTS = ["io_depth", "threads"]


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("4096", 4096),
        ("64MiB", 64 << 20),
        ("1GB", 10**9),
        ("512KiB", 512 << 10),
        (" 2 GiB ", 2 << 30),
        ("1.5MiB", 3 << 19),
        ("10B", 10),
        ("1tib", 1 << 40),
        (7, 7),
    ],
)
def test_sizes(text: object, nbytes: int) -> None:
    assert parse_size(text, "x") == nbytes


@given(st.integers(1, 1 << 40), st.sampled_from(["KiB", "MiB", "GiB"]))
def test_size_of_any_number(count: int, unit: str) -> None:
    factor = 1024 ** (1 + ["KiB", "MiB", "GiB"].index(unit))
    if count * factor <= 1 << 62:
        assert parse_size(f"{count}{unit}", "x") == count * factor


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize(
    "value",
    [0, -1, "0", "-4MiB", "much", "1XB", "1.5", "0.3B", "", "1e9", 1.5, True, [], "MiB", 1 << 63, "9" * 5000],
)
def test_sizes_that_are_none(name: str, value: object) -> None:
    with pytest.raises(OptionError, match=rf"{name} is .*expected a size above 0.*64MiB"):
        LoadOptions.resolve({}, **{name: value})


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("value", [0, -2, "0", "four", 1.0, True, 5000, "1.0", "9" * 30])
def test_counts_that_are_none(name: str, value: object) -> None:
    with pytest.raises(OptionError, match=rf"{name} is .*from 1 to 4096"):
        LoadOptions.resolve({}, **{name: value})


def test_one_read_is_whole_blocks() -> None:
    with pytest.raises(OptionError, match="chunk_size is 1000; expected a multiple of 4096"):
        LoadOptions(chunk_size=1000)


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("URING", ("URING",)),
        (["URING", "PREAD"], ("URING", "PREAD")),
        (("MMAP",), ("MMAP",)),
        ("URING, PREAD", ("URING", "PREAD")),
    ],
)
def test_back_ends(value: object, names: tuple[str, ...]) -> None:
    assert LoadOptions.resolve({}, backend=value).backend == names


@pytest.mark.parametrize("value", ["uring", "", "URING,", ["PREAD", "mmap"], 3, [None], [[]]])
def test_unknown_back_ends_list_the_known(value: object) -> None:
    with pytest.raises(OptionError, match="backend has .*" + ", ".join(BACKENDS)):
        LoadOptions.resolve({}, backend=value)


def test_back_ends_that_make_no_list() -> None:
    with pytest.raises(OptionError, match="backend is empty"):
        LoadOptions.resolve({}, backend=[])
    with pytest.raises(OptionError, match="twice"):
        LoadOptions.resolve({}, backend=["PREAD", "PREAD"])


def test_unknown_options_list_the_known() -> None:
    with pytest.raises(
        OptionError, match=r"unknown option 'chunksize' \(did you mean chunk_size\?\).*arena_size, "
    ):
        LoadOptions.resolve({}, chunksize=1)


def test_explicit_wins_over_the_environment_and_that_over_automatic() -> None:
    environ = {"TENSORLIFT_THREADS": "3", "TENSORLIFT_IO_DEPTH": "9", "TENSORLIFT_ARENA_SIZE": ""}
    options = LoadOptions.resolve(environ, threads=2, io_depth=None)
    assert (options.threads, options.io_depth, options.arena_size) == (2, 9, None)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("THREADS", "many"),
        ("CHUNK_SIZE", "-1"),
        ("BACKEND", "pread"),
        ("PROGRESS", "maybe"),
        ("SLOT_SIZE", "0"),
    ],
)
def test_a_bad_variable_is_named(variable: str, value: str) -> None:
    with pytest.raises(OptionError, match=f"TENSORLIFT_{variable} "):
        LoadOptions.resolve({f"TENSORLIFT_{variable}": value})


def test_a_bad_variable_does_not_matter_where_a_value_is_given() -> None:
    assert LoadOptions.resolve({"TENSORLIFT_THREADS": "many"}, threads=1).threads == 1


def test_progress() -> None:
    def report(done: int, total: int) -> None: ...

    assert LoadOptions.resolve({}, progress=report).progress is report
    assert LoadOptions.resolve({"TENSORLIFT_PROGRESS": "on"}).progress is True
    assert LoadOptions.resolve({"TENSORLIFT_PROGRESS": "on"}, progress=False).progress is False
    with pytest.raises(OptionError, match="progress is 3"):
        LoadOptions.resolve({}, progress=3)


def test_every_field_says_what_it_is() -> None:
    for field in dataclasses.fields(LoadOptions):
        assert field.default is None
        assert {"unit", "doc", "automatic", "parse"} <= set(field.metadata)
        assert LoadOptions.variable(field.name) == f"TENSORLIFT_{field.name.upper()}"


@pytest.mark.parametrize("name", ["trace", "verify"])
@pytest.mark.parametrize("path", ["a\0b.json", "half \ud800.json", " "])
def test_paths_that_no_kernel_takes(name: str, path: str) -> None:
    with pytest.raises(OptionError, match=f"{name} is"):
        LoadOptions.resolve({}, **{name: path})


def test_backends_in_a_list_may_have_commas() -> None:
    for names in ("URING,PREAD", ["URING,PREAD"], ["URING", " PREAD"]):
        assert LoadOptions.resolve({}, backend=names).backend == ("URING", "PREAD")
    with pytest.raises(OptionError, match="twice"):
        LoadOptions.resolve({}, backend=["PREAD,URING", "PREAD"])


def test_an_unknown_variable_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    environ = {"TENSORLIFT_THREDS": "3", "TENSORLIFT_TEST_BIG": "1", "TENSORLIFT_LIBRARY": "", "OTHER": "x"}
    for _ in range(2):
        assert LoadOptions.resolve(environ).threads is None
    (record,) = caplog.records
    assert (
        "'TENSORLIFT_THREDS' is unknown and changes nothing; did you mean TENSORLIFT_THREADS?"
        in record.message
    )


def test_every_variable_that_is_read_is_known() -> None:
    """What the package names anywhere is an option, or in the list of those that are none."""
    package = Path(options.__file__).parent
    named = {
        name
        for path in package.rglob("*.py")
        for name in re.findall(r'"(TENSORLIFT_[A-Z_]+)"', path.read_text())
    }
    known = {LoadOptions.variable(field.name) for field in dataclasses.fields(LoadOptions)}
    assert named - known - set(options._NO_SETTINGS) <= {options._PREFIX, options._OF_TESTS}


def test_rates() -> None:
    assert parse_rate("50GB/s", "x") == 50_000_000_000
    assert parse_rate(" 1.5MiB/s ", "x") == 1_572_864


@pytest.mark.parametrize("value", ["50GB", "fast/s", "/s", "0GB/s", 5, None])
def test_what_is_no_rate(value: object) -> None:
    with pytest.raises(OptionError, match=r'expected a rate: a size a second, such as "50GB/s"'):
        parse_rate(value, "x")
