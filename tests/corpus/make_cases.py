"""Small inputs that reproduce kinds of fault which users of such loaders reported in public.

    PYTHONPATH=tests python -m corpus.make_cases make OUT [--big]          write inputs and OUT/cases.json
    PYTHONPATH=tests python -m corpus.make_cases without WHAT[,WHAT] -- CMD ...
                     run CMD where the kernel refuses WHAT: io_uring, o_direct, shared_mmap

cases.json is a list of
    id, kind, reports   what it stands for
    files               paths relative to OUT (surrogate-escaped where a name is not UTF-8)
    do                  what to do, in words
    unit                file: the outcome holds for each file; directory: for the folder as a whole
    outcome             load   every tensor of every file comes back, bytes as by the oracle
                        error  an ordinary exception within 10 s that names what is in 'error_names'; no
                               crash, no hang, no tensor with invented content, no descriptor or thread left
                        action see 'right'
    right               the right outcome in words
    tensors             {file: [{name, dtype, shape, seed, nbytes}]} or {file: {"rule": ...}}
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from corpus import broken, folders, legal
from corpus.writer import (
    CASES,
    Book,
)
from support import seccomp

MODULES = (legal, broken, folders)  # importing them registers their cases

REFUSED = {
    "io_uring": seccomp.NO_URING,
    "o_direct": seccomp.NO_DIRECT_OPEN,
    "shared_mmap": seccomp.NO_FILE_MAP,
}


def make(out: Path, big: bool = False) -> list[dict[str, Any]]:
    """Writes every case below a folder, and cases.json there."""
    book = Book(out, big)
    for name, maker in CASES.items():
        maker(book, name)
    (out / "cases.json").write_text(json.dumps(book.cases, indent=1))
    return book.cases


def main(arguments: list[str]) -> None:
    if len(arguments) >= 2 and arguments[0] == "make":
        cases = make(Path(arguments[1]), "--big" in arguments)
        print(f"{len(cases)} cases, {sum(len(c['files']) for c in cases)} files")
    elif len(arguments) >= 4 and arguments[0] == "without" and arguments[2] == "--":
        what = arguments[1].split(",")
        unknown = sorted(set(what) - set(REFUSED))
        if unknown:
            sys.exit(f"unknown: {', '.join(unknown)}; known: {', '.join(REFUSED)}")
        seccomp.install([rule for name in what for rule in REFUSED[name]])
        os.execvp(arguments[3], arguments[3:])
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
