# Every target uses .venv, which `make setup` makes from the pinned requirements and keeps up to date.
VENV := .venv
PY := $(VENV)/bin/python
UV := $(VENV)/bin/uv
# uv does not read pip's find-links; where there are none, it knows where PyTorch keeps its CPU builds.
ifneq ($(UV_FIND_LINKS)$(PIP_FIND_LINKS),)
export UV_FIND_LINKS := $(if $(UV_FIND_LINKS),$(UV_FIND_LINKS),$(PIP_FIND_LINKS))
TORCH :=
else
TORCH := --torch-backend cpu
endif

# Tests run in so many processes: one on the shared end-to-end server, the other beside it. WORKERS=0 runs all in one.
WORKERS ?= 2
PYTEST = $(PY) -m pytest -n $(WORKERS) -r s

.PHONY: setup demo serve test test-fast test-gpu gpu-wheels test-postgres check lint format types imports docs compat bench soak chaos fuzz audit lock proto clean

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

# Tells at its end which tests it left out, and why.
test: setup
	$(PYTEST)

test-fast: setup
	$(PYTEST) tests/unit tests/contract

# What only a GPU can show (docs/gpu.md), with whatever Python holds a torch for that GPU: make test-gpu GPU_PY=python3
# SKYRL_TEST_DEVICE=cpu rehearses it on a CPU.
GPU_PY ?= $(PY)
test-gpu:
	$(GPU_PY) -m pytest tests/gpu

# The small packages that the GPU tests need beside torch, transformers and peft, as wheels for another machine
GPU_PYTHON ?= 3.12
gpu-wheels:
	python3 -m pip download --quiet --no-deps --only-binary=:all: --python-version $(GPU_PYTHON) --implementation cp \
	  $(foreach n,28 27 17 12 5,--platform manylinux_2_$(n)_x86_64) --platform manylinux2014_x86_64 \
	  --platform manylinux1_x86_64 -d build/gpu-wheels -r requirements/gpu-tests.txt

# All but what is about SQLite, on a PostgreSQL that the tests start: make test-postgres TESTS="tests/e2e -k samples"
test-postgres: setup
	SKYRL_TEST_DATABASE=postgres $(PYTEST) $(TESTS)

check: lint types imports docs

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

format: setup
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

types: setup
	$(VENV)/bin/pyright

imports: setup
	$(VENV)/bin/lint-imports

docs: setup
	$(VENV)/bin/mkdocs build --strict --quiet

compat: setup
	$(PY) -m tests.e2e.sdk.table

bench: setup
	$(PY) -m benchmarks $(BENCH)

soak: setup
	$(PY) -m benchmarks.soak $(SOAK)

chaos: setup
	$(PY) -m tests.chaos $(CHAOS)

# Seconds that other inputs than in the tests are tried for: make fuzz FUZZ=3600
FUZZ ?= 300
fuzz: setup
	FUZZ_S=$(FUZZ) $(PY) -m pytest -q --timeout 0 tests/fuzz/test_fuzz.py

# Known holes in what requirements/cpu.txt pins; AUDIT="--ignore-vuln ID" leaves out one that is no danger here.
# Whether the advisories are there is asked with a version that is known to have some: a mirror may have none of them.
HOLED := https://pypi.org/pypi/jinja2/2.4.1/json
audit: $(VENV)/bin/uv
	@if $(PY) -c 'import json, urllib.request as r; json.load(r.urlopen("$(HOLED)", timeout=10))["vulnerabilities"][0]' \
	  2>/dev/null; \
	then $(UV) tool run pip-audit==2.10.1 --disable-pip --no-deps $(AUDIT) -r requirements/cpu.txt; \
	else echo 'skipped: no advisory data reachable'; fi

lock: $(VENV)/bin/uv
	$(UV) pip compile --quiet --universal --python-version 3.11 $(TORCH) --override requirements/overrides.txt \
	  --no-emit-package skyrl --no-header requirements/cpu.in -o requirements/cpu.txt
	$(UV) pip compile --quiet --universal --python-version 3.11 $(TORCH) --override requirements/cookbook-overrides.txt \
	  --no-header requirements/cookbook.in -o requirements/cookbook.txt
	for file in requirements/sdk/*.txt; do name=$${file##*/tinker-}; echo "tinker==$${name%.txt}" \
	  | $(UV) pip compile --quiet --universal --python-version 3.11 --no-header - -o $$file; done

proto: setup
	$(PY) -m grpc_tools.protoc -I skyrl/wire --python_out=skyrl/wire --pyi_out=skyrl/wire skyrl/wire/tinker.proto

clean:
	rm -rf $(VENV) site build dist
