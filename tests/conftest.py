"""What all tests may have; and those that failed end their process whatever they left: Python waits for its
threads without an end.
"""

import os
import sys
import threading
from collections.abc import Iterator

import pytest

from support import leaks

_status = 0


@pytest.fixture
def clean() -> Iterator[None]:
    """For tests that leave nothing."""
    with leaks.nothing_left():
        yield


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
