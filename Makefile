# tpu-relay. `make help` lists what there is.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup setup-xla train sweep up down status test test-xla lint bench ui pictures clean

# Every flow, server and program is a process of its own: without compiled files each compiles Prefect anew, for seconds.
unexport PYTHONDONTWRITEBYTECODE

# The first Python of 3.11 or newer; or name one: make setup PYTHON=/path/to/python3.12
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3 python; do \
  $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# PyTorch/XLA lives in an environment of its own: 8 GB, and only one version of torch fits.
VENV_XLA := .venv-xla
READY_XLA := $(VENV_XLA)/.ready

RUN ?= icl
FRAMEWORK ?= jax
BENCH ?= overhead
T ?=
# Test processes at a time: most tests wait more than they work. A few tests are quicker in one (WORKERS=0).
WORKERS ?= 3

help: ## List every target
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "  RUN=icl|bytelm and FRAMEWORK=jax|xla for train, BENCH=overhead|recovery|fleet|chaos|worker|sweep|elastic|pack|xla for bench, T='-k word' for test"
	@echo "  NOTIFY=slack-webhook/team for up: messages about runs by a notification block of that name"

setup: $(READY) ## Only set up: a virtual environment in .venv with all packages (once)

$(READY): pyproject.toml
	@test -n "$(PYTHON)" || { echo "tpu-relay needs Python 3.11 or newer; none found. Name one: make setup PYTHON=/path/to/python3.11"; exit 1; }
	@echo "== setting up .venv with $$($(PYTHON) --version): 1-3 minutes, once"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	@$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python --editable '.[dev]' \
	  || $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $(READY)
	@echo "== set up"

setup-xla: $(READY_XLA) ## Only set up PyTorch/XLA: .venv-xla, 3-5 minutes and 8 GB (once)

$(READY_XLA): pyproject.toml | $(READY)
	@echo "== setting up .venv-xla with PyTorch/XLA: 3-5 minutes and 8 GB, once"
	@test -x $(VENV_XLA)/bin/python || $(BIN)/python -m venv $(VENV_XLA)
	@$(BIN)/uv pip install --quiet --python $(VENV_XLA)/bin/python --editable '.[dev,xla]'
	@touch $(READY_XLA)
	@echo "== set up"

train: $(READY) $(if $(filter xla,$(FRAMEWORK)),$(READY_XLA)) ## Run the main job: a training on emulated TPU slices that survives two preemptions (RUN=icl or bytelm, FRAMEWORK=jax or xla)
	@$(BIN)/python -m deployments.demo $(RUN) --framework $(FRAMEWORK)

sweep: $(READY) ## Run a sweep: 12 trials on two emulated slices of 4 chips, one of which is preempted; each with the bits of a run alone
	@$(BIN)/python -m deployments.sweep_demo

up: $(READY) ## Start a Prefect server, an emulated Cloud TPU and a worker in the background, and deploy all flows
	@$(BIN)/python -m deployments.local up

down: $(READY) ## End what `make up` started; runs save first
	@$(BIN)/python -m deployments.local down

status: $(READY) ## Show what runs, where the UI is, which slices exist and what they cost an hour
	@$(BIN)/python -m deployments.local status

test: $(READY) lint ## Pass all tests (T='-k word' picks some)
	@echo "== testing: about 30 minutes on 2 cores; no cloud is touched"
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(T)

test-xla: $(READY_XLA) ## Pass the tests of the PyTorch/XLA trainer, in .venv-xla (T='-k word' picks some)
	@echo "== testing PyTorch/XLA: about 10 minutes on 2 cores; no cloud is touched"
	@$(VENV_XLA)/bin/pyright --project pyright-xla.json && $(VENV_XLA)/bin/python -m pytest tests/xla $(T)

lint: $(READY) ## Check style, types and the arrows between packages
	@echo "== ruff, pyright, import-linter"
	@$(BIN)/ruff check . && $(BIN)/ruff format --check --quiet . && $(BIN)/pyright --pythonpath $(BIN)/python && $(BIN)/lint-imports --no-logo

bench: $(READY) $(if $(filter xla,$(BENCH)),$(READY_XLA)) ## Measure against a peer or the limit; prints one JSON object last (BENCH=overhead, recovery, fleet, chaos, worker, sweep, elastic, pack or xla)
	@$(BIN)/python -m deployments.bench.$(BENCH)

ui: $(READY) ## Look at the runs of `make train` in the Prefect UI (Ctrl-C ends it)
	@$(BIN)/python -m deployments.demo --ui

pictures: $(READY) ## Make the pictures of the README anew: a run in the Prefect UI, photographed in Chromium (about 5 minutes)
	@$(BIN)/python -m deployments.pictures

clean: ## Remove what the demo left in .relay; the environment stays
	rm -rf .relay
