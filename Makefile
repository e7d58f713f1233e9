# Every target does its own set-up: a fresh clone needs nothing but python3 (3.11 or later) and make.
PYTHON ?= python3
VENV   ?= .venv
PY     := $(VENV)/bin/python

# Without a GPU everything is pinned, torch to its CPU build: the CUDA build is gigabytes that could not run.
# `make test CONSTRAINTS=` takes the newest of everything instead. Where the package index lacks a pinned version (a mirror
# that lags behind), only torch is pinned, and a line says so; with STRICT set that is an error.
PINS        := constraints/cpu.txt constraints/torch-cpu.txt
CONSTRAINTS := $(if $(shell command -v nvidia-smi),,-c constraints/cpu.txt)
LOOSE       := $(if $(CONSTRAINTS),-c constraints/torch-cpu.txt)
STRICT      ?=
INSTALL = install() { $(PY) -m pip install -q $(CONSTRAINTS) "$$@" || { test -z "$(STRICT)" && \
	echo "Not all versions of constraints/cpu.txt are to be had here: installing others." >&2 && \
	$(PY) -m pip install -q $(LOOSE) "$$@"; }; }; install
NO_TORCH := "No CPU build of torch was found. Point pip at an index that has one (PIP_EXTRA_INDEX_URL), or install torch into $(VENV) first."

# Two test processes: some tests start ranks, which need cores as well. A file's tests stay in one process, so that they
# share its fixtures. `make test WORKERS=0` runs everything in one process.
WORKERS ?= 2
PYTEST   = $(PY) -m pytest -q -n $(WORKERS) --dist loadfile

.PHONY: demo quick test hf-tests test-all coverage lint docs wheel gpu-test bench clean

demo: $(VENV)/.demo
	$(PY) -m pagestash demo

quick: $(VENV)/.test
	$(PYTEST) -m quick --ignore=tests/jax --ignore=tests/gpu

test: $(VENV)/.test
	$(PYTEST) -m "not gpu and not slow"

# transformers' own tests of its MoE models, unmodified, with our experts; SRC is a checkout of it, and their test
# requirements (parameterized, pytest-xdist; torchvision for gemma4) must be installed. With EVERY_CALL=1 in the
# environment our block runs without gradients, too.
HF_MODELS ?= qwen3_moe mixtral olmoe deepseek_v3 gpt_oss gemma4 glm4_moe minimax
HF_TESTS ?= eager_matches_batched_and_grouped or training or gradient_checkpointing or overfit
hf-tests: $(VENV)/.test
	cd $(SRC) && PYTHONPATH=$(CURDIR)/src:$(CURDIR)/tests/integrations $(abspath $(PY)) -m pytest -q -p hf_plugin \
		$(foreach model,$(HF_MODELS),tests/models/$(model)/test_modeling_$(model).py) -k "$(HF_TESTS)"

test-all: $(VENV)/.test
	LONG_SWEEPS=1 $(PYTEST) -m "not gpu"

coverage: $(VENV)/.test
	$(PY) -m coverage erase
	$(PY) -m coverage run -m pytest -q -n $(WORKERS) --dist loadfile -m "not gpu and not slow"
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

# Most of their time is compiling kernels, which several processes do at once.
GPU_WORKERS ?= 8
gpu-test: $(VENV)/.test
	$(PY) -m pytest -q -n $(GPU_WORKERS) --dist loadfile -m "not alone" tests/gpu
	$(PY) -m pytest -q -m alone tests/gpu

bench: $(VENV)/.test
	$(PY) -m benchmarks all

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage .coverage.* dist site

# A stamp for each set of extras, so that `make demo` installs no test tools.
$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.base: pyproject.toml $(PINS) | $(VENV)/bin/python
	$(INSTALL) torch || { echo $(NO_TORCH) >&2; exit 1; }
	$(INSTALL) -e ".[train]"
	touch $@

$(VENV)/.demo: $(VENV)/.base
	$(INSTALL) -e ".[plan,plot]"
	touch $@

$(VENV)/.test: $(VENV)/.base
	$(INSTALL) -e ".[test,jax,hf,plot]"
	touch $@

$(VENV)/.lint: $(VENV)/.test
	$(INSTALL) -e ".[lint]"
	touch $@

$(VENV)/.docs: $(VENV)/.base
	$(INSTALL) -e ".[docs]"
	touch $@

$(VENV)/.release: $(VENV)/.base
	$(INSTALL) -e ".[release]"
	touch $@
