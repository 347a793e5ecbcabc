"""Which host this is, as far as memory can be shared."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

__all__ = ["host_id"]


def host_id() -> str:
    """The same in two processes that see each other's sockets: of one kernel, in one network namespace.

    Raises OSError where the kernel does not say.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    return hashlib.sha256(f"{boot}{os.readlink('/proc/self/ns/net')}".encode()).hexdigest()[:32]
