# SPDX-License-Identifier: Apache-2.0
#
# `make demo` and `make test` do all their own set-up. Each stage leaves a stamp in
# the virtual environment; a stage runs again only when what it depends on changed.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3.11
VENV   ?= .venv
export PYTHON VENV

# Two OpenMP threads on a small shared machine can be slower than one: barriers spin.
OMP_NUM_THREADS ?= 1
# Test files run side by side; each starts its own engines, about 2 GiB at a time.
TEST_WORKERS ?= 2
VLLM_CPU_KVCACHE_SPACE ?= 1
export OMP_NUM_THREADS VLLM_CPU_KVCACHE_SPACE
export VLLM_NO_USAGE_STATS := 1

PY    := $(VENV)/bin/python
STAMP := $(VENV)/.stamp
MODEL := $(or $(KEYFORMER_CACHE),$(HOME)/.cache/keyformer-vllm)/smollm2

NATIVE_SOURCES := $(shell find csrc -type f \( -name '*.h' -o -name '*.hpp' \
	-o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' \) 2>/dev/null)

.PHONY: help setup demo test test-fast soak lint format build clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | \
		sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 18

setup: $(STAMP)-native $(STAMP)-model-deps  ## prepare everything that demo, test and lint need
	@$(MAKE) --silent --no-print-directory --jobs=2 $(STAMP)-tools $(MODEL)/config.json

demo: $(STAMP)-native $(MODEL)/config.json  ## serve a real model with eviction on and ask it about a real article
	@$(PY) -m keyformer_vllm demo --model $(MODEL)

test: setup  ## run the whole test suite
	@$(PY) -m pytest tests -n $(TEST_WORKERS) --dist loadfile $(PYTEST_ARGS)

test-fast: $(STAMP)-tools $(STAMP)-native  ## run the tests that load no model and start no engine
	@$(PY) -m pytest tests -m "not slow" $(PYTEST_ARGS)

soak: setup  ## send 1,000 random requests to a server over HTTP
	@KEYFORMER_SOAK_REQUESTS=1000 $(PY) -m pytest tests/e2e/test_fire.py $(PYTEST_ARGS)

lint: $(STAMP)-tools  ## check Python, C++, shell and container files, changing nothing
	@.ci/lint.sh

format: $(STAMP)-tools  ## apply ruff and clang-format
	@.ci/lint.sh --fix

build: $(STAMP)-native  ## build the native extension

clean:  ## remove the environment and build outputs (not the converted model)
	rm -rf $(VENV) build dist *.egg-info keyformer_vllm/*.so \
		.pytest_cache .mypy_cache .ruff_cache .hypothesis

$(STAMP)-venv:
	@.ci/setup_env.sh venv
	@touch $@

$(STAMP)-engine: .ci/alias_vllm.py | $(STAMP)-venv
	@.ci/setup_env.sh engine
	@touch $@

$(STAMP)-model-deps: | $(STAMP)-engine
	@.ci/setup_env.sh model-deps
	@touch $@

$(STAMP)-tools: pyproject.toml | $(STAMP)-engine
	@.ci/setup_env.sh tools
	@touch $@

$(STAMP)-native: pyproject.toml setup.py $(NATIVE_SOURCES) | $(STAMP)-engine
	@.ci/setup_env.sh native
	@touch $@

# The folder appears by one rename at the end of the conversion: it is whole or absent.
$(MODEL)/config.json: | $(STAMP)-model-deps $(STAMP)-native
	@$(PY) -m keyformer_vllm.demo.model --output $(MODEL)
