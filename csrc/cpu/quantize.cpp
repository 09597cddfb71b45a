// amax, quantize and dequantize.
#include <atomic>

#include "cpu/parallel.h"
#include "cpu/quantize_blocks.h"
#include "cpu/simd/loops.h"
#include "math/scale.h"

namespace mixprec::cpu {

namespace {

uint32_t amax_bits(const Tensor& x, Dtype dtype) {
  std::atomic<uint32_t> largest{0};
  const void* data = x.const_data_ptr();
  for_pieces(x.numel(), [&](int64_t begin, int64_t end) {
    raise_to(largest, loops().amax(dtype, at(data, dtype, begin), end - begin));
  });
  return largest;
}

// x itself if its memory order does not matter or is row-major, else a row-major copy.
Tensor dense(const Tensor& x) { return is_dense(x) ? x : to_contiguous(x); }

// Scales per row or block of an [M, K] tensor: the scale of element (row, col).
struct ScaleGrid {
  const float* data;
  int64_t rows, cols;  // per scale
  int64_t stride_row, stride_col;

  float at(int64_t row, int64_t col) const {
    return data[row / rows * stride_row + col / cols * stride_col];
  }
};

}  // namespace

// x: any shape, fp32/bf16/fp16 -> fp32 []
Tensor amax(Tensor x) {
  Dtype dtype = float_dtype(x, "amax: x");
  return empty_scalar(bits_float(amax_bits(dense(x), dtype)));
}

// x [..., K] -> data (x's shape), data_t [K, M] (or [0, 0]), scale_inv, scale_inv_t (shapes by the
// granularity), amax []
Quantized quantize(Tensor x, ScalarType type, MaybeTensor scale, bool transpose, Text granularity,
                   bool power_of_two_scale) {
  Dtype from = float_dtype(x, "quantize: x");
  Dtype to = check_cast({type, scale, transpose, granularity, power_of_two_scale}, x, "quantize");
  STD_TORCH_CHECK(to != Dtype::f32, "quantize: dtype must be fp8, fp16 or bf16");
  Blocks blocks = blocks_of(granularity);
  float s = read_scalar(scale, 0.0f, "quantize", "scale");

  x = row_major(x);
  auto [rows, cols] = as_matrix(x);
  const void* src = x.const_data_ptr();
  Tensor data = empty(x.sizes(), type);
  Tensor data_t = empty({transpose ? cols : 0, transpose ? rows : 0}, type);
  void *dst = data.mutable_data_ptr(), *dst_t = data_t.mutable_data_ptr();
  if (blocks.rows != 0) {
    BlockCast cast = {from, to, src, rows, cols, transpose, power_of_two_scale};
    Tensor scale_inv = scales_of(blocks, rows, cols);
    Tensor scale_inv_t = transpose ? scales_of(blocks, cols, rows) : empty({0}, ScalarType::Float);
    uint32_t largest =
        quantize_by_blocks(cast, blocks, dst, fp32_of(scale_inv), dst_t, fp32_of(scale_inv_t));
    return {data, data_t, scale_inv, scale_inv_t, empty_scalar(bits_float(largest))};
  }

  if (s == 0.0f) {  // not given, or not initialised yet
    s = is_fp8(to) ? scale_from_amax(bits_float(amax_bits(x, from)), format_max(to), 1.0f,
                                     power_of_two_scale, 1.0f)
                   : 1.0f;
  } else {
    s = checked_scale(s);
  }
  std::atomic<uint32_t> largest{0};
  if (transpose) {
    constexpr int64_t band = 64;  // rows: full cache lines of each row of the transpose
    int64_t grain = cols == 0 ? 1 : std::max<int64_t>(1, kPiece / (band * cols));
    torch::stable::parallel_for(
        0, (rows + band - 1) / band, grain, [&](int64_t first, int64_t last) {
          for (int64_t i = first; i < last; ++i) {
            int64_t row = i * band, n = std::min(band, rows - row);
            raise_to(largest, loops().quantize_transpose(from, to, at(src, from, row * cols), s,
                                                         at(dst, to, row * cols),
                                                         at(dst_t, to, row), n, cols, cols, rows));
          }
        });
  } else {
    for_pieces(x.numel(), [&](int64_t begin, int64_t end) {
      raise_to(largest, loops().quantize(from, to, at(src, from, begin), s, at(dst, to, begin),
                                         end - begin));
    });
  }
  return {data, data_t, empty_scalar(1.0f / s), empty({0}, ScalarType::Float),
          empty_scalar(bits_float(largest))};
}

// data: any shape; scale_inv: fp32, of any granularity -> data's shape
Tensor dequantize(Tensor data, Tensor scale_inv, ScalarType type) {
  Dtype from = dtype_of(data, "dequantize: data");
  Dtype to = float_dtype(type, "dequantize: dtype");
  STD_TORCH_CHECK(from != Dtype::f32 && from != Dtype::f64,
                  "dequantize: data must be fp8, fp16 or bf16");
  auto [rows, cols] = as_matrix(data);
  auto [rows_each, cols_each] = check_scale_inv(scale_inv, data, rows, cols);

  data = row_major(data);
  Tensor out = empty(data.sizes(), type);
  const void* src = data.const_data_ptr();
  void* dst = out.mutable_data_ptr();
  if (scale_inv.numel() == 1) {
    float s = *read_fp32(scale_inv);
    for_pieces(data.numel(), [&](int64_t begin, int64_t end) {
      loops().dequantize(from, to, at(src, from, begin), s, at(dst, to, begin), end - begin);
    });
    return out;
  }
  ScaleGrid grid = {read_fp32(scale_inv), rows_each, cols_each, scale_inv.stride(0),
                    scale_inv.stride(1)};
  torch::stable::parallel_for(0, rows, std::max<int64_t>(1, kPiece / std::max<int64_t>(1, cols)),
                              [&](int64_t first, int64_t last) {
                                for (int64_t r = first; r < last; ++r) {
                                  for (int64_t c = 0; c < cols; c += grid.cols) {
                                    int64_t i = r * cols + c;
                                    loops().dequantize(from, to, at(src, from, i), grid.at(r, c),
                                                       at(dst, to, i),
                                                       std::min(grid.cols, cols - c));
                                  }
                                }
                              });
  return out;
}

}  // namespace mixprec::cpu

STABLE_TORCH_LIBRARY_IMPL(mixprec, CPU, m) {
  m.impl("amax", TORCH_BOX(&mixprec::cpu::amax));
  m.impl("quantize", TORCH_BOX(&mixprec::cpu::quantize));
  m.impl("dequantize", TORCH_BOX(&mixprec::cpu::dequantize));
}
