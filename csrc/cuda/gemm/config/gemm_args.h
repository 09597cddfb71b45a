// What the GEMM kernels are told, without torch.
#pragma once

#include "cuda/gemm/config/gemm_tiles.h"
#include "dispatch.h"

namespace mixprec::cuda {

// The scale of element (row, k), where "row" is a row of a or a column of b. row_shift: 0 where
// rows have their own scales, 7 where 128 share one; a stride is 0 where all rows, or all of K,
// share one. Strides are in elements. Null data: 1.
struct ScaleView {
  const float* data;
  int64_t row_stride, chunk_stride;
  int row_shift;

  // chunk: k / 128
  MIXPREC_HD float at(int64_t row, int64_t chunk) const {
    return data == nullptr ? 1.0f : data[(row >> row_shift) * row_stride + chunk * chunk_stride];
  }
};

// What happens to the sum of products of one element of C: (sum * a_scale) * b_scale + bias, then
// one rounding.
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
  bool tma_store;              // by TMA: out is 16-byte aligned, its pitch too; not with `partial`
  ScaleView a_chunk, b_chunk;  // applied to each 128 of K (Accumulate::scaled)
  float* partial;              // fp32 [splits, m, n], finished by another kernel; null: 1 split
};

}  // namespace mixprec::cuda
