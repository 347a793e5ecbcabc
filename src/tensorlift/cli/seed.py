"""``tensorlift seed``: a checkpoint held in host memory, offered to other processes."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import typer

from tensorlift.cli.console import guarded, told
from tensorlift.cli.interrupts import at_once, until_terminated
from tensorlift.cli.serving import listening, rest, tls_context
from tensorlift.forking.links import link_rate
from tensorlift.forking.throttle import parse_limit
from tensorlift.forking.tokens import token_of
from tensorlift.format.quoting import plural
from tensorlift.stats import human_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tensorlift.forking.manifest import ModelKey
    from tensorlift.format.checkpoint import Checkpoint

__all__ = ["command"]


@guarded
def command(
    paths: list[str] = typer.Argument(metavar="PATH", help="A file, files, a folder or a Hub id."),
    host: str = typer.Option("127.0.0.1", help="Where to listen: an address of this machine."),
    port: int = typer.Option(0, min=0, max=65535, help="Of the URL; 0: one that is free."),
    token_file: str | None = typer.Option(
        None, metavar="FILE", help="A file with the token that forks have to know. [TENSORLIFT_TOKEN]"
    ),
    insecure: bool = typer.Option(
        False, "--insecure", help="Without a token also where other machines reach it."
    ),
    tls_cert: str | None = typer.Option(
        None, metavar="FILE", help="Answer at https://, with these certificates (PEM)."
    ),
    tls_key: str | None = typer.Option(None, metavar="FILE", help="The key of --tls-cert (PEM)."),
    limit: str | None = typer.Option(
        None, metavar="RATE", help='The most that it sends: "2GB/s", or "25%" of the network; else all.'
    ),
    readers: int = typer.Option(8, min=1, help="The most forks at once."),
    key: str | None = typer.Option(
        None, metavar="MODEL", help="What the model is called; without it, as its folder or its Hub id."
    ),
    registry: str | None = typer.Option(
        None, metavar="REGISTRY", help="Where it announces itself: http(s)://host:port, redis://host:port."
    ),
    place: str | None = typer.Option(
        None, help="Where this is, from the widest: zone-1/rack-12. [TENSORLIFT_PLACE]"
    ),
    progress: bool | None = typer.Option(
        None, "--progress/--no-progress", help="A bar on stderr; without either, on a terminal only."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Load a checkpoint into host memory and offer it to other processes, until Ctrl-C or SIGTERM."""
    token = token_of(token_file)
    parse_limit(limit, "--limit", lambda: link_rate(host))
    tls = tls_context(tls_cert, tls_key)
    with at_once():
        from tensorlift.forking.keys import check_host
        from tensorlift.forking.listener import Listener
        from tensorlift.forking.remote import url_of
        from tensorlift.instances import seed as begun
        from tensorlift.integrations.checkpoints import checkpoint_of

    check_host(host, token, insecure)
    with until_terminated():
        with listening(host, port):
            # Before a load that may take minutes.
            Listener(host, port, id, 1).close()
        tensors, facts = _loaded(paths, progress)
        model = _key(paths, key)
        with listening(host, port):
            seed = begun(
                tensors, key=model, host=host, port=port, token=token or None, insecure=insecure, limit=limit,
                readers=readers, tls=tls, registry=registry, place=place,
                weights=checkpoint_of(paths[0]) if len(paths) == 1 else "",
            )  # fmt: skip
        with seed:
            urls = {"url": seed.url, "source": url_of(seed.url, model.model)}
            _print(facts | {"key": model.model} | urls, as_json)
            rest()


def _loaded(paths: list[str], progress: bool | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """All tensors of a checkpoint in host memory, and what that took."""
    from tensorlift import sources
    from tensorlift.loading import load_into

    path = paths[0] if len(paths) == 1 else paths
    checkpoint = sources.read_headers(sources.find(path))
    tensors = _room_for(checkpoint)
    with told(progress) as report:
        stats = load_into(tensors, path, progress=report).stats
    seconds = stats.seconds["total"]
    return tensors, {"paths": paths, "tensors": len(tensors), "bytes": stats.bytes, "seconds": seconds}


def _room_for(checkpoint: Checkpoint) -> dict[str, Any]:
    """Host memory for each of its tensors, which forks of this host are given as a file."""
    import numpy as np
    import torch

    from tensorlift.forking.manifest import Layout
    from tensorlift.forking.shared_memory import shared_tensors
    from tensorlift.format import dtypes
    from tensorlift.tensors.memory import check_host
    from tensorlift.tensors.views import check_expressible, torch_shape

    check_expressible(checkpoint, np.arange(len(checkpoint)))
    check_host(int(checkpoint.sizes.sum()))
    layouts = []
    for name, kind, shape in zip(
        checkpoint.names, checkpoint.dtypes.tolist(), checkpoint.shapes, strict=True
    ):
        dense = torch.empty(torch_shape(dtypes.ALL[kind], shape), device="meta")
        layouts.append(Layout(name, str(dtypes.ALL[kind].torch_name), tuple(dense.shape), dense.stride()))
    return shared_tensors(layouts)


def _key(paths: Sequence[str], given: str | None) -> ModelKey:
    from tensorlift.forking.manifest import ModelKey
    from tensorlift.sources import hub

    first = paths[0]
    asked = None if os.path.exists(first) else hub.parse_id(first)
    if asked is not None:
        name, revision = asked
        return ModelKey(model=given or name, revision=revision or "", processed=False)
    folder = os.path.realpath(first if os.path.isdir(first) else os.path.dirname(first))
    return ModelKey(model=given or os.path.basename(folder), processed=False)


def _print(facts: dict[str, Any], as_json: bool) -> None:
    if as_json:
        text = json.dumps(facts, indent=2)
    else:
        text = (
            f"{plural(facts['tensors'], 'tensor')}, {human_bytes(facts['bytes'])} of {facts['key']} in host "
            f"memory after {facts['seconds']:.2f} s; Ctrl-C ends it\n"
            f"{facts['url']}\n{facts['source']}"
        )
    print(text, flush=True)
