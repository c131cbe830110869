# Everything a developer or CI does, by name. `make` alone lists it.
# Needs: Linux, bash, git, make, Python >= 3.10 with venv. Everything else comes from the package indexes
# into .venv, .venvs/, .browser and labextension/node_modules.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

PYTHON ?= python3
export PYTHON
BIN := .venv/bin
OLD := .venvs/old
CLIENTS := .venvs/clients
RELEASE := .venvs/release
STEP := scripts/step
# The longest first: two are made at a time, and neither of the two is to end long before the other.
STAGES := unit-tests ui-tests blackbox-tests e2e-tests core-tests server-tests kernel-tests ts core-seeds docs \
          types imports lint
THOROUGH_STAGES := thorough-tests thorough-ui thorough-blackbox floor kernel-tests-old pythons environments-three
PYTEST := $(BIN)/python -m pytest -q
TESTS := tests native/tests emulator integrations
# tests/thorough.txt names the tests that only `make test-all` runs.
DEFAULT := not gpu and not slow and not wheels
QUICK_MARKS := $(DEFAULT) and not thorough
QUICK := -m '$(QUICK_MARKS)'
THOROUGH := -m '$(DEFAULT) and thorough'
# An environment that grows: Kiwi alone, with JupyterLab, with all that the tests use. Whoever asks for
# the last gets all at once.
KIWI_READY := .venv/.kiwi-installed
JUPYTERLAB_READY := .venv/.kiwi-jupyterlab
READY := .venv/.kiwi-ready
COMPILED := .venv/.kiwi-compiled
OLD_READY := $(OLD)/.kiwi-ready
CLIENTS_READY := $(CLIENTS)/.kiwi-ready
RELEASE_READY := $(RELEASE)/.kiwi-ready
LAB := labextension
# npm writes it last, and the build of the package looks at it, too: one npm ci for both.
NODE_READY := $(LAB)/node_modules/.package-lock.json
NPM := scripts/node .venv npm --prefix $(LAB) --silent
LAB_READY := .venv/.kiwi-lab-ready
LAB_INSTALLED := .venv/share/jupyter/labextensions/kiwi-jupyter
LAB_SOURCES := $(shell find $(LAB)/src $(LAB)/schema $(LAB)/style -type f) \
               $(addprefix $(LAB)/,package.json package-lock.json tsconfig.json webpack.config.js install.json) \
               packaging/address.py

# A developer's own settings must not decide what the tests see.
unexport KIWI_DISABLE KIWI_GPU KIWI_SOCKET_DIR KIWI_STATE_DIR KIWI_DAEMON_ARGS
# Containers often set this. Each of the thousand programs that tests start would compile Kiwi anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup browser floor pythons environments tensorflow lab test test-all fast lint types imports docs docs-links ts panel-pictures core-tests core-seeds unit-tests server-tests \
        kernel-tests kernel-tests-old e2e-tests blackbox-tests ui-tests blackbox profiles truth mutations cluster soak fuzz demo bench \
        wheels format hooks lock clean

# What a newcomer needs first is marked by ##!.
help:  ## list what can be made
	@list() { \
	  grep -hE "^[a-z0-9-]+:.*$$1 " $(MAKEFILE_LIST) | sed -E "s/^([a-z0-9-]+):.*$$1 */\1\t/" | \
	    while IFS=$$'\t' read -r name text; do printf '  make %-18s %s\n' "$$name" "$$text"; done; \
	}; echo "Begin with:"; list '##!'; echo "All others:"; list '##'

# What stages share is made here: a stage that has to wait for it would begin after all others.
setup: $(READY) $(OLD_READY) $(CLIENTS_READY) $(LAB_READY) $(COMPILED)  ##! make the virtual environments (.venv, .venvs/old, .venvs/clients), build the labextension and the C libraries
	@# Told at the start. The tests that need one fail, and no others.
	@$(STEP) browser scripts/browser >&2 || true

browser:  ## a Chromium for the browser tests: the machine's own, one from apt, or unpacked into .browser without root
	@$(STEP) browser scripts/browser

lab: $(LAB_READY)  ## build the labextension anew where its sources changed, and put it into .venv

