// dequantize_mx: iterates over pieces of rows; the loops are in dequantize_mx_loops.h.
#include "arguments/block_formats.h"
#include "arguments/check.h"
#include "cpu/quantize_blocks.h"
#include "cpu/simd/loops.h"

namespace mixprec::cpu {

// data, scale_inv and tensor_scale_inv of quantize_mx -> [..., columns]
Tensor dequantize_mx(Tensor data, Tensor scale_inv, MaybeTensor tensor_scale_inv, Text fmt,
                     int64_t columns, ScalarType type) {
  BlockFormat f = block_format(fmt, "dequantize_mx");
  Dtype to = float_dtype(type, "dequantize_mx: dtype");
  int64_t rows = check_blocks(data, scale_inv, tensor_scale_inv, f, columns).first;

  data = row_major(data);
  scale_inv = row_major(scale_inv);
  Tensor out = empty(with_last(data, columns), type);
  const uint8_t* q = static_cast<const uint8_t*>(data.const_data_ptr());
  const uint8_t* scales = static_cast<const uint8_t*>(scale_inv.const_data_ptr());
  const float* of_tensor = tensor_scale_inv.has_value() ? read_fp32(*tensor_scale_inv) : nullptr;
  void* result = out.mutable_data_ptr();
  int64_t across = ceil_div(columns, kPiece), length = std::min(columns, kPiece);
  int64_t grain = std::max<int64_t>(1, kPiece / std::max<int64_t>(1, length));
  torch::stable::parallel_for(0, rows * across, grain, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      int64_t row = i / across, col = i % across * kPiece;
      loops().dequantize_mx(f, to, q + row * block_bytes(f, columns) + block_bytes(f, col),
                            scales + row * blocks_of(f, columns) + blocks_of(f, col), of_tensor,
                            at(result, to, row * columns + col), std::min(kPiece, columns - col));
    }
  });
  return out;
}

}  // namespace mixprec::cpu

STABLE_TORCH_LIBRARY_IMPL(mixprec, CPU, m) {
  m.impl("dequantize_mx", TORCH_BOX(&mixprec::cpu::dequantize_mx));
}
