// The scales and the sums of a product, and how a tile of sums becomes a part of its result.
#pragma once

#include "cpu/gemm_panels.h"
#include "cpu/gemm_scales.h"

namespace mixprec::cpu {

constexpr int64_t kTileRows = 56, kTileCols = 256;  // of sums that are scaled or stored together

// One for each column of a tile.
inline const float* ones() {
  static const std::vector<float> all(kTileCols, 1.0f);
  return all.data();
}

// The scales of both operands. Those of b come from `columns_of`, [chunks][n] or [n]; `b` points at
// the first column of the part.
struct BothScales {
  Scales a;
  const float* b;
  int64_t n;  // columns of all of b
  bool b_by_chunk;
  bool promoted = false;  // the sums of chunks are apart, whether or not they have scales

  bool by_chunk() const { return promoted || a.by_chunk || b_by_chunk; }
  // The factors of the sums of one chunk of rows and columns, those of rows in `row_scales`.
  Epilogue chunk_factors(int64_t row, int64_t m, int64_t col, int64_t chunk,
                         float* row_scales) const {
    for (int64_t i = 0; i < m; ++i) row_scales[i] = a.by_chunk ? a.at(row + i, chunk) : 1.0f;
    return {row_scales, b_by_chunk ? b + chunk * n + col : ones(), nullptr};
  }
  // The factors of the sums over all chunks.
  void row_factors(int64_t row, int64_t m, float* factors) const {
    for (int64_t i = 0; i < m; ++i) factors[i] = a.by_chunk ? 1.0f : a.at(row + i, 0);
  }
  const float* column_factors(int64_t col) const { return b_by_chunk ? ones() : b + col; }
};

// A part of the result: rows [row, row + m) by columns [col, col + n).
struct Part {
  int64_t row, col, m, n;
};

// fp32 sums, row-major.
struct Sums {
  float* data;
  int64_t ld;

  float* at(int64_t row, int64_t col) const { return data + row * ld + col; }
};

// The part of a result that a block of a gives, and the factors of its rows.
struct Output {
  const Result& result;
  const BothScales& scales;
  Part part;
  const float* row_scales;  // [part.m]

  // Tile (row, col) of the part, of m x n at most.
  void store(int64_t row, int64_t col, int64_t m, int64_t n, Sums sums) const {
    SumTile tile = {sums.data, sums.ld, std::min(m, part.m - row), std::min(n, part.n - col)};
    int64_t at_col = part.col + col;
    void* to = result.element(part.row + row, at_col);
    Epilogue e = {row_scales + row, scales.column_factors(at_col),
                  result.bias == nullptr ? nullptr : result.bias + at_col};
    if (result.adds) {
      loops().accumulate_tile(tile, e, static_cast<float*>(to), result.stride_i, result.stride_j);
    } else {
      loops().store_tile(result.dtype, tile, e, to, result.stride_i);
    }
  }
  // Fetches the first lines of the tile's rows, before it is multiplied.
  void fetch(int64_t row, int64_t col, int64_t m) const {
    const char* line = static_cast<char*>(result.element(part.row + row, part.col + col));
    int64_t step = result.stride_i * element_size(result.dtype);
    for (int64_t i = std::min(m, part.m - row); i > 0; --i, line += step) {
      __builtin_prefetch(line, 1);
    }
  }
  void store_all(Sums sums) const {
    for (int64_t col = 0; col < part.n; col += kTileCols) {
      store(0, col, part.m, kTileCols, {sums.at(0, col), sums.ld});
    }
  }
};

}  // namespace mixprec::cpu
