// gemm_simulated: gemm with the products and sums of a GPU's tensor cores.
#include "arguments/check.h"
#include "cpu/gemm_arguments.h"
#include "math/tensor_core.h"

namespace mixprec::cpu {

namespace {

Gpu gpu_of(const std::string& arch) {
  constexpr const char* names[] = {"v100", "a100", "ada", "hopper", "blackwell"};
  for (int32_t i = 0; i < 5; ++i) {
    if (arch == names[i]) return static_cast<Gpu>(i);
  }
  STD_TORCH_CHECK(false, "gemm_simulated: arch must be v100, a100, ada, hopper or blackwell");
  return Gpu::v100;
}

// The kernel of loops() for one tensor core and two formats.
struct Simulated {
  const SimulatedKernel& kernel;
  TensorCore core;
  int least_a, least_b;
  int64_t mr = kernel.mr, nr = kernel.nr;
  decltype(GemmKernel::pack_a) pack_a = kernel.pack_a;
  decltype(GemmKernel::pack_b) pack_b = kernel.pack_b;

  int64_t words(int64_t k) const { return kernel.words_of_k * k; }
  int64_t width_a(int64_t /*rows*/) const { return mr; }
  void micro(int64_t /*width*/, int64_t words, const uint32_t* a, const uint32_t* b, float* c,
             int64_t ldc, bool accumulate) const {
    kernel.micro(core, least_a, least_b, words / kernel.words_of_k, a, b, c, ldc, accumulate);
  }
};

}  // namespace

// as gemm, with the products and sums of the tensor cores of `arch`, a GPU of math/tensor_core.h
Tensor gemm_simulated(Tensor a, Tensor b, MaybeTensor a_scale_inv, MaybeTensor b_scale_inv,
                      MaybeTensor bias, ScalarType out_type, bool fast_accum, Text arch) {
  const char* op = "gemm_simulated";
  check_operands(a, b, op);
  Dtype of_a = dtype_of(a, op), of_b = dtype_of(b, op);
  TensorCore core = tensor_core(gpu_of(arch), of_a);
  STD_TORCH_CHECK(core.terms > 0, op, ": ", arch, " has no tensor core instruction for a's dtype");
  Scaling scaling(a, b, a_scale_inv, b_scale_inv, op);
  scaling.both.promoted = core.promoted && !fast_accum;
  const SimulatedKernel& loop =
      core.significant_bits == 14 ? loops().simulated_short : loops().simulated;
  Simulated kernel{loop, core, min_exponent(of_a), min_exponent(of_b)};
  return gemm_with(kernel, a, b, scaling.both, bias, out_type, op);
}

}  // namespace mixprec::cpu

STABLE_TORCH_LIBRARY_IMPL(mixprec, CPU, m) {
  m.impl("gemm_simulated", TORCH_BOX(&mixprec::cpu::gemm_simulated));
}
