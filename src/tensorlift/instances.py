"""`seed` and `fork`: weights out of a running instance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tensorlift.forking.fork import Forked, fork_into
from tensorlift.forking.manifest import ModelKey
from tensorlift.forking.seed import Seed
from tensorlift.forking.sglang import fork_from_sglang, is_sglang
from tensorlift.progress import Report, SourceReport, reporter

__all__ = ["fork", "seed"]


def seed(
    model: object,
    *,
    key: ModelKey | str,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | None = None,
    limit: str | None = None,
    **options: Any,
) -> Seed:
    """Offers the weights of a model to forks, at its ``url``, until it is closed.

    model: a torch.nn.Module (parameters, buffers, derived tensors) or a dict of tensors. key: which weights
    they are; the name of a model stands for ModelKey(model=name), a whole one. token: what forks have to
    know; needed where host is not loopback. limit: such as "2GB/s", or "25%" of the network's rate. join: the
    URL of another seed, behind which this one stands as another rank or role. Other options are those of
    Seed. Raises RequestError, OptionError, SeedError where another seed cannot be joined, OSError where
    nobody can listen there.
    """
    return Seed(model, key, host=host, port=port, token=token, limit=limit, **options)


def fork(
    source: str | Sequence[str],
    *,
    into: object,
    token: str | None = None,
    key: ModelKey | str | None = None,
    progress: bool | Report | SourceReport | None = None,
    **options: Any,
) -> Forked:
    """Fills the tensors of a model from a running instance.

    source: the URL of a seed, or of several with the same weights, of which all are read at once; or
    sglang+http://host:port, a server of SGLang (docs/fork.md). into: a
    torch.nn.Module or a dict of tensors, with the names, dtypes, shapes and strides of the seed's. key: which
    weights of the instance are wanted (rank, role); without it those of the seed itself. progress: a bar on
    stderr, or a function that is called with (bytes done, bytes in all), and with by_source, bytes by URL and
    "files", if it has a parameter of that name. Other options are those of forking.fork.fork_into. Raises
    ForkError, SeedError, ManifestError, RequestError, OptionError; after an error the contents of the tensors
    are undefined.
    """
    with reporter(progress) as report:
        if isinstance(source, str) and is_sglang(source):
            return fork_from_sglang(into, source, token=token, key=key, progress=report, **options)
        return fork_into(into, source, token=token, key=key, progress=report, **options)
