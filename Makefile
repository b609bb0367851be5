# Two commands: `make demo` and `make test`. Each does all the set-up it needs, once.
# pip and venv only; EXTRAS=fast,guided adds optional parts, PYTHON=... picks the interpreter.

PYTHON ?= python3
VENV ?= .venv
EXTRAS ?=
PYTEST ?= --numprocesses 2 --dist loadfile
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt
comma := ,

.DEFAULT_GOAL := help
.PHONY: help demo test test-all lint format bench clean

help:
	@echo "make demo      set up, then the head's report, a next-token table and a continuation"
	@echo "make test      set up, then lint, types and the whole test suite"
	@echo "make test-all  the same, with the tests that need gemma3-270m (its terms apply)"
	@echo "make bench     every benchmark, one after the other"
	@echo "make format    let ruff format the code"
	@echo "make clean     remove $(VENV) and the tools' caches"

# A fresh venv gets its pip from the outer one: quicker than ensurepip, and with a progress bar.
$(BIN)/pip:
	@echo "[set-up] creating $(VENV)"
	@$(PYTHON) -c 'import sys; sys.exit("lmhead needs Python 3.11 or newer, got " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	@$(PYTHON) -m venv --without-pip $(VENV)
	@$(PYTHON) -m pip --python $(BIN)/python install --disable-pip-version-check --constraint constraints.txt pip

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/pip
	@echo "[set-up] installing lmhead and what it needs into $(VENV)"
	@$(PIP) --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "[set-up] installing the tools for development"
	@$(PIP) --editable '.[dev$(if $(EXTRAS),$(comma)$(EXTRAS))]'
	@touch $@

demo: $(VENV)/.installed
	@$(BIN)/lmhead pull smollm2-135m
	@$(BIN)/lmhead inspect smollm2-135m
	@$(BIN)/lmhead next "The capital of France is"
	@$(BIN)/lmhead generate "The capital of France is" -n 24

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

test: lint
	@$(BIN)/lmhead pull smollm2-135m
	$(BIN)/python -m pytest $(PYTEST)

test-all: lint
	@$(BIN)/lmhead pull smollm2-135m
	@$(BIN)/lmhead pull gemma3-270m --accept-terms
	$(BIN)/python -m pytest $(PYTEST)

bench: $(VENV)/.installed-dev
	@for file in benchmarks/*.py; do echo "== $$file"; $(BIN)/python $$file || exit 1; done

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis
