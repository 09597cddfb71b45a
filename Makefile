# The commands a person types; `make help` lists them. Two ways to run each of them:
#   make test                          in .venv, which is created here with all it needs
#   make test PYTHON=/path/to/python   in that environment, which is only read: mixprec is built
#                                      beside it, under build/, and found through PYTHONPATH

PYTHON ?=
# What .venv is made of: the interpreter, and torch as pip should be asked for it.
PYTHON3 ?= python3
TORCH ?= torch==2.13.0
# FULL=1: the longer demo, every case of gpu-bench. TESTS: these tests instead of the quick ones.
# WORKERS: processes of test, test-slow, test-kernels. ARGS: more arguments for the program that runs.
FULL ?=
TESTS ?=
WORKERS ?= 2
ARGS ?=
# Where make gpu-first, gpu-test, gpu-bench and gpu-train write (default: bench/results/ and the GPU's name).
OUT ?=

.DEFAULT_GOAL := help
.PHONY: help demo test lint bench cuda gpu-first gpu-test gpu-bench gpu-train test-slow test-kernels mutate test-all integrations-table versions docs notebooks wheel wheel-check clean
.NOTPARALLEL:
# How .venv, or the environment of PYTHON, gets what a command needs; and make cuda.
include .ci/environment.mk .ci/cuda.mk

# The lines below that begin with "#:".
help:
	@sed -n 's/^#: \{0,1\}//p' Makefile

#: make demo    train one GPT in fp32, bf16, fp16, fp8, and in fp32 from another seed; results in
#:              demo/ (FULL=1: longer)
demo: needs-demo $(call ready_for,demo)
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
#: make test    run the tests that a change needs, in two processes (WORKERS=8 for eight;
#:              TESTS=tests/ops/test_gemm.py ARGS=-x for some tests, in one process)
test: needs-test $(call ready_for,test)
	$(call TIMED,$(PYTEST) $(CHOSEN))

SLOWLY = slow and not exhaustive
#: make test-slow    run the tests that start programs, several ranks or inductor
test-slow: needs-test $(call ready_for,test)
	$(call TIMED,$(PYTEST) $(PARALLEL) -m "$(SLOWLY)" $(ARGS) $(QUICK))

# Twice, because triton reads TRITON_INTERPRET when it is imported: modules of the other kind are
# skipped and say so. (5: all of them, where triton is not installed.)
#: make test-kernels run the GPU kernels on the CPU: emulated, and in the interpreter of Triton
test-kernels: needs-kernels $(call ready_for,test) $(call ready_for,kernels)
	$(call TIMED,{ ( export TRITON_INTERPRET=1; \
	  $(PYTEST) $(PARALLEL) $(ARGS) ../../tests/emulated/triton_interpreter ../../tests/emulated/values ) || [ $$? = 5 ]; } && \
	  $(PYTEST) $(PARALLEL) $(ARGS) ../../tests/emulated)

#: make integrations-table  run the tests of transformers, Accelerate, Lightning, Fabric, peft and
#:                TRL and write which versions they ran with into docs/integrations.md; measure
#:                each family of models for docs/models.md
integrations-table: needs-integrations $(call ready_for,test)
	@export MIXPREC_INTEGRATIONS_TABLE="$(CURDIR)/docs/integrations.md"; \
	  $(PYTEST) $(ARGS) ../../tests/integrations
	@$(RUN) -m mixprec.bench.studies.models --out "$(CURDIR)/bench/results/cpu/model-table.json"
	@cd "$(CURDIR)" && PYTHONPATH=. "$(PY)" -P -m mixprec.bench report

#: make versions run the tests with each version of Python and torch that docs/install.md lists
#:               (ARGS="3.13-2.15": with these), in build/versions/; writes that table
versions: needs-build $(READY)
	@$(RUN) ../../.ci/versions.py $(ARGS)

#: make mutate BASE=REV  plant wrong variants of the lines that differ from that revision, run the
#:              tests that reach each, print those that no test sees (N=20 SEED=1: so many, drawn at
#:              random; ONLY="mixprec/optim csrc": of these files; TESTS=tests/training: these tests)
mutate: needs-test $(call ready_for,test)
	@$(if $(BASE),,echo "make mutate: BASE must be a revision, such as BASE=main" >&2; exit 2;) \
	  $(RUN) ../../.ci/mutate.py "$(BASE)" "$(N)" "$(SEED)" "$(WORKERS)" \
	  "$(or $(ONLY),mixprec triton_kernels csrc)" "$(or $(TESTS),$(QUICK:../../%=%))"

#: make test-all     run all of these, and the casts of every input
test-all:
	$(call TIMED,$(MAKE) test TESTS= && $(MAKE) test-slow SLOWLY="slow or exhaustive" && $(MAKE) test-kernels)

#: make wheel   build in dist/ an sdist and, for each Python of this machine from 3.10 on, a wheel
#:              (ARGS="3.11": for this one); make wheel-check installs each where there is no
#:              compiler, with the oldest and the newest torch, and runs it
wheel wheel-check:
	$(call TIMED,"$(or $(PYTHON),$(PYTHON3))" .ci/wheels.py $(if $(filter wheel,$@),build,check) $(ARGS))

