"""Each check of the tree finds what it is there to find, and passes over what is right."""

from __future__ import annotations

from pathlib import Path

import pytest

import check_tree


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "src/tensorlift/cli").mkdir(parents=True)
    (tmp_path / "docs").mkdir()
    return tmp_path


def put(root: Path, name: str, text: str) -> str:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)
    return name


def test_long_file_is_found(tree: Path) -> None:
    short = put(tree, "short.py", "x = 1\n" * check_tree.FILE_LINES)
    long = put(tree, "long.py", "x = 1\n" * (check_tree.FILE_LINES + 1))
    found = check_tree.check_sizes(tree, [short, long])
    assert len(found) == 1
    assert found[0].startswith("long.py: 401 lines")


def test_long_python_function_is_found(tree: Path) -> None:
    def function(lines: int) -> str:
        return "def f():\n" + "    x = 1\n" * (lines - 1)

    fits = put(tree, "fits.py", function(check_tree.FUNCTION_LINES))
    not_ = put(tree, "not_.py", function(check_tree.FUNCTION_LINES + 1))
    assert check_tree.check_sizes(tree, [fits, not_]) == ["not_.py:1: f has 61 lines, at most 60"]


def test_c_functions_are_measured() -> None:
    source = (
        "namespace tl {\n"
        "// pread(2), {\n"
        "int declared(int a);\n"
        "int one() { return 1; }\n"
        "static int two(int a,\n"
        "               int b) {\n"
        "    if (a) {\n"
        "        return b;\n"
        "    }\n"
        "    return a;\n"
        "}\n"
        "class Thing {\n"
        "    void method() {\n"
        "        run();\n"
        "    }\n"
        "};\n"
        "}  // namespace tl\n"
    )
    assert list(check_tree.c_functions(source)) == [(5, "two", 7), (13, "method", 3)]


@pytest.mark.parametrize(
    ("name", "source", "says"),
    [
        ("plan/x.py", "import torch\n", "imports torch"),
        ("plan/x.py", "from torch.cuda import Stream\n", "imports torch"),
        ("plan/x.py", "import ctypes\n", "imports ctypes"),
        ("plan/x.py", "def f():\n    import torch\n", "imports torch"),
        ("cli/x.py", "import torch\n", "imports torch"),
        ("plan/x.py", "import tensorlift\n", "imports the root package"),
        ("plan/x.py", "from tensorlift import load\n", "imports the root package"),
    ],
)
def test_import_in_the_wrong_place_is_found(tree: Path, name: str, source: str, says: str) -> None:
    file = put(tree, f"src/tensorlift/{name}", source)
    (finding,) = check_tree.check_imports(tree, [file])
    assert says in finding


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("loading.py", "import torch\n"),
        ("tensors/x.py", "import torch\n"),
        ("engine/abi.py", "import ctypes\n"),
        ("cli/x.py", "def f():\n    import torch\n"),
        ("plan/x.py", "from tensorlift.format import header\n"),
        ("plan/x.py", "from tensorlift import cli\n"),
        ("plan/x.py", "import torchlike\n"),
    ],
)
def test_import_in_its_place_passes(tree: Path, name: str, source: str) -> None:
    file = put(tree, f"src/tensorlift/{name}", source)
    assert check_tree.check_imports(tree, [file]) == []


def test_module_named_like_a_public_function_is_found(tree: Path) -> None:
    files = [
        put(tree, "src/tensorlift/__init__.py", '__all__ = ["load", "open"]\n'),
        put(tree, "src/tensorlift/load.py", ""),
        put(tree, "src/tensorlift/cli/open.py", ""),
    ]
    assert check_tree.check_module_names(tree, files) == [
        "src/tensorlift/load: a module has the name of a public object"
    ]


def test_structure_is_compared_both_ways(tree: Path) -> None:
    put(tree, "docs/structure.md", "## `src/tensorlift/`\n\n- `there.py`, `too.py`: one\n- `gone.py`: two\n")
    names = ("there.py", "too.py", "new.py", "cli/__init__.py")
    files = [put(tree, f"src/tensorlift/{name}", "") for name in names]
    assert check_tree.check_structure(tree, files) == [
        "docs/structure.md: no line for src/tensorlift/new.py",
        "docs/structure.md: src/tensorlift/gone.py is not there",
    ]


def test_dead_links_are_found(tree: Path) -> None:
    put(tree, "docs/a.md", "# A heading, here\n")
    text = "[1](a.md) [2](a.md#a-heading-here) [3](a.md#no) [4](b.md) [5](https://example.org/x)\n```\n[6](c.md)\n```\n"
    file = put(tree, "docs/links.md", text)
    assert check_tree.check_links(tree, [file]) == [
        "docs/links.md: a.md#no: no such heading",
        "docs/links.md: the link b.md leads nowhere",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "see /" + "work/main",
        "../" + "shared/x",
        "https://pypi" + ".org/x",
        "# TO" + "DO: later",
        "/ho" + "me/me/x",
    ],
)
def test_foreign_words_are_found(tree: Path, text: str) -> None:
    file = put(tree, "x.md", f"first\n{text}\n")
    (finding,) = check_tree.check_foreign(tree, [file])
    assert finding.startswith("x.md:2: ")


def test_ordinary_words_pass(tree: Path) -> None:
    file = put(tree, "x.md", "the framework/ folder, homework, todos, /dev/shm and artwork/x\n")
    assert check_tree.check_foreign(tree, [file]) == []
