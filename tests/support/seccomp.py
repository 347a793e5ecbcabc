"""Filters that make system calls fail for this process and its children, as containers and old kernels do.

A filter cannot be taken back: install it in a process made for the test (``support.child``), after its
imports. Only what a filter sees can be a condition: the numbers in registers, not what they point to.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# From the kernel's arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h (aarch64).
_NUMBERS = {
    "x86_64": {
        "cachestat": 451, "execve": 59, "fcntl": 72, "io_uring_enter": 426, "io_uring_register": 427,
        "io_uring_setup": 425, "mincore": 27, "mmap": 9, "open": 2, "openat": 257, "openat2": 437,
        "pread64": 17, "preadv": 295, "preadv2": 327, "process_vm_readv": 310, "mlock": 149,
        "io_setup": 206, "io_destroy": 207, "io_getevents": 208, "io_submit": 209, "io_pgetevents": 333,
        "statx": 332, "clone": 56, "clone3": 435,
    },
    "aarch64": {
        "cachestat": 451, "execve": 221, "fcntl": 25, "io_uring_enter": 426, "io_uring_register": 427,
        "io_uring_setup": 425, "mincore": 232, "mmap": 222, "openat": 56, "openat2": 437, "pread64": 67,
        "preadv": 69, "preadv2": 286, "process_vm_readv": 270, "mlock": 228, "io_setup": 0, "io_destroy": 1,
        "io_submit": 2, "io_getevents": 4, "io_pgetevents": 292, "statx": 291,
        "clone": 220, "clone3": 435,
    },
}  # fmt: skip
# linux/audit.h
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# linux/seccomp.h, linux/bpf_common.h
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _FILTER = 22, 38, 2


@dataclass(frozen=True)
class Test:
    """A condition on the low 32 bits of an argument: a bit in common with ``value``, or (not) equal to it."""

    argument: int
    kind: str  # "any bit", "equal", "not equal"
    value: int

    __test__ = False


@dataclass(frozen=True)
class Rule:
    """The calls of a name fail with an errno, where all tests hold."""

    call: str
    errno: int = errno.EPERM
    tests: tuple[Test, ...] = ()


def supported() -> str | None:
    """None where filters can be used, else why not."""
    if platform.machine() not in _NUMBERS:
        return f"no system call numbers for {platform.machine()}"
    return None


def named(name: str) -> tuple[Rule, ...]:
    """A group of this module, or one call with its errno: "io_setup=EAGAIN"."""
    call, _, number = name.partition("=")
    if not number:
        return tuple(globals()[name])
    return (Rule(call, getattr(errno, number)),)


def install(rules: Iterable[Rule]) -> None:
    """Installs a filter; a call that does not exist on this architecture is left out."""
    numbers = _NUMBERS[platform.machine()]
    code = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_EQUAL, 1, 0, _ARCHITECTURES[platform.machine()]),
        (_RETURN, 0, 0, _ALLOW),
    ]
    for rule in rules:
        if rule.call in numbers:
            code += _compiled(rule, numbers[rule.call])
    code.append((_RETURN, 0, 0, _ALLOW))
    _load_program(code)


def _compiled(rule: Rule, number: int) -> list[tuple[int, int, int, int]]:
    """Instructions of one rule: each test jumps behind the rule where it does not hold."""
    size = 2 * len(rule.tests) + 1  # after the comparison of the number
    code = [(_LOAD, 0, 0, _NUMBER_AT), (_EQUAL, 0, size, number)]
    for at, test in enumerate(rule.tests):
        behind = size - 2 * at - 2
        code.append((_LOAD, 0, 0, _ARGUMENTS_AT + 8 * test.argument))
        if test.kind == "any bit":
            code.append((_ANY_BIT, 0, behind, test.value))
        elif test.kind == "equal":
            code.append((_EQUAL, 0, behind, test.value))
        else:
            code.append((_EQUAL, behind, 0, test.value))
    code.append((_RETURN, 0, 0, _ERRNO | rule.errno))
    return code


def _load_program(code: Sequence[tuple[int, int, int, int]]) -> None:
    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]

    raw = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *instruction) for instruction in code))
    program = Program(len(code), ctypes.addressof(raw))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        _PR_SET_SECCOMP, _FILTER, ctypes.byref(program), 0, 0
    ):
        raise OSError(ctypes.get_errno(), "the seccomp filter was not accepted")


NO_URING = tuple(Rule(f"io_uring_{name}") for name in ("setup", "enter", "register"))
NO_AIO = tuple(Rule(f"io_{name}") for name in ("setup", "submit", "getevents", "pgetevents"))
NO_PREAD = tuple(Rule(name) for name in ("pread64", "preadv", "preadv2"))
NO_VM_READ = (Rule("process_vm_readv"),)
# Shared maps of a file; anonymous shared memory (descriptor -1) stays allowed: rings and threads may use it.
NO_FILE_MAP = (
    Rule("mmap", errno.ENODEV, (Test(3, "any bit", 0x01), Test(4, "not equal", 0xFFFFFFFF))),  # MAP_SHARED
)
NO_DIRECT_OPEN = (
    Rule("open", errno.EINVAL, (Test(1, "any bit", os.O_DIRECT),)),
    Rule("openat", errno.EINVAL, (Test(2, "any bit", os.O_DIRECT),)),
    Rule("openat2", errno.ENOSYS),
    Rule("fcntl", errno.EINVAL, (Test(1, "equal", 4), Test(2, "any bit", os.O_DIRECT))),  # F_SETFL
)
NO_CACHESTAT = (Rule("cachestat", errno.ENOSYS),)
NO_MINCORE = (Rule("mincore"),)
