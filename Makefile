# `make demo` and `make test` set everything up by themselves: Python 3.11 or newer and make are
# all that a machine needs.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

# The first Python that is new enough, or the one given as PYTHON=….
PYTHON ?= $(shell for each in python3 python3.14 python3.13 python3.12 python3.11 python; do \
    $$each -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$each && break; \
    done)
# Dozens of processes that tests start read what the first of them compiled.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready

.PHONY: help demo docs test test-slow test-all lint kernels format setup clean

help:
	@echo "make demo       find a plan for GPT-2 on 16 A100s, then plan and run a small GPT here"
	@echo "make test       linters, types and the tests, but for what follows"
	@echo "make test-slow  what takes seconds each and runs lines that others run, too"
	@echo "make test-all   everything, and long ones: thousands of damaged files, many faults"
	@echo "make docs       the documentation, in site/"
	@echo "make lint       linters and types only"
	@echo "make format     let ruff format the code"
	@echo "make setup      the virtual environment in $(VENV) only"
	@echo "make clean      remove everything that was built"

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(if $(PYTHON),,echo "error: no Python 3.11 or newer found; make PYTHON=/path/to/python3" >&2; exit 1)
	@echo "setting up $(VENV) (once; some minutes)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --quiet --no-compile --disable-pip-version-check \
	    --constraint constraints.txt --editable '.[dev,zoo,notebook,docs]'
	@touch $@

demo: $(READY)
	$(BIN)/python -m examples.demo

docs: $(READY)
	$(BIN)/python -m mkdocs build --strict

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python docs/rooms.py

# What tests run compiled, so that not each of their processes begins by compiling it.
kernels: $(READY)
	$(BIN)/python -m stratagem search examples.small_gpt:build --cluster dgx-a100 --nodes 1 --devices 4 \
	    --evaluations 200 --json --out $(VENV)/plan.json >/dev/null

# Files of tests are dealt out to this many processes; 0 runs all in one.
TEST_PROCESSES ?= 2

test: $(READY)
	$(MAKE) --no-print-directory --jobs=2 lint kernels
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile -m 'not slow and not long'

# What continuous integration runs behind `make test`.
test-slow: kernels
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile -m 'slow and not long'

# With the tests of `long`, whose few cases the others have too: some take half an hour.
test-all: $(READY)
	$(MAKE) --no-print-directory --jobs=2 lint kernels
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile -m 'long or not long' \
	    --timeout 7200 -o faulthandler_timeout=7200

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) out site build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
