// mixprec._C: build information for Python. The ops register themselves when this library is
// loaded.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "cpu/simd/loops.h"

namespace {

std::vector<std::string> isa_available() {
  std::istringstream words(mixprec::cpu::isa_available());
  std::vector<std::string> levels;
  for (std::string level; words >> level;) levels.push_back(level);
  return levels;
}

std::map<std::string, std::string> build_info() {
  return {{"compiler", __VERSION__},
          {"torch", MIXPREC_BUILT_WITH_TORCH},
          {"no_cuda", MIXPREC_NO_CUDA},  // why the CUDA kernels were not built; empty if they were
          {"cuda_archs", MIXPREC_CUDA_ARCHS}};  // for which GPUs they were built
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  mixprec::cpu::loops();  // an unusable MIXPREC_ISA is an ImportError, not a crash in a thread
  m.doc() =
      "The compiled half of mixprec: CPU kernels (registered as torch ops) and build information.";
  m.def(
      "isa", [] { return std::string(mixprec::cpu::loops().isa); },
      "The instruction set in use: base, avx2, avx512 or avx512_bf16 (MIXPREC_ISA overrides).");
  m.def("isa_available", &isa_available, "The levels that this processor can run, lowest first.");
  m.def("build_info", &build_info, "The compiler and the torch that this library was built with.");
}
