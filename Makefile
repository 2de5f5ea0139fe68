# make demo | quick | test | wordings | bench | gpu | check | docs | hosts | versions | clean | help: each creates .venv when it is missing and brings it up to date.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PACKAGES := preconditioners quantization distributed optimizers experiments hosts
# Named after the place, because an environment does not survive being moved or copied.
READY := $(VENV)/ready-$(shell pwd | cksum | cut -d ' ' -f 1)
# The demo needs half of the packages, and does not install the others.
DEMO_READY := $(VENV)/demo-$(notdir $(READY))
HOSTS := .venv-hosts
HOSTS_READY := $(HOSTS)/ready-$(shell pwd | cksum | cut -d ' ' -f 1)

# Keeps the checkout itself off the import path, where its folders would hide installed packages of the same name.
export PYTHONSAFEPATH := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Modules are compiled once, not by each of the many processes that tests start.
export PYTHONDONTWRITEBYTECODE :=
# Two processes. A file's tests stay in one, so that what they share (launched ranks, builds, caches) is made once; files
# go out by name, which leaves those that take long for neither end.
SHARED := -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: help demo quick test wordings bench gpu check docs hosts versions clean links
.DEFAULT_GOAL := help

help:
	@echo "make demo   compare AdamW, Shampoo, soap_fitted and Muon on three small tasks, and write a report (three to five minutes on two idle desktop cores, after the installation; a third of it with ARGS='seeds=[0]')"
	@echo "make quick  run the tests that start no process and train nothing, while writing a stage (about a minute)"
	@echo "make test   run all tests            (make test ARGS='-k house' for some of them; -n 0 in one process)"
	@echo "make wordings  write the messages of errors to tests/wordings.txt after a rewording (ARGS=tests/laws for some tests)"
	@echo "make bench  steps against other libraries and their floor (under 10 minutes; make bench ARGS='threads=2', BENCH= for all)"
	@echo "make gpu    laws, steps, memory and decompositions on a GPU (under 10 minutes; make gpu ARGS=--simulated without one)"
	@echo "make check  lint, formatting, layers of imports, types"
	@echo "make docs   build the documentation into site/, without a network"
	@echo "make hosts  train, save and resume in Hugging Face, accelerate, Lightning, timm, torchtitan, Optuna, Ray (5 minutes)"
	@echo "make versions  the wheel and the simulated accelerator with torch 2.11 to 2.15, gigabytes each (make versions ARGS='--torch 2.15.0')"
	@echo "make clean  remove the environment, caches and build folders; runs/ stays"

demo: $(or $(wildcard $(READY)),$(DEMO_READY))
	$(BIN)/eigengraft demo $(ARGS)

quick: $(READY)
	$(BIN)/python -m pytest $(SHARED) -m "not slow and not gpu" $(ARGS)

test: $(READY)
	$(BIN)/python -m pytest $(SHARED) $(ARGS)

# One diff shows all messages that a change words anew.
wordings: $(READY)
	$(BIN)/python -m pytest $(SHARED) --accept-wordings $(ARGS)

# Peers without what they depend on: torch and numpy are there already, and steps need nothing else.
BENCH ?= --quick
bench: $(READY)
	$(BIN)/python -m pip install --quiet --no-deps heavyball opt-einsum pytorch-optimizer torchao
	$(BIN)/eigengraft bench step $(BENCH) $(ARGS)

gpu: $(READY)
	@$(BIN)/python tests/gpu/report.py $(ARGS)

check: $(READY)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m mypy

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "open site/index.html"

# In an environment of its own, with what these libraries bring.
hosts: $(HOSTS_READY)
	PYTHONPATH="$(CURDIR)/src" $(HOSTS)/bin/python -m pytest -p no:cacheprovider --durations=0 tests/hosts $(ARGS)

versions: $(READY)
	$(BIN)/python tests/versions/versions.py $(ARGS)

clean:
	rm -rf $(VENV) $(HOSTS) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} + -o -name '*.egg-info' -prune -exec rm -rf {} +

# Some unpackers of zips turn symlinks into text files. The wheel does without them; an editable install needs the one
# to `distributed`, which has no __init__.py, and type checkers need them all.
links:
	@for name in $(PACKAGES); do test -d src/eigengraft/$$name || { rm -f src/eigengraft/$$name && ln -s ../../$$name src/eigengraft/$$name; } || exit 1; done

$(HOSTS_READY): requirements-hosts.txt | links
	@test -x $(HOSTS)/bin/python || "$(PYTHON)" -m venv $(HOSTS)
	$(HOSTS)/bin/python -m pip install --quiet --requirement requirements-hosts.txt
	@rm -f $(HOSTS)/ready-*
	@touch $@

$(BIN)/python: | links
	@command -v "$(PYTHON)" >/dev/null || { echo "eigengraft: Python 3.11 or newer is required, but there is no '$(PYTHON)'; install it or name another: make PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "eigengraft: Python 3.11 or newer is required, got $$("$(PYTHON)" --version 2>&1); name another: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@"$(PYTHON)" -m venv $(VENV) || { rm -rf $(VENV); echo "eigengraft: '$(PYTHON) -m venv' failed; on Debian and Ubuntu install the package python3-venv" >&2; exit 1; }

$(READY): requirements.txt pyproject.toml | $(BIN)/python
	@echo "eigengraft: installs the $$(grep -c == requirements.txt) packages of requirements.txt into $(VENV), once; this takes minutes"
	$(BIN)/python -m pip install --requirement requirements.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@rm -f $(VENV)/*ready-*
	@touch $@

$(DEMO_READY): requirements.txt pyproject.toml | $(BIN)/python
	@echo "eigengraft: installs the library and the packages of its extra 'experiments' into $(VENV), once; this takes minutes"
	$(BIN)/python -m pip install --quiet --constraint requirements.txt setuptools
	$(BIN)/python -m pip install --constraint requirements.txt --no-build-isolation --editable ".[experiments]"
	@rm -f $(VENV)/*ready-*
	@touch $@
