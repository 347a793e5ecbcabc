"""Checks what no linter knows: sizes, imports, docs against the tree, nothing of one machine in it.

Each check takes the root and the tracked files and returns one line a finding. Run as a script it prints
them all and exits 1 if there is one.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "src/tensorlift/"
FILE_LINES = 400
FUNCTION_LINES = 60
CODE = (".py", ".c", ".cpp", ".h", ".hpp")
# Where the listed module may be imported: prefixes inside the package.
RESTRICTED = {
    "ctypes": ("engine/abi",),
    "torch": (
        "tensors/",
        "distributed/",
        "loading.py",
        "weights.py",
        "compat.py",
        "integrations/",
        "forking/holding.py",
        "forking/offering.py",
        "forking/shared_memory.py",
        "forking/movers.py",
        "forking/remote.py",
        "forking/sglang_protocol.py",
    ),
}
# Where it may be imported inside a function: only when it is needed.
LATE = {"torch": ("cli/", "bench/")}
# Written in parts, so that this file does not find itself.
FOREIGN = tuple(
    re.compile(pattern)
    for pattern in (
        r"(?<![\w.])/" + r"work/",
        r"\.\./" + r"shared",
        r"/" + r"root/",
        r"/" + r"home/\w",
        r"/opt/" + r"(wheels|pypi)",
        r"pypi" + r"\.org",
        r"python" + r"hosted\.org",
        r"debian" + r"\.org/debian",
        r"npmjs" + r"\.(com|org)",
        r"\bTO" + r"DO\b|\bFIX" + r"ME\b|\bXX" + r"X\b",
    )
)
# Sections of docs/structure.md whose files are all listed, with the endings that count.
LISTED = {
    "src/tensorlift/": (".py", ".c"),
    "native/include/": (".h",),
    "native/src/": (".cpp", ".hpp"),
    "tools/": (".py", ".sh"),
    "examples/": (".py",),
    "benchmarks/": (".py", ".c"),
}

Check = Callable[[Path, list[str]], list[str]]


def tracked(root: Path) -> list[str]:
    """Files that git tracks or would, relative to the root, that exist."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    out = subprocess.run(command, cwd=root, check=True, capture_output=True).stdout
    return sorted({name for name in out.decode().split("\0") if name and (root / name).is_file()})


def _text(root: Path, name: str) -> str:
    return (root / name).read_text(encoding="utf-8", errors="replace")


