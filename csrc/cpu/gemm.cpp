// gemm and gemm_accumulate_: both operands are packed into panels of fp32 words or bf16 pairs.
#include "arguments/check.h"
#include "cpu/gemm_arguments.h"

namespace mixprec::cpu {

namespace {

// Whether the memory ranges of two tensors overlap.
bool overlap(const Tensor& x, const Tensor& y) {
  if (x.numel() == 0 || y.numel() == 0) return false;
  auto end = [](const Tensor& t) {
    int64_t last = 0;
    for (size_t i = 0; i < t.sizes().size(); ++i) last += (t.sizes()[i] - 1) * t.strides()[i];
    return static_cast<const char*>(t.const_data_ptr()) +
           (last + 1) * element_size(dtype_of(t, "gemm_accumulate_"));
  };
  return x.const_data_ptr() < end(y) && y.const_data_ptr() < end(x);
}

const GemmKernel& kernel_for(const Tensor& a) {
  return dtype_of(a, "gemm") == Dtype::f16 ? loops().gemm_f32 : loops().gemm_bf16;
}

}  // namespace

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
  STD_TORCH_CHECK(!overlap(acc, a) && !overlap(acc, b) &&
                      !(a_scale_inv.has_value() && overlap(acc, *a_scale_inv)) &&
                      !(b_scale_inv.has_value() && overlap(acc, *b_scale_inv)),
                  "gemm_accumulate_: acc must not overlap in memory with what it is made from");
  Scaling scaling(a, b, a_scale_inv, b_scale_inv, "gemm_accumulate_");
  if (acc.numel() == 0 || a.sizes()[1] == 0) return;
  float* data = static_cast<float*>(acc.mutable_data_ptr());
  int64_t stride_m = acc.strides()[0], stride_n = acc.strides()[1];
  multiply(kernel_for(a), rows_of(a), columns_of(b), a.sizes()[1], scaling.both,
           [&](int64_t row, int64_t col, int64_t count, const float* sums) {
             Epilogue here = scaling.both.at_the_end(row, col, nullptr, ones());
             loops().accumulate_row(sums, here, data + row * stride_m + col * stride_n, stride_n,
                                    count);
           });
}

}  // namespace mixprec::cpu

STABLE_TORCH_LIBRARY_IMPL(mixprec, CPU, m) {
  m.impl("gemm", TORCH_BOX(&mixprec::cpu::gemm));
  m.impl("gemm_accumulate_", TORCH_BOX(&mixprec::cpu::gemm_accumulate_));
}
