"""Weights from one rank of a crew to another while the first decodes: by a fork, and by broadcasts."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

from tensorlift.bench.crew_member import Member
from tensorlift.bench.decoding import Decoder, hash_of, llama, room_for
from tensorlift.bench.member_loads import settle
from tensorlift.forking.fork import fork_into
from tensorlift.forking.manifest import ModelKey
from tensorlift.forking.seed import Seed

__all__ = ["broadcasts", "decode", "decode_and_broadcast", "forget", "forks", "hashes", "offer", "take"]

_KEY = ModelKey(model="benchmark")
# Of a fork, for a seed to answer.
_PATIENCE = 60.0


def offer(member: Member, layers: int, hidden: int | None, tokens: int, limit: str) -> dict[str, Any]:
    """The first rank: a model that decodes so many tokens a round, and its seeds, one under a limit."""
    from tensorlift.forking.offering import named_tensors

    model = llama(layers, hidden, member.device)
    decoder = Decoder(model, tokens, member.device)
    seeds = Seed(model, _KEY), Seed(model, _KEY, limit=limit)
    named = {one.name: one.tensor for one in named_tensors(model)}
    member.kept |= {"model": model, "decoder": decoder, "seeds": seeds, "weights": named}
    member.kept["tokens"] = decoder.run()[0]
    nbytes = sum(tensor.nbytes for tensor in named.values())
    return {"url": seeds[0].url, "limited": seeds[1].url, "bytes": nbytes}


def take(member: Member, url: str, options: dict[str, Any]) -> str:
    """The other rank: memory for what a seed has, and the first fork into it; gives its transport."""
    weights = member.kept["weights"] = room_for(url, member.device)
    return str(fork_into(weights, url, patience=_PATIENCE, **options).transports[url])


def forget(member: Member) -> None:
    """Ends the seeds, and gives everything back."""
    for seed in member.kept.get("seeds", ()):
        seed.close()
    member.kept.clear()
    settle(member)


def hashes(member: Member) -> dict[str, int]:
    """Of all weights of a rank, by name."""
    return {name: hash_of(tensor) for name, tensor in member.kept["weights"].items()}


def decode(member: Member) -> dict[str, Any]:
    """One round: the seconds of each token, and from which on they were others than in the first round."""
    tokens, seconds = member.kept["decoder"].run()
    pairs = zip(tokens, member.kept["tokens"], strict=True)
    other = next((at for at, (now, first) in enumerate(pairs) if now != first), None)
    return {"token_seconds": seconds, "other_from": other}


def forks(member: Member, url: str, options: dict[str, Any]) -> list[float]:
    """Forks, one behind the other, until the parent says stop: the seconds of each."""
    found: list[float] = []
    while not found or not member.stop.is_set():
        begin = time.perf_counter()
        fork_into(member.kept["weights"], url, patience=_PATIENCE, **options)
        found.append(time.perf_counter() - begin)
    return found


def decode_and_broadcast(member: Member) -> dict[str, Any]:
    """A round of the first rank, beside which a thread of it broadcasts all weights again and again."""
    over = threading.Event()
    failed: list[BaseException] = []

    def run() -> None:
        try:
            _broadcast(member, lambda: not over.is_set())
        except BaseException as error:  # noqa: BLE001 - raised again below
            failed.append(error)

    thread = threading.Thread(target=run, name="broadcast", daemon=True)
    thread.start()
    try:
        found = decode(member)
    finally:
        over.set()
        # The parent's patience ends first.
        thread.join(3600)
    if failed:
        raise failed[0]
    return found


def broadcasts(member: Member) -> list[float]:
    """The other rank's part of that: the seconds of each broadcast of all weights."""
    return _broadcast(member, lambda: True)


def _broadcast(member: Member, more: Callable[[], bool]) -> list[float]:
    """Broadcasts of the first rank until it says that there are no ``more``, on a stream of their own."""
    import torch
    import torch.distributed as dist

    found: list[float] = []
    weights = [tensor for _, tensor in sorted(member.kept["weights"].items())]
    side: Any = contextlib.nullcontext()
    if member.is_cuda:
        torch.cuda.set_device(torch.device(member.device))  # of this thread
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side = torch.cuda.stream(stream)
    with side, torch.inference_mode():
        while True:
            going_on = torch.tensor([int(more() or not found)], device=member.device)
            dist.broadcast(going_on, 0)
            if not int(going_on.item()):
                return found
            begin = time.perf_counter()
            for work in [dist.broadcast(tensor, 0, async_op=True) for tensor in weights]:
                work.wait()
            if member.is_cuda:
                stream.synchronize()
            found.append(time.perf_counter() - begin)
