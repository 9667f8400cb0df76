# `make demo` and `make test` set up what they need: a virtual environment in .venv with the versions of constraints.txt.

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: demo test check format clean

demo: $(INSTALLED)
	@PATH="$(CURDIR)/$(BIN):$$PATH" ./demo.sh

test: $(INSTALLED)
	$(BIN)/python -m pytest

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv chunkplan-out dist

# hatchling comes first, so that the build itself runs with the pinned version too.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: Python 3.11 or newer is needed; name it with: make PYTHON=python3.12 ..." >&2; exit 2; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt hatchling
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[runtime,dev]'
	@touch $@
