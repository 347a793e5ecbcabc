"""Whether ranks exchange what all of them want: what exchange="auto" does."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from tensorlift.distributed.agreement import Request
from tensorlift.engine import abi
from tensorlift.format.checkpoint import Checkpoint
from tensorlift.plan.prediction import Costs, Rates, Work, predict

__all__ = ["cached", "choose", "ranks_per_host"]

# gloo, processes of one host, 2 cores: 0.12 to 0.21 GB/s received by a rank.
_GLOO = 0.2e9


def cached(checkpoint: Checkpoint) -> float:
    """What share of a checkpoint's bytes is in this host's page cache; -1 where that is not known."""
    shares = [(shard.nbytes, abi.library().cached_share(shard.absolute)) for shard in checkpoint.shards]
    known = [(nbytes, share) for nbytes, share in shares if share >= 0]
    total = sum(nbytes for nbytes, _ in known)
    return sum(nbytes * share for nbytes, share in known) / total if total else -1.0


def ranks_per_host(given: Sequence[Request]) -> int:
    """Of the host that has most of them; a rank that does not know its host counts as alone on it."""
    hosts = Counter(request.host for request in given if request.host)
    return max(hosts.values(), default=1)


def choose(given: Sequence[Request], nbytes: int) -> tuple[str, str, dict[str, float]]:
    """("gather" or "none", why, the figures that it rests on) for ``nbytes`` bytes that all want."""
    first = given[0]
    if first.verify:
        return "none", "digests are of tensors that are read whole", {}
    # Of the ranks that know it the one with least; where none does, as if all came from storage.
    known = [request.cached for request in given if request.cached >= 0]
    share = min(known, default=0.0)
    cuda = first.device == "cuda"
    rates = Rates() if cuda else Rates(link=math.inf, peer=_GLOO, network=_GLOO)
    costs = Costs() if cuda and first.temporary else Costs(make_communicator=0, destroy_communicator=0)
    per_host, arena = ranks_per_host(given), min(request.arena_size for request in given)
    work = Work(nbytes, len(given), per_host, cached=share, arena=arena)
    ways = predict(work, rates, costs)
    gather, alone = ways["gather"], ways["all"]
    taken = {name: rate for name, rate in rates.taken().items() if math.isfinite(rate)}
    figures = {
        "gather_seconds": gather.seconds,
        "none_seconds": alone.seconds,
        "bytes": float(nbytes),
        "cached": share,
        "cached_known": float(bool(known)),
        "ranks_per_host": float(per_host),
        **{f"{name}_rate": rate for name, rate in taken.items()},
    }
    exchange = "gather" if gather.seconds < alone.seconds else "none"
    why = (
        f"predicted: {gather.seconds:.2f} s with it ({gather.limit} is the limit), "
        f"{alone.seconds:.2f} s where each rank reads all ({alone.limit})"
    )
    return exchange, why, figures
