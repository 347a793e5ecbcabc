# One word each; every target sets up what it needs: Debian packages, .venv, the native library.
.PHONY: help demo test check bench sanitize smoke engines build fuzz format wheel docs clean
.DEFAULT_GOAL := help
SHELL := /bin/bash

PYTHON ?= $(shell python3.11 -c '' 2>/dev/null && echo python3.11 || echo python3)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
NATIVE := build/native
ENGINES ?= build/engines
SECONDS ?= 60
IN_ENGINES = TENSORLIFT_TEST_VLLM=$(abspath $(ENGINES))/vllm/bin/python TENSORLIFT_TEST_SGLANG=$(abspath $(ENGINES))/sglang/bin/python
LIBRARY := $(NATIVE)/libtensorlift.so
LINK := src/tensorlift/libtensorlift.so
NATIVE_SOURCES := CMakeLists.txt $(shell find native -type f 2>/dev/null)
FORMATTED := $(shell find native src -name '*.c' -o -name '*.h' -o -name '*.cpp' -o -name '*.hpp' 2>/dev/null)
PYTHON_TREE := src tests tools benchmarks examples

help:  ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 10

demo: $(LIBRARY) $(VENV)/.demo  ## load a real model, compare it byte for byte with safetensors, embed sentences
	$(BIN)/python examples/demo_minilm.py

test: $(LIBRARY) $(VENV)/.dev  ## run the tests
	@tools/system.sh $(PYTHON) tests || echo "Tests that need them are skipped."
	$(BIN)/python -m pytest $(ARGS)

check: $(LIBRARY) $(VENV)/.dev  ## style, types, import directions, sizes, docs against the tree
	$(BIN)/ruff check $(PYTHON_TREE)
	$(BIN)/ruff format --check $(PYTHON_TREE)
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/clang-format --dry-run -Werror $(FORMATTED)
	$(BIN)/codespell
	$(BIN)/python tools/check_tree.py
	$(BIN)/python tools/settings_page.py --check
	$(BIN)/python tools/prediction_page.py --check

bench: $(LIBRARY) $(VENV)/.dev  ## measure against this machine's ceilings; writes benchmarks/results/
	$(BIN)/python -m tensorlift.bench $(ARGS)

sanitize: $(LIBRARY) $(VENV)/.dev  ## Python tests over the library under each sanitizer; ARGS are pytest's
	$(BIN)/python tools/sanitize.py address,undefined $(ARGS)
	$(BIN)/python tools/sanitize.py thread $(ARGS)

smoke: $(LIBRARY) $(VENV)/.dev  ## real engines on a CPU: builds their environments (ENGINES=folder), starts each a few times
	tools/engines.sh $(ENGINES)
	$(IN_ENGINES) $(BIN)/python -m pytest tests/engines/test_start.py $(ARGS)

engines: $(LIBRARY) $(VENV)/.dev  ## real engines on a CPU: builds their environments (ENGINES=folder), runs the matrix
	tools/engines.sh $(ENGINES)
	$(IN_ENGINES) $(BIN)/python -m pytest tests/engines $(ARGS)
	$(BIN)/python benchmarks/engines_vllm.py $(abspath $(ENGINES))/vllm/bin/python --out build/engines-vllm.json
	$(BIN)/python benchmarks/engines_sglang.py $(abspath $(ENGINES))/sglang/bin/python --out build/engines-sglang.json

fuzz: $(LIBRARY) $(VENV)/.dev  ## fuzz what reads hostile input, SECONDS=60 each, two at a time
	@tools/system.sh $(PYTHON) tests || echo "What needs them is not run."
	$(BIN)/python tools/fuzzing.py --seconds $(SECONDS) $(ARGS)

build: $(LIBRARY)  ## compile the native library

format: $(VENV)/.dev  ## rewrite sources in the project's style
	$(BIN)/ruff check --fix-only --quiet $(PYTHON_TREE)
	$(BIN)/ruff format $(PYTHON_TREE)
	$(BIN)/clang-format -i $(FORMATTED)

docs: $(VENV)/.dev  ## write the generated pages
	$(BIN)/python tools/settings_page.py
	$(BIN)/python tools/prediction_page.py

wheel: $(VENV)/.dev  ## build dist/tensorlift-*.whl
	rm -rf dist build/wheel
	PATH="$(abspath $(BIN)):$$PATH" $(PIP) wheel --no-deps --no-build-isolation -w dist .

clean:  ## remove what was built (not .venv)
	rm -rf build dist $(LINK) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

# torch first and alone: its pinned build also satisfies the package, so that nothing pulls in another one.
$(VENV)/.base: tools/system.sh
	@tools/system.sh $(PYTHON)
	@$(BIN)/python -c '' 2>/dev/null || { rm -rf $(VENV); $(PYTHON) -m venv $(VENV); }
	$(PIP) install --quiet --upgrade 'pip>=25.1'
	$(PIP) install --quiet torch==2.13.0
	@touch $@

# The package itself is linked to the tree, and the library that is compiled below is linked into the tree.
$(VENV)/.dev: $(VENV)/.base pyproject.toml
	$(PIP) install --quiet --group build
	$(PIP) install --quiet --no-build-isolation -C wheel.cmake=false -C editable.mode=inplace -e .
	$(PIP) install --quiet --group test --group check --group bench
	@touch $@

$(VENV)/.demo: $(VENV)/.dev
	$(PIP) install --quiet --group demo
	@touch $@

$(LIBRARY): $(VENV)/.dev $(NATIVE_SOURCES)
	@tools/system.sh $(PYTHON)
	$(BIN)/cmake -S . -B $(NATIVE) -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) --log-level=WARNING
	$(BIN)/cmake --build $(NATIVE)
	@ln -sf ../../$@ $(LINK)
	@touch $@
