# `make demo` sets up .venv with the planner and its runtime, in the versions of constraints.txt; `make test`, `check` and
# the others add what development needs.

PYTHON ?= python3
BIN := .venv/bin
RUNS := .venv/.runs
INSTALLED := .venv/.installed
INSTALL := $(BIN)/python -m pip install --constraint constraints.txt

.PHONY: demo test soak test-oldest test-gpu gpu-report check docs-check format docs clean

demo: $(RUNS)
	@PATH="$(CURDIR)/$(BIN):$$PATH" ./demo.sh

# One thread each: two processes share two cores better than four threads do. Each takes a file at a time, in the order
# of tests/conftest.py.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test: $(INSTALLED)
	$(PYTEST) -m 'not soak and not docs'

# The slow hardening that `make test` leaves out: sweeps of which it has a few cases.
soak: $(INSTALLED)
	$(PYTEST) -m soak

# The runtime with the oldest versions it promises to run with. This torch comes with CUDA libraries: several GB.
test-oldest:
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet torch==2.11.0 transformers==5.17.0 pytest pytest-xdist hypothesis \
		--editable '.[hf,lora]'
	OMP_NUM_THREADS=1 .venv-oldest/bin/python -m pytest -n 2 --dist loadfile -m 'not soak' \
		tests/runtime

# On a machine with a GPU, by whatever Python there is: what is measured there needs torch, transformers and pyarrow.
GPU_PYTHON = PYTHONPATH=.:runtime:cli:$$PYTHONPATH PYTHONUNBUFFERED=1 \
	$(shell test -x $(BIN)/python && echo $(BIN)/python || echo $(PYTHON))

# All tests that are marked `gpu`, a line each.
test-gpu:
	$(GPU_PYTHON) -m pytest --override-ini addopts=--import-mode=importlib -v -rs -m gpu \
		tests/runtime/test_gpu.py tests/runtime/distributed/test_gpu.py

# PARTS=kernels,probe,... SIZE=toy OUTPUT=folder: see benchmarks/gpu_report.py.
gpu-report:
	$(GPU_PYTHON) benchmarks/gpu_report.py \
		$(if $(PARTS),--parts $(PARTS)) $(if $(SIZE),--size $(SIZE)) $(if $(OUTPUT),--output $(OUTPUT))

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The words of pages against the source: names, tables, figures and lengths of lines. Commands of pages run in `test`.
docs-check: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'docs and not soak' tests/docs tests/cost/test_measured.py \
		tests/runtime/test_gpu_report.py

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The pages and pictures that programs write.
docs: $(INSTALLED)
	for program in docs/draw_*.py docs/generate_*.py docs/list_*.py; do $(BIN)/python $$program || exit 1; done

clean:
	rm -rf .venv .venv-oldest chunkplan-out dist

# hatchling comes first, so that the build itself runs with the pinned version too.
$(RUNS): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: Python 3.11 or newer is needed; name it with: make PYTHON=python3.12 ..." >&2; exit 2; }
	$(PYTHON) -m venv .venv
	$(INSTALL) --quiet hatchling
	$(INSTALL) --no-build-isolation --editable '.[runtime]'
	@touch $@

$(INSTALLED): $(RUNS)
	$(INSTALL) --no-build-isolation --editable '.[runtime,dev]'
	@touch $@
