"""Which of some seeds a fork reads from: those of the weights that it wants, and all of the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from tensorlift.errors import ForkError, SeedError
from tensorlift.forking.client import SeedClient
from tensorlift.forking.keys import told_key
from tensorlift.forking.manifest import Layout, Manifest, ModelKey, differences
from tensorlift.forking.offering import Offering
from tensorlift.forking.reader import Source
from tensorlift.format.quoting import quote, some_of

__all__ = ["Wanted", "alike", "check_key", "sources_of"]

_SHOWN = 8
_UNLIKE = "it has other weights than the first seed, or has them in other regions"
_UNNAMED = ', or neither says a version: give seeds of the same weights the same weights=, such as "v1"'


class Wanted(NamedTuple):
    """What a seed has to have, and how it has to be reached."""

    key: ModelKey | None
    ours: Offering
    kinds: Sequence[str]
    part_of: Mapping[str, Manifest] | None
    digests: bool
    unwanted: Callable[[str], str]


def sources_of(clients: Sequence[SeedClient], wanted: Wanted, left: dict[str, str]) -> list[Source]:
    """The seeds that offer what is wanted, in the same regions; raises why there is none."""
    layouts = [Layout(one.name, one.dtype, one.shape, one.stride) for one in wanted.ours.tensors]

    def look(client: SeedClient) -> Manifest:
        manifest = client.manifest() if wanted.part_of is None else _same(client, wanted.part_of[client.url])
        _check(client, manifest, wanted, layouts)
        return manifest

    return alike(clients, wanted.key, look, left)


def alike(
    clients: Sequence[SeedClient],
    key: ModelKey | None,
    look: Callable[[SeedClient], Manifest],
    left: dict[str, str],
) -> list[Source]:
    """The seeds of which ``look`` finds the same as of the first one; the others are ``left``.

    key: of the seeds behind these. Raises why there is none.
    """
    found: list[Source] = []
    problems: list[ForkError] = []
    for client in clients:
        try:
            if key is not None:
                client = client.peer(key)
            source = Source(client, look(client))
        except ForkError as error:
            problems.append(error)
            left[client.url] = str(error).removeprefix(client.url).lstrip(": ")
            continue
        if found and not _alike(found[0].manifest, source.manifest):
            left[source.name] = _UNLIKE + (_UNNAMED if not source.manifest.weights else "")
        else:
            left.pop(source.name, None)
            found.append(source)
    if not found:
        raise _none_of(problems)
    return found


def _none_of(problems: Sequence[ForkError]) -> ForkError:
    """What to raise where no seed can be read, for these reasons."""
    if len(problems) == 1:
        return problems[0]
    kind = SeedError if all(isinstance(problem, SeedError) for problem in problems) else ForkError
    return kind(f"none of {len(problems)} seeds can be read: " + "; ".join(map(str, problems)))


def _same(client: SeedClient, seen: Manifest) -> Manifest:
    """What was seen, if it is so still."""
    now = client.state()
    if (now.instance, now.epoch) != (seen.instance, seen.epoch):
        raise ForkError(
            f"{client.url}: the weights have changed, or it is another instance, since they were looked at; "
            "begin again"
        )
    return seen


def _check(client: SeedClient, manifest: Manifest, wanted: Wanted, layouts: Sequence[Layout]) -> None:
    check_key(client, manifest, wanted.key)
    if why := wanted.unwanted(manifest.weights):
        raise ForkError(f"{client.url}: {why}")
    if unlike := differences(manifest, layouts, part=wanted.part_of is not None):
        raise ForkError(
            f"{client.url} has other weights than the model here: "
            + "; ".join(unlike)
            + "; make it as the seed's was made: the same configuration and dtype, in the same state "
            "(before or after processing), and the module itself, not its state_dict()"
        )
    if not any(offer.kind in wanted.kinds for offer in manifest.transports):
        shown = [(quote(kind)[1:-1], quote(why, 300)[1:-1]) for kind, why in manifest.off.items()]
        off = [f"; {kind} is off there: {why}" for kind, why in shown]
        raise ForkError(
            f"{client.url} offers no transport that this fork takes: {', '.join(wanted.kinds)}"
            + some_of(off, _SHOWN, between="")
        )


def check_key(client: SeedClient, manifest: Manifest, key: ModelKey | None) -> None:
    """Raises ForkError for a seed of other weights than those of a key."""
    if key is not None and manifest.key != key:
        raise ForkError(
            f"{client.url} has {told_key(manifest.key)}, wanted is {told_key(key)}; name a seed of the same "
            "model and ranks"
        )


def _alike(one: Manifest, other: Manifest) -> bool:
    if not one.weights and one.instance != other.instance:
        return False  # of weights without a version nobody says that they are the same
    return (one.key, one.weights, one.regions, one.tensors) == (
        other.key,
        other.weights,
        other.regions,
        other.tensors,
    )
