// The kernels before and after that of a GEMM: the scales of rows in the order in which it reads
// them, and the end of a split K.
#pragma once

#include "cuda/common/launch.h"
#include "cuda/common/vec.cuh"
#include "cuda/gemm/config/gemm_args.h"

namespace mixprec::cuda {

struct ScaleCopy {
  ScaleView from;
  float* to;
  int rows, chunks;  // 0: nothing to copy
  int64_t pitch;     // of `to`, from one chunk to the next
};

constexpr int kScalesPerThread = 8;  // along K: a sector

MIXPREC_HD int64_t pieces_of(const ScaleCopy& copy) {
  return int64_t{copy.rows} * ((copy.chunks + kScalesPerThread - 1) / kScalesPerThread);
}

// Neighbouring threads take neighbouring rows, so that a warp writes whole lines.
__device__ __forceinline__ void copy_piece(const ScaleCopy& copy, int64_t piece) {
  int row = static_cast<int>(piece % copy.rows);
  int first = static_cast<int>(piece / copy.rows) * kScalesPerThread;
#pragma unroll
  for (int j = 0; j < kScalesPerThread; ++j) {
    int chunk = first + j;
    if (chunk < copy.chunks) copy.to[chunk * copy.pitch + row] = copy.from.at(row, chunk);
  }
}

static __global__ void __launch_bounds__(kThreads) copy_scales_kernel(ScaleCopy a, ScaleCopy b) {
  int64_t of_a = pieces_of(a), pieces = of_a + pieces_of(b);
  int64_t stride = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < pieces; i += stride) {
    if (i < of_a) {
      copy_piece(a, i);
    } else {
      copy_piece(b, i - of_a);
    }
  }
}

inline cudaError_t copy_scales(const ScaleCopy& a, const ScaleCopy& b, const Gpu& gpu) {
  int64_t pieces = pieces_of(a) + pieces_of(b);
  if (pieces == 0) return cudaSuccess;
  return launch(copy_scales_kernel, {grid_for((pieces + kThreads - 1) / kThreads, gpu)}, gpu.stream,
                a, b);
}

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
                               const Gpu& gpu) {
  if (m == 0 || n == 0) return cudaSuccess;
  return with_float(e.out_dtype, [&]<class O>(Type<O>) {
    int64_t threads = int64_t{m} * n / kVector<O>;
    return launch(gemm_finish_kernel<O>, {grid_for(threads / kThreads, gpu)}, gpu.stream, partial,
                  splits, m, n, e);
  });
}

}  // namespace mixprec::cuda
