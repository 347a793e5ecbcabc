"""Tests that failed end their process whatever they left: Python waits for its threads without an end."""

import os
import sys
import threading

import pytest

_status = 0


def pytest_sessionfinish(exitstatus: int) -> None:
    global _status
    _status = int(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    main = threading.main_thread()
    left = [one.name for one in threading.enumerate() if not one.daemon and one is not main]
    if _status and left:
        print(f"Threads that tests have left: {', '.join(left)}", flush=True)
        sys.stderr.flush()
        os._exit(_status)
