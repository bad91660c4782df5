# Two commands: `make demo` trains a small policy by the fused loss and by a plain one, `make test` runs the tests. Both set up what they
# need: the package is built once, and again only where its sources have changed; each target adds packages beside it.
# `make test-machines` runs the tests as on other kinds of processor: with AVX2 alone, with AVX-512 without BF16, with one thread.
# `make bench` measures us beside the peers: what the committed result files lack or what has changed since.
# `make docs` builds the documentation as a site in build/docs; `make matrix` tests the wheel from the oldest torch to the newest, with the
# budgets of the compiled kernels of each Triton, and writes docs/versions.md; `make rehearsal` runs the GPU kit on a CPU.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --constraint constraints.txt

.PHONY: demo test test-machines bench docs matrix rehearsal clean
.NOTPARALLEL:

demo: $(VENV)/package $(VENV)/demo
	$(BIN)/python -m examples.demo

# A file of tests stays in one process, so that what its tests share is made once; the longest come first, in the order of
# tests/conftest.py. Comparisons of speed run alone, afterwards.
SPEED := tests/benchmarks/test_speed.py
test: $(VENV)/package $(VENV)/dev
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder --ignore $(SPEED)
	$(BIN)/python -m pytest $(SPEED)

# The same tests under each set of instructions that this processor can be limited to.
test-machines: $(VENV)/package $(VENV)/dev
	$(BIN)/python tests/repository/machines.py

bench: $(VENV)/package $(VENV)/bench
	status=0; $(BIN)/python -m benchmarks || status=$$?; \
	$(BIN)/python -m benchmarks.report --write && exit $$status

docs: $(VENV)/package $(VENV)/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "open build/docs/index.html; with the search: $(BIN)/python -m http.server --directory build/docs --bind 127.0.0.1"

matrix: $(VENV)/package $(VENV)/dev
	$(BIN)/python tests/repository/versions.py environments --write

rehearsal: $(VENV)/package $(VENV)/dev
	$(BIN)/python -m pytest -m slow tests/benchmarks/test_gpu_kit.py

# ---- the set-up: a file for each step that is done

# constraints.txt names the torch that everything else is tested with.
$(VENV)/base: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install "pip>=25.1"  # knows dependency groups
	$(INSTALL) torch
	touch $@

# Built with tools of this environment, whose paths stay the same, so that a second build compiles what has changed alone.
$(VENV)/package: $(VENV)/base $(VENV)/build pyproject.toml CMakeLists.txt $(wildcard csrc/*)
	$(INSTALL) --verbose --no-build-isolation --editable .
	touch $@

# A group of pyproject.toml.
GROUPS := build demo dev bench docs
$(GROUPS:%=$(VENV)/%): $(VENV)/%: $(VENV)/base pyproject.toml
	$(INSTALL) --group $*
	touch $@

clean:
	rm -rf $(VENV) build dist
