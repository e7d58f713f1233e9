# Every target does its own set-up: a fresh clone needs nothing but make and python3 with its venv module.
PYTHON ?= python3
VENV   ?= .venv
PY     := $(VENV)/bin/python

# All versions are pinned; `make test-newest` takes the newest of everything instead.
PINS   ?= constraints/pinned.txt
PINNED := $(if $(PINS),-c $(PINS))
PIP     = $(PY) -m pip install -q $(PINNED)

# torch alone comes from PyTorch's own index, by uv, which knows the build for this machine. Without a GPU that is the one
# for CPUs, a tenth as large. If that index does not answer within ten seconds, torch comes from where pip takes the rest.
UV      = UV_HTTP_TIMEOUT=10 UV_HTTP_CONNECT_TIMEOUT=10 UV_HTTP_RETRIES=0 $(VENV)/bin/uv pip install -q --python $(PY)
NO_INDEX = PyTorch's package index does not answer, or has no torch for this machine. It comes from the index that pip uses: \
	2.8 GB to download and 5 GB on the disk, if that is not a build for CPUs.

# Two test processes: some tests start ranks, which need cores as well. A file's tests stay in one process, so that they
# share its fixtures. `make test WORKERS=0` runs everything in one process.
WORKERS ?= 2
PYTEST   = $(PY) -m pytest -q -n $(WORKERS) --dist loadfile

# A set-up that fails half-way begins anew the next time.
.DELETE_ON_ERROR:
.PHONY: demo test test-rest test-all test-newest frameworks hf-tests coverage resolve lint docs wheel gpu-test bench clean

demo: $(VENV)/.demo
	$(PY) -m pagestash demo

# What to run before a commit: about six minutes on two cores. The rest, marked slow, has more examples of the same
# properties, programs that compile, many ranks.
test: $(VENV)/.test
	$(PYTEST) -m "not gpu and not slow" --ignore=tests/gpu

test-rest: $(VENV)/.test
	$(PYTEST) -m "slow and not gpu"

test-all: test test-rest

# All with the newest version of everything.
test-newest:
	rm -rf .venv-newest
	$(MAKE) test-all VENV=.venv-newest PINS=

# Frameworks that `make test` does not install, each in an environment of its own with the newest of everything. (Not
# with our test tools: torchtitan and TRL want other versions of datasets.)
FRAMEWORKS ?= lightning torchtitan megatron deepspeed swift
PACKAGE_megatron := megatron-core
PACKAGE_swift := ms-swift
frameworks: $(FRAMEWORKS:%=framework-%)

framework-%:
	$(MAKE) .venv-$*/.base VENV=.venv-$* PINS=
	.venv-$*/bin/python -m pip install -q -e ".[hf]" pytest hypothesis triton $(or $(PACKAGE_$*),$*)
	.venv-$*/bin/python -m pytest -q tests/integrations/test_$*.py tests/examples -k "not test_examples or $*"

# transformers' own tests of its MoE models, unmodified, with our experts; SRC is a checkout of it, and their test
# requirements (parameterized, pytest-xdist; torchvision for gemma4) must be installed. With EVERY_CALL=1 in the
# environment our block runs without gradients, too.
HF_MODELS ?= qwen3_moe mixtral olmoe deepseek_v3 gpt_oss gemma4 glm4_moe minimax
HF_TESTS ?= eager_matches_batched_and_grouped or training or gradient_checkpointing or overfit
hf-tests: $(VENV)/.test
	cd $(SRC) && PYTHONPATH=$(CURDIR)/src:$(CURDIR)/tests/integrations $(abspath $(PY)) -m pytest -q -p hf_plugin \
		$(foreach model,$(HF_MODELS),tests/models/$(model)/test_modeling_$(model).py) -k "$(HF_TESTS)"

coverage: $(VENV)/.test
	$(PY) -m coverage erase
	$(PY) -m coverage run -m pytest -q -n $(WORKERS) --dist loadfile -m "not gpu"
	$(PY) -m coverage combine -q
	$(PY) -m coverage report

# Whether all that is pinned is on the public index, as wheels. No other index counts, and no file on this disk.
PLATFORMS := x86_64-manylinux_2_28 aarch64-manylinux_2_28
PYTHONS   := 3.11 3.12 3.13 3.14
EXTRAS    := train hf jax plot# frameworks are not pinned: they do not all go together
BARE      := env -u UV_INDEX -u UV_DEFAULT_INDEX -u UV_INDEX_URL -u UV_EXTRA_INDEX_URL -u UV_FIND_LINKS UV_NO_CONFIG=1
resolve: $(VENV)/.uv
	@printf '%s\n' $(foreach python,$(PYTHONS),$(PLATFORMS:%=$(python):%)) | xargs -P 8 -n 1 sh -c 'at=$$1; \
		$(BARE) $(VENV)/bin/uv pip compile -q --only-binary :all: $(PINNED) $(EXTRAS:%=--extra %) pyproject.toml \
		requirements/*.txt \
		--python-version $${at%%:*} --python-platform $${at#*:} >/dev/null && echo "Python $${at%%:*}, $${at#*:}: all there"' -

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
	rm -rf $(VENV) .venv-newest $(FRAMEWORKS:%=.venv-%) .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage .coverage.* dist site

# A stamp for each set of packages, so that `make demo` installs no test tools.
$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.uv: $(PINS) | $(VENV)/bin/python
	$(PIP) uv
	touch $@

$(VENV)/.base: pyproject.toml $(PINS) | $(VENV)/.uv
	$(UV) --torch-backend auto --no-deps $(PINNED) torch 2>/dev/null || { echo "$(NO_INDEX)"; $(PIP) torch; }
	$(PIP) -e ".[train]"
	touch $@

$(VENV)/.demo: $(VENV)/.base
	$(PIP) -e ".[demo]"
	touch $@

$(VENV)/.test: $(VENV)/.base
	$(PIP) -e ".[jax,hf,plot]" -r requirements/test.txt
	touch $@

$(VENV)/.lint: $(VENV)/.test
	$(PIP) -r requirements/lint.txt
	touch $@

$(VENV)/.docs: $(VENV)/.base
	$(PIP) -r requirements/docs.txt
	touch $@

$(VENV)/.release: $(VENV)/.base
	$(PIP) -r requirements/release.txt
	touch $@
