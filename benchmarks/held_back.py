"""What an arena holds back when few tensors are kept, by arena_size: the table of docs/tensors.md.

    python benchmarks/held_back.py [PATH] [--every 50]

Every 50th tensor of a load() to a device is kept and the others are dropped. Computed from headers alone, so
it needs neither a device nor the bytes: without PATH for Qwen3-30B-A3B's geometry (24 layers: 9,435 tensors,
31 GB, in 16 files), written to a temporary folder as headers and holes.
"""

from __future__ import annotations

import argparse

from tensorlift.bench.held_back import ARENA_SIZES, EVERY, held_back, held_back_of_model, show_held_back


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", nargs="?", help="a checkpoint; its headers are read")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--shards", type=int, default=16)
    parser.add_argument("--every", type=int, default=EVERY)
    given = parser.parse_args()
    if given.path is None:
        found = held_back_of_model(given.layers, given.shards, every=given.every)
    else:
        found = [held_back(given.path, size, given.every) for size in ARENA_SIZES]
    show_held_back(found)


if __name__ == "__main__":
    main()