test:  ##! set up everything, run every kind of test
	@MAKE='$(MAKE)' scripts/stages $(STAGES)

test-all:  ## the tests that `make test` leaves out: more combinations and seeds, the oldest versions, other Pythons
	@MAKE='$(MAKE)' scripts/stages $(THOROUGH_STAGES)

fast: lint types imports fast-tests  ##! lint, types and the quick tests of the Python side: under a minute

lint: $(READY)  ## ruff: rules and formatting
	@$(STEP) lint $(BIN)/ruff check --quiet .
	@$(STEP) format $(BIN)/ruff format --quiet --check .

types: $(READY)  ## mypy --strict
	@$(STEP) types $(BIN)/mypy

imports: $(READY)  ## import-linter: who may import what; the same for the rooms of the C library
	@$(STEP) imports $(BIN)/lint-imports --no-cache
	@$(STEP) rooms $(BIN)/python scripts/rooms.py

# Nothing is kept from the last build: Sphinx does not repeat the warnings of pages that are unchanged.
SPHINX := $(BIN)/sphinx-build --fresh-env --write-all --nitpicky --quiet --conf-dir docs \
          --doctree-dir build/doctrees

docs: $(READY)  ##! the documentation site (build/docs); a link inside it that leads nowhere is an error
	@rm -rf build/docs
	@$(STEP) docs $(SPHINX) --fail-on-warning --keep-going . build/docs

docs-links: $(READY)  ## ask the network whether the links to other sites lead somewhere
	@$(STEP) --alive docs-links $(SPHINX) --builder linkcheck . build/docs-links

ts: $(NODE_READY)  ## the labextension: lint, types and unit tests of its TypeScript
	@$(STEP) ts-lint $(NPM) run lint
	@$(STEP) ts-types $(NPM) run types
	@$(STEP) ts-tests $(NPM) run test

.PHONY: catalogue
catalogue: $(NODE_READY)  ## write the template for translators (labextension/locale) from the sources
	@$(NPM) run catalogue

panel-pictures: $(NODE_READY) browser  ## photograph every state of the sidebar, in each theme and width (build/panel)
	@PYTHONPATH=tests/support $(STEP) --alive panel-pictures $(BIN)/python tools/stories.py build/panel

.PHONY: fast-tests
fast-tests: $(READY)
	@$(STEP) fast-tests $(PYTEST) -x -m 'not gpu and not e2e and not slow and not wheels' \
	  tests/wire tests/sched tests/client tests/tooling --ignore=tests/sched/test_simulation.py

# Measuring coverage takes four times as long as the tests, so the long random ones are not measured.
core-tests: $(READY)  ## scheduler and protocol, with the gate: every branch covered
	@COVERAGE_FILE=.coverage.core $(STEP) core-tests $(BIN)/coverage run -m pytest -q \
	  -m '$(QUICK_MARKS) and not seeded' tests/sched tests/wire
	@COVERAGE_FILE=.coverage.core $(STEP) core-coverage $(BIN)/coverage report --skip-covered

core-seeds: $(READY)  ## random events of the scheduler
	@$(STEP) core-seeds $(PYTEST) -m '$(QUICK_MARKS) and seeded' tests/sched tests/wire

# The tests of a module share daemons, kernels and pagers, so they stay in one process.
unit-tests: $(READY) $(CLIENTS_READY) | $(COMPILED)  ## everything that has no target of its own
	@$(STEP) unit-tests $(PYTEST) $(QUICK) -n 3 --dist loadscope $(TESTS) --ignore=tests/sched --ignore=tests/wire --ignore=tests/kernel \
	  --ignore=tests/server_ext --ignore=tests/e2e --ignore=tests/blackbox --ignore=tests/ui

server-tests: $(READY) | $(COMPILED)  ## the server extension: routes, stream, placement of kernels
	@$(STEP) server-tests $(PYTEST) $(QUICK) -n 3 --dist loadfile tests/server_ext

kernel-tests: $(READY) | $(COMPILED)  ## the notebook side, on current ipykernel and IPython
	@$(STEP) kernel-tests $(PYTEST) $(QUICK) -n 3 tests/kernel

