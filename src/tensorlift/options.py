"""What a load can be told: each setting once, with its unit, default and environment variable.

An explicit value wins; ``None`` or an absent one means ``TENSORLIFT_<NAME>`` and, without that, an automatic
choice that is made where the work is known (``engine/sizing.py``). The metadata of the fields is what the
settings page and the command line are generated from.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tensorlift.errors import OptionError
from tensorlift.format.quoting import shown

__all__ = [
    "BACKENDS",
    "HOST_BACKENDS",
    "LoadOptions",
    "parse_count",
    "parse_port",
    "parse_progress",
    "parse_rate",
    "parse_seconds",
    "parse_size",
    "parse_switch",
]

# In the order of tl_backend.
BACKENDS = ("AUTO", "PREAD", "URING", "MMAP", "URING_BUFFERED", "AIO", "AIO_BUFFERED", "BUFFERED", "CUFILE")
# Those that fill host memory, and so work for every device.
HOST_BACKENDS = BACKENDS[:-1]

Progress = Callable[[int, int], object]

_UNITS = {
    "": 1,
    "B": 1,
    **{f"{p}B": 1000**i for i, p in enumerate("KMGT", 1)},
    **{f"{p}IB": 1024**i for i, p in enumerate("KMGT", 1)},
}
# Python makes no number of thousands of digits.
_SIZE = re.compile(r"\s*(\d{1,30})(?:\.(\d{1,30}))?\s*([A-Za-z]*)\s*")
_SIZE_FORM = 'a size above 0: a number of bytes, or text such as "512KiB", "64MiB" or "1GB"'
_WORDS = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(("0", "false", "no", "off"), False)
# The engine takes 64-bit sizes, and it counts threads and reads in 32 bits; a machine has fewer than these.
_LARGEST_SIZE = 1 << 62
_LARGEST_COUNT = 4096
_LONGEST = 7 * 86400  # seconds
_PREFIX, _OF_TESTS = "TENSORLIFT_", "TENSORLIFT_TEST"
# Read elsewhere: engine/library.py, cli/console.py, forking/tokens.py and fleet/contract.py.
_NO_SETTINGS = ("TENSORLIFT_LIBRARY", "TENSORLIFT_DEBUG", "TENSORLIFT_TOKEN", "TENSORLIFT_PLACE")
_log = logging.getLogger("tensorlift")
_told: set[str] = set()


def parse_size(value: object, name: str) -> int:
    """Bytes of ``value``, an int or text such as ``"64MiB"``; ``name`` is what an OptionError calls it."""
    nbytes = None
    if isinstance(value, int) and not isinstance(value, bool):
        nbytes = value
    elif isinstance(value, str) and (match := _SIZE.fullmatch(value)):
        unit = _UNITS.get(match[3].upper())
        if unit is not None:
            digits = match[2] or ""
            whole, rest = divmod(int(match[1] + digits) * unit, 10 ** len(digits))
            nbytes = None if rest else whole
    if nbytes is None or not 0 < nbytes <= _LARGEST_SIZE:
        raise OptionError(f"{name} is {shown(value)}; expected {_SIZE_FORM}")
    return nbytes


def parse_rate(value: object, name: str) -> int:
    """Bytes a second of text such as ``"50GB/s"``; ``name`` is what an OptionError calls it."""
    size = value.strip().removesuffix("/s") if isinstance(value, str) else ""
    try:
        if not isinstance(value, str) or size == value.strip():
            raise OptionError(name)
        return parse_size(size, name)
    except OptionError:
        form = 'a rate: a size a second, such as "50GB/s"'
        raise OptionError(f"{name} is {shown(value)}; expected {form}") from None


def _parse_read(value: object, name: str) -> int:
    nbytes = parse_size(value, name)
    # O_DIRECT wants offset, length and address in whole blocks; 4096 fits every block device (see statx(2)).
    if nbytes % 4096:
        raise OptionError(f"{name} is {shown(value)}; expected a multiple of 4096 bytes, such as 1MiB")
    return nbytes


def parse_count(value: object, name: str, most: int = _LARGEST_COUNT) -> int:
    """A whole number from 1 to ``most``, an int or text; ``name`` is what an OptionError calls it."""
    number = value
    if isinstance(value, str) and re.fullmatch(r"\s*\d{1,9}\s*", value):
        number = int(value)
    if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number <= most:
        raise OptionError(f"{name} is {shown(value)}; expected a whole number from 1 to {most}")
    return number


def parse_port(value: object, name: str) -> int:
    """A port, or 0 for one that is free; ``name`` is what an OptionError calls it."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= 65535:
        raise OptionError(
            f"{name} is {shown(value)}; expected a whole number up to 65535, or 0 for one that is free"
        )
    return value


