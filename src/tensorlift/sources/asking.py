"""What a caller asks for, of a checkpoint whose headers are read: which tensors, what part, which digests."""

from __future__ import annotations

from collections.abc import Mapping

from tensorlift.format.checkpoint import Checkpoint, Names
from tensorlift.options import LoadOptions
from tensorlift.plan.parts import Asked, Slices, take_parts
from tensorlift.sources.sidecars import expected_digests

__all__ = ["asked_of"]


def asked_of(checkpoint: Checkpoint, names: Names, slices: Slices, options: LoadOptions) -> Asked:
    """The rows that ``names`` selects, those that ``slices`` cuts as parts, and what ``options.verify`` asks.

    Reads no tensor. Raises what Checkpoint.select, expected_digests and take_parts do.
    """
    rows = checkpoint.select(names)
    # Digests first: a file of them has the shapes of whole tensors.
    expected = expected_digests(checkpoint, rows, options, whole=names is None)
    asked = Asked(checkpoint, rows, expected)
    return take_parts(asked, slices, given=isinstance(options.verify, Mapping))
