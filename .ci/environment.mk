# The environment that commands run in and mixprec is built for: .venv, or that of PYTHON.
# PY: its interpreter. RUN: starts it. READY: the stamp of the build; $(call ready_for,EXTRA), of it with
# that extra. NEEDS: names lacking packages.

CXX_SOURCES := $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
FORMATTED := $(shell find csrc tests -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
PY_SOURCES := $(shell find mixprec bench triton_kernels -name '*.py')
BUILD_FILES := setup.py pyproject.toml
BUILD_TOOLS := setuptools wheel pybind11 ninja
PIP = "$(PY)" -m pip install -q --disable-pip-version-check

ifeq ($(strip $(PYTHON)),)
PY := $(CURDIR)/.venv/bin/python
KEY := venv
READY := .venv/.built
# With what an extra of mixprec installs.
ready_for = .venv/.$(1)
NEEDS =
WITH := PATH="$(CURDIR)/.venv/bin:$$PATH"
else
# An absolute path, because commands run in other folders; symbolic links stay, they make a venv.
PY := $(shell p=$$(command -v '$(PYTHON)') && case $$p in (/*) echo "$$p";; (*) echo "$$PWD/$$p";; esac)
ifeq ($(PY),)
$(error PYTHON=$(PYTHON) is not a program)
endif
KEY := $(or $(shell "$(PY)" .ci/environment.py key 2>/dev/null),none)
READY := build/ext/$(KEY)/.built
ready_for = $(READY)
NEEDS = @"$(PY)" .ci/environment.py packages pip setuptools torch $(1)
# The environment is not written to, not even byte code.
WITH := PYTHONDONTWRITEBYTECODE=1 PATH="$(dir $(PY)):$$PATH" \
  PYTHONPATH="$(CURDIR)/build/ext/$(KEY)/site$${PYTHONPATH:+:$$PYTHONPATH}"
endif

# Python looks for modules in the current folder first, and the one here named mixprec holds no
# compiled ops: programs start in an empty folder. (PYTHONSAFEPATH would do, from Python 3.11 on.)
RUN = mkdir -p build/run && cd build/run && $(WITH) "$(PY)"

# What commands take from an environment that is only read, as modules.
PACKAGES_build :=
PACKAGES_test := scipy pytest pytest_xdist hypothesis numpy matplotlib gfloat ml_dtypes
PACKAGES_integrations := pytest hypothesis numpy transformers accelerate lightning peft trl datasets
PACKAGES_gpu-test := pytest pytest_xdist hypothesis numpy matplotlib
PACKAGES_kernels := $(PACKAGES_test) triton
PACKAGES_demo := matplotlib
PACKAGES_lint := ruff mypy clang_format
PACKAGES_docs := sphinx myst_nb furo sphinx_copybutton jupytext ipykernel
NEEDED := $(addprefix needs-,build test kernels integrations gpu-test demo lint docs)
.PHONY: $(NEEDED)
$(NEEDED): needs-%:
	$(call NEEDS,$(PACKAGES_$*))

# One stamp per request for torch: another TORCH= installs it over the last one and rebuilds.
TORCH_READY := .venv/.torch-$(shell printf '%s' '$(TORCH)' | cksum | cut -d' ' -f1)
$(TORCH_READY):
	@command -v "$(PYTHON3)" >/dev/null || { echo "mixprec needs Python 3.10 or newer, and" \
	  "$(PYTHON3) is not a program; on Debian and Ubuntu: sudo apt-get install" \
	  "python3 python3-venv python3-dev g++" >&2; exit 1; }
	@"$(PYTHON3)" .ci/build_checks.py venv
	"$(PYTHON3)" -m venv .venv
	@command -v nvidia-smi >/dev/null || echo "make: no GPU was found. Unless pip is set up otherwise," \
	  "\"$(TORCH)\" brings CUDA, a download of about 3 GB; its build for CPUs has 200 MB: make TORCH=..." \
	  "with what https://pytorch.org/get-started/locally says for pip and CPU, or make" \
	  "PYTHON=/path/to/python with a torch that is there" >&2
	$(PIP) $(TORCH)
	$(PIP) $(BUILD_TOOLS)
	@rm -f .venv/.torch-*
	@touch $@

# Compiled before pip comes, which would hide the count of files; it finds nothing left to compile.
# A changed C++ source alone needs no pip.
.venv/.built: $(TORCH_READY) $(BUILD_FILES) $(CXX_SOURCES)
	@$(WITH) "$(PY)" setup.py build_ext --inplace
	$(if $(filter-out $(CXX_SOURCES),$?),$(WITH) $(PIP) --no-build-isolation -e .)
	@touch $@
	@[ "$$MIXPREC_WERROR" != 1 ] || { mkdir -p build/werror/venv && touch build/werror/venv/.built; }

STAMPS := $(addprefix .venv/.,demo examples test kernels lint docs)
$(STAMPS): .venv/.%: $(TORCH_READY) $(BUILD_FILES) | .venv/.built
	$(PIP) $$("$(PY)" .ci/environment.py extra $*)
	@touch $@

# setuptools keeps its intermediate files under build_base; Python files that are gone from the
# source must not come back out of it.
build/ext/$(KEY)/.built: $(BUILD_FILES) $(CXX_SOURCES) $(PY_SOURCES)
	@mkdir -p $(@D)
	@[ ! -d $(@D)/base ] || find $(@D)/base -name '*.py' -delete
	@printf '[build]\nbuild_base = build/ext/$(KEY)/base\n' >$(@D)/build.cfg
	@$(WITH) DIST_EXTRA_CONFIG=$(@D)/build.cfg "$(PY)" setup.py build_ext
	$(WITH) DIST_EXTRA_CONFIG=$(@D)/build.cfg $(PIP) \
	  --no-deps --no-build-isolation --upgrade --target $(@D)/site .
	@touch $@

# What lint compiles; .venv built with MIXPREC_WERROR=1 has shown the same.
build/werror/$(KEY)/.built: $(READY) setup.py $(CXX_SOURCES)
	MIXPREC_WERROR=1 $(WITH) "$(PY)" setup.py build_ext \
	  --build-temp $(@D)/temp --build-lib $(@D)/lib
	@touch $@
