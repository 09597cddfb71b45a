// The arguments of the GEMM kernels, for host and device, without torch: the order of the tiles of
// C, scales and the epilogue.
#pragma once

#include "dispatch.h"
#include "math/hd.h"

namespace mixprec::cuda {

struct GemmTiles {
  int m_tiles, n_tiles;  // of C; m_tiles counts clusters, whose blocks are adjacent along M
  int splits;            // of K
  int group;             // consecutive tiles down a column, which share b in L2
};

struct GemmTile {
  int m, n, split;
};

MIXPREC_HD int64_t tile_count(const GemmTiles& t) {
  return int64_t{t.m_tiles} * t.n_tiles * t.splits;
}

// Splits are innermost; then bands of `group` tile rows, column by column.
MIXPREC_HD GemmTile tile_at(const GemmTiles& t, int64_t index) {
  int split = static_cast<int>(index % t.splits);
  int64_t tile = index / t.splits, per_band = int64_t{t.group} * t.n_tiles;
  int first = static_cast<int>(tile / per_band) * t.group;
  int height = t.m_tiles - first < t.group ? t.m_tiles - first : t.group;
  int within = static_cast<int>(tile % per_band);
  return {first + within % height, within / height, split};
}

// The scale of element (row, k), where "row" is a row of a or a column of b. row_shift: 0 if each
// row has its own scale, 7 if 128 rows share one. A stride is 0 if all rows, or all of K, share
// one. Strides are in elements. Null data: a scale of 1.
struct ScaleView {
  const float* data;
  int64_t row_stride, chunk_stride;
  int row_shift;

  // chunk: k / 128
  MIXPREC_HD float at(int64_t row, int64_t chunk) const {
    return data == nullptr ? 1.0f : data[(row >> row_shift) * row_stride + chunk * chunk_stride];
  }
};

// The epilogue of one element of C: (sum * a_scale) * b_scale + bias, then one rounding.
struct Epilogue {
  void* out;  // [m, n], rows `pitch` elements apart
  int64_t pitch;
  Dtype out_dtype;
  bool accumulate;             // out += instead of out =; fp32
  const void* bias = nullptr;  // [n], or null
  Dtype bias_dtype = Dtype::f32;
  ScaleView a_scale = {}, b_scale = {};  // those that are not applied chunk by chunk
};

struct GemmArgs {
  int m, n, k;
  int chunks_per_split;  // of 128 bytes of K
  int stages;            // of the ring in shared memory
  GemmTiles tiles;
  Epilogue epilogue;
  bool tma_store;              // out and its pitch must be 16-byte aligned; not with `partial`
  ScaleView a_chunk, b_chunk;  // applied to each 128 of K (Accumulate::scaled)
  bool b_scale_by_column;      // then b_chunk comes by TMA
  float* partial;              // fp32 [splits, m, n], reduced by another kernel; null: 1 split
};

// Takes the factors as arguments, for callers that have loaded them for a whole row or column.
MIXPREC_HD float scaled(float sum, float a_scale, float b_scale) {
  return (sum * a_scale) * b_scale;
}

MIXPREC_HD float scaled(const Epilogue& e, float sum, int64_t row, int64_t col) {
  return scaled(sum, e.a_scale.at(row, 0), e.b_scale.at(col, 0));
}

MIXPREC_HD float with_bias(const Epilogue& e, float value, int64_t col) {
  if (e.bias == nullptr) return value;
  return with_float(e.bias_dtype, [&]<class T>(Type<T>) {
    return value + decode(static_cast<const T*>(e.bias)[col]);
  });
}

// The value of C[row, col], or with `accumulate` the value that is added to it.
MIXPREC_HD float finished(const Epilogue& e, float sum, int64_t row, int64_t col) {
  return with_bias(e, scaled(e, sum, row, col), col);
}

}  // namespace mixprec::cuda
