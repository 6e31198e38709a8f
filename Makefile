# make run: install into .venv and run the demo; make test: lint, types and tests; both need Python >= 3.11 only.
PYTHON ?= python3
VENV := .venv
OLDEST := .venv-oldest
PIP := -m pip install --quiet --disable-pip-version-check
export HF_HUB_OFFLINE := 1
export PIP_NO_INPUT := 1

.PHONY: run test test-oldest lint clean

run: $(VENV)/.run
	$(VENV)/bin/longreach demo

test: $(VENV)/.test lint
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n 2

test-oldest: $(OLDEST)/.test
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest -n 2 tests/adapters tests/methods

lint: $(VENV)/.test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

# torch comes first and alone: with it in place, nothing that follows can pull in another build of it
%/bin/python:
	@echo "installing torch into $* (the largest download; README.md says how large)"
	@$(PYTHON) -m venv $*
	@$*/bin/python $(PIP) torch==2.13.0

$(VENV)/.run: constraints.txt pyproject.toml | $(VENV)/bin/python
	@echo "installing longreach and its dependencies into $(VENV)"
	@$(VENV)/bin/python $(PIP) -c constraints.txt -e .
	@touch $@

$(VENV)/.test: constraints.txt pyproject.toml | $(VENV)/bin/python
	@echo "installing longreach, its dependencies and test tools into $(VENV)"
	@$(VENV)/bin/python $(PIP) -c constraints.txt -e ".[dev]"
	@touch $@ $(VENV)/.run

$(OLDEST)/.test: constraints-oldest.txt pyproject.toml | $(OLDEST)/bin/python
	@echo "installing longreach with the oldest supported transformers into $(OLDEST)"
	@$(OLDEST)/bin/python $(PIP) -c constraints-oldest.txt -e ".[dev]"
	@touch $@

clean:
	rm -rf $(VENV) $(OLDEST) build dist .ruff_cache .mypy_cache .hypothesis
