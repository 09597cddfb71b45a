// The arguments and results of quantize, dequantize and the ops that cast what they compute, on
// every device.
#pragma once

#include "arguments/check.h"
#include "math/activation.h"

namespace mixprec {

// data, data_t, scale_inv, scale_inv_t, amax
using Quantized = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

struct Cast {
  ScalarType type;  // fp32, for ops that compute values: the values as they are
  MaybeTensor scale;
  bool transpose;
  std::string granularity;
  bool power_of_two_scale;
};

inline Dtype check_cast(const Cast& cast, const Tensor& x, const char* op) {
  Dtype to = dtype_of(cast.type, op);
  bool given = cast.scale.has_value();
  STD_TORCH_CHECK(to != Dtype::f64 && (to != Dtype::f32 || !(cast.transpose || given)), op,
                  ": dtype must be fp8, fp16 or bf16, or fp32 without scale and transpose");
  STD_TORCH_CHECK(!cast.transpose || x.dim() >= 2, op,
                  ": transpose needs x of 2 or more dimensions");
  STD_TORCH_CHECK(cast.granularity == "tensor" || (is_fp8(to) && !given), op,
                  ": scales by rows or blocks are for fp8 and come from x");
  return to;
}

constexpr int64_t kScaleBlock = 128;

// How many rows and columns of data [m, k] share a scale, which the shape of scale_inv tells.
inline std::pair<int64_t, int64_t> check_scale_inv(const Tensor& scale_inv, const Tensor& data,
                                                   int64_t m, int64_t k) {
  STD_TORCH_CHECK(scale_inv.scalar_type() == ScalarType::Float && same_device(scale_inv, data),
                  "dequantize: scale_inv must be fp32 on data's device");
  if (scale_inv.numel() == 1) return {std::max<int64_t>(1, m), std::max<int64_t>(1, k)};
  auto blocks_in = [](int64_t n) { return (n + kScaleBlock - 1) / kScaleBlock; };
  bool is_matrix = scale_inv.dim() == 2;
  int64_t r = is_matrix ? scale_inv.size(0) : -1, c = is_matrix ? scale_inv.size(1) : -1;
  STD_TORCH_CHECK(
      (r == m && (c == 1 || c == blocks_in(k))) || (r == blocks_in(m) && c == blocks_in(k)),
      "dequantize: scale_inv fits no granularity");
  return {r == m ? 1 : kScaleBlock, c == 1 ? std::max<int64_t>(1, k) : kScaleBlock};
}

inline Activation activation_of(const std::string& name, const char* op) {
  if (name == "silu") return Activation::silu;
  if (name == "gelu") return Activation::gelu;
  if (name == "gelu_tanh") return Activation::gelu_tanh;
  STD_TORCH_CHECK(name == "relu2", op, ": kind must be silu, gelu, gelu_tanh or relu2, got ", name);
  return Activation::relu2;
}

}  // namespace mixprec
