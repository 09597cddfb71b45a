# The commands a person types; `make help` lists them. Two ways to run each of them:
#   make test                          in .venv, which is created here with all it needs
#   make test PYTHON=/path/to/python   in that environment, which is only read: mixprec is built
#                                      beside it, under build/, and found through PYTHONPATH

PYTHON ?=
# What .venv is made of: the interpreter, and torch as pip should be asked for it.
PYTHON3 ?= python3
TORCH ?= torch==2.13.0
# FULL=1: the longer demo, every shape of gpu-bench. TESTS: these tests instead of the quick ones.
# ARGS: more arguments for the program that runs. WORKERS: processes of test, test-slow, test-kernels.
FULL ?=
TESTS ?=
ARGS ?=
WORKERS ?= 2
# Where make gpu-test, gpu-bench and gpu-train write (default: bench/results/ and the GPU's name).
OUT ?=

CXX_SOURCES := $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
FORMATTED := $(shell find csrc tests -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
PY_SOURCES := $(shell find mixprec bench triton_kernels -name '*.py')
BUILD_FILES := setup.py pyproject.toml
BUILD_TOOLS := setuptools wheel pybind11 ninja
EXTRAS := test,examples
PIP = "$(PY)" -m pip install -q --disable-pip-version-check

# Sees what only the system's package manager can bring; names all of it in one line.
define CHECK_SYSTEM
python=$$1; cxx=$$2; venv=$$3; need=
if ! command -v "$$python" >/dev/null; then
  need=" python3 python3-venv python3-dev"
elif ! "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
  echo "mixprec needs Python 3.10 or newer, $$python is $$("$$python" -V 2>&1):" \
    "sudo apt-get install python3.12 python3.12-venv python3.12-dev," \
    "then add PYTHON3=python3.12 to the make command" >&2
  exit 1
else
  [ -z "$$venv" ] || "$$python" -c 'import ensurepip, venv' 2>/dev/null || need=" python3-venv"
  "$$python" -c 'import os, sys, sysconfig as s
sys.exit(not os.path.exists(os.path.join(s.get_path("include"), "Python.h")))' || need="$$need python3-dev"
fi
command -v "$$cxx" >/dev/null || need="$$need g++"
[ -z "$$need" ] || { echo "missing:$$need. Run: sudo apt-get install$$need" >&2; exit 1; }
endef
export CHECK_SYSTEM

# Sees which of the packages named by its arguments an environment lacks; names them in one line.
define CHECK_PACKAGES
import importlib.metadata, importlib.util, sys
module = {"pytest_xdist": "xdist"}  # where it is not the name of the package
lack = [n.replace("_", "-") for n in sys.argv[1:] if importlib.util.find_spec(module.get(n, n)) is None]
if "setuptools" not in lack and int(importlib.metadata.version("setuptools").split(".")[0]) < 64:
    lack.append("'setuptools>=64'")
if lack:
    packages = " ".join(lack)
    sys.exit(f"missing in this environment: {packages}. Run: {sys.executable} -m pip install {packages}")
endef
export CHECK_PACKAGES

# Tells builds for different interpreters and torches apart. (One line: make 4.3 gives exported
# variables to recipes, but not to $(shell).)
PRINT_KEY := import hashlib, importlib.metadata as m, sys; \
  print(hashlib.sha256(repr((sys.executable, sys.version, m.version("torch"))).encode()).hexdigest()[:12])

define PRINT_LINT_TOOLS
import importlib.metadata
extra = '; extra == "lint"'
print(*(r.removesuffix(extra) for r in importlib.metadata.requires("mixprec") if r.endswith(extra)))
endef
export PRINT_LINT_TOOLS

ifeq ($(strip $(PYTHON)),)
PY := $(CURDIR)/.venv/bin/python
KEY := venv
READY := .venv/.built
LINT_READY := .venv/.lint
NEEDS =
WITH := PATH="$(CURDIR)/.venv/bin:$$PATH"
else
# An absolute path, because commands run in other folders; symbolic links stay, they make a venv.
PY := $(shell p=$$(command -v '$(PYTHON)') && case $$p in (/*) echo "$$p";; (*) echo "$$PWD/$$p";; esac)
ifeq ($(PY),)
$(error PYTHON=$(PYTHON) is not a program)
endif
KEY := $(or $(shell "$(PY)" -c '$(PRINT_KEY)' 2>/dev/null),none)
READY := build/ext/$(KEY)/.built
LINT_READY :=
NEEDS = @"$(PY)" -c "$$CHECK_PACKAGES" pip setuptools torch $(1)
# The environment is not written to, not even byte code.
WITH := PYTHONDONTWRITEBYTECODE=1 PATH="$(dir $(PY)):$$PATH" \
  PYTHONPATH="$(CURDIR)/build/ext/$(KEY)/site$${PYTHONPATH:+:$$PYTHONPATH}"
endif

# Python looks for modules in the current folder first, and the one here named mixprec holds no
# compiled ops: programs start in an empty folder. (PYTHONSAFEPATH would do, from Python 3.11 on.)
RUN = mkdir -p build/run && cd build/run && $(WITH) "$(PY)"

.PHONY: help demo test lint bench cuda gpu-test gpu-bench gpu-train test-slow test-kernels test-all integrations-table clean needs-build needs-test needs-integrations needs-gpu-test needs-demo needs-lint
.NOTPARALLEL:

help:
	@echo 'make demo    train one GPT in fp32, bf16, fp16 and fp8; results in demo/ (FULL=1: longer)'
	@echo 'make test    run the tests that a change needs, in two processes (WORKERS=8 for eight;'
	@echo '             TESTS=tests/ops/test_gemm.py ARGS=-x for some tests, in one process)'
	@echo 'make lint    ruff, mypy, clang-format, and the C++ compiler with warnings as errors'
	@echo 'make bench   measure every op against its baselines on this CPU; results in build/bench/'
	@echo 'make test-slow    run the tests that start programs, several ranks or inductor'
	@echo 'make test-kernels run the GPU kernels on the CPU: emulated, and in the interpreter of Triton'
	@echo 'make test-all     run all of these, and the casts of every input'
	@echo 'make cuda    compile the CUDA kernels for every GPU generation (TORCH_CUDA_ARCH_LIST="8.0;9.0a":'
	@echo '             for these), look at the machine code, load'
	@echo '             them, and run the tests of a GPU on a fake one, on the CPU; needs nvcc 13'
	@echo '             and no GPU; a CUDA build of torch comes into build/cuda'
	@echo 'make gpu-test  on a machine with an NVIDIA GPU: every op on it, in graphs, under sanitizers;'
	@echo '               results in bench/results/ or OUT= (ARGS="--jobs test --limit SECONDS")'
	@echo 'make gpu-bench measure every GPU kernel against its baselines; results in the same folder'
	@echo 'make gpu-train train a GPT of 160 million parameters on the GPU in five precisions'
	@echo 'make integrations-table  run the tests of transformers, Accelerate, Lightning, Fabric and peft'
	@echo '               and write which versions they ran with into docs/integrations.md'
	@echo 'make clean   remove .venv, build/ and everything compiled'
	@echo
	@echo 'Each creates .venv on its first run. PYTHON=/path/to/python uses that environment instead,'
	@echo 'without writing to it. TORCH="torch==2.13.0 --index-url URL" chooses the torch of .venv.'

demo: needs-demo $(READY)
	@$(WITH) "$(PY)" examples/train_gpt.py --out demo $(if $(filter-out 0,$(FULL)),--full) $(ARGS)

# $(call TIMED,COMMAND): its last line says how long it took.
TIMED = @start=$$(date +%s); { $(1); } && status=0 || status=$$?; \
  echo "make $@: $$(($$(date +%s) - start)) s"; exit $$status
PYTEST = $(RUN) -m pytest -c ../../pyproject.toml --rootdir ../..
PARALLEL = -n $(WORKERS) --dist worksteal
QUICK = ../../tests/ops ../../tests/modules ../../tests/training ../../tests/tooling ../../tests/integrations

# Threads that wait sleep: demo and tests are many short parallel loops, and on a machine that does
# other things as well, spinning ones hold up the thread they wait for (tests on two busy cores: 100 s
# against more than 600 s). With a worker for each core, an op runs on one thread; tests of threads set their number.
demo test test-slow test-kernels: export OMP_WAIT_POLICY ?= PASSIVE
ifeq ($(strip $(TESTS)),)
test: export OMP_NUM_THREADS ?= 1
endif
test-slow test-kernels: export OMP_NUM_THREADS ?= 1

CHOSEN = $(if $(strip $(TESTS)),$(ARGS) $(addprefix ../../,$(TESTS)),$(QUICKLY) $(ARGS) $(QUICK))
QUICKLY = $(PARALLEL) -m "not slow and not exhaustive"
test: needs-test $(READY)
	$(call TIMED,$(PYTEST) $(CHOSEN))

SLOWLY = slow and not exhaustive
test-slow: needs-test $(READY)
	$(call TIMED,$(PYTEST) $(PARALLEL) -m "$(SLOWLY)" $(ARGS) $(QUICK))

# Twice, because triton reads TRITON_INTERPRET when it is imported: modules of the other kind are
# skipped and say so. (5: all of them, where triton is not installed.)
test-kernels: needs-test $(READY)
	$(call TIMED,{ ( export TRITON_INTERPRET=1; \
	  $(PYTEST) $(PARALLEL) $(ARGS) ../../tests/emulated/triton_interpreter ../../tests/emulated/values ) || [ $$? = 5 ]; } && \
	  $(PYTEST) $(PARALLEL) $(ARGS) ../../tests/emulated)

# Into docs/integrations.md: which tests of the adapters ran, with which versions, and the outcome.
integrations-table: needs-integrations $(READY)
	@export MIXPREC_INTEGRATIONS_TABLE="$(CURDIR)/docs/integrations.md"; \
	  $(PYTEST) $(ARGS) ../../tests/integrations

test-all:
	$(call TIMED,$(MAKE) test TESTS= && $(MAKE) test-slow SLOWLY="slow or exhaustive" && $(MAKE) test-kernels)

lint: needs-lint $(READY) $(LINT_READY) build/werror/$(KEY)/.built
	@$(WITH) "$(PY)" -m ruff check .
	@$(WITH) "$(PY)" -m ruff format --check .
	@$(WITH) "$(PY)" -m mypy
	@$(WITH) "$(PY)" -c 'from clang_format import *; clang_format()' --dry-run -Werror $(FORMATTED)

bench: needs-build $(READY)
	@$(RUN) -m mixprec.bench run --device cpu \
	  --out "$(CURDIR)/build/bench/$(shell date -u +%Y%m%d-%H%M%S).json" $(ARGS)

# What the checks of make cuda depend on: with the same sources they are not run again.
CUDA_FILES := setup.py $(wildcard tests/emulated/build_check/*.py) $(shell find csrc -name '*.h' -o -name '*.cu' -o -name '*.cuh')
FAKE_DEVICE_FILES := $(wildcard tests/*.py tests/gpu/*.py tests/emulated/*.py tests/emulated/values/*.py) $(shell find tests/emulated/shim tests/emulated/hopper tests/emulated/device -name '*.py' -o -name '*.h' -o -name '*.cpp')
CUDA_PY := build/cuda/venv/bin/python
CUDA_TORCH ?= torch==2.11.0
# One stamp for all generations, one for fewer.
CUDA_CHECKED := build/cuda/.checked$(if $(TORCH_CUDA_ARCH_LIST),-$(shell printf '%s' '$(TORCH_CUDA_ARCH_LIST)' | cksum | cut -d' ' -f1))
NVCC := $(or $(shell command -v nvcc),$(wildcard /usr/local/cuda/bin/nvcc))

cuda: $(CUDA_CHECKED) build/cuda/.ran
	@"$(CUDA_PY)" -c 'import json; r = json.load(open("build/cuda/report.json")); k = r["kernels"]; \
	  print(len(k), "kernels for", *sorted({x["gpu"] for x in k}), r["wrong"] or "all is well")'
	@cat build/cuda/.ran

build/cuda/.installed:
	@[ -n "$(NVCC)" ] || { echo "make cuda needs nvcc 13, the compiler of the CUDA toolkit" >&2; exit 1; }
	"$(PYTHON3)" -m venv build/cuda/venv
	"$(CUDA_PY)" -m pip install -q --disable-pip-version-check "$(CUDA_TORCH)" $(BUILD_TOOLS) "numpy<2.4" pytest pytest-xdist hypothesis rich
	@touch $@

$(CUDA_CHECKED): build/cuda/.installed $(CUDA_FILES) $(PY_SOURCES)
	@[ ! -d build/cuda/base ] || find build/cuda/base -name '*.py' -delete
	@printf '[build]\nbuild_base = build/cuda/base\n' >build/cuda/build.cfg
	DIST_EXTRA_CONFIG=build/cuda/build.cfg MIXPREC_BUILD=cuda MIXPREC_WERROR=1 PATH="$(CURDIR)/build/cuda/venv/bin:$(dir $(NVCC)):$$PATH" "$(CUDA_PY)" \
	  -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation \
	  --upgrade --target build/cuda/site .
	@mkdir -p build/run && cd build/run && PYTHONPATH="$(CURDIR)/build/cuda/site" \
	  PATH="$(dir $(NVCC)):$$PATH" "$(CURDIR)/$(CUDA_PY)" ../../tests/emulated/build_check/check.py --objects ../cuda/base \
	  --report ../cuda/report.json --summary ../cuda/summary.json
	@touch $@

# tests/gpu on the fake device (tests/emulated/device): all but the hardware, Triton and speed. Most
# of test_values is left out: make test runs the same kernels on many more values.
FAKE_DEVICE_TESTS := not test_values or self_test or several_launches or unscale or dequantize_by_blocks
build/cuda/.ran: $(CUDA_CHECKED) $(FAKE_DEVICE_FILES)
	@cd build/run && PYTHONPATH="$(CURDIR)/build/cuda/site" PATH="$(dir $(NVCC)):$$PATH" OMP_NUM_THREADS=1 \
	  "$(CURDIR)/$(CUDA_PY)" ../../tests/emulated/device/run.py -m pytest -c ../../pyproject.toml --rootdir ../.. \
	  -p no:cacheprovider -q $(PARALLEL) -m "not large" -k "($(FAKE_DEVICE_TESTS)) and not triton" ../../tests/gpu \
	  >../cuda/fake-device.log 2>&1 || { cat ../cuda/fake-device.log; exit 1; }
	@tail -n 1 build/cuda/fake-device.log >$@

# With PYTHON=python3 nothing is installed or downloaded: torch, pytest and the rest are there.
UNATTENDED = $(RUN) ../../tests/gpu/unattended.py $(if $(OUT),--out "$(abspath $(OUT))")
gpu-test: needs-gpu-test $(READY)
	@$(UNATTENDED) --jobs env,test,sanitize $(ARGS)

gpu-bench: needs-gpu-test $(READY)
	@$(UNATTENDED) --jobs bench $(ARGS)

# A GPT that fills the GPU (about 160 million parameters, 16,384 bytes of text a step), five
# precisions, four minutes on an H200 if it reaches half of its peak.
GPU_TRAIN := --layers 12 --width 1024 --context 1024 --batch 16 --steps 150 --lr 6e-4
gpu-train: needs-build $(READY)
	@rm -rf build/gpu-train && mkdir -p build/run
	@out="$(OUT)"; [ -n "$$out" ] || out="bench/results/$$(cd build/run && $(WITH) "$(PY)" -c \
	  'from mixprec.bench import device; print(device.folder_name(device.name()))')"; mkdir -p "$$out"; \
	$(WITH) "$(PY)" examples/train_gpt.py --device cuda $(GPU_TRAIN) --out build/gpu-train $(ARGS); \
	status=$$?; for file in results.json loss.png; do \
	  [ ! -f build/gpu-train/$$file ] || cp build/gpu-train/$$file "$$out/train-gpt-$$file"; done; \
	exit $$status

clean:
	rm -rf .venv build *.egg-info mixprec/_C*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find mixprec bench triton_kernels tests examples -name __pycache__ -type d -prune -exec rm -rf {} +

needs-build:
	$(call NEEDS)
needs-test:
	$(call NEEDS,pytest pytest_xdist hypothesis numpy rich matplotlib gfloat ml_dtypes)
needs-integrations:
	$(call NEEDS,pytest hypothesis numpy transformers accelerate lightning peft)
needs-gpu-test:
	$(call NEEDS,pytest hypothesis numpy rich matplotlib)
needs-demo:
	$(call NEEDS,rich matplotlib)
needs-lint:
	$(call NEEDS,ruff mypy clang_format)

# One stamp per request for torch: another TORCH= installs it over the last one and rebuilds.
TORCH_READY := .venv/.torch-$(shell printf '%s' '$(TORCH)' | cksum | cut -d' ' -f1)
$(TORCH_READY):
	@sh -c "$$CHECK_SYSTEM" check "$(PYTHON3)" "$(firstword $(CXX))" venv
	"$(PYTHON3)" -m venv .venv
	$(PIP) $(TORCH)
	$(PIP) $(BUILD_TOOLS)
	@rm -f .venv/.torch-*
	@touch $@

# A changed C++ source alone is compiled in place, without what it left unchanged.
.venv/.built: $(TORCH_READY) $(BUILD_FILES) $(CXX_SOURCES)
	$(if $(filter-out $(CXX_SOURCES),$?),\
	  $(WITH) $(PIP) --no-build-isolation -e ".[$(EXTRAS)]",\
	  $(WITH) "$(PY)" setup.py -q build_ext --inplace --build-temp build/inplace)
	@touch $@
	@[ "$$MIXPREC_WERROR" != 1 ] || { mkdir -p build/werror/venv && touch build/werror/venv/.built; }

.venv/.lint: .venv/.built
	$(PIP) $$("$(PY)" -c "$$PRINT_LINT_TOOLS")
	@touch $@

# setuptools keeps its intermediate files under build_base; Python files that are gone from the
# source must not come back out of it.
build/ext/$(KEY)/.built: $(BUILD_FILES) $(CXX_SOURCES) $(PY_SOURCES)
	@sh -c "$$CHECK_SYSTEM" check "$(PY)" "$(firstword $(CXX))" ""
	@mkdir -p $(@D)
	@[ ! -d $(@D)/base ] || find $(@D)/base -name '*.py' -delete
	@printf '[build]\nbuild_base = build/ext/$(KEY)/base\n' >$(@D)/build.cfg
	$(WITH) DIST_EXTRA_CONFIG=$(@D)/build.cfg $(PIP) \
	  --no-deps --no-build-isolation --upgrade --target $(@D)/site .
	@touch $@

# What lint compiles; .venv built with MIXPREC_WERROR=1 has shown the same.
build/werror/$(KEY)/.built: $(READY) setup.py $(CXX_SOURCES)
	MIXPREC_WERROR=1 $(WITH) "$(PY)" setup.py -q build_ext \
	  --build-temp $(@D)/temp --build-lib $(@D)/lib
	@touch $@
