// LayerNorm and RMSNorm on the GPU: the statistics of the rows, the norm as a source of the casting
// kernels, and the gradients. Sums are in the order that math/norm.h fixes.
#pragma once

#include "cuda/common/launch.h"
#include "cuda/fused/cast_from.cuh"
#include "cuda/fused/computed.cuh"
#include "math/norm.h"

namespace mixprec::cuda {

constexpr int kRowRun = kNormLanes / kWarp;  // consecutive elements of a row that a lane adds

// The rows of a matrix [rows, cols], one warp for each.
struct Rows {
  int64_t rows, cols;
  bool wide;  // runs of kRowRun are aligned

  int64_t grid(int sms) const {
    constexpr int64_t together = kThreads / kWarp;
    return grid_for((rows + together - 1) / together, sms);
  }

  // f(row) for each row of this warp
  template <class F>
  __device__ __forceinline__ void for_each_row(const F& f) const {
    int64_t warps = int64_t{gridDim.x} * (kThreads / kWarp);
    int64_t first = int64_t{blockIdx.x} * (kThreads / kWarp) + threadIdx.x / kWarp;
    for (int64_t row = first; row < rows; row += warps) f(row);
  }

  // f(column, count) for the runs of this lane, in ascending order; beyond the row, the last one
  // has less than kRowRun elements.
  template <class F>
  __device__ __forceinline__ void for_each_run(const F& f) const {
    for (int64_t c = threadIdx.x % kWarp * kRowRun; c < cols; c += kNormLanes) {
      f(c, cols - c < kRowRun ? static_cast<int>(cols - c) : kRowRun);
    }
  }
};

// This lane's part of the kNormLanes partial sums of a row.
struct RowSum {
  float partial[kRowRun] = {};

  // The same for all lanes, which must all call it.
  __device__ __forceinline__ float total() {
#pragma unroll
    for (float& p : partial) p = warp_reduce<Sum>(p, kWarp);
#pragma unroll
    for (int half = kRowRun / 2; half > 0; half /= 2) {
#pragma unroll
      for (int j = 0; j < half; ++j) partial[j] += partial[j + half];
    }
    return partial[0];
  }
};

struct NormStatistics : Rows {
  Floats x, residual;
  void* total;  // [rows, cols] of x's dtype, with a residual
  float eps;
  float *mean, *rstd;  // [rows]; mean: null for RMSNorm
};

static __global__ void __launch_bounds__(kThreads) norm_rows_kernel(const NormStatistics a) {
  const Floats normalized = {a.total != nullptr ? a.total : a.x.data, a.x.dtype};
  float k = static_cast<float>(a.cols);
  a.for_each_row([&](int64_t row) {
    int64_t start = row * a.cols;
    RowSum sum, squares;
    a.for_each_run([&](int64_t c, int count) {
      float x[kRowRun];
      a.x.load(start + c, x, count, a.wide);
      if (a.total != nullptr) {
        float residual[kRowRun];
        a.residual.load(start + c, residual, count, a.wide);
#pragma unroll
        for (int j = 0; j < kRowRun; ++j) x[j] += residual[j];
        store_rounded(a.total, a.x.dtype, start + c, x, count, a.wide);
      }
#pragma unroll
      for (int j = 0; j < kRowRun; ++j) {
        sum.partial[j] += x[j];
        squares.partial[j] += norm_square(x[j], 0.0f);
      }
    });
    if (a.mean != nullptr) {
      float mean = norm_mean(sum.total(), k);
      squares = {};
      a.for_each_run([&](int64_t c, int count) {
        float x[kRowRun];
        normalized.load(start + c, x, count, a.wide);  // this lane has written it
#pragma unroll
        for (int j = 0; j < kRowRun; ++j) {
          squares.partial[j] += j < count ? norm_square(x[j], mean) : 0.0f;
        }
      });
      if (threadIdx.x % kWarp == 0) a.mean[row] = mean;
    }
    float rstd = norm_rstd(squares.total(), k, a.eps);
    if (threadIdx.x % kWarp == 0) a.rstd[row] = rstd;
  });
}

// The normalized rows, a source. wide: cols is a multiple of 16, too.
struct Norm : Computed {
  Floats x, weight, bias;
  const float *mean, *rstd;
  int64_t cols;

  template <int n>
  __device__ __forceinline__ void load(int64_t i, float (&y)[n]) const {
    // 64-bit divisions are slow, and few tensors need them.
    bool is_short = i >> 32 == 0 && cols >> 32 == 0;
    int64_t row = is_short ? static_cast<uint32_t>(i) / static_cast<uint32_t>(cols) : i / cols;
    load_of(row, i - row * cols, y, n, true);
  }

  template <int n>
  __device__ __forceinline__ void load_of(int64_t row, int64_t col, float (&y)[n], int count,
                                          bool together) const {
    int64_t i = row * cols + col;
    if (count == 0) return x.load(i, y, 0, false);  // there may be no such row
    float w[n], b[n], m = mean != nullptr ? mean[row] : 0.0f, r = rstd[row];
    x.load(i, y, count, together);
    weight.load_or(1.0f, col, w, count, together);
    bias.load_or(-0.0f, col, b, count, together);
#pragma unroll
    for (int j = 0; j < n; ++j) {
      y[j] = j < count ? norm_value(norm_xhat(y[j], m, r), w[j], b[j]) : 0.0f;
    }
  }
};

// x [rows, cols], weight and bias [cols]; args: of the casts. total: null without a residual.
inline cudaError_t norm_quantize(const Floats& x, const Floats& residual, const Floats& weight,
                                 const Floats& bias, float eps, void* total, float* mean,
                                 float* rstd, const Quantize& args, int sms, cudaStream_t stream) {
  const void* normalized = total != nullptr ? total : x.data;
  bool by_rows = args.cols % kRowRun == 0 && all_aligned({x.data, residual.data, total});
  NormStatistics statistics = {
      {args.rows, args.cols, by_rows}, x, residual, total, eps, mean, rstd};
  cudaError_t error =
      launch(norm_rows_kernel, statistics.grid(sms), kThreads, 0, stream, statistics);
  if (error != cudaSuccess) return error;
  bool wide = args.cols % 16 == 0 && all_aligned({normalized, weight.data, bias.data});
  Norm source = {{wide}, {normalized, x.dtype}, weight, bias, mean, rstd, args.cols};
  return cast_from(source, args, sms, stream);
}

}  // namespace mixprec::cuda
