// The gradients of LayerNorm and RMSNorm.
#pragma once

#include "cuda/fused/norm_quantize.cuh"

namespace mixprec::cuda {

struct NormGradients : Rows {
  Floats g, x, weight, g_total;  // [rows, cols], weight [cols]
  const float *mean, *rstd;      // [rows]; mean: null for RMSNorm
  void* dx;                      // [rows, cols] of x's dtype
  float *dweight, *dbias;        // [cols]; null: not wanted
  float* bands;                  // [2, bands, cols] if either is wanted

  MIXPREC_HD int64_t bands_down() const { return (rows + kNormBand - 1) / kNormBand; }
};

static __global__ void __launch_bounds__(kThreads) norm_dx_kernel(const NormGradients a) {
  float k = static_cast<float>(a.cols);
  a.for_each_row([&](int64_t row) {
    int64_t start = row * a.cols;
    float mean = a.mean != nullptr ? a.mean[row] : 0.0f, rstd = a.rstd[row];
    // f(column, count, gw, xhat) for each run
    auto for_each_run = [&](const auto& f) {
      a.for_each_run([&](int64_t c, int count) {
        float gw[kRowRun], weight[kRowRun], xhat[kRowRun];
        a.g.load(start + c, gw, count, a.wide);
        a.x.load(start + c, xhat, count, a.wide);
        a.weight.load_or(1.0f, c, weight, count, a.wide);
#pragma unroll
        for (int j = 0; j < kRowRun; ++j) {
          gw[j] *= weight[j];
          xhat[j] = norm_xhat(xhat[j], mean, rstd);
        }
        f(c, count, gw, xhat);
      });
    };
    RowSum products, sum;
    for_each_run([&](int64_t, int count, const auto& gw, const auto& xhat) {
#pragma unroll
      for (int j = 0; j < kRowRun; ++j) {
        products.partial[j] += j < count ? gw[j] * xhat[j] : 0.0f;
        sum.partial[j] += j < count ? gw[j] : 0.0f;
      }
    });
    float c1 = norm_mean(products.total(), k);
    float c2 = a.mean != nullptr ? norm_mean(sum.total(), k) : 0.0f;
    for_each_run([&](int64_t c, int count, const auto& gw, const auto& xhat) {
      float dx[kRowRun];
      a.g_total.load_or(-0.0f, start + c, dx, count, a.wide);
#pragma unroll
      for (int j = 0; j < kRowRun; ++j) dx[j] = norm_dx(gw[j], xhat[j], c1, c2, rstd) + dx[j];
      store_rounded(a.dx, a.x.dtype, start + c, dx, count, a.wide);
    });
  });
}

// A thread adds one column of a band.
static __global__ void __launch_bounds__(kThreads) norm_bands_kernel(const NormGradients a) {
  int64_t across = (a.cols + kThreads - 1) / kThreads, down = a.bands_down();
  for (int64_t t = blockIdx.x; t < across * down; t += gridDim.x) {
    int64_t band = t / across, col = t % across * kThreads + threadIdx.x;
    if (col >= a.cols) continue;
    float dweight = 0.0f, dbias = 0.0f;
    int64_t end = band + 1 < down ? (band + 1) * kNormBand : a.rows;
#pragma unroll 4
    for (int64_t row = band * kNormBand; row < end; ++row) {
      float g[1], x[1];
      a.g.load_at_once(row * a.cols + col, g);
      dbias += g[0];
      if (a.dweight == nullptr) continue;
      a.x.load_at_once(row * a.cols + col, x);
      dweight += g[0] * norm_xhat(x[0], a.mean != nullptr ? a.mean[row] : 0.0f, a.rstd[row]);
    }
    a.bands[band * a.cols + col] = dweight;
    a.bands[(down + band) * a.cols + col] = dbias;
  }
}

static __global__ void __launch_bounds__(kThreads) norm_columns_kernel(const NormGradients a) {
  int64_t col = int64_t{blockIdx.x} * kThreads + threadIdx.x, down = a.bands_down();
  if (col >= a.cols) return;
  auto sum = [&](const float* bands) {
    float total = 0.0f;
#pragma unroll 8
    for (int64_t band = 0; band < down; ++band) total += bands[band * a.cols + col];
    return total;
  };
  if (a.dweight != nullptr) a.dweight[col] = sum(a.bands);
  if (a.dbias != nullptr) a.dbias[col] = sum(a.bands + down * a.cols);
}

inline cudaError_t norm_backward(NormGradients a, int sms, cudaStream_t stream) {
  a.wide = a.cols % kRowRun == 0 &&
           all_aligned({a.g.data, a.x.data, a.weight.data, a.g_total.data, a.dx});
  cudaError_t error = launch(norm_dx_kernel, a.grid(sms), kThreads, 0, stream, a);
  if (error != cudaSuccess || (a.dweight == nullptr && a.dbias == nullptr)) return error;
  int64_t across = std::max<int64_t>(1, (a.cols + kThreads - 1) / kThreads);
  error = launch(norm_bands_kernel, grid_for(across * a.bands_down(), sms), kThreads, 0, stream, a);
  if (error != cudaSuccess) return error;
  return launch(norm_columns_kernel, across, kThreads, 0, stream, a);
}

}  // namespace mixprec::cuda
