"""`seed` and `fork`: weights out of a running instance."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tensorlift.errors import OptionError
from tensorlift.fleet.announcing import announce
from tensorlift.fleet.contract import MOST_CANDIDATES, WAIT_SECONDS, near_of
from tensorlift.fleet.finding_seeds import SeedFinder
from tensorlift.fleet.registry_urls import FORMS, announced_at, registry_of
from tensorlift.forking.encryption import Ca
from tensorlift.forking.fork import Forked, fork_into
from tensorlift.forking.keys import checked_key, checked_token
from tensorlift.forking.manifest import ModelKey
from tensorlift.forking.seed import Seed
from tensorlift.forking.sglang_protocol import fork_from_sglang, is_sglang
from tensorlift.forking.tokens import token_of
from tensorlift.format.quoting import shown
from tensorlift.options import parse_count, parse_progress, parse_seconds
from tensorlift.progress import Report, SourceReport, by_source, reporter

__all__ = ["finder_of", "fork", "seed"]

# What has a place of its own, and what the package alone gives.
_PLACED = ("model", "source", "into", "url", "urls", "options")
_OURS = ("part_of", "pacer", "unwanted")


def seed(
    model: object,
    *,
    key: ModelKey | str,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | None = None,
    limit: str | None = None,
    registry: str | Sequence[str] | None = None,
    registry_ca: Any = None,
    place: str | None = None,
    **options: Any,
) -> Seed:
    """Offers the weights of a model to forks, at its ``url``, until it is closed.

    model: a torch.nn.Module (parameters, buffers, derived tensors) or a dict of tensors. key: which weights
    they are; the name of a model stands for ModelKey(model=name), a whole one. token: what forks have to
    know, else what TENSORLIFT_TOKEN says; needed where host is not loopback. limit: such as "2GB/s", or "25%"
    of the network's rate. join: the URL of another seed, behind which this one stands as another rank or
    role.

    registry: where it announces itself (docs/fleet.md), by the same token; one that is down stops no seed.
    registry_ca: whom a registry at https:// is trusted by. place: where this is, "zone-1/rack-12", else what
    TENSORLIFT_PLACE says. Other options are those of Seed. Raises RequestError, OptionError, SeedError where
    another seed cannot be joined, OSError where nobody can listen there.
    """
    _check_names("seed", options, seed, Seed)
    if registry is None and not (place is None and registry_ca is None):
        raise OptionError("place and registry_ca are for a registry, and none was given")
    near, token = near_of(place), _token(token)
    known = None if registry is None else announced_at(registry, checked_token(token), registry_ca)
    made = Seed(model, key, host=host, port=port, token=token, limit=limit, **options)
    if known is not None:
        announce(made, known, near)
    return made


def fork(
    source: str | Sequence[str] | None = None,
    *,
    into: object,
    token: str | None = None,
    key: ModelKey | str | None = None,
    progress: bool | Report | SourceReport | None = None,
    registry: str | Sequence[str] | None = None,
    place: str | None = None,
    seeds: int = 1,
    wait: float = WAIT_SECONDS,
    **options: Any,
) -> Forked:
    """Fills the tensors of a model from a running instance.

    source: the URL of a seed, or of several with the same weights, of which all are read at once; or
    sglang+http://host:port, SGLang's (docs/transports.md). into: a torch.nn.Module or a dict of tensors, with
    the names, dtypes, shapes and strides of the seed's. token: the seed's, else what TENSORLIFT_TOKEN says.
    key: which weights of the instance are wanted (rank, role); without it those of the seed itself.
    progress: a bar on stderr, or a function that is called with (bytes done, bytes in all), and with
    by_source, bytes by URL and "files", if it has a parameter of that name.

    registry: instead of a source, who knows seeds of the key (docs/fleet.md). place: see seed(). seeds: how
    many of them are read at once. wait: seconds that one with room is waited for. Other options are those of
    forking.fork.fork_into. Raises ForkError, SeedError, ManifestError, RequestError, OptionError; after an
    error the contents of the tensors are undefined.
    """
    fill = fork_from_sglang if isinstance(source, str) and is_sglang(source) else fork_into
    _check_names("fork", options, fork, fill)
    if callable(source):
        raise OptionError(f"a fork wants the URL of a seed, or several in a list, not {shown(source)}")
    progress = None if progress is None else parse_progress(progress, "progress")
    token, keys = _token(token), None if key is None else [checked_key(key)]
    secret, ca = checked_token(token), options.get("ca")
    asked = finder_of(source, registry, keys, secret, ca, place, seeds, wait)
    with reporter(progress) as report:
        if fill is fork_from_sglang:
            return fork_from_sglang(into, str(source), token=token, key=key, progress=report, **options)
        if asked is None:
            assert source is not None
            return fork_into(into, source, token=token, key=key, progress=report, **options)
        with asked:
            told = asked.progress(by_source(report))
            return fork_into(into, asked.seeds, token=token, key=asked.key, progress=told, **options)


def finder_of(
    source: str | Sequence[str] | None,
    registry: str | Sequence[str] | None,
    keys: Sequence[ModelKey] | None,
    token: str,
    ca: Ca | None,
    place: str | None,
    seeds: int,
    wait: float,
) -> SeedFinder | None:
    """Who finds the seeds of a fork; None where the source names them. keys: that will do, see SeedFinder;
    token: "" for none; all else as of fork(). Asks nobody yet. Raises OptionError, RequestError.
    """
    if (source is None) == (registry is None):
        raise OptionError(f"a fork wants either the URL of a seed or a registry: {FORMS}")
    count, wait = parse_count(seeds, "seeds", MOST_CANDIDATES), parse_seconds(wait, "wait")
    if registry is None:
        if place is not None or (count, wait) != (1, WAIT_SECONDS):
            raise OptionError("place, seeds and wait are for a registry, and none was given")
        return None
    if keys is None:
        raise OptionError(
            "a registry is asked by a key: give key (--key), the name of a model or a whole one"
        )
    return SeedFinder(registry_of(registry, token, ca), keys, near_of(place), count, wait)


def _token(given: str | None) -> str | None:
    return token_of() or None if given is None else given


def _check_names(
    what: str, given: Mapping[str, object], face: Callable[..., object], inside: Callable[..., object]
) -> None:
    """``face``: what was called; ``inside``: what takes the options that it was given beyond its own."""
    taken = [name for name in inspect.signature(inside).parameters if name not in _PLACED]
    for name in given:
        if name not in taken:
            own = [one for one in inspect.signature(face).parameters if one not in _PLACED]
            listed = ", ".join(one for one in dict.fromkeys([*own, *taken]) if one not in _OURS)
            raise OptionError(f"a {what} here takes no {name!r}; expected one of {listed}")
