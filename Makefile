# The commands of this project. Needs Python 3.11 or newer, git and make; the rest goes into .venv.

VENV := .venv
BIN := $(VENV)/bin
BENCH := .venv-bench

# The first interpreter that really runs, is new enough and has what a virtual environment and
# the queue need. It is tried, not looked up: a version manager leaves stubs on the path that
# only say "not installed".
PYTHON ?= $(shell for python in python3.13 python3.12 python3.11 python3; do \
	"$$python" -c 'import ensurepip, sqlite3, ssl, sys, venv; sys.exit(sys.version_info < (3, 11))' \
	>/dev/null 2>&1 && { echo "$$python"; break; }; done)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

.PHONY: help
help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: run
run: $(VENV)/.installed ## Run a demonstration in the foreground; Ctrl-C stops it
	@exec $(BIN)/python -m supervisor demo --keep-running

.PHONY: test
test: lint ## Check everything: style, types, imports, tests
	$(BIN)/python -m pytest -n 4 --dist loadgroup

.PHONY: lint
lint: $(VENV)/.installed-dev ## Check style, types and import contracts
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy --strict queue_core supervisor
	$(BIN)/python -m mypy --strict -p grafana
	$(BIN)/basedpyright --level error
	$(BIN)/lint-imports --no-logo

.PHONY: format
format: $(VENV)/.installed-dev ## Rewrite the sources in the one style
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

# Peers bring packages of their own; apart, they cannot change what `make test` checks with.
.PHONY: bench
bench: $(BENCH)/.installed ## Run us beside other queues, for hours; results in benchmarks/results
	$(BENCH)/bin/python -m benchmarks $(BENCH_ARGS)

.PHONY: campaign
campaign: $(VENV)/.installed-dev ## Kill 500 processes at random and account for every job
	$(BIN)/python -m tests.campaign.kills

.PHONY: soak
soak: $(VENV)/.installed-dev ## Kill processes of a running service for ten minutes; all jobs are accounted for
	HERDSMAN_SOAK_SECONDS=600 $(BIN)/python -m pytest tests/process/test_chaos.py --timeout 900

.PHONY: clean
clean: ## Remove what the commands above made; keeps var/, where databases live
	rm -rf $(VENV) $(BENCH) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache \
		.hypothesis .import_linter_cache .grimp_cache
	find queue_core supervisor tests config grafana benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# Each stamp is younger than pyproject.toml when its packages are installed, so that a second
# `make test` starts at once. The developer's set contains the user's, hence both stamps.

$(VENV)/.installed: pyproject.toml
	$(call prepare_venv)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml
	$(call prepare_venv)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $(VENV)/.installed $@

$(BENCH)/.installed: VENV := $(BENCH)
$(BENCH)/.installed: BIN := $(BENCH)/bin
$(BENCH)/.installed: pyproject.toml
	$(call prepare_venv)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[bench]'
	@touch $@

# Keeps an environment that works; a half-made one (an interrupted run) is made anew.
define prepare_venv
	@$(BIN)/python -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		python='$(PYTHON)'; \
		test -n "$$python" || { echo 'No usable Python 3.11 or newer on the path; \
install one (with its venv and sqlite3 modules) or run make PYTHON=/path/to/python3.' >&2; exit 1; }; \
		echo "Creating $(VENV) with $$("$$python" --version)"; \
		"$$python" -m venv --clear $(VENV); \
	}
endef
