"""What a registry knows, as Prometheus reads it. The package prometheus-client is optional."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tensorlift.fleet.contract import View
from tensorlift.forking.manifest import SPLITS, ModelKey
from tensorlift.forking.metrics import CONTENT_TYPE, MISSING, exposed

if TYPE_CHECKING:
    from prometheus_client import Metric

__all__ = ["CONTENT_TYPE", "MISSING", "exposition"]

_TEXTS = ("model", "revision", "role", "dtype", "quantization", "engine")
_LABELS = (*_TEXTS, *SPLITS, "processed")


def _values(key: ModelKey) -> list[str]:
    ranks = ["/".join(map(str, getattr(key, name))) for name in SPLITS]
    return [*(getattr(key, name) for name in _TEXTS), *ranks, str(key.processed).lower()]


def exposition(view: View) -> bytes | None:
    """A View in Prometheus' text format; None where prometheus-client is not installed."""

    def gauge(name: str, text: str, found: Iterable[tuple[ModelKey, float]]) -> Metric:
        summed: dict[ModelKey, float] = {}
        for key, value in found:
            summed[key] = summed.get(key, 0) + value
        return _family("Gauge", name, text, _LABELS, [(_values(key), total) for key, total in summed.items()])

    def collect() -> Iterator[Metric]:
        seeds = view.seeds
        yield gauge("seeds", "Seeds that renew.", ((seed.key, 1) for seed in seeds))
        yield gauge("readers", "Forks that hold a lease of a seed.", ((s.key, s.load.readers) for s in seeds))
        yield gauge("rate_bytes", "Bytes a second that seeds send.", ((s.key, s.load.rate) for s in seeds))
        labels, forks = (*_LABELS, "state"), collections.Counter((f.key, f.state) for f in view.forks)
        under_way = [([*_values(key), state], number) for (key, state), number in forks.items()]
        yield _family("Gauge", "forks", "Forks under way.", labels, under_way)
        ended = [([*_values(key), how], number) for (key, how), number in view.ended.items()]
        yield _family("Counter", "ended_forks", "Forks that ended.", labels, ended)

    return exposed(collect)


def _family(
    kind: str, name: str, text: str, labels: Sequence[str], rows: Iterable[tuple[list[str], float]]
) -> Metric:
    from prometheus_client import core

    made: Any = getattr(core, f"{kind}MetricFamily")(f"tensorlift_registry_{name}", text, labels=labels)
    for values, number in rows:
        made.add_metric(values, number)
    metric: Metric = made
    return metric
