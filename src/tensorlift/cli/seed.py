"""``tensorlift seed``: a checkpoint held in host memory, offered to other processes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tensorlift.cli.console import guarded, named, told
from tensorlift.cli.interrupts import at_once, until_terminated
from tensorlift.cli.options import (
    AS_JSON,
    DEVICES,
    HOST,
    INSECURE,
    PLACE,
    PROGRESS,
    PROTOCOL,
    TLS_CERT,
    TLS_KEY,
    TOKEN_FILE,
    TRANSPORTS,
    words,
)
from tensorlift.cli.serving import listening, rest, tls_context
from tensorlift.errors import OptionError
from tensorlift.forking.tokens import token_of
from tensorlift.format.quoting import plural
from tensorlift.options import parse_count
from tensorlift.stats import human_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tensorlift.forking.manifest import ModelKey
    from tensorlift.format.checkpoint import Checkpoint

__all__ = ["command"]

# A little more than a registry has for its answer.
_ANNOUNCING_SECONDS = 6.0

_LIMIT = typer.Option(
    None, metavar="RATE", help='The most that it sends: "2GB/s", or "25%" of its network; else all.'
)
_KEY = typer.Option(
    None, metavar="MODEL", help="What the model is called; without it, as its folder or its Hub id."
)
_REGISTRY = typer.Option(
    None, metavar="REGISTRY", help="Where it announces itself: http(s)://host:port, redis://host:port."
)
_REGISTRY_CA = typer.Option(
    None,
    metavar="FILE",
    help="Certificates (PEM) that a registry under TLS is trusted by; else the system's.",
)


@guarded
def command(
    paths: list[str] = typer.Argument(metavar="PATH", help="A file, files, a folder or a Hub id."),
    host: str = HOST,
    port: int = typer.Option(0, min=0, max=65535, help="Of the URL; 0: one that is free."),
    token_file: str | None = TOKEN_FILE,
    insecure: bool = INSECURE,
    tls_cert: str | None = TLS_CERT,
    tls_key: str | None = TLS_KEY,
    limit: str | None = _LIMIT,
    readers: int = typer.Option(8, min=1, help="The most forks at once."),
    transports: list[str] | None = TRANSPORTS,
    devices: list[str] | None = DEVICES,
    protocol: str = PROTOCOL,
    key: str | None = _KEY,
    registry: str | None = _REGISTRY,
    registry_ca: Path | None = _REGISTRY_CA,
    place: str | None = PLACE,
    progress: bool | None = PROGRESS,
    as_json: bool = AS_JSON,
) -> None:
    """Load a checkpoint into host memory and offer it to other processes, until Ctrl-C or SIGTERM."""
    token = token_of(token_file)
    tls = tls_context(tls_cert, tls_key)
    with at_once():
        from tensorlift.fleet.announcing import announce
        from tensorlift.fleet.contract import near_of
        from tensorlift.forking.keys import check_host, checked_key
        from tensorlift.forking.listener import Listener
        from tensorlift.forking.remote import url_of
        from tensorlift.forking.seed import Seed
        from tensorlift.forking.transports import SERVED
        from tensorlift.forking.ways import ways_of
        from tensorlift.sources.identifying import checkpoint_of

    # All that can be wrong, before a load that may take minutes.
    check_host(host, token, insecure)
    kinds = words(transports) or SERVED
    ways_of(kinds, words(devices), protocol, limit, host=host)
    parse_count(readers, "--readers")
    model = checked_key(_key(paths, key))
    near, known = near_of(place), _registry(registry, registry_ca, place, token)
    with until_terminated():
        with listening(host, port):
            Listener(host, port, id, 1).close()
        tensors, facts = _loaded(paths, progress)
        with listening(host, port):
            seed = Seed(
                tensors, model, host=host, port=port, token=token or None, insecure=insecure, limit=limit,
                readers=readers, tls=tls, transports=kinds, devices=words(devices), protocol=protocol,
                weights=checkpoint_of(paths[0]) if len(paths) == 1 else "",
            )  # fmt: skip
        with seed:
            facts |= {"key": model.model, "transports": seed.transports, "off": seed.off}
            facts |= {"url": seed.url, "source": url_of(seed.url, model.model)}
            if known is not None:
                made = announce(seed, known, near, is_told=True)
                why = "no transport is there" if made is None else made.problem(_ANNOUNCING_SECONDS)
                facts |= {"registry": known.url, "announced": not why, "why_not": why}
            _print(facts, as_json)
            rest()


def _registry(text: str | None, ca: Path | None, place: str | None, token: str) -> Any:
    """Where a seed is announced, if anywhere. Raises RequestError."""
    from tensorlift.fleet.registry_urls import announced_at

    if text is not None:
        return announced_at(text, token, ca)
    if (ca, place) != (None, None):
        raise OptionError("--registry-ca and --place are for --registry, and none is given")
    return None


def _loaded(paths: list[str], progress: bool | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """All tensors of a checkpoint in host memory, and what that took."""
    from tensorlift import sources
    from tensorlift.loading import load_into

    path = named(paths)
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

    if given == "":
        raise OptionError("--key is empty; leave it out, or name the model (is a variable not set?)")
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
        text += "".join(f"\nnot {kind}: {why}" for kind, why in facts["off"].items())
        if "registry" in facts:
            text += "\nannounced at " if facts["announced"] else "\nnot announced at "
            text += facts["registry"] + (f": {facts['why_not']}" if facts["why_not"] else "")
    print(text, flush=True)
