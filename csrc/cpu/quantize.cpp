// amax, quantize and dequantize.
#include <atomic>

#include "check.h"
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

ScaleGrid grid_of(const Tensor& scale, int64_t m, int64_t k) {
  STD_TORCH_CHECK(scale.dim() == 2, "dequantize: scale_inv fits no granularity");
  int64_t r = scale.size(0), c = scale.size(1), blocks = (m + kBlock - 1) / kBlock;
  int64_t chunks = (k + kBlock - 1) / kBlock;
  STD_TORCH_CHECK((r == m && (c == 1 || c == chunks)) || (r == blocks && c == chunks),
                  "dequantize: scale_inv fits no granularity");
  return {static_cast<const float*>(scale.const_data_ptr()), r == m ? 1 : kBlock,
          c == 1 ? std::max<int64_t>(1, k) : kBlock, scale.stride(0), scale.stride(1)};
}

float* fp32_of(const Tensor& t) { return static_cast<float*>(t.mutable_data_ptr()); }

Dtype check_input(const Tensor& x, const char* what) {
  Dtype dtype = dtype_of(x, what);
  STD_TORCH_CHECK(is_float(dtype) && on_cpu(x), what, " must be fp32, bf16 or fp16 on the CPU");
  return dtype;
}

}  // namespace

// x: any shape, fp32/bf16/fp16 -> fp32 []
Tensor amax(Tensor x) {
  Dtype dtype = check_input(x, "amax: x");
  return empty_scalar(bits_float(amax_bits(dense(x), dtype)));
}

// x [..., K] -> data (x's shape), data_t [K, M] (or [0, 0]), scale_inv, scale_inv_t (shapes by the
// granularity), amax []
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> quantize(Tensor x, ScalarType type,
                                                            MaybeTensor scale, bool transpose,
                                                            std::string granularity,
                                                            bool power_of_two_scale) {
  Dtype from = check_input(x, "quantize: x");
  Dtype to = dtype_of(type, "quantize: dtype");
  STD_TORCH_CHECK(to != Dtype::f32 && to != Dtype::f64,
                  "quantize: dtype must be fp8, fp16 or bf16");
  STD_TORCH_CHECK(!transpose || x.dim() >= 2,
                  "quantize: transpose needs x of 2 or more dimensions");
  Blocks blocks = blocks_of(granularity);
  STD_TORCH_CHECK(blocks.rows == 0 || (is_fp8(to) && !scale.has_value()),
                  "quantize: scales by rows or blocks are for fp8 and come from x");
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
  Dtype to = dtype_of(type, "dequantize: dtype");
  STD_TORCH_CHECK(from != Dtype::f32 && from != Dtype::f64 && on_cpu(data),
                  "dequantize: data must be fp8, fp16 or bf16 on the CPU");
  STD_TORCH_CHECK(is_float(to), "dequantize: dtype must be fp32, bf16 or fp16");
  STD_TORCH_CHECK(scale_inv.scalar_type() == ScalarType::Float && on_cpu(scale_inv),
                  "dequantize: scale_inv must be fp32 on the CPU");

  data = row_major(data);
  auto [rows, cols] = as_matrix(data);
  Tensor out = empty(data.sizes(), type);
  const void* src = data.const_data_ptr();
  void* dst = out.mutable_data_ptr();
  if (scale_inv.numel() == 1) {
    float s = *static_cast<const float*>(scale_inv.const_data_ptr());
    for_pieces(data.numel(), [&](int64_t begin, int64_t end) {
      loops().dequantize(from, to, at(src, from, begin), s, at(dst, to, begin), end - begin);
    });
    return out;
  }
  ScaleGrid grid = grid_of(scale_inv, rows, cols);
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