def _parse_backend(value: object, name: str) -> tuple[str, ...]:
    parts = [value] if isinstance(value, str) or not isinstance(value, Iterable) else list(value)
    given: list[object] = []
    for part in parts:
        # Commas count inside a list too: an option of the command line that may be repeated gives one.
        given += [name.strip() for name in part.split(",")] if isinstance(part, str) else [part]
    known = ", ".join(BACKENDS)
    if not given:
        raise OptionError(f"{name} is empty; expected one or several of {known}")
    for part in given:
        if part not in BACKENDS:
            raise OptionError(f"{name} has {shown(part)}; the known back ends are {known} (in capitals)")
    if len(set(given)) < len(given):
        raise OptionError(f"{name} is {shown(value)}, which has a back end twice")
    return tuple(str(part) for part in given)


def _one_of(*words: str) -> Callable[[object, str], str]:
    def parse(value: object, name: str) -> str:
        if isinstance(value, str) and value in words:
            return value
        raise OptionError(f"{name} is {shown(value)}; expected one of {', '.join(map(repr, words))}")

    return parse


def parse_seconds(value: object, name: str) -> float:
    """Seconds above 0 and at most a week, a number or text; ``name`` is what an OptionError calls it."""
    seconds = value
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            seconds = float(value)
    if not isinstance(seconds, (int, float)) or isinstance(seconds, bool) or not 0 < seconds <= _LONGEST:
        raise OptionError(f"{name} is {shown(value)}; expected seconds above 0, at most {_LONGEST}")
    return float(seconds)