def python_functions(source: str) -> Iterator[tuple[int, str, int]]:
    """(line, name, lines) of each function, decorators left out."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name, (node.end_lineno or node.lineno) - node.lineno + 1


_NOT_A_FUNCTION = re.compile(
    r"\s*(?:#|//|\*|/\*|(?:namespace|class|struct|union|enum|extern|typedef|if|for|while|switch|else|do|try|case)\b)"
)


def c_functions(source: str) -> Iterator[tuple[int, str, int]]:
    """(line, name, lines) of each function of a formatted C or C++ file: found by its indentation.

    The formatter puts the closing brace of a body below the first letter of its definition, so a body ends
    at the first brace with the same indentation. Definitions stand at column 0, or at 4 inside a class.
    """
    lines = source.splitlines()
    start = 0
    while start < len(lines):
        line = lines[start]
        indent = len(line) - len(line.lstrip(" "))
        name = re.search(r"(~?\w+)\(", line)
        if indent not in (0, 4) or not name or _NOT_A_FUNCTION.match(line):
            start += 1
            continue
        end, opened = start, False
        while end < len(lines):
            opened = opened or lines[end].endswith("{")
            if not opened and lines[end].rstrip().endswith((";", "}")):
                break
            if opened and lines[end].startswith(" " * indent + "}"):
                yield start + 1, name.group(1), end - start + 1
                break
            end += 1
        start = end + 1


def check_sizes(root: Path, files: list[str]) -> list[str]:
    """Files and functions stay small."""
    found = []
    for name in files:
        if not name.endswith(CODE):
            continue
        source = _text(root, name)
        count = source.count("\n")
        if count > FILE_LINES:
            found.append(f"{name}: {count} lines, at most {FILE_LINES}: split it")
        functions = python_functions(source) if name.endswith(".py") else c_functions(source)
        found += [
            f"{name}:{line}: {function} has {lines} lines, at most {FUNCTION_LINES}"
            for line, function, lines in functions
            if lines > FUNCTION_LINES
        ]
    return found


def _imports(source: str) -> Iterator[tuple[int, str, tuple[str, ...], bool]]:
    """(line, module, names, inside a function?) of each import; relative ones start with dots."""
    tree = ast.parse(source)
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    late = {id(node) for function in functions for node in ast.walk(function)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, (), id(node) in late
        elif isinstance(node, ast.ImportFrom):
            names = tuple(alias.name for alias in node.names)
            yield node.lineno, "." * node.level + (node.module or ""), names, id(node) in late


def check_imports(root: Path, files: list[str]) -> list[str]:
    """torch and ctypes stay in their places, and nobody inside imports the root package."""
    found = []
    for name in files:
        if not (name.startswith(PACKAGE) and name.endswith(".py")):
            continue
        inside = name[len(PACKAGE) :]
        for line, module, names, late in _imports(_text(root, name)):
            top = module.split(".")[0]
            allowed = late and inside.startswith(LATE.get(top, ()))
            if top in RESTRICTED and not inside.startswith(RESTRICTED[top]) and not allowed:
                found.append(f"{name}:{line}: imports {top}, allowed in {', '.join(RESTRICTED[top])}")
            places = [root / PACKAGE / part for part in names]
            modules = [place.is_dir() or place.with_suffix(".py").is_file() for place in places]
            if module == "tensorlift" and not (modules and all(modules)):
                found.append(f"{name}:{line}: imports the root package; import the submodule")
    return found


def check_module_names(root: Path, files: list[str]) -> list[str]:
    """A module named like a public function would hide it once it is imported."""
    source = _text(root, PACKAGE + "__init__.py")
    public = set(re.findall(r'"(\w+)"', source.partition("__all__")[2].partition("]")[0]))
    inside = [name[len(PACKAGE) :] for name in files if name.startswith(PACKAGE)]
    modules = {name.removesuffix(".py").split("/")[0] for name in inside}
    return [f"{PACKAGE}{name}: a module has the name of a public object" for name in sorted(public & modules)]


def listed_in_structure(text: str) -> dict[str, str]:
    """Path -> description, from sections headed by a folder and items that start with a file."""
    listed: dict[str, str] = {}
    base = ""
    for line in text.splitlines():
        if heading := re.match(r"#+ .*`([\w./-]+/)`", line):
            base = heading.group(1)
        elif item := re.match(r"- ((?:`[\w./-]+`(?:, )?)+): (.+)", line):
            listed |= {base + name: item.group(2) for name in re.findall(r"`([^`]+)`", item.group(1))}
    return listed


def check_structure(root: Path, files: list[str]) -> list[str]:
    """docs/structure.md has one line for each module, and no other."""
    listed = listed_in_structure(_text(root, "docs/structure.md"))
    disk = {
        name
        for name in files
        for base, endings in LISTED.items()
        if name.startswith(base) and name.endswith(endings)
    }
    # A sub-package's __init__ holds a docstring only: the section's heading speaks for it.
    disk = {name for name in disk if not name.endswith("__init__.py") or name == PACKAGE + "__init__.py"}
    claimed = {name for name in listed if name.startswith(tuple(LISTED))}
    return [f"docs/structure.md: no line for {name}" for name in sorted(disk - claimed)] + [
        f"docs/structure.md: {name} is not there" for name in sorted(claimed - disk)
    ]


def _anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def check_links(root: Path, files: list[str]) -> list[str]:
    """Links inside the documents lead somewhere."""
    found = []
    for name in files:
        if not name.endswith(".md"):
            continue
        text = re.sub(r"```.*?```", "", _text(root, name), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if re.match(r"[a-z]+:", target):
                continue
            path, _, anchor = target.partition("#")
            file = ((root / name).parent / path) if path else root / name
            if not file.exists():
                found.append(f"{name}: the link {target} leads nowhere")
            elif anchor and file.suffix == ".md" and anchor not in _anchors(file.read_text(encoding="utf-8")):
                found.append(f"{name}: {target}: no such heading")
    return found


def check_foreign(root: Path, files: list[str]) -> list[str]:
    """Nothing that belongs to one machine or one registry, and nothing left for later."""
    found = []
    for name in files:
        data = (root / name).read_bytes()
        if b"\0" in data:
            continue
        for number, line in enumerate(data.decode("utf-8", "replace").splitlines(), 1):
            found += [f"{name}:{number}: {hit.group(0)!r}" for rule in FOREIGN if (hit := rule.search(line))]
    return found


CHECKS: tuple[Check, ...] = (
    check_sizes,
    check_imports,
    check_module_names,
    check_structure,
    check_links,
    check_foreign,
)


def main() -> int:
    files = tracked(ROOT)
    found = [finding for check in CHECKS for finding in check(ROOT, files)]
    for finding in found:
        print(finding, file=sys.stderr)
    print(f"tree: {len(files)} files, {len(CHECKS)} checks, {len(found)} findings")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
