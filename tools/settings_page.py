"""Writes docs/settings.md from the options themselves; with --check says whether it is still true."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from tensorlift.options import LoadOptions

PAGE = Path(__file__).resolve().parent.parent / "docs" / "settings.md"
HEAD = """# Settings

Written from `tensorlift.options.LoadOptions` by `make docs`; `make check` compares the two.

Each setting can be given to `load`, `open`, `load_into`, `safe_open` and `load_file` by its name, to the
command line as an option of `tensorlift load`, and by its environment variable. An explicit value wins;
without one the environment variable is taken, and without that (or where it is empty) the automatic choice.
Sizes are bytes, or text such as `"512KiB"`, `"64MiB"`, `"1GB"`. An unknown name or a value that does not
fit is an `OptionError` that lists what is known. An unknown variable that begins
with `TENSORLIFT_` changes nothing; the log says so once, with the nearest name that is known.
"""
FOOT = """
## Not settings of a load

| variable | meaning |
| --- | --- |
| `TENSORLIFT_TOKEN` | what a seed asks for, of `tensorlift://` paths and of `seed` and `fork` everywhere |
| `TENSORLIFT_PLACE` | where this process is, for registries: `zone-1/rack-12` ([fleets](fleet.md)) |
| `TENSORLIFT_LIBRARY` | path of the native library to use instead of the package's own |
| `TENSORLIFT_DEBUG` | `1`: the command line shows the traceback of an error |
"""


def section(field: dataclasses.Field[object]) -> str:
    meta = field.metadata
    option = f"`--{field.name.replace('_', '-')}`"
    if field.name == "progress":
        option = "`--progress / --no-progress`"
    if not meta["cli"]:
        option = "none: it loads in one process"
    return (
        f"\n## `{field.name}`\n\n{meta['doc']}\n\n"
        f"| | |\n| --- | --- |\n"
        f"| unit | {meta['unit']} |\n"
        f"| automatic | {meta['automatic']} |\n"
        f"| environment | `{LoadOptions.variable(field.name)}` |\n"
        f"| command line | {option} |\n"
    )


def page() -> str:
    return HEAD + "".join(section(field) for field in dataclasses.fields(LoadOptions)) + FOOT


def main(arguments: list[str]) -> int:
    text = page()
    if arguments == ["--check"]:
        if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
            print("docs/settings.md differs from the options: run make docs", file=sys.stderr)
            return 1
        print("settings: the page agrees with the options")
        return 0
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