def parse_switch(value: object, name: str) -> bool:
    """True or false, or a word for it; ``name`` is what an OptionError calls it."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().lower() in _WORDS:
        return _WORDS[value.strip().lower()]
    raise OptionError(f"{name} is {shown(value)}; expected true or false")


def parse_progress(value: object, name: str) -> bool | Progress:
    """True or false, a word for it, or a function; ``name`` is what an OptionError calls it."""
    if isinstance(value, str):
        if value.strip().lower() in _WORDS:
            return _WORDS[value.strip().lower()]
    elif isinstance(value, bool) or callable(value):
        return value
    raise OptionError(
        f"{name} is {shown(value)}; expected true, false or a function of (bytes done, bytes in all)"
    )


def _is_path(value: object) -> bool:
    """Text that can be given to the kernel: not empty, no NUL, no half of a surrogate pair."""
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        return False
    try:
        os.fsencode(value)
    except UnicodeEncodeError:
        return False
    return True


def _parse_verify(value: object, name: str) -> bool | str | Mapping[str, str]:
    if isinstance(value, str) and value.strip().lower() in _WORDS:
        return _WORDS[value.strip().lower()]
    if isinstance(value, (bool, Mapping)):
        return value
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    if isinstance(path, str) and _is_path(path):
        return path
    raise OptionError(
        f"{name} is {shown(value)}; expected true, false, the path of a file of digests, or digests by "
        "tensor name"
    )


def _parse_trace(value: object, name: str) -> str:
    path = os.fspath(value) if isinstance(value, (str, os.PathLike)) else value
    if isinstance(path, str) and _is_path(path):
        return path
    raise OptionError(f"{name} is {shown(value)}; expected the path of a file to write")


def _warn_of_unknown(environ: Mapping[str, str]) -> None:
    """Tells of misspelt variables in the log, each once a process: an unknown one changes nothing."""
    for variable in environ:
        if not variable.startswith(_PREFIX) or variable.startswith(_OF_TESTS) or variable in _told:
            continue
        known = [
            *_NO_SETTINGS,
            *(LoadOptions.variable(field.name) for field in dataclasses.fields(LoadOptions)),
        ]
        if variable not in known:
            _told.add(variable)
            near = difflib.get_close_matches(variable, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"the known ones are {', '.join(known)}"
            _log.warning("the environment variable %r is unknown and changes nothing; %s", variable, hint)


def _setting(
    parse: Callable[[object, str], Any], unit: str, automatic: str, doc: str, *, cli: bool = True
) -> Any:
    metadata = {"parse": parse, "unit": unit, "automatic": automatic, "doc": doc, "cli": cli}
    return dataclasses.field(default=None, metadata=metadata)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """The settings of a load; ``None`` means automatic. Every value is checked and put into its plain form.

    Each field's metadata has ``unit``, ``doc``, ``automatic`` (what None chooses), ``parse`` and ``cli``
    (whether the command line, which loads in one process, has it); the environment variable is
    ``LoadOptions.variable(name)``.
    """

    backend: tuple[str, ...] | None = _setting(
        _parse_backend,
        "name, or an ordered list of names; as text, separated by commas",
        "AUTO",
        "Ways of reading, in the order of preference: the first that works on the file is taken. "
        "AUTO reads what is cached by pread and the rest directly, PREAD too, but by threads alone; "
        "URING (io_uring) and AIO (Linux AIO) read all directly, URING_BUFFERED, AIO_BUFFERED, MMAP and "
        "BUFFERED (pread, with more threads where storage is slow) all through the page cache. CUFILE "
        "(GPUDirect Storage) reads to a CUDA device without host memory between; AUTO never takes it.",
    )
    chunk_size: int | None = _setting(
        _parse_read,
        "bytes",
        "1 MiB on a device, up to 4 MiB on a CPU, less for small loads",
        "One read; a multiple of 4096.",
    )
    io_depth: int | None = _setting(
        parse_count, "reads", "32", "Direct reads in flight, for what is not in the page cache."
    )
    threads: int | None = _setting(
        parse_count,
        "threads",
        "as many as CPUs may be used (affinity, cgroup quota, local ranks), at most 16 and one per read",
        "Threads that copy out of the page cache.",
    )
    slot_size: int | None = _setting(
        parse_size,
        "bytes",
        "16 MiB, less for small loads and small caches",
        "One copy to the device; rounded up to whole chunks. Not used on a CPU.",
    )
    pinned_bytes: int | None = _setting(
        parse_size,
        "bytes",
        "128 MiB, at most half of the last-level cache that our CPUs reach and what the work needs",
        "Pinned host memory: the ring, at least two slots, and a page a slot on top. Not used on a CPU.",
    )
    keep_pinned: bool | None = _setting(
        parse_switch,
        "true, or false",
        "false",
        "Leave the ring pinned for later loads of this process to the same device, until "
        "tensorlift.release_pinned(). Any load whose slots are no larger and no more takes what is kept and "
        "leaves it; one that wants more gives it back first. At most one ring a device, the larger, is kept.",
    )
    arena_size: int | None = _setting(
        parse_size,
        "bytes",
        "258 MiB on a device, 66 MiB on a CPU, less where buffer_size or free memory are small",
        "Capacity of an arena, the block that tensors share; a tensor kept holds back at most its arena.",
    )
    own: str | None = _setting(
        _one_of("arena", "tensor"),
        "arena, or tensor",
        "arena",
        "What owns memory: arenas that tensors share, or each tensor a block of its own, which holds nothing "
        "else back, takes longer, and on a device comes from torch's own allocator.",
    )
    buffer_size: int | None = _setting(
        parse_size,
        "bytes",
        "1 GiB on a device, at most half of what is free there; 256 MiB on a CPU",
        "Arenas read ahead of the consumer of open(); one arena, and so the largest tensor, always fits.",
    )
    progress: bool | Progress | None = _setting(  # noqa: RUF009 - makes a field, which is what is wanted
        parse_progress,
        "true, false, or a function",
        "false",
        "A bar on stderr, or a function that is called with (bytes done, bytes in all).",
    )
    trace: str | None = _setting(
        _parse_trace,
        "path of a file to write",
        "none",
        "What each thread did when, in the Trace Event format, which ui.perfetto.dev opens; written at the "
        "end of a load, after an error too (safe_open writes one in get_tensors() alone). Each load replaces "
        "its own file of before, and nothing else; {pid} in the path becomes the process's id.",
    )

    verify: bool | str | Mapping[str, str] | None = _setting(
        _parse_verify,
        "true, false, or a path",
        "false",
        "Compare each tensor with its digest before it is handed out: true finds what "
        "'tensorlift digest' wrote beside the files, a path names it; in Python also a mapping from names to "
        "digests.",
    )

    exchange: str | None = _setting(
        _one_of("auto", "gather", "none"),
        "auto, gather, or none",
        "auto",
        "With a process group: gather has each rank read its share of what all want and take the rest from "
        "the others, none has each read all that it wants, auto does what is predicted to be faster.",
        cli=False,
    )
    peer_timeout: float | None = _setting(
        parse_seconds,
        "seconds",
        "10",
        "With a process group: within this time all ranks know that one has failed or is gone. A rank on "
        "another host that gives no sign for 0.6 of it counts as gone.",
        cli=False,
    )
    join_timeout: float | None = _setting(
        parse_seconds,
        "seconds",
        "300",
        "With a process group: how long to wait for ranks that have not begun to load.",
        cli=False,
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None:
                object.__setattr__(self, field.name, field.metadata["parse"](value, field.name))

    @staticmethod
    def variable(name: str) -> str:
        """The environment variable of an option."""
        return f"TENSORLIFT_{name.upper()}"

    @classmethod
    def resolve(cls, environ: Mapping[str, str] | None = None, /, **given: object) -> LoadOptions:
        """Options from explicit values, then from the environment; what neither gives stays None, automatic.

        Raises OptionError for an unknown name or a value that does not fit, naming the option or the
        variable.
        """
        environ = os.environ if environ is None else environ
        _warn_of_unknown(environ)
        fields = {field.name: field for field in dataclasses.fields(cls)}
        for name in given:
            if name not in fields:
                near = difflib.get_close_matches(name, fields, n=1)
                hint = f" (did you mean {near[0]}?)" if near else ""
                raise OptionError(
                    f"unknown option {name!r}{hint}; the known ones are {', '.join(sorted(fields))}"
                )
        values: dict[str, Any] = {}
        for name, field in fields.items():
            variable = cls.variable(name)
            if given.get(name) is not None:
                values[name] = given[name]
            # An empty variable counts as absent: it is how a shell or a container file unsets one.
            elif environ.get(variable):
                values[name] = field.metadata["parse"](environ[variable], variable)
        return cls(**values)
