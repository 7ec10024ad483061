# Each target sets up .venv by itself, from nothing but Python 3.11 and make.
PYTHON ?= python3
# The CPU build in development; the range in pyproject.toml stays open.
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
SEEDS ?= 2000

export OMP_NUM_THREADS ?= 1

.PHONY: venv demo test check format simulate clean

venv: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

demo: venv ## three nodes train one model; one is killed and comes back
	$(BIN)/python examples/demo.py

test: check ## everything that CI runs
	$(BIN)/python -m pytest

check: venv ## style, types, imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) out dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
