# Everything runs in .venv, which each target brings up to date first: quick when nothing has changed.
# Needed on the machine: Python 3.11 or newer, make, a C compiler. Pins with hashes: requirements/*.txt.

ifndef PYTHON
PYTHON := $(shell for p in .venv/bin/python python3 python3.11 python3.12 python3.13; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
endif
ifeq ($(PYTHON),)
$(error No Python 3.11 or newer on the PATH. Install one, or name it: make PYTHON=/path/to/python3.11)
endif

SET_UP := @"$(PYTHON)" tools/environment.py
BIN := .venv/bin
VERSIONS := 0.5.12
NOT_FULL := -m "not full"
AT_ONCE := -n 2 --dist loadfile # most tests wait for servers, so that two at once take little more than half the time

.NOTPARALLEL:
.PHONY: help demo demo-sglang lab test test-fast test-full test-openai-oldest test-sglang check format check-sglang-resolution
.PHONY: setup dev chromium lock upgrade wheel clean

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1|/p' Makefile | awk -F'|' '{printf "%-32s%s\n", $$1, $$2}'

setup: ## .venv with every package pinned by hash
	$(SET_UP) base

demo: setup ## real completions from a small model on this machine, with a report at the end
	$(BIN)/dfexp run params/demo.yaml

demo-sglang: setup ## the same through two real SGLang servers on the CPU, with a tiny model of random weights
	@env=$$("$(PYTHON)" tools/environment.py sglang-cpu $(firstword $(VERSIONS))) && $(BIN)/dfexp run params/sglang_cpu.yaml \
		--set fleet.python=$$env/bin/python --set fleet.model=$$env/models/hybrid

lab: setup ## the notebooks in JupyterLab
	$(BIN)/jupyter lab --ServerApp.root_dir=. $(if $(filter 0,$(shell id -u)),--allow-root) $(LAB_ARGS) \
		--LabApp.default_url=/lab/tree/notebooks/03_generate.ipynb \
		--LabApp.news_url=None --LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate

test: check test-openai-oldest chromium ## every test that needs no network, no GPU and no SGLang
	$(BIN)/python -m pytest --ignore=tests/sglang $(AT_ONCE) $(NOT_FULL) $(PYTEST_ARGS)

test-fast: dev ## the tests that take under ten seconds each, in under two minutes
	$(BIN)/python -m pytest --ignore=tests/sglang $(AT_ONCE) -m "not slow and not full" $(PYTEST_ARGS)

test-full: VERSIONS := 0.5.12 0.5.23
test-full: NOT_FULL :=
test-full: check-sglang-resolution test test-sglang ## all of it; needs the package index

test-sglang: dev ## real SGLang servers on the CPU, of each of VERSIONS="0.5.12 0.5.23" (the first alone unless given)
	@folders= && for version in $(VERSIONS); do \
		folders="$$folders:$$("$(PYTHON)" tools/environment.py sglang-cpu "$$version")" || exit 1; done && \
		DFEXP_SGLANG="$${folders#:}" $(BIN)/python -m pytest tests/sglang $(NOT_FULL) $(PYTEST_ARGS)

test-openai-oldest: dev ## the client and the run against the oldest openai that is supported
	@venv=$$("$(PYTHON)" tools/environment.py oldest) && \
		echo "tests with $$("$$venv/bin/python" -c 'import openai; print("openai", openai.__version__)')" && \
		PYTHONPATH="$(CURDIR)" "$$venv/bin/python" -m pytest -q $(AT_ONCE) -m "not slow" -p no:cacheprovider \
			tests/test_client.py tests/generate

check: dev ## format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: dev ## put the code into its format, and mend what the linter can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

check-sglang-resolution: ## does `pip install dfexp[sglang]` resolve? Asks the package index, downloads nothing large
	$(SET_UP) sglang

wheel: dev ## dist/*.whl, with the notebooks and the parameter files inside
	$(BIN)/uv build --no-build-isolation --python $(BIN)/python --quiet --out-dir dist
	@ls -l dist

dev:
	$(SET_UP) dev

chromium:
	$(SET_UP) chromium

lock: ## compile requirements/*.txt again after a change of pyproject.toml or requirements/*.in
	$(SET_UP) lock

upgrade: ## compile requirements/*.txt again with the newest versions
	$(SET_UP) lock -U

clean: ## remove .venv and everything built; never outputs/
	rm -rf .venv dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './outputs/*' -prune -exec rm -rf {} +
