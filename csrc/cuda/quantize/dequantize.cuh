// dequantize on the GPU: out = data * scale_inv in fp32, one rounding to out's dtype.
#pragma once

#include "cuda/common/convert.cuh"
#include "cuda/common/launch.h"
#include "cuda/common/vec.cuh"
#include "dispatch.h"

namespace mixprec::cuda {

// Scales of a matrix of `cols` columns, each for `rows_each` rows and `cols_each` columns.
struct ScaleGrid {
  const float* data;
  int64_t cols, rows_each, cols_each;
  int64_t stride_row, stride_col;

  // The scale of element i; 64-bit divisions are slow, and few tensors need them.
  __device__ __forceinline__ float of(int64_t i) const {
    return (i | cols | rows_each | cols_each) >> 32 == 0 ? of<uint32_t>(i) : of<int64_t>(i);
  }
  template <class Index>
  __device__ __forceinline__ float of(int64_t i) const {
    auto in_block = [](Index at, int64_t each) { return each == 1 ? at : at / Index(each); };
    Index row = Index(i) / Index(cols), col = Index(i) - row * Index(cols);
    return data[in_block(row, rows_each) * stride_row + in_block(col, cols_each) * stride_col];
  }
};

// Elements of Q that make one vector of O, or of Q if its elements are wider; and how many such
// packs a thread loads before it stores the first. The scales of four would take too many
// registers.
template <class Q, class O>
constexpr int kDequantizeRun = kVector<O> < kVector<Q> ? kVector<O> : kVector<Q>;
template <bool by_blocks>
constexpr int kDequantizePacks = by_blocks ? 2 : 4;

// by_blocks: a scale for every block of the matrix; otherwise one scale for all.
template <class Q, class O, bool by_blocks>
__global__ void __launch_bounds__(kThreads)
    dequantize_kernel(const Q* __restrict__ data, O* __restrict__ out, int64_t count,
                      const ScaleGrid grid) {
  constexpr int n = kDequantizeRun<Q, O>;
  float one = by_blocks ? 1.0f : *grid.data;
  int64_t first = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  Span span = split<n>(count, data, out);
  // Then n consecutive elements are in one row and in one block.
  if (by_blocks && (span.head != 0 || grid.cols % n != 0)) span = {count, 0, 0};
  auto multiply = [&]<int size, int together>(Int<size>, Int<together>, int64_t i, int64_t step) {
    Q in[together][size];
    float s[together];
#pragma unroll
    for (int p = 0; p < together; ++p) {
      load(data + i + p * step, in[p]);
      s[p] = by_blocks ? grid.of(i + p * step) : one;
    }
#pragma unroll
    for (int p = 0; p < together; ++p) {
      float x[size];
      O result[size];
      decode_all(in[p], x);
#pragma unroll
      for (float& value : x) value = value * s[p];
      round_all(x, result);
      store(out + i + p * step, result);
    }
  };
  for_each_group<n, kDequantizePacks<by_blocks>>(span, first, int64_t{gridDim.x} * kThreads,
                                                 multiply);
}

// One scale if grid.rows_each is 0.
inline cudaError_t dequantize(Dtype data_dtype, Dtype out_dtype, const void* data, void* out,
                              int64_t count, const ScaleGrid& grid, const Gpu& gpu) {
  if (count == 0) return cudaSuccess;
  return with_low(data_dtype, [&]<class Q>(Type<Q>) {
    return with_float(out_dtype, [&]<class O>(Type<O>) {
      bool by_blocks = grid.rows_each != 0;
      auto kernel = by_blocks ? dequantize_kernel<Q, O, true> : dequantize_kernel<Q, O, false>;
      int packs = by_blocks ? kDequantizePacks<true> : kDequantizePacks<false>;
      int64_t pieces = count / (kDequantizeRun<Q, O> * packs) / kThreads;
      return launch_over(kernel, pieces, gpu, static_cast<const Q*>(data), static_cast<O*>(out),
                         count, grid);
    });
  });
}

}  // namespace mixprec::cuda
