"""Loads in a child process, described in plain values: what came, by which way, and what was said."""

from __future__ import annotations

import hashlib
import logging
from typing import Any

import torch

from support import seccomp


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def digest(tensors: dict[str, torch.Tensor]) -> str:
    """One digest over names and bytes, by name."""
    total = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        total.update(name.encode())
        total.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def filtered_load(path: str, warm_up: str, rules: list[str], options: dict[str, Any]) -> dict[str, Any]:
    """Loads ``path`` under named rules (seccomp.named); imports and library come before the filter."""
    from tensorlift import loading

    loading.load(warm_up)
    seccomp.install([rule for name in rules for rule in seccomp.named(name)])
    lines = _Lines()
    logging.getLogger("tensorlift").addHandler(lines)
    logging.getLogger("tensorlift").setLevel(logging.INFO)
    state = loading.load(path, **options)
    return {"digest": digest(state), "stats": state.stats.to_dict(), "log": lines.lines}
