"""What the engine tells of its threads in a trace: the layout of an event, the stages and the paths."""

from __future__ import annotations

import numpy as np

__all__ = ["PATH_NAMES", "STAGE_NAMES", "TRACE_EVENT"]

PATH_NAMES = (
    "PREAD_BUFFERED",
    "PREAD_DIRECT",
    "URING_DIRECT",
    "MMAP",
    "URING_BUFFERED",
    "AIO_DIRECT",
    "AIO_BUFFERED",
    "CUFILE",
)
"""Names by tl_path; in the statistics too."""

STAGE_NAMES = ("READ", "WAIT_SLOT", "COPY", "DIGEST", "ASK_CACHE")
"""Names by tl_stage."""

TRACE_EVENT = np.dtype(
    [(name, "u8") for name in ("begin_ns", "end_ns", "offset", "nbytes")]
    + [("file", "i4"), ("thread", "u4"), ("stage", "u4"), ("path", "u4")]
)
"""tl_trace_event; times are CLOCK_MONOTONIC."""
