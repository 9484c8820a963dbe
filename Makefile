# The five commands: setup, run, test, lint, bench. All call `setup`, which does nothing if .venv is up to date.
# The lock is for Python 3.11 (docs/deployment.md).
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
AUDIT := .venv-audit
LOCK := requirements/cpu.txt
CONFIG ?= deployments/configs/demo.yaml
ARGS ?=

# torch's CPU build has its own index. If PIP_FIND_LINKS names a folder with its wheel, that folder is used instead.
ifdef PIP_FIND_LINKS
export UV_FIND_LINKS := $(PIP_FIND_LINKS)
else
export UV_TORCH_BACKEND ?= cpu
endif
export UV_LINK_MODE ?= copy
# Every stage is a new process. Without bytecode files, each would compile all packages again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup run test test-unit test-slow lint format bench bench-training chaos audit up down status lock clean help

help:
	@echo "make setup | run | test | lint | bench     (also: up, down, status, test-unit, test-slow, bench-training, chaos, audit, format, lock, clean)"

setup: $(STAMP)

$(STAMP): $(LOCK) requirements/bootstrap.txt pyproject.toml
	$(PYTHON) -c 'import sys; assert sys.version_info[:2] == (3, 11), f"Python 3.11 is needed; this is {sys.version.split()[0]}. Try: make PYTHON=/path/to/python3.11 setup"'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r requirements/bootstrap.txt
	$(BIN)/uv pip sync --quiet --python $(BIN)/python --require-hashes $(LOCK) requirements/bootstrap.txt
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --offline -e .
	@touch $(STAMP)

run: setup
	$(BIN)/rlhf run $(CONFIG) $(ARGS)

test: test-unit
	$(BIN)/pytest -m "not slow and not gpu" tests/integration

test-unit: setup
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 tests/unit

test-slow: setup
	$(BIN)/pytest -m slow

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup
	$(BIN)/python -m tests.benchmarks.ppo_iteration $(ARGS)

bench-training: setup
	$(BIN)/python -m tests.benchmarks.throughput $(ARGS)

chaos: setup
	$(BIN)/python -m tests.chaos $(ARGS)

audit:
	test -x $(AUDIT)/bin/python || $(PYTHON) -m venv $(AUDIT)
	$(AUDIT)/bin/pip install --quiet --disable-pip-version-check --require-hashes -r requirements/audit.txt
	$(AUDIT)/bin/python .ci/audit.py $(ARGS)

up: setup
	$(BIN)/rlhf up

down: setup
	$(BIN)/rlhf down

status: setup
	$(BIN)/rlhf status

lock: $(STAMP)
	$(BIN)/uv pip compile --quiet --python-version 3.11 --generate-hashes --no-emit-index-url --no-annotate \
	  --custom-compile-command "make lock" requirements/bootstrap.in -o requirements/bootstrap.txt
	$(BIN)/uv pip compile --quiet --python-version 3.11 --generate-hashes --no-emit-index-url --no-annotate \
	  --custom-compile-command "make lock" requirements/audit.in -o requirements/audit.txt
	$(BIN)/uv pip compile --quiet --python-version 3.11 --generate-hashes --no-emit-index-url --no-annotate \
	  --no-emit-package uv \
	  --custom-compile-command "make lock" --extra dev --override requirements/override.txt \
	  requirements/cpu.in pyproject.toml -o $(LOCK)

clean:
	rm -rf .rlhf .pytest_cache .mypy_cache .ruff_cache