kernel-tests-old: $(OLD_READY) | $(COMPILED)  ## the same on the oldest ipykernel and IPython supported
	@KIWI_TEST_KERNEL_PYTHON=$(abspath $(OLD)/bin/python) \
	  $(STEP) kernel-tests-old $(OLD)/bin/python -m pytest $(QUICK) -q -n 3 -p no:cacheprovider tests/kernel

e2e-tests: $(READY) | $(COMPILED)  ## real kernels and daemons on the emulated driver
	@$(STEP) e2e-tests $(PYTEST) $(QUICK) -n 3 --dist loadscope tests/e2e

# Two at a time: they mostly wait. A module, or a class, shares daemons and kernels: it stays together.
# What calls the driver, on the oldest Python and the lowest versions of what Kiwi depends on.
floor: $(OLD_READY) | $(COMPILED)  ## movers, pager, conformance, bench and demo with the oldest versions supported
	@$(STEP) floor-tests $(OLD)/bin/python -m pytest -q $(QUICK) -n 3 --dist loadscope tests/movers tests/pager/test_emulated.py emulator/conformance \
	  tests/gpu/test_bindings.py tests/wire
	@$(STEP) floor-bench $(OLD)/bin/kiwi bench --emulate 1x256MiB
	@$(STEP) floor-demo $(OLD)/bin/kiwi demo --headless --emulate

pythons: $(READY) $(OLD_READY) | $(COMPILED)  ## every other Python that this machine has: doctor, kernel tests, the headless demo
	@$(STEP) --alive pythons scripts/each-python

ENVIRONMENTS := $(BIN)/python packaging/environments.py
environments: $(READY)  ## do packages that people have (packaging/environments.txt) keep their versions beside Kiwi? asks the index for minutes
	@$(STEP) --alive environments $(ENVIRONMENTS) --result packaging/environments.json

.PHONY: environments-three
environments-three: $(READY)
	@$(STEP) --alive environments $(ENVIRONMENTS) --first 3

TENSORFLOW := .venvs/tensorflow
$(TENSORFLOW)/.kiwi-ready: | $(READY)
	@KIWI_PIP_FROM=$(BIN)/python $(STEP) --alive environment-tensorflow scripts/venv $(TENSORFLOW) tensorflow tensorflow
	@touch $@

tensorflow: $(TENSORFLOW)/.kiwi-ready | $(COMPILED)  ## does TensorFlow start the same with Kiwi and without? fetches 600 MB, keeps 2 GB
	@$(STEP) tensorflow $(PYTEST) tests/real_clients/tensorflow_starts.py

blackbox-tests: $(READY) | $(COMPILED)  ## the installed command, real kernels and servers: whom anybody could kill or ask
	@$(STEP) blackbox-tests $(PYTEST) $(QUICK) -n 2 --dist loadscope tests/blackbox

ui-tests: $(LAB_READY) browser | $(COMPILED)  ## JupyterLab and Notebook in a real browser
	@$(STEP) ui-tests $(PYTEST) $(QUICK) tests/ui

.PHONY: thorough-tests thorough-blackbox thorough-ui
thorough-tests: $(READY) $(CLIENTS_READY) | $(COMPILED)
	@$(STEP) thorough-tests $(PYTEST) $(THOROUGH) -n 3 $(TESTS) --ignore=tests/blackbox --ignore=tests/ui

thorough-blackbox: $(READY) | $(COMPILED)
	@$(STEP) thorough-blackbox $(PYTEST) $(THOROUGH) -n 2 --dist loadscope tests/blackbox

thorough-ui: $(LAB_READY) browser | $(COMPILED)
	@$(STEP) thorough-ui $(PYTEST) $(THOROUGH) tests/ui

blackbox: $(READY)  ## the same with all cases: each victim in each state with each pager
	@$(STEP) blackbox $(PYTEST) -m 'slow or not slow' -n 2 --dist loadscope tests/blackbox

