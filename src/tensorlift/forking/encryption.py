"""TLS for what is asked over HTTP: what callers give for it, as contexts. Weights never pass under it."""

from __future__ import annotations

import os
import ssl

from tensorlift.errors import OptionError
from tensorlift.format.quoting import quote

__all__ = ["Ca", "Tls", "fork_context", "seed_context"]

Tls = tuple[str | os.PathLike[str], str | os.PathLike[str]] | ssl.SSLContext
Ca = str | os.PathLike[str] | ssl.SSLContext


def seed_context(tls: Tls | None) -> ssl.SSLContext | None:
    """Of (file of certificates, file of the key), both PEM. Raises OptionError."""
    if isinstance(tls, ssl.SSLContext) and tls.protocol == ssl.PROTOCOL_TLS_CLIENT:
        raise OptionError("tls is a context for clients; make one with ssl.Purpose.CLIENT_AUTH")
    if tls is None or isinstance(tls, ssl.SSLContext):
        return tls
    try:
        certificates, key = tls
        for path in (certificates, key):
            # ssl does not say which one is not there. A number would be a descriptor, and closed.
            open(os.fspath(path), "rb").close()
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        # Else a key that is encrypted would have the terminal asked.
        context.load_cert_chain(certificates, key, password="")
    except (OSError, TypeError, ValueError) as error:
        raise OptionError(
            f"tls is {quote(tls)}; expected (file of certificates, file of their key without a password) or "
            f"an ssl.SSLContext: {error}"
        ) from None
    return context


def fork_context(ca: Ca | None) -> ssl.SSLContext:
    """That trusts who signed with what is in a file (PEM), or whom the system trusts. Raises OptionError."""
    if isinstance(ca, ssl.SSLContext) and ca.protocol == ssl.PROTOCOL_TLS_SERVER:
        raise OptionError("ca is a context for servers; make one with ssl.Purpose.SERVER_AUTH")
    if isinstance(ca, ssl.SSLContext):
        return ca
    try:
        if ca is not None and not os.fspath(ca):
            # For ssl it is none, and all whom the system trusts would be trusted.
            raise ValueError("the path is empty")
        return ssl.create_default_context(cafile=ca)
    except (OSError, TypeError, ValueError) as error:
        raise OptionError(
            f"ca is {quote(ca)}; expected a file of certificates or an ssl.SSLContext: {error}"
        ) from None
