// quantize_mx: iterates over pieces of rows and tiles; the loops are in quantize_mx_loops.h.
#include <algorithm>
#include <atomic>

#include "arguments/block_formats.h"
#include "arguments/check.h"
#include "cpu/quantize_blocks.h"
#include "cpu/simd/block_cast.h"

namespace mixprec::cpu {

namespace {

constexpr int64_t kRows = 128, kCols = 64;  // of x in a tile of the transpose

struct Codes {
  uint8_t *q, *scale_inv;
};

Codes codes_of(const Tensor& data, const Tensor& scale_inv) {
  return {static_cast<uint8_t*>(data.mutable_data_ptr()),
          static_cast<uint8_t*>(scale_inv.mutable_data_ptr())};
}

int64_t in_whole_blocks(BlockFormat f, int64_t k) { return blocks_of(f, k) * block_size(f); }

// x [rows, cols], row-major; returns its amax as bits.
uint32_t by_rows(const BlockCastRule& rule, const void* x, int64_t rows, int64_t cols, Codes out) {
  std::atomic<uint32_t> largest{0};
  int64_t across = ceil_div(cols, kPiece), length = std::min(cols, kPiece);
  int64_t grain = std::max<int64_t>(1, kPiece / std::max<int64_t>(1, length));
  torch::stable::parallel_for(0, rows * across, grain, [&](int64_t first, int64_t last) {
    uint32_t most = 0;
    for (int64_t i = first; i < last; ++i) {
      int64_t row = i / across, col = i % across * kPiece;
      uint32_t seen = loops().quantize_mx(
          rule, at(x, rule.x_dtype, row * cols + col), std::min(kPiece, cols - col),
          row * in_whole_blocks(rule.format, cols) + col,
          out.q + row * block_bytes(rule.format, cols) + block_bytes(rule.format, col),
          out.scale_inv + row * blocks_of(rule.format, cols) + blocks_of(rule.format, col));
      most = std::max(most, seen);
    }
    raise_to(largest, most);
  });
  return largest;
}

// Of the transpose. Down the columns, so that each row of the results is written from left to
// right.
void by_columns(const BlockCastRule& rule, const void* x, int64_t rows, int64_t cols, Codes out) {
  BlockFormat f = rule.format;
  int64_t ld_q = block_bytes(f, rows), ld_scale = blocks_of(f, rows);
  int64_t ld_element = in_whole_blocks(f, rows), down = ceil_div(rows, kRows);
  torch::stable::parallel_for(0, ceil_div(cols, kCols) * down, 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      int64_t col = i / down * kCols, row = i % down * kRows;
      loops().quantize_mx_columns(rule, at(x, rule.x_dtype, row * cols + col), cols,
                                  std::min(kRows, rows - row), std::min(kCols, cols - col),
                                  col * ld_element + row, ld_element,
                                  out.q + col * ld_q + block_bytes(f, row), ld_q,
                                  out.scale_inv + col * ld_scale + blocks_of(f, row), ld_scale);
    }
  });
}

// Scales [rows, blocks] in the swizzled layout. A copy: it is for GPUs, and here small beside x.
Tensor swizzled_copy(const Tensor& scales) {
  int64_t rows = scales.size(0), blocks = scales.size(1);
  Tensor out = empty(block_scale_shape(rows, blocks, true), scales.scalar_type());
  const auto* from = static_cast<const uint8_t*>(scales.const_data_ptr());
  auto* to = static_cast<uint8_t*>(out.mutable_data_ptr());
  std::fill_n(to, out.numel(), uint8_t{0});
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t i = 0; i < blocks; ++i) to[swizzled_at(row, i, blocks)] = from[row * blocks + i];
  }
  return out;
}

}  // namespace

// x [..., K], seed: int64 [1] -> data [..., bytes of K], data_t [K, bytes of M] (or [0, 0]),
// scale_inv [M, blocks of K], scale_inv_t [K, blocks of M] (or [0]), swizzled or not,
// tensor_scale_inv [] (or [0]), amax [] (or [0])
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> quantize_mx(Tensor x, Text fmt,
                                                                       Text mode, bool transpose,
                                                                       MaybeTensor seed,
                                                                       bool swizzled,
                                                                       bool with_amax) {
  auto [dtype, f, how] = check_block_cast(x, fmt, mode, transpose, seed);
  x = row_major(x);
  auto [m, k] = as_matrix(x);
  Tensor data = empty(with_last(x, block_bytes(f, k)), element_type(f));
  Tensor scale_inv = empty({m, blocks_of(f, k)}, block_scale_type(f));
  int64_t m_t = transpose ? m : 0, k_t = transpose ? k : 0;
  Tensor data_t = empty({k_t, block_bytes(f, m_t)}, element_type(f));
  Tensor scale_inv_t = transpose ? empty({k, blocks_of(f, m)}, block_scale_type(f))
                                 : empty({0}, block_scale_type(f));
  bool nvfp4 = f == BlockFormat::nvfp4;
  float tensor_amax = 0.0f;
  if (nvfp4) tensor_amax = *read_fp32(amax(x));
  bool stochastic = seed.has_value();
  BlockCastRule rule = {dtype, f, scale_rule(f, how, tensor_amax, stochastic), stochastic, 0, 0};
  if (stochastic) {
    rule.seed = static_cast<uint64_t>(*static_cast<const int64_t*>(seed->const_data_ptr()));
  }
  uint32_t largest = by_rows(rule, x.const_data_ptr(), m, k, codes_of(data, scale_inv));
  if (transpose) {
    rule.stream = 1;
    by_columns(rule, x.const_data_ptr(), m, k, codes_of(data_t, scale_inv_t));
  }
  if (swizzled) {
    scale_inv = swizzled_copy(scale_inv);
    if (transpose) scale_inv_t = swizzled_copy(scale_inv_t);
  }
  auto scalar_if = [](bool wanted, float value) {
    return wanted ? empty_scalar(value) : empty({0}, ScalarType::Float);
  };
  return {data,
          data_t,
          scale_inv,
          scale_inv_t,
          scalar_if(nvfp4, rule.scale.tensor_inv),
          scalar_if(nvfp4 || with_amax, bits_float(largest))};
}

}  // namespace mixprec::cpu

STABLE_TORCH_LIBRARY_IMPL(mixprec, CPU, m) {
  m.impl("quantize_mx", TORCH_BOX(&mixprec::cpu::quantize_mx));
}