# A test whose subject is a kill is marked host_goes_down: on 595-open it would hang a real host.
profiles: $(READY)  ## pager, daemon and e2e-tests on each named emulated driver (DRIVERS="580 595-open")
	@for driver in $(or $(DRIVERS),580 595 595-open 610); do \
	  KIWI_EMULATOR_DRIVER=$$driver $(STEP) "driver-$$driver" $(PYTEST) -n 2 tests/pager tests/daemon tests/e2e; done

# Its report is in test-artifacts/ui/crowded-surfaces.txt.
truth: $(LAB_READY) browser  ## a crowded GPU for MINUTES=30, every surface compared at random moments
	@KIWI_TRUTH_MINUTES=$(or $(MINUTES),30) $(STEP) truth $(PYTEST) tests/ui/test_crowded_surfaces.py

mutations: $(READY)  ## break Kiwi in forty places, one after another: does make test notice each?
	@$(BIN)/python tools/mutations.py

cluster: $(READY)  ## JupyterHub, Slurm, containers and Kubernetes' schemas, from scratch to a verdict (root, Debian or Ubuntu)
	@$(BIN)/python tests/cluster/run.py

soak: $(READY)  ## everything at once for HOURS=24 (0.05, say, too); SEED= repeats one
	@$(BIN)/python tools/soak.py --hours $(or $(HOURS),24) $(if $(SEED),--seed $(SEED))

# What reaches new code is merged into the corpus, which tests/wire replays.
fuzz: $(READY)  ## fuzz the daemon's side of the wire for MINUTES=60, guided by coverage (x86-64: atheris)
	@$(BIN)/python -m pip install --quiet 'atheris>=3'
	@mkdir -p .fuzz
	@$(BIN)/python tests/wire/fuzz_wire.py .fuzz tests/wire/corpus -max_len=4096 -timeout=60 \
	  -artifact_prefix=.fuzz/ -print_final_stats=1 -max_total_time=$$(( $(or $(MINUTES),60) * 60 ))
	@$(BIN)/python tests/wire/fuzz_wire.py -merge=1 tests/wire/corpus .fuzz

demo: $(if $(HEADLESS),$(KIWI_READY),$(LAB_READY))  ##! two notebooks share one emulated GPU (HEADLESS=1: without a browser)
	@$(BIN)/kiwi demo $(if $(HEADLESS),--headless) $(DEMO_ARGS)

bench: $(LAB_READY) browser  ## measure what runs on this machine (benchmarks/)
	@for file in benchmarks/bench_*.py; do $(STEP) "$$(basename "$$file" .py)" $(BIN)/python "$$file"; done

