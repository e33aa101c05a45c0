# Two commands matter to a newcomer: `make run` shows headgate working, `make test` proves it. Both install what they
# need into .venv/ (ignored by git); what the tests need of the system comes from Debian, by scripts/install-packages.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check
BUILT  := pyproject.toml setup.py $(wildcard src/headgate/*.c src/headgate/algorithms/*.h)

.DEFAULT_GOAL := help
.PHONY: help run test check bench chaos mutate format clean servers

help: ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

run: $(VENV)/.run ## open the example API: a tour of its policy, then it is yours to try (RUN_ARGS="--demo" only shows it)
	@$(BIN)/python -m examples.shop $(RUN_ARGS)

test: check servers $(VENV)/.test ## everything that must hold: lint, types, and the tests on real servers
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile $(PYTEST_ARGS)

check: $(VENV)/.test ## lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.bench ## compare headgate with its peers, and write docs/benchmarks.md (BENCH_ARGS=--quick: a few minutes)
	@scripts/install-packages servers wrk
	$(BIN)/python -m bench $(BENCH_ARGS)

chaos: $(VENV)/.chaos ## break the store in every way, under load: a table and a picture in .build/chaos/
	@scripts/install-packages servers faketime
	$(BIN)/python -m chaos $(CHAOS_ARGS)

mutate: servers $(VENV)/.mutate ## change every comparison and constant of the algorithms, and see that a test notices
	$(BIN)/python tests/support/mutation.py $(MUTATE_ARGS)

format: $(VENV)/.test ## rewrite the code in the house's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove everything that the other commands made
	rm -rf $(VENV) .build build .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find src -name '*.so' -delete

servers:
	@scripts/install-packages servers

# A venv that could not be finished (on Debian, for want of python3-venv) is there, but without pip. One of a Python that is
# too old is never begun: it would stand in the way of the next.
$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "headgate needs Python 3.11 or newer, and $(PYTHON) is not: name another, as in make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { echo "making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@touch $@

$(VENV)/.ready: $(VENV)/.made
	@$(PIP) --upgrade 'pip>=25.1'
	@touch $@

$(VENV)/.run: $(VENV)/.ready $(BUILT)
	@echo "installing headgate and what the shop needs into $(VENV)"
	@$(PIP) --editable '.[admin,fastapi,redis,yaml]' --group run
	@touch $@

$(VENV)/.test: $(VENV)/.ready $(BUILT)
	@PYTHON=$(BIN)/python scripts/install-packages compiler
	@echo "installing headgate and what the tests need into $(VENV)"
	@$(PIP) --editable '.[all]' --group test --group check
	@touch $@

$(VENV)/.bench: $(VENV)/.test
	@echo "installing the peers for the benchmark"
	@$(PIP) --group bench
	@touch $@

$(VENV)/.chaos: $(VENV)/.test
	@$(PIP) --group draw
	@touch $@

$(VENV)/.mutate: $(VENV)/.test
	@$(PIP) --group mutate
	@touch $@
