# make cuda: the kernels compiled and looked at, and the tests of a GPU on a fake one.

# What the checks of make cuda depend on: with the same sources they are not run again.
CUDA_FILES := setup.py $(wildcard tests/emulated/build_check/*.py) $(shell find csrc -name '*.h' -o -name '*.cu' -o -name '*.cuh')
FAKE_DEVICE_FILES := $(wildcard tests/*.py tests/gpu/*.py tests/emulated/*.py tests/emulated/values/*.py) $(shell find tests/emulated/shim tests/emulated/hopper tests/emulated/device -name '*.py' -o -name '*.h' -o -name '*.cuh' -o -name '*.cpp')
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
	"$(CUDA_PY)" -m pip install -q --disable-pip-version-check "$(CUDA_TORCH)" $(BUILD_TOOLS) "numpy<2.4" pytest pytest-xdist hypothesis
	@touch $@

$(CUDA_CHECKED): build/cuda/.installed $(CUDA_FILES) $(PY_SOURCES)
	@[ ! -d build/cuda/base ] || find build/cuda/base -name '*.py' -delete
	@printf '[build]\nbuild_base = build/cuda/base\n' >build/cuda/build.cfg
	DIST_EXTRA_CONFIG=build/cuda/build.cfg MIXPREC_BUILD=cuda MIXPREC_WERROR=1 PATH="$(CURDIR)/build/cuda/venv/bin:$(dir $(NVCC)):$$PATH" "$(CUDA_PY)" \
	  -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation \
	  --upgrade --target build/cuda/site .
	@strip build/cuda/site/mixprec/*.so
	@git rev-parse --short=12 HEAD >build/cuda/site/commit || true
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
