"""Loads that were published or measured, each with what the model of several ranks needs to predict it."""

from __future__ import annotations

from dataclasses import dataclass

from tensorlift.plan.prediction import Rates, Work

__all__ = ["EXPLAINED", "GATHERS", "SCALES", "UNEXPLAINED", "Row", "Scale", "gb_per_second"]

QWEN, R1 = 61_064_245_248, 688_600_000_000
# Qwen3-30B-A3B cut to 24 and to 6 layers; 120,000 tensors of an NVFP4 model.
PART, DISK, MANY = 31_154_454_528, 8_722_111_488, 26_542_320_000
# The other platform's storage is not published: the rate that its own row of one rank gives.
ANY = 70_000_000_000
GB = 1e9


@dataclass(frozen=True, slots=True)
class Row:
    """One load. ``found``: seconds, (least, most) where several are known."""

    what: str
    way: str
    work: Work
    rates: Rates
    found: tuple[float, ...]
    why: str = ""

    @property
    def middle(self) -> float:
        """What the ratio is taken of."""
        return sum(self.found) / len(self.found)


@dataclass(frozen=True, slots=True)
class Scale:
    """A number of ranks to plan for."""

    what: str
    way: str
    work: Work
    rates: Rates


def gb_per_second(nbytes: int, *rates: float) -> tuple[float, ...]:
    """Seconds of a load whose rates, in GB/s, were published instead."""
    return tuple(nbytes / GB / rate for rate in sorted(rates, reverse=True))


