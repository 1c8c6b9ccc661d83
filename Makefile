# tpu-relay. `make help` lists what there is.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup train test lint bench ui clean

# The first Python of 3.11 or newer; or name one: make setup PYTHON=/path/to/python3.12
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3 python; do \
  $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

RUN ?= icl
BENCH ?= overhead
T ?=

help: ## List every target
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "  RUN=icl|bytelm for train, BENCH=overhead|recovery for bench, T='-k word' for test"

setup: $(READY) ## Only set up: a virtual environment in .venv with all packages (once)

$(READY): pyproject.toml
	@test -n "$(PYTHON)" || { echo "tpu-relay needs Python 3.11 or newer; none found. Name one: make setup PYTHON=/path/to/python3.11"; exit 1; }
	@echo "== setting up .venv with $$($(PYTHON) --version): 1-3 minutes, once"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --editable '.[dev]' \
	  || $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $(READY)
	@echo "== set up"

train: $(READY) ## Run the main job: a training on emulated TPU slices that survives two preemptions (RUN=icl or bytelm)
	@$(BIN)/python -m deployments.demo $(RUN)

test: $(READY) lint ## Pass all tests (T='-k word' picks some)
	@echo "== testing: at most 15 minutes on 2 cores; no cloud is touched"
	@$(BIN)/python -m pytest $(T)

lint: $(READY) ## Check style, types and the arrows between packages
	@echo "== ruff, pyright, import-linter"
	@$(BIN)/ruff check . && $(BIN)/ruff format --check --quiet . && $(BIN)/pyright --pythonpath $(BIN)/python && $(BIN)/lint-imports --no-logo

bench: $(READY) ## Measure against a peer or the limit; prints one JSON object last (BENCH=overhead or recovery)
	@$(BIN)/python -m deployments.bench.$(BENCH)

ui: $(READY) ## Look at the runs of `make train` in the Prefect UI (Ctrl-C ends it)
	@$(BIN)/python -m deployments.demo --ui

clean: ## Remove what the demo left in .relay; the environment stays
	rm -rf .relay
