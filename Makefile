# Everything runs from two project-local environments: .venv (python3, JAX 0.10) and .venv-latest (python3.12, JAX 0.12).
# What compiles for TPUs has a third, .venv-tpu: with a TPU compiler installed, JAX looks for TPUs.
# Each is rebuilt only when its pins or pyproject.toml change.

.DEFAULT_GOAL := help
.PHONY: help setup setup-latest setup-tpu setup-cuda demo test test-all test-latest test-compilers test-compilers-gpu lint imports types format clean
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

# python3 of the path. But where that is the shared build of Python (--enable-shared), which takes 1.2 to 1.3 times as long
# to plan (benchmarks/planning_time.py names the build), it is the system's own of the same minor version if that is another.
PYTHON ?= $(shell version=$$(python3 -c 'import sys; print(sys.version_info[:2])' 2>/dev/null) && \
  for each in python3 /usr/bin/python3; do \
    if $$each -c 'import ensurepip, sys, venv; sys.exit(str(sys.version_info[:2]) != sys.argv[1] \
      or "/libpython" in open("/proc/self/maps").read())' "$$version" 2>/dev/null; then echo $$each; exit; fi; \
  done; echo python3)
WORKERS ?= 2
BIN := .venv/bin
BIN_LATEST := .venv-latest/bin
BIN_TPU := .venv-tpu/bin
BIN_CUDA := .venv-cuda/bin
# The built-in "ci" profile: the same examples every time and no per-example deadline.
PYTEST_FLAGS := -q -n $(WORKERS) --dist worksteal --hypothesis-profile=ci
# Bytecode is written also where the environment says otherwise: else each of the processes that tests start compiles
# all it imports that changed since `make setup`, and each worker all tests.
test test-all test-latest test-compilers test-compilers-gpu: export PYTHONDONTWRITEBYTECODE :=
# The files that hold tests marked `compiled`: their run imports no others.
COMPILED_FILES = $(shell grep -rl --include='test_*.py' 'mark\.compiled' tests)

# tests/conftest.py says what this undoes, and why. Newer versions of XLA know no such flag, and need none.
FUSED_AS_BY_USERS := XLA_FLAGS="--xla_cpu_use_fusion_emitters=true $(XLA_FLAGS)"

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | while IFS='|' read -r name what; do printf '%-14s %s\n' "$$name" "$$what"; done

setup: .venv/.stamp ## create .venv with the pinned versions

setup-latest: .venv-latest/.stamp ## create .venv-latest (Python 3.12, newest supported JAX)

setup-tpu: .venv-tpu/.stamp ## create .venv-tpu (the same with XLA's compiler for TPUs, which needs none)

setup-cuda: .venv-cuda/.stamp ## create .venv-cuda (the same with XLA's compiler for NVIDIA GPUs, which needs none)

# python3.12 by name where it runs, otherwise the newest 3.12 that pyenv holds.
PYTHON_LATEST ?= $(shell if python3.12 -c '' 2>/dev/null; then echo python3.12; else \
  version=$$(pyenv versions --bare 2>/dev/null | grep -E '^3\.12\.[0-9]+$$' | sort -V | tail -n 1) && \
  [ -n "$$version" ] && echo "$$(pyenv prefix "$$version")/bin/python3.12"; fi)

# $(1) python, $(2) environment, $(3) pins. What is installed is compiled by pip, the project's own modules here: else
# the first command does it, or every one where Python may write no bytecode. The stamp is written last, so an
# interrupted set-up starts again.
define create_venv
rm -rf $(2)
$(1) -m venv $(2)
$(2)/bin/python -m pip install --quiet --disable-pip-version-check -r $(3)
$(2)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
$(2)/bin/python -m compileall -q src
touch $(2)/.stamp
endef

.venv/.stamp: requirements/py311.txt pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if v >= (3, 11) else \
	  "refused: make setup; got: Python %d.%d; needed: 3.11 or newer; try: make setup PYTHON=python3.11" % v)'
	$(call create_venv,$(PYTHON),.venv,requirements/py311.txt)

.venv-tpu/.stamp: requirements/tpu.txt requirements/py311.txt pyproject.toml
	$(call create_venv,$(PYTHON),.venv-tpu,requirements/tpu.txt)

.venv-cuda/.stamp: requirements/cuda.txt requirements/py311.txt pyproject.toml
	$(call create_venv,$(PYTHON),.venv-cuda,requirements/cuda.txt)

.venv-latest/.stamp: requirements/py312.txt pyproject.toml
	@test -n "$(PYTHON_LATEST)" || { echo "refused: make setup-latest; got: no python3.12 on the path and none in pyenv;" \
	  "needed: Python 3.12; try: pyenv install 3.12, or make setup-latest PYTHON_LATEST=/path/to/python3.12" >&2; exit 1; }
	$(call create_venv,$(PYTHON_LATEST),.venv-latest,requirements/py312.txt)

demo: .venv/.stamp ## train a small GPT on eight virtual devices and on one
	$(BIN)/meshwright demo

test: lint imports types ## what a change must pass: lint, import order, types and every test that is not slow
	$(BIN)/python -m pytest $(PYTEST_FLAGS) -m "not slow and not compiled"
	$(FUSED_AS_BY_USERS) $(BIN)/python -m pytest $(PYTEST_FLAGS) -m "not slow and compiled" $(COMPILED_FILES)

test-all: lint imports types ## the same with the slow tests
	$(BIN)/python -m pytest $(PYTEST_FLAGS) -m "not compiled"
	$(FUSED_AS_BY_USERS) $(BIN)/python -m pytest $(PYTEST_FLAGS) -m compiled $(COMPILED_FILES)

test-latest: .venv-latest/.stamp ## the tests that are not slow on Python 3.12 and JAX 0.12
	$(BIN_LATEST)/python -m pytest $(PYTEST_FLAGS) -m "not slow"

test-compilers: .venv-tpu/.stamp ## the tests that compile for TPUs, with none
	$(BIN_TPU)/python -m pytest $(PYTEST_FLAGS) -m "compilers and not slow"

test-compilers-gpu: .venv-cuda/.stamp ## the tests that compile for NVIDIA GPUs, with none
	$(BIN_CUDA)/python -m pytest $(PYTEST_FLAGS) -m compilers tests/unit/test_gpu_targets.py tests/unit/test_liveness_accelerators.py tests/unit/test_kernels_compiled.py

lint: .venv/.stamp ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

imports: .venv/.stamp ## the import order of pyproject.toml
	$(BIN)/lint-imports

types: .venv/.stamp ## pyrefly over src and benchmarks/stated
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python

format: .venv/.stamp ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove the environments and every cache
	rm -rf .venv .venv-latest .venv-tpu .venv-cuda build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache .grimp_cache
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
