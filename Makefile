# Every target does its own set-up: a fresh clone needs nothing but python3 (3.11 or later) and make.
PYTHON ?= python3
VENV   ?= .venv
PY     := $(VENV)/bin/python

# Without a GPU everything is pinned, torch to its CPU build: the CUDA build is gigabytes that could not run.
# `make test CONSTRAINTS=` takes the newest of everything instead.
CONSTRAINTS := $(if $(shell command -v nvidia-smi),,-c constraints/cpu.txt)
NO_TORCH := "No CPU build of torch was found. Point pip at an index that has one (PIP_EXTRA_INDEX_URL), or install torch into $(VENV) first."

.PHONY: demo test test-all coverage lint docs wheel gpu-test bench clean

demo: $(VENV)/.base
	$(PY) -m pagestash demo

test: $(VENV)/.test
	$(PY) -m pytest -q -m "not gpu and not slow"

test-all: $(VENV)/.test
	$(PY) -m pytest -q -m "not gpu"

coverage: $(VENV)/.test
	$(PY) -m coverage erase
	$(PY) -m coverage run -m pytest -q -m "not gpu and not slow"
	$(PY) -m coverage combine -q
	$(PY) -m coverage report

lint: $(VENV)/.lint
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

wheel: $(VENV)/.release
	rm -rf dist
	$(PY) -m build

gpu-test: $(VENV)/.test
	$(PY) -m pytest -q tests/gpu

bench: $(VENV)/.test
	$(PY) -m benchmarks all

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage .coverage.* dist site

# A stamp for each set of extras, so that `make demo` installs no test tools.
$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.base: pyproject.toml constraints/cpu.txt | $(VENV)/bin/python
	$(PY) -m pip install -q $(CONSTRAINTS) torch || { echo $(NO_TORCH) >&2; exit 1; }
	$(PY) -m pip install -q $(CONSTRAINTS) -e ".[train]"
	touch $@

$(VENV)/.test: $(VENV)/.base
	$(PY) -m pip install -q $(CONSTRAINTS) -e ".[test,jax,hf,plot]"
	touch $@

$(VENV)/.lint: $(VENV)/.test
	$(PY) -m pip install -q $(CONSTRAINTS) -e ".[lint]"
	touch $@

$(VENV)/.docs: $(VENV)/.base
	$(PY) -m pip install -q $(CONSTRAINTS) -e ".[docs]"
	touch $@

$(VENV)/.release: $(VENV)/.base
	$(PY) -m pip install -q $(CONSTRAINTS) -e ".[release]"
	touch $@
