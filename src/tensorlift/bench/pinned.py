"""The rate of a device's link."""

from __future__ import annotations

import statistics

__all__ = ["COPY_BYTES", "pinned_copy_rate"]

COPY_BYTES = 1 << 30


def pinned_copy_rate(device: str, repeats: int = 10) -> float:
    """Bytes per second of one pinned 1 GiB copy to the device: the median, timed by the device's events."""
    import torch

    host = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    seconds: list[float] = []
    with torch.cuda.device(device):
        for _ in range(repeats + 1):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            target.copy_(host, non_blocking=True)
            end.record()
            end.synchronize()
            seconds.append(start.elapsed_time(end) / 1000)
    del host, target
    torch.cuda.empty_cache()
    return COPY_BYTES / statistics.median(seconds[1:])
