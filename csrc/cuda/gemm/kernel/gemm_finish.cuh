// The end of a split-K GEMM: adds the partial sums in the order of K and applies the epilogue.
// Without partial sums (K = 0) the sum is 0.
#pragma once

#include "cuda/common/launch.h"
#include "cuda/common/vec.cuh"
#include "cuda/gemm/kernel/gemm_epilogue.cuh"

namespace mixprec::cuda {

// The threads of the grid iterate over packs of `width` elements, row by row, without a division in
// the loop, which would dominate its time.
template <int width, class O>
__device__ __forceinline__ void finish_packs(const float* partial, int splits, int m, int n,
                                             const Epilogue& e) {
  int packs = n / width;  // of a row
  int first = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  int stride = static_cast<int>(gridDim.x * kThreads);
  int rows = stride / packs, rest = stride % packs, pack = first % packs;
  for (int64_t row = first / packs; row < m; row += rows) {
    int col = pack * width;
    float sum[width] = {}, part[width];
    for (int s = 0; s < splits; ++s) {
      load(partial + (int64_t{s} * m + row) * n + col, part);
#pragma unroll
      for (int j = 0; j < width; ++j) sum[j] += part[j];
    }
    O* to = static_cast<O*>(e.out) + row * e.pitch + col;
    O result[width];
    if (e.accumulate) load(to, result);
#pragma unroll
    for (int j = 0; j < width; ++j) {
      float value = finished(e, sum[j], row, col + j);
      result[j] = Convert<O>::encode(e.accumulate ? decode(result[j]) + value : value);
    }
    store(to, result);
    pack += rest;
    if (pack >= packs) pack -= packs, ++row;
  }
}

// partial: [splits, m, n], dense and 16-byte aligned.
template <class O>
__global__ void __launch_bounds__(kThreads)
    gemm_finish_kernel(const float* partial, int splits, int m, int n, Epilogue e) {
  constexpr int width = kVector<O>;
  // Then no pack extends beyond its row, and all packs are aligned.
  if (n % width == 0 && e.pitch % width == 0 && is_aligned(e.out)) {
    finish_packs<width, O>(partial, splits, m, n, e);
  } else {
    finish_packs<1, O>(partial, splits, m, n, e);
  }
}

inline cudaError_t gemm_finish(const float* partial, int splits, int m, int n, const Epilogue& e,
                               int sms, cudaStream_t stream) {
  if (m == 0 || n == 0) return cudaSuccess;
  return with_float(e.out_dtype, [&](auto t) {
    using O = typename decltype(t)::type;
    int64_t threads = int64_t{m} * n / kVector<O>;
    return launch(gemm_finish_kernel<O>, grid_for(threads / kThreads, sms), kThreads, 0, stream,
                  partial, splits, m, n, e);
  });
}

}  // namespace mixprec::cuda
