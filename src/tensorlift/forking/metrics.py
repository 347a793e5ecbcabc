"""What a seed counts, as Prometheus reads it. The package prometheus-client is optional."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from tensorlift.forking.manifest import SPLITS, ModelKey

if TYPE_CHECKING:
    from prometheus_client import Metric

__all__ = ["CONTENT_TYPE", "MISSING", "exposed", "exposition"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MISSING = "the package prometheus-client is not there: pip install 'tensorlift[metrics]'"

_COUNTERS = {
    "sent_bytes": "Bytes of weights that were sent.",
    "sent_chunks": "Chunks of weights that were sent.",
    "refused_chunks": "Chunks that were not sent: the weights are of another epoch, or are being changed.",
    "stale_chunks": "Chunks that were sent while the weights changed, so that readers throw them away.",
    "bad_requests": "Requests for chunks that are none.",
    "granted_leases": "Leases that were given.",
    "refused_leases": "Leases that were not given or not prolonged.",
}
_GAUGES = {
    "readers": "Forks that hold a lease.",
    "connections": "Connections that chunks go over.",
    "epoch": "How often the weights have changed.",
    "transports_off": "Transports that were asked for and are not there.",
    "registered_bytes": "Memory that an engine of one-sided reads knows.",
    "planning_us": "Microseconds that it took to see which memory is registered as one.",
    "registering_us": "Microseconds that registering it took.",
}


def exposition(key: ModelKey, instance: str, stats: Mapping[str, int]) -> bytes | None:
    """What Seed.stats() says, in Prometheus' text format; None where prometheus-client is not installed."""
    labels = {
        "model": key.model,
        "revision": key.revision,
        "role": key.role,
        "engine": key.engine,
        "instance_id": instance,
    }
    labels |= {name: "/".join(map(str, getattr(key, name))) for name in SPLITS}

    def collect() -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

        yield InfoMetricFamily("tensorlift_seed", "Which weights these are.", value=labels)
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"tensorlift_seed_{name}", text, value=stats[name])
        for name, text in _GAUGES.items():
            yield GaugeMetricFamily(f"tensorlift_seed_{name}", text, value=stats[name])

    return exposed(collect)


def exposed(collect: Callable[[], Iterator[Metric]]) -> bytes | None:
    """Families of metrics in Prometheus' text format; None where prometheus-client is not installed."""
    try:
        from prometheus_client import CollectorRegistry, generate_latest
        from prometheus_client.registry import Collector
    except ImportError:
        return None

    class Collected(Collector):
        def collect(self) -> Iterator[Metric]:
            return collect()

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collected())
    return generate_latest(registry)
