// The gradients of LayerNorm and RMSNorm: dx with the sums of its band of rows in one pass over g
// and x, if that fills the GPU, and otherwise in two; then the sums over all bands. Sums are in the
// order that math/norm.h fixes.
#pragma once

#include "cuda/fused/norm_band.cuh"

namespace mixprec::cuda {

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

// Of dweight, then of dbias: a block for each kWarp columns. All its warps load, and the first one
// adds.
static __global__ void __launch_bounds__(kThreads) norm_columns_kernel(const NormGradients a) {
  constexpr int together = 64, warps = kThreads / kWarp;
  __shared__ float part[together][kWarp];
  int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  int64_t across = a.column_groups(), down = a.bands_down();
  bool of_bias = blockIdx.x >= across;
  int64_t col = blockIdx.x % across * kWarp + lane;
  const float* from = a.bands + (of_bias ? down * a.cols : 0);
  float* to = of_bias ? a.dbias : a.dweight;
  if (to == nullptr) return;
  float total = 0.0f;
  for (int64_t band = 0; band < down; band += together) {
    int count = down - band < together ? static_cast<int>(down - band) : together;
#pragma unroll 8
    for (int i = warp; i < count; i += warps) {
      part[i][lane] = col < a.cols ? from[(band + i) * a.cols + col] : 0.0f;
    }
    __syncthreads();
    for (int i = 0; warp == 0 && i < count; ++i) total += part[i][lane];
    __syncthreads();
  }
  if (warp == 0 && col < a.cols) to[col] = total;
}

inline cudaError_t norm_backward(NormGradients a, int sms, cudaStream_t stream) {
  a.wide = a.cols % kRowRun == 0 &&
           all_aligned({a.g.data, a.x.data, a.weight.data, a.g_total.data, a.dx});
  bool sums = a.dweight != nullptr || a.dbias != nullptr;
  cudaError_t error = cudaSuccess;
  if (sums && a.by_bands(sms)) {
    auto kernel = a.band_runs(sms) == 1 ? norm_band_kernel<1> : norm_band_kernel<2>;
    error = launch(kernel, a.bands_down(), a.band_threads(sms), 0, stream, a);
  } else {
    constexpr int64_t warps = kThreads / kWarp;
    error = launch(norm_dx_kernel, a.grid(sms, warps), kThreads, 0, stream, a);
    int64_t across = std::max<int64_t>(1, (a.cols + kThreads - 1) / kThreads);
    if (error == cudaSuccess && sums) {
      error =
          launch(norm_bands_kernel, grid_for(across * a.bands_down(), sms), kThreads, 0, stream, a);
    }
  }
  if (error != cudaSuccess || !sums) return error;
  return launch(norm_columns_kernel, 2 * a.column_groups(), kThreads, 0, stream, a);
}

}  // namespace mixprec::cuda
