# Two commands: `make demo` trains a small policy on arithmetic, `make test` runs the tests. Both set everything up.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test bench clean

demo: $(VENV)/ready
	$(BIN)/python -m examples.arithmetic

test: $(VENV)/ready
	$(BIN)/python -m pytest

bench: $(VENV)/ready
	$(BIN)/python -m benchmarks.logits_level --save
	$(BIN)/python -m benchmarks.hidden_level --save
	$(BIN)/python -m benchmarks.tables --write

# torch goes first: constraints.txt names the build that everything else is tested with.
$(VENV)/ready: pyproject.toml constraints.txt CMakeLists.txt $(wildcard csrc/*)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build dist
