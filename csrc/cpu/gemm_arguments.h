// The arguments of gemm on the CPU: checked, and in the form that the loops over panels take.
#pragma once

#include "arguments/check.h"
#include "cpu/gemm_multiply.h"

namespace mixprec::cpu {

inline void check_devices_and_dtypes(const Tensor& a, const Tensor& b, const char* op) {
  STD_TORCH_CHECK(on_cpu(a) && on_cpu(b), op, ": a and b must be on the CPU");
  Dtype x = dtype_of(a, op), y = dtype_of(b, op);
  STD_TORCH_CHECK((is_fp8(x) && is_fp8(y)) || (x == y && (x == Dtype::f16 || x == Dtype::bf16)), op,
                  ": a and b must both be fp16, both bf16, or fp8");
}

inline void check_operands(const Tensor& a, const Tensor& b, const char* op) {
  STD_TORCH_CHECK(a.dim() == 2 && b.dim() == 2 && a.sizes()[1] == b.sizes()[0], op,
                  ": a must be [M, K] and b [K, N]");
  check_devices_and_dtypes(a, b, op);
}

inline Matrix rows_of(const Tensor& a) {
  return {dtype_of(a, "gemm"), a.const_data_ptr(), a.sizes()[0], a.strides()[0], a.strides()[1]};
}

inline Matrix columns_of(const Tensor& b) {
  return {dtype_of(b, "gemm"), b.const_data_ptr(), b.sizes()[1], b.strides()[1], b.strides()[0]};
}

// Whether the memory ranges of two tensors overlap.
inline bool ranges_overlap(const Tensor& x, const Tensor& y) {
  if (x.numel() == 0 || y.numel() == 0) return false;
  auto end = [](const Tensor& t) {
    int64_t last = 0;
    for (size_t i = 0; i < t.sizes().size(); ++i) last += (t.sizes()[i] - 1) * t.strides()[i];
    return static_cast<const char*>(t.const_data_ptr()) +
           (last + 1) * element_size(dtype_of(t, "gemm"));
  };
  return x.const_data_ptr() < end(y) && y.const_data_ptr() < end(x);
}

inline const GemmKernel& kernel_for(const Tensor& a) {
  return dtype_of(a, "gemm") == Dtype::f16 ? loops().gemm_f32 : loops().gemm_bf16;
}

// BothScales and the memory behind them.
struct Scaling {
  std::vector<float> columns;
  BothScales both;

  Scaling(const Tensor& a, const Tensor& b, const MaybeTensor& a_scale_inv,
          const MaybeTensor& b_scale_inv, const char* op) {
    int64_t n = b.sizes()[1], k = a.sizes()[1];
    Scales of_b = scales_of(b_scale_inv, n, k, 1, op, "b_scale_inv");
    columns = columns_of(of_b, n, k);
    both = {scales_of(a_scale_inv, a.sizes()[0], k, 0, op, "a_scale_inv"), columns.data(), n,
            of_b.by_chunk};
  }
};

// bias, if any, as fp32.
inline std::vector<float> bias_as_fp32(const MaybeTensor& maybe, int64_t n, const char* op) {
  if (!maybe.has_value()) return {};
  const Tensor& bias = *maybe;
  STD_TORCH_CHECK(
      bias.dim() == 1 && bias.numel() == n && on_cpu(bias) && is_float(dtype_of(bias, op)), op,
      ": bias must be [N], fp32, bf16 or fp16, on the CPU");
  Dtype dtype = dtype_of(bias, op);
  int64_t stride = n > 0 ? bias.strides()[0] : 1;
  std::vector<float> wide(n);
  with_float(dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    const T* x = static_cast<const T*>(bias.const_data_ptr());
    for (int64_t i = 0; i < n; ++i) wide[i] = decode(x[i * stride]);
  });
  return wide;
}

// The result of a product [M, N] of `out_type` with a bias, by any kernel.
template <class Kernel>
Tensor gemm_with(const Kernel& kernel, const Tensor& a, const Tensor& b, const BothScales& scales,
                 const MaybeTensor& bias, ScalarType out_type, const char* op) {
  Dtype out_dtype = dtype_of(out_type, op);
  STD_TORCH_CHECK(is_float(out_dtype), op, ": out_dtype must be fp32, bf16 or fp16");
  int64_t m = a.sizes()[0], n = b.sizes()[1];
  std::vector<float> wide_bias = bias_as_fp32(bias, n, op);
  Tensor out = empty({m, n}, out_type);
  if (m == 0 || n == 0) return out;
  Result result = {out_dtype, static_cast<char*>(out.mutable_data_ptr()),   n, 1,
                   false,     bias.has_value() ? wide_bias.data() : nullptr};
  multiply(kernel, rows_of(a), columns_of(b), a.sizes()[1], scales, result);
  return out;
}

}  // namespace mixprec::cpu
