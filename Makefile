# make demo           train a small model with the fused loss and with plain PyTorch
# make test           run the tests
# make test-machines  run the tests as on other processors: AVX2 only, AVX-512 without BF16, one thread
# make bench          measure what the result files lack or what has changed since, with other projects
# make docs           build the documentation as a site in build/docs
# make matrix         test the wheel from the oldest torch to the newest, and write docs/versions.md
# make rehearsal      run the GPU benchmark script on a CPU
#
# Each target sets up what it needs in .venv. The package is built once, and again when its sources change.
#
# On Linux, pip may install a build of torch with CUDA, which takes gigabytes. To choose the CPU build, pass the URL of
# its index, which the README's section Install has: make demo TORCH_ARGS="--index-url URL"
PYTHON ?= python3
TORCH_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --constraint constraints.txt

.PHONY: demo test test-machines bench docs matrix rehearsal clean
.NOTPARALLEL:

demo: $(VENV)/package $(VENV)/demo
	$(BIN)/python -m examples.demo

# A file of tests stays in one process, because its tests share work. The longest files come first (tests/conftest.py).
# Comparisons of speed run alone, afterwards.
SPEED := tests/benchmarks/test_speed.py
test: $(VENV)/package $(VENV)/dev
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder --ignore $(SPEED)
	$(BIN)/python -m pytest $(SPEED)

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

# ---- set-up: one marker file for each finished step

# The versions of constraints.txt are the tested ones.
$(VENV)/base: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install "pip>=25.1"  # knows dependency groups
	$(INSTALL) torch $(TORCH_ARGS)
	touch $@

# Without build isolation the paths of the tools stay the same, so that a second build compiles changed files only.
$(VENV)/package: $(VENV)/base $(VENV)/build pyproject.toml CMakeLists.txt $(wildcard csrc/*)
	$(INSTALL) --verbose --no-build-isolation --editable .
	touch $@

# The dependency groups of pyproject.toml.
GROUPS := build demo dev bench docs
$(GROUPS:%=$(VENV)/%): $(VENV)/%: $(VENV)/base pyproject.toml
	$(INSTALL) --group $*
	touch $@

clean:
	rm -rf $(VENV) build dist
