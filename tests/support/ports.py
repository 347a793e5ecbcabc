"""Ports where nobody listens."""

from __future__ import annotations

import socket


def free_port(address: str = "127.0.0.1") -> int:
    """One that was free a moment ago."""
    with socket.create_server((address, 0)) as taken:
        return int(taken.getsockname()[1])


def nobody() -> str:
    """A URL where nobody listens."""
    return f"http://127.0.0.1:{free_port()}"
