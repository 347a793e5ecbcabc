"""What the verbs share that listen until they are told to end."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING, NoReturn

from tensorlift.errors import MachineError, OptionError
from tensorlift.forking.encryption import seed_context
from tensorlift.format.quoting import quote

if TYPE_CHECKING:
    import ssl

__all__ = ["listening", "rest", "tls_context"]


def tls_context(certificates: str | None, key: str | None) -> ssl.SSLContext | None:
    """Of --tls-cert and --tls-key. Raises OptionError."""
    if (certificates is None) != (key is None):
        raise OptionError(
            "--tls-cert and --tls-key go together: a file of certificates, and one of their key"
        )
    return None if certificates is None or key is None else seed_context((certificates, key))


@contextlib.contextmanager
def listening(host: str, port: int) -> Iterator[None]:
    """Around what listens there: MachineError where nobody can."""
    try:
        yield
    except OSError as error:
        raise MachineError(
            f"nobody can listen on {quote(host)}, port {port}: {error.strerror or error}; name another "
            "--host or --port"
        ) from None


def rest() -> NoReturn:
    """Until a signal's handler raises."""
    while True:
        signal.pause()
