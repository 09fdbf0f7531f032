# make demo   train a language model over two workers, from a fresh clone
# make test   all tests but the slow ones, with lint and types
# make test-all   the slow and random ones too
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
READY := $(VENV)/.ready
READY_DEV := $(VENV)/.ready-dev

.PHONY: demo test test-all lint setup clean

setup: $(READY_DEV)

# torch first and by its number: a range would bring a CUDA build of several GB
$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) "torch==2.13.0"
	$(PIP) --editable ".[cpu]"
	touch $(READY)

$(READY_DEV): $(READY)
	$(PIP) --editable ".[cpu,dev]"
	touch $(READY_DEV)

demo: $(READY)
	$(BIN)/reparto train

lint: $(READY_DEV)
	$(BIN)/ruff check src tests examples docs/pictures
	$(BIN)/ruff format --check src tests examples docs/pictures
	$(BIN)/mypy

test: lint $(READY_DEV)
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-all: lint
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "slow or not slow"

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
