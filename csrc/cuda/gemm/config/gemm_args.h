// The arguments of the GEMM kernels, without torch.
#pragma once

#include "cuda/gemm/config/gemm_tiles.h"
#include "dispatch.h"

namespace mixprec::cuda {

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
  bool accumulate;   // out += instead of out =; fp32
  const void* bias;  // [n], or null
  Dtype bias_dtype;
  ScaleView a_scale, b_scale;  // those that are not applied chunk by chunk
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

}  // namespace mixprec::cuda
