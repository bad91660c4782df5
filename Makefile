# Two commands: `make demo` trains a small policy by the fused loss and by a plain one, `make test` runs the tests. Both set everything up.
# `make bench` measures us beside the peers: what the committed result files lack or what has changed since.
# `make docs` builds the documentation as a site in build/docs; `make matrix` tests the wheel from the oldest torch to the newest, with the
# budgets of the compiled kernels of each Triton, and writes docs/versions.md; `make rehearsal` runs the GPU kit on a CPU.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test bench docs matrix rehearsal clean

demo: $(VENV)/ready
	$(BIN)/python -m examples.demo

# A file of tests stays in one process, so that what its tests share is made once; the longest come first, in the order of
# tests/conftest.py. Comparisons of speed run alone, afterwards.
SPEED := tests/benchmarks/test_speed.py
test: $(VENV)/ready
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder --ignore $(SPEED)
	$(BIN)/python -m pytest $(SPEED)

bench: $(VENV)/ready
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[bench,dev]"
	status=0; $(BIN)/python -m benchmarks || status=$$?; \
	$(BIN)/python -m benchmarks.report --write && exit $$status

docs: $(VENV)/ready
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "open build/docs/index.html; with the search: $(BIN)/python -m http.server --directory build/docs --bind 127.0.0.1"

matrix: $(VENV)/ready
	$(BIN)/python tests/repository/matrix.py --write

rehearsal: $(VENV)/ready
	$(BIN)/python -m pytest -m slow tests/benchmarks/test_gpu_kit.py

# torch goes first: constraints.txt names the build that everything else is tested with.
$(VENV)/ready: pyproject.toml constraints.txt CMakeLists.txt $(wildcard csrc/*)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build dist