_TMPFS = 1.0
_FAST = Rates(storage=50e9)
_UNKNOWN = Rates()
_QWEN_1, _QWEN_1_TMPFS = Work(QWEN), Work(QWEN, cached=_TMPFS)
_R1_8, _R1_8_TMPFS = Work(R1, 8), Work(R1, 8, cached=_TMPFS)
# Each rank has its own experts (EP 8), and these are nearly all of the model.
_R1_EP, _R1_EP_TMPFS = (Work(R1, 8, own=R1 // 8, own_read=R1 // 8, cached=cached) for cached in (0.0, _TMPFS))
_SLOW_INSTANT, _SLOW_RUNAI = Rates(storage=ANY / 6.70), Rates(storage=ANY / 7.06)
_PAIR = Work(PART, 2, cached=_TMPFS)
_ONE = Work(PART, cached=_TMPFS)
# The link, and the bare direct loop over the disk, of the same runs.
_LINK, _LINK_9, _LINK_6 = Rates(link=55.54e9), Rates(link=55.49e9), Rates(link=55.45e9)
_EXT4 = Rates(storage=DISK / 4.793, link=55.5e9)

EXPLAINED = (
    Row("Qwen3-30B-A3B, one rank, storage of 50 GB/s: InstantTensor", "all", _QWEN_1, _FAST, (1.77,),
        "half a second beyond both rates, of unknown origin; on eight ranks its share is small"),
    Row("the same from tmpfs: InstantTensor", "all", _QWEN_1_TMPFS, _UNKNOWN, (1.26,), "the link"),
    Row("DeepSeek-R1, eight ranks, storage of 50 GB/s: InstantTensor", "gather", _R1_8, _FAST, (15.3,),
        "each byte leaves storage once"),
    Row("the same from tmpfs: InstantTensor", "gather", _R1_8_TMPFS, _UNKNOWN, (12.1,),
        "the page cache of one host"),
    Row("DeepSeek-R1, eight ranks, storage of 50 GB/s: Run:ai", "all", _R1_8, _FAST, (101,),
        "eight times the bytes: storage gave 54.5 GB/s"),
    Row("the same from tmpfs: Run:ai", "all", _R1_8_TMPFS, _UNKNOWN, (79.8,),
        "eight times the bytes: the page cache gave 69 GB/s"),
    Row("Qwen3.5-35B-A3B, two ranks, another platform: InstantTensor", "gather", Work(ANY, 2),
        _SLOW_INSTANT, (6.91,), "storage: from the 6.73 s of one rank"),
    Row("the same: Run:ai, distributed", "gather", Work(ANY, 2), _SLOW_RUNAI, (6.96,),
        "storage: from its 7.09 s of one rank"),
    Row("31 GB, tmpfs, one process of two H200: an early prototype", "all", _ONE, _UNKNOWN,
        gb_per_second(PART, 46), "the link"),
    Row("31 GB, tmpfs, two ranks of two H200, each all, ring of 128 MiB: an early prototype", "all", _PAIR,
        _UNKNOWN, gb_per_second(PART, 28), "the page cache, shared"),
    Row("the same with a ring of 32 MiB, pieces of 256 KiB", "all", _PAIR, _UNKNOWN,
        gb_per_second(PART, 34, 35), "the page cache: the host gave 69 GB/s so"),
    Row("31 GB, tmpfs, one H200: `load`", "all", _ONE, _LINK, (0.599,), "the link"),
    Row("the same: `load_into`", "all", _ONE, _LINK, (0.621,),
        "the link, and 30 to 45 ms of Python before the first byte"),
    Row("61 GB, tmpfs, one H200: `load`", "all", _QWEN_1_TMPFS, _LINK_9, (1.156,), "the link"),
    Row("8.7 GB, ext4, warm, one H200: `load`", "all", Work(DISK, cached=1.0), _EXT4, (0.185,), "the link"),
    Row("the same, cold", "all", Work(DISK), _EXT4, (4.836,), "the disk"),
    Row("the same, half cached", "all", Work(DISK, cached=0.5), _EXT4, (2.477,), "the disk, then the link"),
    Row("the same, warm: InstantTensor, which reads directly", "all", Work(DISK), _EXT4, (5.6,),
        "the disk: what is cached is not asked"),
)  # fmt: skip
"""What the hardware's rates explain."""

_MAP = "one thread, fault by fault through a lazy map: "
_COPIES = "its own copies: "
UNEXPLAINED = (
    Row("Qwen3-30B-A3B, one rank, storage of 50 GB/s: safetensors", "all", _QWEN_1, _FAST, (57.4,),
        _MAP + "1.06 GB/s"),
    Row("the same from tmpfs", "all", _QWEN_1_TMPFS, _UNKNOWN, (12.7,), _MAP + "4.8 GB/s"),
    Row("DeepSeek-R1, eight ranks, storage of 50 GB/s: safetensors", "slices", _R1_EP, _FAST, (160,),
        _MAP + "0.54 GB/s a rank, if each touches its eighth"),
    Row("the same from tmpfs", "slices", _R1_EP_TMPFS, _UNKNOWN, (22.6,), _MAP + "3.8 GB/s a rank"),
    Row("Qwen3-30B-A3B, one rank, storage of 50 GB/s: fastsafetensors", "all", _QWEN_1, _FAST, (22.2,),
        _COPIES + "tmpfs is hardly faster"),
    Row("the same from tmpfs", "all", _QWEN_1_TMPFS, _UNKNOWN, (16.7,), _COPIES + "3.7 GB/s"),
    Row("DeepSeek-R1, eight ranks, storage of 50 GB/s: fastsafetensors", "gather", _R1_8, _FAST, (75.8,),
        _COPIES + "tmpfs is hardly faster"),
    Row("the same from tmpfs", "gather", _R1_8_TMPFS, _UNKNOWN, (63.4,), _COPIES + "1.4 GB/s a rank"),
    Row("Qwen3-30B-A3B, one rank, storage of 50 GB/s: Run:ai", "all", _QWEN_1, _FAST, (9.29,),
        _COPIES + "out of memory that is not pinned; tmpfs is hardly faster"),
    Row("the same from tmpfs", "all", _QWEN_1_TMPFS, _UNKNOWN, (8.21,), _COPIES + "7.4 GB/s"),
    Row("DeepSeek-R1, eight ranks, storage of 50 GB/s: Run:ai, distributed", "gather", _R1_8, _FAST, (192,),
        "slower than each rank reading all: its exchange"),
    Row("the same from tmpfs", "gather", _R1_8_TMPFS, _UNKNOWN, (156,), "its exchange"),
    Row("Qwen3.5-35B-A3B, one rank, another platform: safetensors", "all", Work(ANY), _SLOW_INSTANT, (140,),
        _MAP + "about 0.5 GB/s"),
    Row("the same, two ranks", "all", Work(ANY, 2), _SLOW_INSTANT, (126,),
        "the kernel reads for both at once, the map stays the limit"),
    Row("Qwen3.5-35B-A3B, one rank, another platform: fastsafetensors", "all", Work(ANY), _SLOW_INSTANT,
        (49.3,), _COPIES + "about 1.4 GB/s"),
    Row("the same, two ranks", "gather", Work(ANY, 2), _SLOW_INSTANT, (32.9,), "half of the copies each"),
    Row("31 GB, tmpfs, two H200: InstantTensor, world group", "gather", _PAIR, _UNKNOWN,
        gb_per_second(PART, 12.8, 13.4), "rings of 4 GiB a process, far beyond the shared cache; its start"),
    Row("the same, each rank alone", "all", _PAIR, _UNKNOWN, gb_per_second(PART, 12.6, 17.6), "the same"),
    Row("31 GB, tmpfs, two ranks of two H200, each all, 8 to 15 threads: an early prototype", "all", _PAIR,
        _UNKNOWN, gb_per_second(PART, 20, 26), "too few threads, and rings beyond the shared cache"),
    Row("31 GB, tmpfs, one H200: safetensors", "all", _ONE, _UNKNOWN, (7.5, 8.4), _MAP + "about 4 GB/s"),
    Row("the same: Run:ai, then a copy to the device", "all", _ONE, _UNKNOWN, (7.8,),
        _COPIES + "out of memory that is not pinned"),
    Row("the same: fastsafetensors", "all", _ONE, _UNKNOWN, (1.40, 1.79), _COPIES + "17 to 22 GB/s"),
    Row("the same: safetensors 0.9.0rc1 `prefetch`", "all", _ONE, _UNKNOWN, (1.15, 1.55),
        _COPIES + "20 to 27 GB/s"),
    Row("the same: InstantTensor, owned", "all", _ONE, _UNKNOWN, (0.80, 1.19), "a clone and a wait a tensor"),
    Row("the same: `load(verify=True)`", "all", _ONE, _LINK, (0.738,), "digests, by the threads that read"),
    Row("26.5 GB, 120,000 tensors, tmpfs, one H200: `load`", "all", Work(MANY, cached=1.0), _LINK_6, (0.602,),
        "Python, about 1 us a tensor"),
    Row("the same: safetensors 0.9.0rc1", "all", Work(MANY, cached=1.0), _LINK_6, (1.73,), "the same"),
    Row("the same: InstantTensor", "all", Work(MANY, cached=1.0), _LINK_6, (8.8,), "Python, 70 us a tensor"),
    Row("8.7 GB, ext4, warm, one H200: InstantTensor's BUFFERED", "all", Work(DISK, cached=1.0), _EXT4,
        (0.27, 0.48), _COPIES + "18 to 32 GB/s"),
    Row("the same: safetensors", "all", Work(DISK, cached=1.0), _EXT4, (1.7,), _MAP + "5 GB/s"),
    Row("4 KiB, tmpfs, one H200: `load`", "all", Work(4096, cached=1.0), _UNKNOWN, (0.0042,),
        "the start that is assumed is that of a large load; a small ring costs less"),
)  # fmt: skip
"""What they do not explain: the time is that of software, or of something that the model leaves out."""

GATHERS = ((8, 128), (64, 438), (256, 537))
"""In-place all-gathers of two H200: MiB of the result, and GB of the result a second."""


def _scales() -> tuple[Scale, ...]:
    scales = []
    for ranks in (8, 32, 1000):
        for what, way, group in (
            ("all together", "gather", None),
            ("host by host", "gather", 8),
            ("-", "all", 1),
        ):
            if ranks > 8 or group != 8:
                scales.append(Scale(what, way, Work(R1, ranks, 8, group=group), _FAST))
    return tuple(scales)


SCALES = _scales()
"""DeepSeek-R1 on storage of 50 GB/s, by ranks."""
