# Everything runs in .venv, which the first target that needs it creates. Nothing is installed again,
# and nothing is fetched, until pyproject.toml or constraints.txt changes.
#
#   make test PYTHON=python3.12   another interpreter for .venv
#   make test ARGS="-k lars"      more arguments for the command of a target
#   make test JOBS=0              in one process, for a debugger
#   make test PY=python3          no .venv: an environment of your own, as it is
#   make demo TORCH_ARGS="..."    more arguments for `pip install torch`: the index of another build
#   make release PYTHON=python3.10 RELEASE_ARGS="torch==2.7.* numba==0.61.*"    the oldest versions

PYTHON ?= python3
ARGS ?=
JOBS ?= 2
TORCH_ARGS ?=
RELEASE_ARGS ?= --constraint constraints.txt
VENV := .venv
PY := $(VENV)/bin/python
PYTEST = $(PY) -m pytest --numprocesses $(JOBS)
PIP := $(PY) -m pip --disable-pip-version-check --quiet
RELEASE := $(VENV)/release
CONSTRAINED := install --constraint constraints.txt

# With PY on the command line there is nothing to create.
ifeq ($(origin PY),command line)
DEV :=
DOCS :=
PEERS :=
FRAMEWORKS :=
else
DEV := $(VENV)/.installed-dev
DOCS := $(VENV)/.installed-docs
PEERS := $(VENV)/.installed-peers
FRAMEWORKS := $(VENV)/.installed-frameworks
endif

GPU_TESTS = $(shell grep -l 'mark\.gpu' tests/test_*.py)

# Those of them that need nothing else of a GPU.
EMULATED_TESTS := tests/test_triton.py tests/test_triton_formats.py tests/test_triton_passes.py \
  tests/test_triton_tables.py

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-all emulate peers frameworks lint format types docs release gpu-check bench clean

help:  ## list the targets
	@$(PYTHON) -c 'import re; print("\n".join("%-10s %s" % t for t in re.findall(r"(?m)^([a-z-]+):.*?## +(.*)", open("Makefile").read())))'

demo: $(DEV)  ## train with 32-, 8- and 4-bit optimizers and compare them
	$(PY) -m benchmarks.quality.compare $(ARGS)

test: $(DEV)  ## run the tests that every change needs
	$(PYTEST) -m "not slow" $(ARGS)

test-all: $(DEV)  ## run all tests: every combination of settings, and the slow ones
	$(PYTEST) $(ARGS)

# Which compiles what other tests interpret.
emulate: $(DEV)  ## run the compiled GPU kernels in an emulator, without a GPU
	TRITON_INTERPRET=0 $(PYTEST) tests/emulated $(ARGS)
	TRITON_INTERPRET=0 $(PYTEST) -m gpu $(EMULATED_TESTS) $(ARGS)

peers: $(PEERS)  ## compare with the optimizers, names and checkpoints of other libraries
	$(PYTEST) tests/test_peers.py tests/test_peers_checkpoints.py \
	  tests/test_bitsandbytes_names.py tests/test_cli_peers.py $(ARGS)

frameworks: $(FRAMEWORKS)  ## run the training loops of transformers, accelerate, Lightning, peft, timm and gsplat
	$(PYTEST) tests/frameworks $(ARGS)

lint: $(DEV)  ## check style and formatting
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

format: $(DEV)  ## rewrite what `lint` can put right by itself
	$(PY) -m ruff check --fix-only .
	$(PY) -m ruff format .

types: $(DEV)  ## check types
	$(PY) -m mypy

docs: $(DOCS)  ## build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet

release: $(DEV)  ## build sdist and wheel, install the wheel into a clean environment and use it there
	rm -rf build dist $(RELEASE)
	$(PY) -c 'from setuptools.build_meta import build_sdist; build_sdist("dist")'
	$(PIP) wheel --no-index --no-deps --no-build-isolation --wheel-dir dist dist/*.tar.gz
	$(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/python -m pip --disable-pip-version-check --quiet install \
	  $(TORCH_ARGS) $(RELEASE_ARGS) "$$(echo dist/*.whl)[cli]"
	cp tests/user_program.py $(RELEASE)
	cd $(RELEASE) && bin/python -I user_program.py
	cd $(RELEASE) && bin/lowbit-optim estimate 4096x4096,4096 --gpu 24GB
	cd $(RELEASE) && $(abspath $(PY)) -m mypy --strict --untyped-calls-exclude=torch --config-file= \
	  --python-executable bin/python --cache-dir=cache user_program.py

bench: $(DEV)  ## time steps on the CPU beside torch's
	$(PY) -m benchmarks.speed.cpu $(ARGS)

gpu-check: JOBS = $(shell n=$$(nproc 2> /dev/null || echo 2); echo $$((n < 8 ? n : 8)))
gpu-check: $(DEV)  ## on a machine with a GPU: its tests, then its benchmark
	@status=0; export PYTHONPATH="$(CURDIR):$(CURDIR)/kernels$${PYTHONPATH:+:$$PYTHONPATH}"; set -x; \
	$(PYTEST) -m gpu $(GPU_TESTS) $(ARGS) || status=1; \
	$(PY) -m benchmarks.speed.gpu || status=1; exit $$status

clean:  ## remove .venv and everything that was built
	rm -rf $(VENV) build dist site *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "lowbit_optim needs Python 3.10 or newer, and $(PYTHON) is" \
	       "$$($(PYTHON) --version 2>&1 || echo missing)." \
	       "Name another: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "$(PYTHON) cannot create a virtual environment; on Debian and Ubuntu its venv module" \
	       "is a package of its own, python3-venv." >&2; exit 1; }
	touch $@

# torch first and alone, so that no other requirement chooses its build; setuptools so that building
# the package needs no environment, and so no network, of its own.
$(VENV)/.installed-%: pyproject.toml constraints.txt $(VENV)/.created
	$(PIP) $(CONSTRAINED) torch $(TORCH_ARGS)
	$(PIP) $(CONSTRAINED) setuptools
	$(PIP) $(CONSTRAINED) --no-build-isolation --editable '.[$*]'
	touch $@

# The last three want torchvision or Lightning; the tests load single files of theirs, which do not.
$(VENV)/.installed-peers: pyproject.toml constraints.txt $(VENV)/.installed-dev
	$(PIP) $(CONSTRAINED) --no-build-isolation --editable '.[peers,test]'
	$(PIP) $(CONSTRAINED) --no-deps timm lightning-bolts 'pylocron; python_version >= "3.11"'
	touch $@

$(VENV)/.installed-frameworks: pyproject.toml constraints.txt $(VENV)/.installed-dev
	$(PIP) $(CONSTRAINED) --no-build-isolation --editable '.[frameworks,test]'
	$(PIP) $(CONSTRAINED) --no-deps timm
	touch $@
