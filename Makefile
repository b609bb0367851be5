# Two commands: `make demo` and `make test`. Each does all the set-up it needs, once.
# pip and venv only; PYTHON=... picks the interpreter.

PYTHON ?= python3
VENV ?= .venv
BARE ?= .venv-bare
DIST ?= .venv-dist
KILLS ?= 64
# The interpreters that the wheel is tried with; the classifiers in pyproject.toml name the same.
PYTHONS ?= python3.11
WHEELS ?= .wheels
COUNT ?= 20000
JSON_COUNT ?= 5000
EXAMPLES ?= 2000
# Without the last option, pytest-xdist waits for ever for the other tests of a worker that crashed.
PYTEST ?= --numprocesses 2 --dist loadfile --max-worker-restart 0
BIN := $(VENV)/bin
PIP := -m pip install --disable-pip-version-check --constraint constraints.txt
SOURCES := $(shell find src -name '*.py')

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-bare test-llamacpp test-max lint format bench fuzz faults lock locked dist try-wheel docs notebooks clean

help:
	@echo "make demo      set up, then show a head's report, a next-token table and a continuation"
	@echo "make test      set up, then run the linters, the type checker, all tests and test-bare"
	@echo "make test-all  the same, plus the tests that need gemma3-270m (its terms apply)"
	@echo "make test-bare tests without any extra: each missing one gives a line that says what to install"
	@echo "make test-llamacpp  build llama-cpp-python once, then test the llama.cpp body"
	@echo "make test-max  install Modular MAX, then test its engine; it compiles for minutes"
	@echo "make bench     run every benchmark, one after the other"
	@echo "make fuzz      feed every reader COUNT=20000 mutated files (JSON_COUNT=5000)"
	@echo "make faults    interrupt every command that writes, KILLS=64 times each, and count what is damaged"
	@echo "make dist      build the wheel and sdist, check advisories, write a bill of materials, all into dist/"
	@echo "make try-wheel install the wheel of dist/ into fresh environments (PYTHONS=python3.11 ...) and try it"
	@echo "make locked    set up for development from requirements-dev.lock, checking every hash"
	@echo "make lock      regenerate the lock files"
	@echo "make docs      generate docs/cli.md from the help of every command, then build the site into site/"
	@echo "make notebooks run the notebooks in examples/ and store their output"
	@echo "make format    format the code with ruff"
	@echo "make clean     remove $(VENV), $(BARE), $(DIST), dist, site and the tools' caches"

# A fresh venv gets its pip from the outer one: quicker than ensurepip, and with a progress bar.
$(BIN)/pip $(BARE)/bin/pip $(DIST)/bin/pip: %/bin/pip:
	@echo "[set-up] creating $*"
	@$(PYTHON) -c 'import sys; sys.exit("lmhead needs Python 3.11 or newer, got " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	@$(PYTHON) -m venv --without-pip $*
	@$(PYTHON) -m pip --python $*/bin/python install --disable-pip-version-check --constraint constraints.txt pip

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/pip
	@echo "[set-up] installing lmhead and what it needs into $(VENV)"
	@$(BIN)/python $(PIP) --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "[set-up] installing the extras that the tests use, and the tools for development"
	@$(BIN)/python $(PIP) --editable '.[dev]'
	@touch $@

# The wheel as a user gets it, without what an extra adds; `test` is what the tests are made of.
$(BARE)/.installed: pyproject.toml constraints.txt $(SOURCES) | $(BARE)/bin/pip
	@echo "[set-up] installing lmhead alone into $(BARE)"
	@$(BARE)/bin/python $(PIP) --quiet '.[test]'
	@touch $@

demo: $(VENV)/.installed
	@$(BIN)/lmhead pull smollm2-135m
	@$(BIN)/lmhead inspect smollm2-135m
	@$(BIN)/lmhead next "The capital of France is"
	@$(BIN)/lmhead generate "The capital of France is" -n 24

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/python scripts/words.py
	$(BIN)/mypy

test: lint
	@$(BIN)/lmhead pull smollm2-135m
	$(BIN)/python -m pytest $(PYTEST)
	@$(MAKE) --no-print-directory test-bare

test-all: lint
	@$(BIN)/lmhead pull smollm2-135m
	@$(BIN)/lmhead pull gemma3-270m --accept-terms
	$(BIN)/python -m pytest $(PYTEST)
	@$(MAKE) --no-print-directory test-bare

