"""What the engine tells of its threads in a trace: the layout of an event and the stages."""

from __future__ import annotations

import numpy as np

__all__ = ["STAGE_NAMES", "TRACE_EVENT"]

STAGE_NAMES = ("READ", "WAIT_SLOT", "COPY", "DIGEST", "ASK_CACHE")
"""Names by tl_stage."""

TRACE_EVENT = np.dtype(
    [(name, "u8") for name in ("begin_ns", "end_ns", "offset", "nbytes")]
    + [("file", "i4"), ("thread", "u4"), ("stage", "u4"), ("path", "u4")]
)
"""tl_trace_event; times are CLOCK_MONOTONIC."""
