# `make` prints the targets. Everything is installed into .venv; nothing else is touched.
SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin
OUT ?= runs/stdlib
ARGS ?=
WORKERS ?= 3
# Copies of recipes may lie beside these.
CODE := benchmarks docs forgekit recipes tests

.DEFAULT_GOAL := help
.PHONY: help train test faults oracle chaos bench lint docs format clean

help: ## print this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

# Not file targets: make deletes those when it is interrupted, and Ctrl-C is how a run is stopped.
train: .venv/run ## train a small model on the standard library's sources; goes on where it stopped
	$(BIN)/forgekit prepare stdlib --out data/stdlib --vocab 4096
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python recipes/pretrain.py data.path=data/stdlib out=$(OUT) $(ARGS)

# Many tests wait for processes, so more at a time than cores; WORKERS=0 takes one after another, in one process.
test: .venv/dev ## run every test, those on several ranks included (ARGS="-k word" selects)
	$(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

faults: .venv/dev ## plant every fault of tests/faults and see it (ARGS="-k 'parallel:'" selects a room)
	$(BIN)/pytest tests/faults -m "oracle or not oracle" $(ARGS)

oracle: .venv/dev .venv/torchao .venv/optimizers ## compare every combination of layout, data and options (long)
	$(BIN)/pytest -m oracle tests $(ARGS)

# One case of each kind is in `make test`.
chaos: .venv/dev ## kill, stop and starve runs in every way; what they lose is what the docs say (long)
	$(BIN)/pytest -m "chaos or not chaos" tests/chaos tests/rollouts/test_kills.py \
	    -o faulthandler_timeout=4000 $(ARGS)

bench: .venv/dev ## run the benchmarks, each beside its baseline, and check their targets
	$(BIN)/pytest benchmarks $(ARGS)

lint: .venv/dev ## check style, types and the floors of the package
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/basedpyright
	$(BIN)/lint-imports

format: .venv/dev ## format the code
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

docs: .venv/docs ## build the documentation into docs/_build
	$(BIN)/sphinx-build -W --keep-going -q docs docs/_build
	@echo "open docs/_build/index.html"

clean: ## remove builds and caches; data, runs and .venv stay
	rm -rf build dist docs/_build .pytest_cache .ruff_cache .import_linter_cache .benchmarks .hypothesis

# torch first, at the version of constraints.txt: anything else pulls another build of it.
.venv/torch: constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt torch
	@touch $@

# In a folder of its own: it slows every import of transformers.
.venv/torchao: .venv/torch constraints.txt
	$(BIN)/pip install -q -c constraints.txt --no-deps --target $@ torchao
	@touch $@

.venv/optimizers: .venv/torch constraints.txt
	$(BIN)/pip install -q -c constraints.txt --no-deps --target $@ muon-optimizer pytorch-optimizer
	@touch $@

.venv/run: .venv/torch pyproject.toml
	$(BIN)/pip install -q -c constraints.txt -e ".[text,plot]"
	@touch $@

.venv/dev: .venv/torch pyproject.toml
	$(BIN)/pip install -q -c constraints.txt -e ".[dev]"
	@touch $@ .venv/run

.venv/docs: .venv/torch pyproject.toml
	$(BIN)/pip install -q -c constraints.txt -e ".[docs]"
	@touch $@