test-bare: $(BARE)/.installed
	LMHEAD_BARE=1 $(BARE)/bin/python -m pytest $(PYTEST) -m bare

# Built from its source, for this machine's processor, and kept by version and processor.
LLAMACPP := $(shell sed -n 's/^llama_cpp_python==//p' constraints.txt)
LLAMACPP_WHEELS := $(WHEELS)/llama_cpp_python-$(LLAMACPP)-$(shell (grep -m1 'model name' /proc/cpuinfo || uname -m) 2>/dev/null | cksum | cut -d' ' -f1)

$(LLAMACPP_WHEELS)/.built: | $(BIN)/pip
	@echo "[set-up] building llama-cpp-python $(LLAMACPP) from its source; it takes a few minutes, once"
	@CMAKE_ARGS="-DLLAVA_BUILD=OFF $(CMAKE_ARGS)" $(BIN)/python -m pip wheel --disable-pip-version-check --no-deps --no-binary llama-cpp-python --wheel-dir $(LLAMACPP_WHEELS) llama-cpp-python==$(LLAMACPP)
	@touch $@

test-llamacpp: $(VENV)/.installed-dev $(LLAMACPP_WHEELS)/.built
	@$(BIN)/python $(PIP) --find-links $(LLAMACPP_WHEELS) --editable '.[llamacpp]'
	@$(BIN)/lmhead pull smollm2-135m
	LMHEAD_LLAMACPP=1 $(BIN)/python -m pytest $(PYTEST) tests/body/test_protocol.py tests/body/test_llama_cpp.py tests/steer/bound/test_llama_cpp.py tests/serve/api/test_llama_cpp.py

# MAX compiles for minutes, and one process cannot hold several of its sessions: a process for each file.
test-max: $(VENV)/.installed-dev
	@$(BIN)/python $(PIP) --editable '.[max]'
	@for file in tests/head/test_max_head.py tests/body/test_max_body.py; do $(BIN)/python -m pytest $$file || exit 1; done

fuzz: $(VENV)/.installed-dev
	$(BIN)/python tests/fuzz/harness.py --count $(COUNT) --json-count $(JSON_COUNT)
	LMHEAD_EXAMPLES=$(EXAMPLES) $(BIN)/python -m pytest tests/fuzz/test_shaped.py

faults: $(VENV)/.installed-dev
	$(BIN)/python tests/faults/breaking.py --kills $(KILLS)

# torch by its pinned version (see scripts/lock.py), everything else by its hash, and no code is built.
locked: | $(BIN)/pip
	@$(BIN)/python $(PIP) torch
	@$(BIN)/python -m pip install --disable-pip-version-check --require-hashes --no-deps --only-binary :all: --requirement requirements-dev.lock
	@$(BIN)/python -m pip install --disable-pip-version-check --no-deps --editable .
	@touch $(VENV)/.installed $(VENV)/.installed-dev

$(DIST)/.installed: requirements-dist.lock | $(DIST)/bin/pip
	@$(DIST)/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes --requirement requirements-dist.lock
	@touch $@

dist: $(DIST)/.installed
	$(DIST)/bin/python scripts/dist.py

try-wheel: dist
	$(DIST)/bin/python scripts/try_wheel.py $(PYTHONS)

lock: | $(DIST)/bin/pip
	@$(DIST)/bin/python -m pip install --quiet --disable-pip-version-check uv
	$(DIST)/bin/python scripts/lock.py

docs: $(VENV)/.installed-dev
	$(BIN)/python docs/write_cli.py
	NO_MKDOCS_2_WARNING=1 SEPARATE_SIGNATURES=true $(BIN)/python -m mkdocs build

notebooks: $(VENV)/.installed-dev
	$(BIN)/python scripts/notebooks.py --write

# These take files of statements, which the project does not hold.
WITH_DATA := benchmarks/statements.py benchmarks/detect.py benchmarks/detect_time.py

bench: $(VENV)/.installed-dev
	@for file in $(filter-out $(WITH_DATA),$(wildcard benchmarks/*.py)); do echo "== $$file"; $(BIN)/python $$file || exit 1; done

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf $(VENV) $(BARE) $(DIST) $(WHEELS) dist site .pytest_cache .ruff_cache .mypy_cache .hypothesis
