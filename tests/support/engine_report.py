"""What the benchmarks of real engines end with: a line a row, and a file of them."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tensorlift.bench import machine

Measure = Callable[[Path], list[dict[str, Any]]]


def parser(about: str | None) -> argparse.ArgumentParser:
    """Of a command that report() is the end of."""
    made = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("python", help="of the engine's environment")
    made.add_argument("--out", type=Path)
    return made


def report(asked: argparse.Namespace, script: str, distribution: str, measure: Measure) -> int:
    """Runs ``measure`` in a folder of its own, prints and writes its rows; 1 where one of them is not ``ok``.

    asked: what parser() gave; its flags that are set are noted. distribution: of the engine, whose version is
    noted.
    """
    begin, load_before = time.perf_counter(), os.getloadavg()
    with tempfile.TemporaryDirectory() as temporary:
        # The folder is this run's own; where it was says nothing.
        text = json.dumps(measure(Path(temporary)), indent=1).replace(temporary, "FOLDER")
    rows = json.loads(text)
    for row in rows:
        print(f"{'ok ' if row['ok'] else 'BAD'} {row['row']}  {row.get('error', '')[:100]}")
    code = f"from importlib.metadata import version; print(version({distribution!r}))"
    found = subprocess.run([asked.python, "-c", code], capture_output=True, text=True, check=True)
    flags = [f"--{name.replace('_', '-')}" for name, value in vars(asked).items() if value is True]
    record = {
        "machine": machine.facts(),
        "command": [script, *flags],
        "load_average": {"before": load_before, "after": os.getloadavg()},
        "engine": f"{distribution} {found.stdout.strip()}",
        "rows": rows,
        "seconds": time.perf_counter() - begin,
    }
    if asked.out:
        asked.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0 if all(row["ok"] for row in rows) else 1
