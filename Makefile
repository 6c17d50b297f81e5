# make up          set up and start the stack            make up ARGS="--port 9000 --workers 2"
# make test        set up and run the tests              make test ARGS="tests/unit -k radix"
# make test-wide   more cases of the same, too
# make test-long   the slow ones too
# make flaky N=10  the tests again and again, each time in another order, beside a busy neighbour
# make check       format, lint, types, import contracts, generated code, tidiness
# make proto       generate shared/coppice_rpc from shared/protos
# make demo-model  train the demo model again (about half an hour)
# make venv        only set up

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13 python3,$(shell \
	command -v $(name) >/dev/null 2>&1 && $(name) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $(name))))
# Where the usual index offers torch with CUDA only, and there is no GPU: TORCH_PIP_ARGS="--index-url URL_OF_CPU_WHEELS"
TORCH_PIP_ARGS ?=
# Two test processes suit two cores; torch with one thread each keeps them from fighting.
TEST_ENV := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder
# Rounds of `make flaky`.
N ?= 10
PROTOC = $(BIN)/python -m grpc_tools.protoc -I shared/protos --python_out=$(1) --grpc_python_out=$(1) \
	--mypy_out=$(1) --mypy_grpc_out=$(1) shared/protos/coppice_rpc/v1/*.proto
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: up test test-wide test-long flaky check proto proto-drift demo-model venv
.DEFAULT_GOAL := help

.PHONY: help
help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

venv: $(STAMP)

# torch goes first and alone, so that the pinned build is chosen before anything else asks for one. The GPU build
# brings the triton that it needs, which the constraint for CPU machines must not overrule.
$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "make: Python 3.11 or newer is needed; set PYTHON=/path/to/python" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	if command -v nvidia-smi >/dev/null 2>&1; then grep -v '^triton' constraints.txt; else cat constraints.txt; fi > $(VENV)/constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH_PIP_ARGS) "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt -e '.[dev]'
	touch $(STAMP)

up: $(STAMP)
	@exec $(BIN)/coppice up $(ARGS)

test: $(STAMP)
	$(TEST_ENV) $(PYTEST) $(ARGS)

test-wide: $(STAMP)
	$(TEST_ENV) $(PYTEST) -m 'not long' $(ARGS)

test-long: $(STAMP)
	$(TEST_ENV) $(PYTEST) -m 'long or not long' $(ARGS)

flaky: $(STAMP)
	@$(TEST_ENV) $(BIN)/python -m tests.flaky $(N) $(PYTEST) $(ARGS)

check: $(STAMP) proto-drift
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -p no:xdist tests/test_tidy.py

proto: $(STAMP)
	$(call PROTOC,shared)

# What is committed must be what protoc makes of the contract; generated next to it, so that checking changes nothing.
proto-drift: $(STAMP)
	rm -rf build/proto && mkdir -p build/proto
	$(call PROTOC,build/proto)
	for file in build/proto/coppice_rpc/v1/*; do cmp "$$file" "shared/coppice_rpc/v1/$$(basename "$$file")" || \
		{ echo "generated code differs from the protos: run make proto" >&2; exit 1; }; done

demo-model: $(STAMP)
	$(BIN)/python -m demo.train $(ARGS)
