# `make` lists the targets. They work as root or not, from any path, and twice in a row.
VENV ?= .venv
PYTHON ?= python3
ARGS ?=
IMAGE ?= armcore-trio

RUN = "$(VENV)/bin/python" -m

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test check pytest format bench bench-peers plot image image-test test-pythons coverage-of-spec clean

# What each extra brings along.
holds_demo = demo
holds_dev = $(holds_demo) dev
holds_bench = $(holds_dev) bench

# The stamp tells what the environment was made from and which extras it holds, and is written last: one half-made, or made
# from something else, is made anew. It is no target of make's, which takes a path with a blank for two.
define install # the extra
	@"$(PYTHON)" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null || { \
		echo "error: Python 3.11, 3.12 or 3.13 is needed, and $(PYTHON) is not: name one, as in make PYTHON=python3.12" >&2; \
		exit 1; }
	@stamp="$(VENV)/.installed"; \
	made_from="$$(cat pyproject.toml constraints.txt | cksum) $$(pwd) $$("$(PYTHON)" --version)"; \
	if "$(VENV)/bin/python" -c 'import pip' 2>/dev/null && [ -f "$$stamp" ]; then \
		case "$$(cat "$$stamp") " in "$$made_from "*"$(1) "*) exit 0 ;; esac; \
	fi; \
	echo "Installing armcore-trio[$(1)] in $(VENV)" >&2; \
	if [ -f "$$stamp" ]; then rm -f "$$stamp"; else clear=$$([ ! -f "$(VENV)/pyvenv.cfg" ] || echo --clear); fi; \
	"$(PYTHON)" -m venv $$clear "$(VENV)" && \
	$(RUN) pip install -qq --disable-pip-version-check -c constraints.txt -e '.[$(1)]' && \
	printf '%s\n' "$$made_from $(holds_$(1))" > "$$stamp"
endef

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 20
	@echo; echo "Variables: VENV=$(VENV) PYTHON=$(PYTHON) IMAGE=$(IMAGE) ARGS=(options for demo, pytest, bench, bench-peers, plot and image)"

demo: ## the whole system on servers of its own: real jobs from row to result
	$(call install,demo)
	@$(RUN) armcore_trio demo $(ARGS)

test: check ## everything

check: ## format, lint, types, coverage of the requirements, tests
	$(call install,dev)
	$(RUN) ruff format --check .
	$(RUN) ruff check .
	$(RUN) mypy
	"$(VENV)/bin/python" tests/coverage_of_spec.py
	$(RUN) pytest $(ARGS)

pytest: ## the tests alone; ARGS="-k outbox" picks some
	$(call install,dev)
	$(RUN) pytest $(ARGS)

format: ## put the code in the form that check wants
	$(call install,dev)
	$(RUN) ruff format .
	$(RUN) ruff check --fix .

bench: ## measure throughput and latency
	$(call install,dev)
	@$(RUN) tests.bench $(ARGS)

bench-peers: ## measure it beside PgQueuer, procrastinate and a plain asyncio program
	$(call install,bench)
	@$(RUN) tests.bench --peers $(ARGS)

plot: ## draw docs/performance.png: throughput against batch size, instances and history
	$(call install,bench)
	@$(RUN) tests.bench.plot $(ARGS)

image: ## build the container image, named IMAGE; ARGS are options for podman build
	podman build --format docker --tag "$(IMAGE)" \
		--build-arg "VERSION=$$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)" \
		--build-arg "REVISION=$$(git describe --always --dirty --abbrev=40 --exclude='*' 2>/dev/null || echo unknown)" $(ARGS) .

image-test: ## build the image and run it with podman, against real servers
	$(call install,dev)
	$(RUN) pytest --capture=sys $(ARGS) tests/image/checks.py

test-pythons: ## the tests on every Python 3.11 to 3.13 found on PATH or by pyenv
	@tested=; \
	for version in 3.11 3.12 3.13; do \
		for python in "python$$version" "$$HOME/.pyenv/versions/$$version".*/bin/python; do \
			"$$python" -c "import sys, venv; sys.exit('%d.%d' % sys.version_info[:2] != '$$version')" 2>/dev/null || continue; \
			echo "== Python $$version"; \
			$(MAKE) --no-print-directory pytest VENV=".venvs/$$version" PYTHON="$$python" || exit 1; \
			tested="$$tested $$version"; \
			break; \
		done; \
	done; \
	[ -n "$$tested" ] || { echo "error: no Python 3.11, 3.12 or 3.13 found" >&2; exit 1; }; \
	echo "== passed on Python$$tested"

coverage-of-spec: ## which test proves which requirement; fails on a gap
	$(call install,dev)
	@"$(VENV)/bin/python" tests/coverage_of_spec.py

clean: ## remove what the targets made
	rm -rf .venv .venvs build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
