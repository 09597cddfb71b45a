// Copies the scales of rows to where the kernel reads them in order: [K / 128, rows], as TMA needs
// them. quantize writes [rows, K / 128], of which each block would read a sector of 32 bytes for 4.
#pragma once

#include "cuda/common/launch.h"
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

inline cudaError_t copy_scales(const ScaleCopy& a, const ScaleCopy& b, int sms,
                               cudaStream_t stream) {
  int64_t pieces = pieces_of(a) + pieces_of(b);
  if (pieces == 0) return cudaSuccess;
  return launch(copy_scales_kernel, grid_for((pieces + kThreads - 1) / kThreads, sms), kThreads, 0,
                stream, a, b);
}

}  // namespace mixprec::cuda
