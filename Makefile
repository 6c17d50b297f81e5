# make up          set up and start the stack            make up ARGS="--port 9000 --workers 2"
# make test        set up and run the tests              make test ARGS="tests/unit -k radix"
# make test-wide   more cases of the same, too
# make test-long   the slow ones too
# make flaky N=10  the tests again and again, each time in another order, beside a busy neighbour
# make seeds       300 seeds of the simulator, others each day   make seeds RUNS=1000 SEED=50000
# make test-containers  build the images, run the stack in containers and break it (Docker, or podman)
# make test-programs    install programs that people have (instructor, litellm) beside .venv, and run them against a stack
# make test-compilers   compile the GPU kernels with the other Tritons that people have, each downloaded into build/
# make gpu         all that wants a GPU: tests, measurements, a table beside what is wanted     make gpu ARGS="--only correct"
# make check       format, lint, types, import contracts, unsafe calls, generated code and tables, tidiness
# make model       check the models in models/ (needs spin and gcc)
# make proto       generate shared/coppice_rpc from shared/protos
# make api-tables  write the tables of docs/API.md that the code has
# make metrics-reference   write docs/METRICS.md, of what the services register
# make boards      write the Grafana boards of deploy/grafana
# make docs        build the documentation as a site, in build/site
# make docs-serve  show it on http://127.0.0.1:8003 while it is written
# make compiled    compile the cores of the cache service and of the scheduler; some minutes, and a C compiler
# make demo-model  train the demo model again (about half an hour)
# make venv        only set up
# make lock        lock all dependencies again         make lock ARGS="--upgrade" or ARGS="--upgrade-package fastapi"

VENV := .venv
BIN := $(VENV)/bin
# PYTHON=... makes .venv with that one; otherwise the first of these that is new enough does.
PYTHON ?=
FOUND_PYTHON = $(or $(PYTHON),$(shell for name in python3.11 python3.12 python3.13 python3; do \
	$$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$name && break; done))
