// gemm and gemm_accumulate_: both operands are packed into panels of fp32 words or bf16 pairs.
#include "arguments/check.h"
#include "cpu/gemm_arguments.h"

namespace mixprec::cpu {

// a [M, K], b [K, N], bias [N] -> [M, N]; scales of a: one element, [M, 1], [M, ceil(K/128)] or
// [ceil(M/128), ceil(K/128)]; scales of b: the transposes of these
Tensor gemm(Tensor a, Tensor b, MaybeTensor a_scale_inv, MaybeTensor b_scale_inv, MaybeTensor bias,
            ScalarType out_type, bool /*fast_accum: a CPU has no shorter accumulator*/) {
  check_operands(a, b, "gemm");
  Scaling scaling(a, b, a_scale_inv, b_scale_inv, "gemm");
  return gemm_with(kernel_for(a), a, b, scaling.both, bias, out_type, "gemm");
}

// acc [M, N] fp32 += a [M, K] @ b [K, N]
void gemm_accumulate_(Tensor acc, Tensor a, Tensor b, MaybeTensor a_scale_inv,
                      MaybeTensor b_scale_inv) {
  check_operands(a, b, "gemm_accumulate_");
  STD_TORCH_CHECK(acc.dim() == 2 && acc.sizes()[0] == a.sizes()[0] &&
                      acc.sizes()[1] == b.sizes()[1] && acc.scalar_type() == ScalarType::Float &&
                      on_cpu(acc) && is_writable(acc),
                  "gemm_accumulate_: acc must be [M, N], fp32, on the CPU, writable");
  STD_TORCH_CHECK(!ranges_overlap(acc, a) && !ranges_overlap(acc, b) &&
                      !(a_scale_inv.has_value() && ranges_overlap(acc, *a_scale_inv)) &&
                      !(b_scale_inv.has_value() && ranges_overlap(acc, *b_scale_inv)),
                  "gemm_accumulate_: acc must not overlap in memory with what it is made from");
  Scaling scaling(a, b, a_scale_inv, b_scale_inv, "gemm_accumulate_");
  if (acc.numel() == 0 || a.sizes()[1] == 0) return;
  Result result = {Dtype::f32,
                   static_cast<char*>(acc.mutable_data_ptr()),
                   acc.strides()[0],
                   acc.strides()[1],
                   true,
                   nullptr};
  multiply(kernel_for(a), rows_of(a), columns_of(b), a.sizes()[1], scaling.both, result);
}

}  // namespace mixprec::cpu

STABLE_TORCH_LIBRARY_IMPL(mixprec, CPU, m) {
  m.impl("gemm", TORCH_BOX(&mixprec::cpu::gemm));
  m.impl("gemm_accumulate_", TORCH_BOX(&mixprec::cpu::gemm_accumulate_));
}
