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
  // A scale that does not vary along K is applied at the end.
  ScaleView scale_at_end() const { return is_per_chunk(granularity) ? ScaleView{} : scale; }
  ScaleView scale_in_loop() const { return is_per_chunk(granularity) ? scale : ScaleView{}; }
};

inline Strided strided(const Tensor& t, int row) {
  return {reinterpret_cast<uint64_t>(t.const_data_ptr()),
          {t.size(0), t.size(1)},
          {t.stride(0), t.stride(1)},
          row};
}

inline Operand operand_of(const Tensor& t, int row, const MaybeTensor& scale_inv, const char* op,
                          const char* name) {
  STD_TORCH_CHECK(t.dim() == 2 && t.is_cuda(), op, ": ", name,
                  " must be a matrix on a CUDA device");
  Operand x = {t, row, dtype_of(t, name)};
  STD_TORCH_CHECK(is_fp8(x.dtype) || x.dtype == Dtype::f16 || x.dtype == Dtype::bf16, op, ": ",
                  name, " must be fp16, bf16 or FP8");
  if (!scale_inv.has_value()) return x;
  const Tensor& s = *scale_inv;
  STD_TORCH_CHECK(s.scalar_type() == ScalarType::Float && same_device(s, t), op, ": ", name,
                  "_scale_inv must be fp32 on ", name, "'s device");
  std::optional<Scales> scales;
  if (s.dim() == 2) {
    scales = scales_of(read_fp32(s), strided(s, row), strided(t, row));
  } else if (s.numel() == 1) {
    scales = Scales{{read_fp32(s), 0, 0, 0}, Granularity::tensor};
  }
  STD_TORCH_CHECK(scales.has_value(), op, ": ", name,
                  "_scale_inv must have one element, or one per ", row == 0 ? "row" : "column",
                  ", per 128 of K of it, or per 128 x 128 of ", name);
  x.scale = scales->view;
  x.granularity = scales->granularity;
  return x;
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

}  // namespace mixprec::cuda::sm90
