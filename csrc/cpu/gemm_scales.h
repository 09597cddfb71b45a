// The scales of a GEMM's operands: one per tensor, per row, or per block of 128, also along K.
#pragma once

#include <algorithm>
#include <optional>
#include <vector>

#include "arguments/check.h"
#include "cpu/parallel.h"

namespace mixprec::cpu {

constexpr int64_t kChunk = 128;  // elements of K, and rows of a square block

// The scale of element (row, k) is data[row / rows_per * row_stride + k / 128 * chunk_stride];
// "row" is a row of a or a column of b. A stride is 0 if the scale does not vary in that direction.
struct Scales {
  const float* data = nullptr;  // null: 1
  int64_t rows_per = 1, row_stride = 0, chunk_stride = 0;
  bool by_chunk = false;  // it varies along K

  float at(int64_t row, int64_t chunk) const {
    return data == nullptr ? 1.0f : data[row / rows_per * row_stride + chunk * chunk_stride];
  }
};

// The scales of an operand of `rows` x k. `row_dim` is the dimension of t along the rows: 0 for a
// [M, K], 1 for b [K, N].
inline Scales scales_of(const std::optional<Tensor>& t, int64_t rows, int64_t k, int row_dim,
                        const char* op, const char* name) {
  Scales s;
  if (!t.has_value()) return s;
  STD_TORCH_CHECK(t->scalar_type() == ScalarType::Float && on_cpu(*t), op, ": ", name,
                  " must be fp32 on the CPU");
  s.data = static_cast<const float*>(t->const_data_ptr());
  if (t->numel() == 1) return s;
  STD_TORCH_CHECK(t->dim() == 2, op, ": ", name, " must hold one element or be 2-D");
  int64_t r = t->sizes()[row_dim], c = t->sizes()[1 - row_dim];
  bool per_row = r == rows, per_block = !per_row && r == ceil_div(rows, kChunk);
  STD_TORCH_CHECK((per_row || per_block) && (c == 1 || c == ceil_div(k, kChunk)), op, ": ", name,
                  " has a shape that fits no granularity");
  s.rows_per = per_row ? 1 : kChunk;
  s.row_stride = t->strides()[row_dim];
  s.by_chunk = c > 1;
  if (s.by_chunk) s.chunk_stride = t->strides()[1 - row_dim];
  if (t->numel() == 0) s.data = nullptr;  // M, N or K is 0
  return s;
}

// One scale per column of b: [chunks][n] if they vary along K, else [n].
inline std::vector<float> columns_of(const Scales& s, int64_t n, int64_t k) {
  int64_t chunks = s.by_chunk ? ceil_div(k, kChunk) : 1;
  std::vector<float> wide(static_cast<size_t>(chunks * n));
  for (int64_t c = 0; c < chunks; ++c) {
    for (int64_t i = 0; i < n; ++i) wide[c * n + i] = s.at(i, c);
  }
  return wide;
}

}  // namespace mixprec::cpu
