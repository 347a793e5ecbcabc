"""Fuzzes what reads hostile input: headers, manifests and what else other processes say, plans, both ends of
a socket. See docs/development.md.

    tools/fuzzing.py [--seconds 60] [--seed 1] [--keep] [TARGET ...]

Two targets at a time, each from the corpus that is kept in tests/fuzz/corpus. What is new goes to
build/fuzz/corpus, an input that breaks something to build/fuzz/found, and its path is printed.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
FUZZ, BUILD = ROOT / "tests" / "fuzz", ROOT / "build" / "fuzz"
CORPUS = FUZZ / "corpus"
# Largest input of each, in bytes. A native program and one for Python in turn: two at a time, while the first
# of Python runs the native ones are built.
TARGETS = {"headers": 4096, "plan": 600, "manifests": 4096, "wire": 400}
NATIVE = ("plan", "wire")
AT_A_TIME = 2
# What takes longer, or more memory, is one more finding.
_LONGEST_SECONDS, _MOST_MEGABYTES = 60, 2048
_building = threading.Lock()


class MissingError(Exception):
    """What it takes is not installed here."""


class Outcome(NamedTuple):
    """What came of one target."""

    name: str
    is_clean: bool
    """Nothing was found."""
    output: str
    found: tuple[Path, ...]
    """Inputs that break something."""


def _tool(name: str) -> str:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    found = shutil.which(name, path=path)
    if found is None:
        raise MissingError(f"{name} is not installed: the native programs cannot be built for libFuzzer here")
    return found


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-6000:]}{done.stderr[-3000:]}")


@functools.cache
def _built(folder: Path) -> Path:
    clang, tools = _tool("clang"), {name: _tool(name) for name in ("clang++", "cmake", "ninja")}
    resources = subprocess.run([clang, "-print-resource-dir"], capture_output=True, text=True, check=True)
    if not list(Path(resources.stdout.strip()).glob("lib/*/libclang_rt.fuzzer*.a")):
        raise MissingError("clang's own libFuzzer (libclang-rt-dev of Debian) is not installed")
    settings = {
        "CMAKE_C_COMPILER": clang,
        "CMAKE_CXX_COMPILER": tools["clang++"],
        "CMAKE_MAKE_PROGRAM": tools["ninja"],
        "TENSORLIFT_FUZZ": "ON",
        "TENSORLIFT_SANITIZE": "fuzzer-no-link,address,undefined",
    }
    defines = [f"-D{name}={value}" for name, value in settings.items()]
    _run([tools["cmake"], "-S", str(ROOT), "-B", str(folder), "-G", "Ninja", *defines])
    _run([tools["cmake"], "--build", str(folder), "--target", *(f"fuzz_{name}" for name in NATIVE)])
    return folder / "native" / "tests" / "fuzz"


def program(name: str) -> list[str]:
    """The command of a target, built if it has to be. Raises MissingError."""
    if name in NATIVE:
        with _building:
            return [str(_built(BUILD / "native") / f"fuzz_{name}")]
    if importlib.util.find_spec("atheris") is None:
        raise MissingError("atheris is not installed, which fuzzes Python")
    return [sys.executable, str(FUZZ / f"fuzz_{name}.py"), f"-dict={FUZZ / 'json.dict'}"]


def _environ() -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(FUZZ.parent),
        "ASAN_OPTIONS": "allocator_may_return_null=1",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    }


def fuzz(name: str, command: Sequence[str], folder: Path, seconds: float, seed: int, most: int) -> Outcome:
    """Runs a program of libFuzzer's for so long, in ``folder``; most: bytes of an input."""
    fresh, found = folder / "corpus" / name, folder / "found"
    for each in (fresh, found):
        each.mkdir(parents=True, exist_ok=True)
    kept = [str(CORPUS / name)] if (CORPUS / name).is_dir() else []
    arguments = {
        "max_total_time": int(seconds),
        "seed": seed,
        "max_len": most,
        "timeout": _LONGEST_SECONDS,
        # Without it what took 10 s on a busy machine is kept too, as if it broke something.
        "report_slow_units": _LONGEST_SECONDS,
        "rss_limit_mb": _MOST_MEGABYTES,
        "artifact_prefix": f"{found}/{name}-",
        "print_final_stats": 1,
    }
    given = [f"-{option}={value}" for option, value in arguments.items()]
    before = set(found.iterdir())
    done = subprocess.run(
        [*command, *given, str(fresh), *kept],
        env=_environ(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False, errors="replace",
        text=True, cwd=folder,
    )  # fmt: skip
    inputs = tuple(sorted(set(found.iterdir()) - before))
    return Outcome(name, done.returncode == 0 and not inputs, done.stdout, inputs)


def run(name: str, seconds: float, seed: int = 1) -> Outcome:
    """Fuzzes one target. Raises MissingError."""
    return fuzz(name, program(name), BUILD, seconds, seed, TARGETS[name])


def keep(name: str) -> int:
    """Takes what was new into the kept corpus, and of that no more than what reaches as much. The files."""
    kept, fresh, least = CORPUS / name, BUILD / "corpus" / name, BUILD / "least" / name
    shutil.rmtree(least, ignore_errors=True)
    for each in (kept, fresh, least):
        each.mkdir(parents=True, exist_ok=True)
    command = [*program(name), "-merge=1", f"-max_len={TARGETS[name]}", str(least), str(kept), str(fresh)]
    done = subprocess.run(command, env=_environ(), cwd=BUILD, capture_output=True, text=True, check=False)
    if done.returncode or not list(least.iterdir()):
        raise RuntimeError(f"the corpus of {name} cannot be made smaller:\n{done.stderr[-3000:]}")
    shutil.rmtree(kept)
    shutil.move(least, kept)
    return len(list(kept.iterdir()))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(TARGETS))
    parser.add_argument("--seconds", type=float, default=60, help="of each target")
    parser.add_argument("--seed", type=int, default=1, help="of libFuzzer's choices")
    parser.add_argument(
        "--keep", action="store_true", help="take what is new into the kept corpus, made smaller"
    )
    given = parser.parse_args(arguments)
    names = given.targets or list(TARGETS)
    if wrong := set(names) - set(TARGETS):
        parser.error(f"no target: {', '.join(sorted(wrong))}; there are {', '.join(TARGETS)}")
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        clean = all(list(pool.map(lambda name: _told(name, given.seconds, given.seed), names)))
    if clean and given.keep:
        for name in names:
            print(f"{name}: {keep(name)} files kept")
    return 0 if clean else 1


def _told(name: str, seconds: float, seed: int) -> bool:
    try:
        outcome = run(name, seconds, seed)
    except MissingError as missing:
        print(f"{name}: not run: {missing}", flush=True)
        return True
    if outcome.is_clean:
        stats = [line for line in outcome.output.splitlines() if line.startswith("stat::number_of_executed")]
        print(f"{name}: nothing found; seed {seed}; {' '.join(stats)}", flush=True)
    else:
        print(
            outcome.output[-8000:], *(f"{name}: found {path}" for path in outcome.found), sep="\n", flush=True
        )
    return outcome.is_clean


if __name__ == "__main__":
    sys.exit(main())
