"""Options that several verbs have, each described once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer

__all__ = [
    "AS_JSON",
    "DEVICES",
    "HOST",
    "INSECURE",
    "PLACE",
    "PROGRESS",
    "PROTOCOL",
    "TLS_CERT",
    "TLS_KEY",
    "TOKEN_FILE",
    "TRANSPORTS",
    "a_path",
    "words",
]

# Of those that listen until they are told to end.
HOST = typer.Option("127.0.0.1", help="Where to listen: an address of this machine.")
INSECURE = typer.Option(False, "--insecure", help="Without a token also where other machines reach it.")
TLS_CERT = typer.Option(None, metavar="FILE", help="Answer at https://, with these certificates (PEM).")
TLS_KEY = typer.Option(None, metavar="FILE", help="The key of --tls-cert (PEM).")

# Of seeds and forks.
TOKEN_FILE = typer.Option(
    None,
    metavar="FILE",
    help="A file with the token that seeds, forks and registry have. [TENSORLIFT_TOKEN]",
)
TRANSPORTS = typer.Option(
    None,
    metavar="NAME",
    help="Those that may be taken: shm, tcp, mooncake, nixl; shm and tcp without it. Repeatable, or "
    "separated by commas.",
)
DEVICES = typer.Option(
    None,
    metavar="NIC",
    help="The NICs of mooncake and nixl, such as mlx5_1, or all but some: ^mlx5_0; the nearest without it. "
    "Repeatable, or separated by commas.",
)
PROTOCOL = typer.Option("", metavar="NAME", help="What mooncake or nixl moves bytes by: rdma, tcp, efa.")
PLACE = typer.Option(None, help="Where this is, from the widest: zone-1/rack-12. [TENSORLIFT_PLACE]")
PROGRESS = typer.Option(
    None, "--progress/--no-progress", help="A bar on stderr; without either, on a terminal only."
)
AS_JSON = typer.Option(False, "--json", help="Print JSON.")


def a_path(text: str) -> Path:
    """Of an option or argument; "", as a variable gives it that is not set, would be the working folder."""
    if not text:
        raise typer.BadParameter("expected a path, and it is empty")
    return Path(text)


def words(given: Sequence[str] | None) -> list[str] | None:
    """Of an option that is repeatable, or has its words separated by commas; None where it is not given."""
    return [word.strip() for text in given for word in text.split(",")] if given else None
