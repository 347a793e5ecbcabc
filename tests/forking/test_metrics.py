"""What Prometheus reads of a seed."""

from __future__ import annotations

import http.client
import sys
from typing import Any

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from tensorlift.forking import metrics
from tensorlift.forking.fork import fork_into
from tensorlift.forking.manifest import ModelKey
from tensorlift.forking.seed import Seed

KEY = ModelKey(model='org/"model"', role="draft", tp=(1, 2))


def scraped(seed: Seed, token: str | None = None) -> tuple[int, str | None, str]:
    connection = http.client.HTTPConnection(*seed.url.removeprefix("http://").split(":"), timeout=60)
    connection.request(
        "GET", "/metrics", headers={} if token is None else {"Authorization": f"Bearer {token}"}
    )
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, answer.headers["Content-Type"], text


def test_what_a_seed_counts() -> None:
    tensors = {"a": torch.ones(1000)}
    with Seed(tensors, KEY, token="hush") as seed:
        assert scraped(seed)[0] == 401
        fork_into({"a": torch.zeros(1000)}, seed.url, token="hush")
        with seed.updating(timeout=0):
            pass
        status, kind, text = scraped(seed, "hush")
        stats = seed.stats()
    assert (status, kind) == (200, metrics.CONTENT_TYPE)
    assert "hush" not in text
    samples: dict[str, Any] = {
        sample.name: sample for family in text_string_to_metric_families(text) for sample in family.samples
    }
    assert samples["tensorlift_seed_sent_bytes_total"].value == 4000
    assert samples["tensorlift_seed_epoch"].value == 1
    labels = samples["tensorlift_seed_info"].labels
    assert (labels["model"], labels["role"], labels["tp"]) == (KEY.model, "draft", "1/2")
    names = {name.removeprefix("tensorlift_seed_").removesuffix("_total") for name in samples}
    assert names == {*stats, "info"}


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with Seed({"a": torch.ones(1)}, KEY) as seed:
        status, _, text = scraped(seed)
    assert (status, text) == (404, metrics.MISSING)
