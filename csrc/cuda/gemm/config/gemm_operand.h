// The operands of gemm: the tensors, with their layout and scales for the Hopper kernel.
#pragma once

#include "cuda/common/on_device.h"
#include "cuda/gemm/config/gemm_layout.h"

namespace mixprec::cuda::sm90 {

// a [M, K], or b [K, N], whose rows here are its columns.
struct Operand {
  Tensor tensor;
  int row;  // the dimension of the rows
  Dtype dtype;
  ScaleView scale = {};  // 1 if none is given
  Granularity granularity = Granularity::tensor;
  Arrangement layout = {};  // set by arrange()

  int64_t rows() const { return tensor.size(row); }
  int64_t k() const { return tensor.size(1 - row); }
};

inline Strided strided(const Tensor& t, int row) {
  return {reinterpret_cast<uint64_t>(t.const_data_ptr()),
          {t.size(0), t.size(1)},
          {t.stride(0), t.stride(1)},
          row};
}

inline void set_scale(Operand& x, const MaybeTensor& given, const char* op, const char* name) {
  if (!given.has_value()) return;
  const Tensor& s = *given;
  STD_TORCH_CHECK(s.scalar_type() == ScalarType::Float && same_device(s, x.tensor), op, ": ", name,
                  "_scale_inv must be fp32 on ", name, "'s device");
  auto* data = static_cast<const float*>(s.const_data_ptr());
  std::optional<Scales> found;
  if (s.dim() == 2) {
    found = scales_of(data, strided(s, x.row), strided(x.tensor, x.row));
  } else if (s.numel() == 1) {
    found = Scales{{data, 0, 0, 0}, Granularity::tensor};
  }
  STD_TORCH_CHECK(found.has_value(), op, ": ", name,
                  "_scale_inv must have one element, or one per ", x.row == 0 ? "row" : "column",
                  ", per 128 of K of it, or per 128 x 128 of ", name);
  x.scale = found->view;
  x.granularity = found->granularity;
}

inline Operand operand_of(const Tensor& x, int row, const MaybeTensor& scale, const char* op,
                          const char* name) {
  STD_TORCH_CHECK(x.dim() == 2 && x.is_cuda(), op, ": ", name,
                  " must be a matrix on a CUDA device");
  Operand made = {x, row, dtype_of(x, name)};
  STD_TORCH_CHECK(is_fp8(made.dtype) || made.dtype == Dtype::f16 || made.dtype == Dtype::bf16, op,
                  ": ", name, " must be fp16, bf16 or FP8");
  set_scale(made, scale, op, name);
  return made;
}

// Determines the layout, and copies the operand if the kernel does not support it.
inline void arrange(Operand& x) {
  x.layout = arrangement_of(strided(x.tensor, x.row), element_size(x.dtype));
  if (!x.layout.copy) return;
  int inner = x.layout.major == Major::k ? 1 - x.row : x.row;
  Tensor lines =
      empty_on(x.tensor, {x.tensor.size(1 - inner), x.layout.pitch}, x.tensor.scalar_type());
  Tensor copy = torch::stable::narrow(lines, 1, 0, x.tensor.size(inner));
  if (inner == 0) copy = torch::stable::transpose(copy, 0, 1);
  torch::stable::copy_(copy, x.tensor);
  x.tensor = copy;
}

// A scale that does not vary along K is applied at the end.
inline ScaleView at_end(const Operand& x) {
  return is_per_chunk(x.granularity) ? ScaleView{} : x.scale;
}
inline ScaleView in_loop(const Operand& x) {
  return is_per_chunk(x.granularity) ? x.scale : ScaleView{};
}

}  // namespace mixprec::cuda::sm90
