# Set-up needs python3 (3.11 or newer) with venv, and pip. `make` lists the targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SGLANG := .venv-sglang
PLAN_GPU := .venv-plan-gpu
ARGS ?=
PIP := pip install --no-compile -qq --disable-pip-version-check --no-input
# Three processes for two cores: tests wait more than they compute. In the order of the folders: the
# files of few and long tests would come last, and one process would wait for the other.
PROCESSES := --numprocesses 3 --dist loadfile --no-loadscope-reorder

# Modules are compiled once, whatever the environment says: pip leaves it to the first that imports
# one, and tests start many processes.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-report test-sglang test-gpu-programs nightly check bench clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 13

demo: $(VENV)/demo.stamp ## set up, then train the tiny model on the CPU (more arguments: ARGS="key=value")
	@$(BIN)/python -m launch.train --accel cpu --cfg progress-demo.yaml $(ARGS)

test: $(VENV)/dev.stamp ## set up, then run the tests (more arguments: ARGS="-k name")
	@$(BIN)/python -m pytest $(PROCESSES) -m "not nightly" $(ARGS)

test-all: $(VENV)/dev.stamp ## the same with the rare and the expensive ones
	@$(BIN)/python -m pytest $(PROCESSES) $(ARGS)

test-sglang: $(VENV)/dev.stamp $(SGLANG)/stamp ## set up, also SGLang for the CPU, then run the tests with real servers
	@MINIRL_SGLANG_PYTHON=$(CURDIR)/$(SGLANG)/bin/python $(BIN)/python -m pytest \
	    tests/launch/test_sglang*.py $(ARGS)

test-gpu-programs: $(PLAN_GPU)/stamp ## set up, also the compilers of GPUs and TPUs (2.4 GB; no device needed), then test what they make of the programs
	@$(PLAN_GPU)/bin/python -m pytest --confcutdir tests/gpu_programs tests/gpu_programs $(ARGS)

test-report: $(VENV)/dev.stamp ## set up, then run the tests of launch.report's page in a headless Chromium, where there is one
	@$(BIN)/python -m pytest -rs tests/launch/test_page.py $(ARGS)

nightly: $(VENV)/dev.stamp ## set up, then run the property tests on 2,000 examples each, other ones every time
	@$(BIN)/python -m pytest -m hypothesis --hypothesis-profile=nightly --timeout=7200 $(ARGS)

check: $(VENV)/dev.stamp ## set up, then formatting, lint, types and the import contract
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/ty check --python $(VENV)
	@$(BIN)/lint-imports

bench: $(VENV)/dev.stamp ## set up, then measure speed on this machine (more arguments: ARGS=...)
	@$(BIN)/python benchmarks/grpo_step.py $(ARGS)

clean: ## remove the environment
	rm -rf $(VENV) $(SGLANG) $(PLAN_GPU)

# A stamp is as new as the last install; it is made again only when what it installs may differ.
$(VENV)/demo.stamp: EXTRAS := cpu
$(VENV)/dev.stamp: EXTRAS := cpu,dev
$(VENV)/demo.stamp $(VENV)/dev.stamp: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing minirl-sql[$(EXTRAS)] into $(VENV)"
	@$(BIN)/python -m $(PIP) \
	    --constraint constraints.txt --editable '.[$(EXTRAS)]'
	@touch $@

# SGLang itself asks for packages of CUDA, which the CPU has no use for.
$(SGLANG)/stamp: tests/launch/sglang_requirements.txt
	@echo "installing SGLang for the CPU into $(SGLANG)"
	@$(PYTHON) -m venv $(SGLANG)
	@$(SGLANG)/bin/python -m $(PIP) --requirement $<
	@$(SGLANG)/bin/python -m $(PIP) --no-deps sglang==0.5.23 xgrammar==0.2.7
	@touch $@

$(PLAN_GPU)/stamp: tests/gpu_programs/requirements.txt pyproject.toml constraints.txt
	@echo "installing minirl-sql[learner] and XLA's CUDA compiler into $(PLAN_GPU)"
	@$(PYTHON) -m venv $(PLAN_GPU)
	@$(PLAN_GPU)/bin/python -m $(PIP) \
	    --constraint constraints.txt --editable '.[learner]' pytest pytest-timeout
	@$(PLAN_GPU)/bin/python -m $(PIP) --no-deps --requirement $<
	@touch $@

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is not on the path: install Python 3.11 or newer, or say make PYTHON=/path/to/python" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "$$($(PYTHON) -V 2>&1) is too old: minirl-sql needs Python 3.11 or newer; say make PYTHON=/path/to/python" >&2; exit 2; }
	@$(PYTHON) -m venv $(VENV)
