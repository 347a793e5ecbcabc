"""Debian's Chromium without a window, told over its pipe what to do (the DevTools protocol)."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.waiting import SECONDS, until


class Page:
    """A page that is open."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process, self._last, self._session = process, 0, ""
        made = self.tell("Target.createTarget", url="about:blank")
        self._session = self.tell("Target.attachToTarget", targetId=made["targetId"], flatten=True)[
            "sessionId"
        ]
        self.errors: list[str] = []
        self.tell("Runtime.enable")
        self.tell("Log.enable")

    def tell(self, method: str, **parameters: Any) -> Any:
        """A command, and what it returns."""
        self._last += 1
        said: dict[str, Any] = {"id": self._last, "method": method, "params": parameters}
        if self._session:
            said["sessionId"] = self._session
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(said).encode() + b"\0")
        self._process.stdin.flush()
        while True:
            text = b""
            while not text.endswith(b"\0"):
                text += (part := self._process.stdout.read(1))
                assert part, "the browser ended"
            heard = json.loads(text[:-1])
            if heard.get("id") == self._last:
                assert "error" not in heard, heard
                return heard["result"]
            if heard.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.errors.append(json.dumps(heard["params"]))

    def js(self, expression: str) -> Any:
        """What it is in the page."""
        found = self.tell("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def open(self, url: str) -> None:
        """Goes there, and waits for it."""
        self.tell("Page.navigate", url=url)
        until(
            lambda: self.js("document.readyState") == "complete" and self.js("location.href") != "about:blank"
        )

    @property
    def text(self) -> str:
        """As it is read."""
        return str(self.js("document.body.innerText"))


@contextlib.contextmanager
def page(folder: Path) -> Iterator[Page]:
    """In a browser with a profile below ``folder``; skips where there is none."""
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("chromium is not installed (Debian: chromium)")
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--remote-debugging-pipe",
    ]
    options += [f"--user-data-dir={folder / 'profile'}", "--no-first-run"]
    # It reads descriptor 3 and writes to 4.
    command = ["sh", "-c", 'exec "$@" 3<&0 4>&1 >/dev/null', "sh", program, *options]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        watch = threading.Timer(2 * SECONDS, process.kill)
        watch.start()
        try:
            yield Page(process)
        finally:
            watch.cancel()
            with contextlib.suppress(OSError):
                assert process.stdin is not None
                process.stdin.close()  # it ends then, and its children with it
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