wheels: $(READY)  ## dist/: one wheel for any machine, and one each with the pager's library in it
	@$(BIN)/python -m pip install --quiet 'ziglang>=0.13'
	@$(STEP) wheel-tests $(PYTEST) -m wheels native/tests emulator/tests
	@for machine in '' x86_64 aarch64; do KIWI_WHEEL_MACHINE=$$machine $(STEP) "wheel$${machine:+-$$machine}" \
	  scripts/node .venv $(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .; done

.PHONY: release
release: $(RELEASE_READY)  ## dist/: source distribution, wheels, chart and bill of materials, built twice, compared and checked
	@$(STEP) --alive release scripts/node .venv $(RELEASE)/bin/python packaging/release.py

format: $(READY) $(NODE_READY)  ##! let ruff, prettier and eslint format and mend what they can
	@$(BIN)/ruff format --quiet .
	@$(BIN)/ruff check --quiet --fix .
	@$(NPM) run format

hooks: $(READY)  ## run lint and types before each commit (git hook)
	@$(BIN)/pre-commit install

lock: $(READY) $(OLD_READY) $(CLIENTS_READY) $(RELEASE_READY)  ## write requirements/ from what is installed (after the tests passed)
	@for pair in dev:$(BIN) old:$(OLD)/bin clients:$(CLIENTS)/bin release:$(RELEASE)/bin; do \
	  $(BIN)/python scripts/lock.py "$${pair#*:}/python" "$${pair%%:*}"; \
	done

clean:  ## remove environments, caches and build results
	@rm -rf .venv .venvs .browser .make .fuzz build dist .coverage* .hypothesis .mypy_cache .pytest_cache .ruff_cache test-artifacts
	@rm -rf $(LAB)/node_modules $(LAB)/lib $(LAB)/*.tsbuildinfo kiwi_jupyter/labextension
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

KIWI_NEEDS := pyproject.toml scripts/venv $(wildcard requirements/dev-*.txt)

# The labextension is made by a step of its own ($(LAB_READY)), which the headless demo needs as little as JupyterLab.
$(KIWI_READY): $(KIWI_NEEDS)
	@KIWI_SKIP_LABEXTENSION=1 KIWI_PIP_LIGHT=1 $(STEP) --alive kiwi scripts/venv .venv dev
	@touch $@

$(JUPYTERLAB_READY): $(KIWI_NEEDS)
	@KIWI_SKIP_LABEXTENSION=1 $(STEP) --alive jupyterlab scripts/venv .venv dev --group demo
	@touch $(KIWI_READY) $@

$(READY): $(KIWI_NEEDS)
	@KIWI_SKIP_LABEXTENSION=1 $(STEP) --alive environment scripts/venv .venv dev --group dev
	@touch $(KIWI_READY) $(JUPYTERLAB_READY) $@

# Before the tests: the first kernel would start it in the background otherwise, where a busy machine takes a minute.
# The tests' own byte code, too: each of the processes that share a suite would make all of it. If that fails, the
# suite says why.
$(COMPILED): $(shell find native/src emulator/kiwi_emulator/src -type f) | $(READY)
	@$(STEP) --alive compiled $(BIN)/python -c \
	  'import kiwi_emulator as emulator; from kiwi_core.preload import ready; emulator.build(); ready.ensure()'
	@$(PYTEST) --collect-only $(TESTS) >/dev/null 2>&1 || true
	@touch $@

# One environment at a time: pip is the same process-hungry thing twice otherwise. It is for kernels
# only: no labextension.
# The lowest version that pyproject.toml allows of each package that Kiwi depends on, on the oldest Python here.
LOWEST = $$(sed -n '/^dependencies = \[/,/^\]/s/^  "\([a-z-]*\)>=\([0-9.]*\).*/\1==\2.*/p' pyproject.toml)
$(OLD_READY): pyproject.toml scripts/venv $(wildcard requirements/old-*.txt) | $(READY)
	@PYTHON=$$(scripts/pythons | sed -n '1s/^[^ ]* //p'); export PYTHON="$${PYTHON:-python3}" KIWI_SKIP_LABEXTENSION=1; \
	$(STEP) --alive environment-old scripts/venv $(OLD) old --group kernel-test 'cuda-core<2' $(LOWEST)
	@touch $@

# What a release is built and checked with: nobody else needs it.
$(RELEASE_READY): pyproject.toml scripts/venv $(wildcard requirements/release-*.txt) | $(READY)
	@KIWI_PIP_FROM=$(BIN)/python $(STEP) --alive environment-release scripts/venv $(RELEASE) release --group release
	@touch $@

# Programs of users and what they import, without Kiwi.
$(CLIENTS_READY): pyproject.toml scripts/venv $(wildcard requirements/clients-*.txt) | $(READY)
	@KIWI_PIP_FROM=$(BIN)/python $(STEP) --alive environment-clients scripts/venv $(CLIENTS) clients --group clients
	@touch $@

# The build of the labextension has done this already, unless the lock has changed since.
$(NODE_READY): $(LAB)/package-lock.json | $(READY)
	@$(STEP) --alive node-modules $(NPM) ci --prefer-offline --ignore-scripts --no-audit --no-fund
	@touch $@

# A copy: a link would be followed, and what it leads to deleted, when pip uninstalls.
$(LAB_READY): $(LAB_SOURCES) $(JUPYTERLAB_READY)
	@$(STEP) --alive labextension scripts/node .venv $(BIN)/python packaging/labextension_build.py
	@rm -rf $(LAB_INSTALLED) && mkdir -p $(LAB_INSTALLED)
	@cp -r kiwi_jupyter/labextension/. $(LAB)/install.json $(LAB_INSTALLED)/
	@touch $@