# Arguments of pip for torch alone. Where pip finds torch with CUDA only, and there is no GPU:
# TORCH_PIP_ARGS="--index-url URL_OF_CPU_WHEELS"
TORCH_PIP_ARGS ?=
# Tests wait now and then: three processes keep two cores at work. Torch with one thread each: they do not fight.
# Hundreds of processes are started: they read what the first of them compiled, also where Python is told to keep none.
TEST_ENV := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE PYTHONDONTWRITEBYTECODE=
PYTEST := $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder
# Rounds of `make flaky`.
N ?= 10
# Seeds of `make seeds`.
RUNS ?= 300
SEED ?= $(shell date +%Y%m%d)000
PROTOC = $(BIN)/python -m grpc_tools.protoc -I shared/protos --python_out=$(1) --grpc_python_out=$(1) \
	--mypy_out=$(1) --mypy_grpc_out=$(1) shared/protos/coppice_rpc/v1/*.proto
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: up compiled test test-wide test-long test-long-alone test-containers test-programs test-compilers gpu flaky seeds check model proto proto-drift api-tables metrics-reference boards docs docs-env docs-serve demo-model venv venv-up lock
.DEFAULT_GOAL := help

.PHONY: help
help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

# What constraints.txt locks is installed; scripts/set_up.py does nothing if it is there already.
SET_UP = @python=$(FOUND_PYTHON); $${python:-false} -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	echo "make: Python 3.11 or newer is needed (Debian, Ubuntu: apt-get install python3 python3-venv); if it has" \
	"another name: PYTHON=/path/to/python" >&2; exit 1; }; \
	exec $$python -m scripts.set_up $(1) $(if $(PYTHON),--python-is-given) --torch-arguments="$(TORCH_PIP_ARGS)"

venv-up:
	$(call SET_UP,up)

venv:
	$(call SET_UP,dev)

up: venv-up
	@exec $(BIN)/coppice up $(ARGS)

compiled: venv
	$(BIN)/python -m scripts.compile_cores $(ARGS)

test: venv
	$(TEST_ENV) $(PYTEST) $(ARGS)

test-wide:
	@$(MAKE) --no-print-directory test ARGS="-m 'not long and not containers' $(ARGS)"

# The wide set by files, as always; then the long ones one by one: a file of them would keep one process for hours.
# What fails in the one half does not keep the other from running, and fails the whole.
test-long:
	@$(MAKE) --no-print-directory --keep-going --jobs=1 test-wide test-long-alone

# Each is named as it ends (-vv takes back pytest's -q): who must stop the run knows what has passed.
test-long-alone: venv
	$(TEST_ENV) $(BIN)/python -m pytest -n 2 --dist worksteal -vv --durations 25 -m 'long and not containers' $(ARGS)

flaky: venv
	@$(TEST_ENV) $(BIN)/python -m tests.flaky $(N) $(PYTEST) $(ARGS)

# The day is the first seed, so that each day runs others; RUNS=... SEED=... replay those of another.
seeds: venv
	$(BIN)/coppice sim --seed $(SEED) --runs $(RUNS) --steps 4000 --jobs 2 --brief --shrink $(ARGS)

test-containers: venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt podman-compose==1.6.0
	$(BIN)/python -m pytest -p no:xdist -rs -m containers tests/containers $(ARGS)

# These programs want other versions than .venv has: they get an environment of their own, and tests start them there.
PROGRAMS := build/programs
test-programs: venv
	test -x $(PROGRAMS)/bin/python || $(BIN)/python -m venv $(PROGRAMS)
	$(PROGRAMS)/bin/python -m pip install --quiet --disable-pip-version-check \
		-c tests/programs/constraints.txt -r tests/programs/requirements.txt
	$(TEST_ENV) $(BIN)/python -m pytest -p no:xdist -rs -m programs tests/programs $(ARGS)

# Beside the one of .venv, which is that of torch 2.13: 3.6 comes with torch 2.11, and newer ones are to come.
COMPILERS ?= 3.6.0 3.9.0
test-compilers: venv
	@for version in $(COMPILERS); do \
	  folder=build/triton-$$version; \
	  [ -d $$folder/triton ] || $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
	    --target $$folder triton==$$version || exit 1; \
	  echo "--- triton $$version"; \
	  PYTHONPATH=$$folder $(BIN)/python -m benchmarks.kernels.compiled_kernels $(ARGS) || exit 1; \
	  PYTHONPATH=$$folder $(TEST_ENV) $(BIN)/python -m pytest -q -n 2 -m "" -W default tests/kernels/compiled || exit 1; \
	done

gpu: venv
	@exec $(BIN)/python -m benchmarks.kernels.gpu $(ARGS)

check: venv proto-drift
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m scripts.api_tables --check
	$(BIN)/python -m scripts.metrics_reference --check
	$(BIN)/python -m scripts.grafana_boards --check
	$(BIN)/bandit -ll -q -r services shared tools
	$(BIN)/python -m pytest -p no:xdist tests/test_tidy.py

model:
	models/check $(ARGS)

proto: venv
	$(call PROTOC,shared)

# What is committed must be what protoc makes of the contract; generated next to it, so that checking changes nothing.
proto-drift: venv
	rm -rf build/proto && mkdir -p build/proto
	$(call PROTOC,build/proto)
	for file in build/proto/coppice_rpc/v1/*; do cmp "$$file" "shared/coppice_rpc/v1/$$(basename "$$file")" || \
		{ echo "generated code differs from the protos: run make proto" >&2; exit 1; }; done

api-tables: venv
	$(BIN)/python -m scripts.api_tables

metrics-reference: venv
	$(BIN)/python -m scripts.metrics_reference

boards: venv
	$(BIN)/python -m scripts.grafana_boards

# MkDocs wants nothing of the project: it gets an environment of its own. Links that lead nowhere fail the build.
DOCS := build/docs-env
MKDOCS = NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs
docs-env:
	test -x $(DOCS)/bin/python || $(or $(FOUND_PYTHON),python3) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check \
		-c scripts/docs_site/constraints.txt -r scripts/docs_site/requirements.txt

# Not --quiet: warnings that are not told are not counted either, and --strict is about those.
docs: docs-env
	$(MKDOCS) build --strict
	$(DOCS)/bin/python -m scripts.docs_site.offline build/site

docs-serve: docs-env
	$(MKDOCS) serve --dev-addr 127.0.0.1:8003

demo-model: venv
	$(BIN)/python -m demo.train $(ARGS)

# One lock for every Python and platform. torch pins its CUDA packages itself, each build others: they are left out.
# uv looks in the public index alone; what a machine's pip finds besides must not end in the lock.
lock: venv
	$(BIN)/python -m pip install --quiet "$$(grep -o 'uv==[0-9.]*' pyproject.toml)"
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --all-extras --no-annotate \
		--custom-compile-command "make lock" --output-file constraints.txt $(ARGS) pyproject.toml
	sed -i.old -E '/^(cuda|nvidia)-/d' constraints.txt && rm constraints.txt.old
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --no-annotate --custom-compile-command "make lock" \
		--output-file tests/programs/constraints.txt $(ARGS) tests/programs/requirements.txt
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --no-annotate --custom-compile-command "make lock" \
		--output-file scripts/docs_site/constraints.txt $(ARGS) scripts/docs_site/requirements.txt
