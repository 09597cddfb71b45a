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
    if (i >> 32 == 0 && cols >> 32 == 0) {
      uint32_t row = static_cast<uint32_t>(i) / static_cast<uint32_t>(cols);
      return at(row, static_cast<uint32_t>(i) - row * static_cast<uint32_t>(cols));
    }
    return at(i / cols, i % cols);
  }
  __device__ __forceinline__ float at(int64_t row, int64_t col) const {
    int64_t r = rows_each == 1 ? row : row / rows_each, c = col >= cols_each ? col / cols_each : 0;
    return data[r * stride_row + c * stride_col];
  }
};

// by_blocks: a scale for every block of the matrix; otherwise one scale for all.
template <class Q, class O, bool by_blocks>
__global__ void __launch_bounds__(kThreads)
    dequantize_kernel(const Q* __restrict__ data, O* __restrict__ out, int64_t count,
                      const ScaleGrid grid) {
  constexpr int n = kVector<Q>;
  float one = by_blocks ? 1.0f : *grid.data;
  int64_t first = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  Span span = split<n>(count, data, out);
  // Then n consecutive elements are in one row and in one block.
  if (by_blocks && (span.head != 0 || grid.cols % n != 0)) span = {count, 0, 0};
  for_each<n>(span, first, int64_t{gridDim.x} * kThreads, [&](auto width, int64_t i) {
    Q in[decltype(width)::value];
    O result[decltype(width)::value];
    load(data + i, in);
    float s = by_blocks ? grid.of(i) : one, x[decltype(width)::value];
    decode_all(in, x);
#pragma unroll
    for (float& value : x) value = value * s;
    round_all(x, result);
    store(out + i, result);
  });
}

// One scale if grid.rows_each is 0.
inline cudaError_t dequantize(Dtype data_dtype, Dtype out_dtype, const void* data, void* out,
                              int64_t count, const ScaleGrid& grid, int sms, cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  return with_low(data_dtype, [&](auto tq) {
    return with_float(out_dtype, [&](auto to) {
      using Q = typename decltype(tq)::type;
      using O = typename decltype(to)::type;
      auto kernel =
          grid.rows_each == 0 ? dequantize_kernel<Q, O, false> : dequantize_kernel<Q, O, true>;
      return launch(kernel, grid_for(kernel, count / kVector<Q> / kThreads, sms), kThreads, 0,
                    stream, static_cast<const Q*>(data), static_cast<O*>(out), count, grid);
    });
  });
}

}  // namespace mixprec::cuda