#: make docs    build the documentation site in build/docs; warnings and broken links are errors
docs: needs-docs $(call ready_for,examples) $(call ready_for,docs)
	@$(RUN) -m sphinx -q -W --keep-going -b html "$(CURDIR)/docs" "$(CURDIR)/build/docs" $(ARGS)
	@echo "the site: build/docs/index.html"

#: make notebooks  run the notebooks of docs/, whose sources are the .py files, and store their output
notebooks: needs-docs $(call ready_for,examples) $(call ready_for,docs)
	@$(RUN) -m jupytext --to ipynb --run-path . --execute "$(CURDIR)"/docs/notebooks/*.py

#: make lint    ruff, mypy, clang-format, and the C++ compiler with warnings as errors
lint: needs-lint $(call ready_for,lint) build/werror/$(KEY)/.built
	@$(WITH) "$(PY)" -m ruff check .
	@$(WITH) "$(PY)" -m ruff format --check .
	@$(WITH) "$(PY)" -m mypy
	@$(WITH) "$(PY)" -c 'from clang_format import *; clang_format()' --dry-run -Werror $(FORMATTED)

#: make bench   measure every op against its baselines on this CPU; results in build/bench/
# Freed memory stays with the process, as PyTorch's tuning guide has it: else how often the system
# clears it again depends on which candidates have run before.
bench: export MALLOC_TRIM_THRESHOLD_ ?= 8000000000
bench: export MALLOC_MMAP_THRESHOLD_ ?= 33554432
bench: needs-build $(call ready_for,examples)
	@$(RUN) -m mixprec.bench run --device cpu \
	  --out "$(CURDIR)/build/bench/$(shell date -u +%Y%m%d-%H%M%S).json" $(ARGS)

#: make cuda    compile the CUDA kernels for every GPU generation (TORCH_CUDA_ARCH_LIST="8.0;9.0a":
#:              for these), look at the machine code, load them, and run the tests of a GPU on a
#:              fake one, on the CPU; needs nvcc 13 and no GPU; a CUDA build of torch comes into
#:              build/cuda

#: make gpu-first what a GPU can show in 12 minutes, most decisive first: tests of every kernel, where
#:                the time of a training step goes, products and casts; with what make cuda has built
#:                (PYTHON=python3: the interpreter), or building it (FAKE=1: a dry run without a GPU,
#:                on the fake device of make cuda)
PREBUILT := $(wildcard build/cuda/site)
gpu-first: $(if $(FAKE)$(PREBUILT),,needs-gpu-test $(READY))
	@$(if $(FAKE),$(FAKE_DEVICE),$(if $(PREBUILT),$(WITH_PREBUILT),$(RUN))) ../../tests/gpu/unattended.py \
	  --first $(if $(OUT)$(FAKE),--out "$(abspath $(or $(OUT),build/gpu-first))") $(ARGS)
# In build/run, as RUN; the commit is that of the build, where the copy has no history.
IN_SITE = mkdir -p build/run && cd build/run && MIXPREC_COMMIT="$$(cat ../cuda/site/commit 2>/dev/null)" PYTHONPATH="$(CURDIR)/build/cuda/site"
WITH_PREBUILT = $(IN_SITE) "$(or $(PYTHON),$(PYTHON3))"
FAKE_DEVICE = $(IN_SITE) MIXPREC_BENCH_TINY=1 PATH="$(dir $(NVCC)):$$PATH" "$(CURDIR)/$(CUDA_PY)" ../../tests/emulated/device/run.py

# With PYTHON=python3 nothing is installed or downloaded: torch, pytest and the rest are there.
UNATTENDED = $(RUN) ../../tests/gpu/unattended.py $(if $(OUT),--out "$(abspath $(OUT))")
#: make gpu-test  on a machine with an NVIDIA GPU: every op on it, in graphs, under sanitizers;
#:                results in bench/results/ or OUT= (ARGS="--jobs test --limit SECONDS")
gpu-test: needs-gpu-test $(READY)
	@$(UNATTENDED) --jobs env,test,sanitize $(ARGS)

#: make gpu-bench measure the GPU kernels against their baselines; results in the same folder
#:                (FULL=1: every size, in 90 minutes)
gpu-bench: needs-gpu-test $(READY)
	@$(UNATTENDED) --jobs bench $(if $(filter-out 0,$(FULL)),--full) $(ARGS)

#: make gpu-train train a GPT of 160 million parameters on the GPU in five precisions
gpu-train: needs-gpu-test $(READY)
	@$(UNATTENDED) --jobs train $(ARGS)

#: make clean   remove .venv, build/ and everything compiled
#:
#: Each creates .venv on its first run. PYTHON=/path/to/python uses that environment instead,
#: without writing to it. TORCH="torch==2.13.0 --index-url URL" chooses the torch of .venv.
clean:
	rm -rf .venv build *.egg-info mixprec/_C*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find mixprec bench triton_kernels tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
