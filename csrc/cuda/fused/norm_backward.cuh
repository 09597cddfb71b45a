// The gradients of LayerNorm and RMSNorm: dx with the sums of its band of rows in one pass over g
// and x, if that fills the GPU, and otherwise in two; then the sums over all bands. Sums are in the
// order that math/norm.h fixes.
#pragma once

#include "cuda/fused/norm_rows.cuh"

namespace mixprec::cuda {

constexpr int kBandTerms = 8192;   // of a row in shared memory, for one sum or for two
constexpr int kBandThreads = 512;  // at most: more have too few registers each

struct NormGradients : Rows {
  Floats g, x, weight, g_total;  // [rows, cols], weight [cols]
  const float *mean, *rstd;      // [rows]; mean: null for RMSNorm
  void* dx;                      // [rows, cols] of x's dtype
  float *dweight, *dbias;        // [cols]; null: not wanted
  float* bands;                  // [2, bands, cols] if either is wanted

  MIXPREC_HD int64_t bands_down() const { return (rows + kNormBand - 1) / kNormBand; }
  MIXPREC_HD int64_t column_groups() const { return cols == 0 ? 1 : (cols + kWarp - 1) / kWarp; }

  // Of norm_band_kernel: whole warps, a thread for each run of a row or for two of them. Two where
  // there are bands for two blocks an SM: one computes while the other waits for its warps.
  int band_runs(const Gpu& gpu) const {
    return cols > (bands_down() > gpu.sms ? kThreads : kBandThreads) * kRowRun ? 2 : 1;
  }
  int band_threads(const Gpu& gpu) const {
    int64_t of_warp = kNormLanes * band_runs(gpu);
    return static_cast<int>((cols + of_warp - 1) / of_warp * kWarp);
  }
  // Whether it takes these arrays, and gives each SM as many threads as a block of the others has.
  bool by_bands(const Gpu& gpu) const {
    bool narrow = g.dtype != Dtype::f32 && x.dtype != Dtype::f32;
    return wide && narrow && cols * (mean != nullptr ? 2 : 1) <= kBandTerms &&
           bands_down() * band_threads(gpu) >= int64_t{gpu.sms} * kThreads;
  }
};

// The sum of partial[kNormLanes], in shared memory: the same for all lanes of the warp.
__device__ __forceinline__ float sum_of_lanes(const float* partial) {
  constexpr int n = kNormLanes / kWarp;
  float sums[n];
#pragma unroll
  for (int i = 0; i < n; ++i) sums[i] = partial[i * kWarp + threadIdx.x % kWarp];
#pragma unroll
  for (int half = n / 2; half > 0; half /= 2) {
#pragma unroll
    for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
  }
  return warp_reduce<Sum>(sums[0], kWarp);
}

// kRowRun columns of a row, in a register each.
using RunOf = float[kRowRun];

// A block for each band, row after row; a thread has the same columns of each, `runs` runs. g and x
// have 16 bits, and those of the next row are loaded while this one is computed.
template <int runs>
__global__ void __launch_bounds__(kBandThreads) norm_band_kernel(const NormGradients a) {
  alignas(16) __shared__ float terms[kBandTerms];  // gw * xhat; after those of the row, gw
  __shared__ float partial[2][kNormLanes];
  int threads = static_cast<int>(blockDim.x), width = threads * kRowRun * runs;
  int sums = a.mean != nullptr ? 2 : 1;
  float k = static_cast<float>(a.cols);
  RunOf dweight[runs] = {}, dbias[runs] = {};
  uint4 next_g[runs], next_x[runs];
  auto for_each_run = [&](const auto& f) {  // f(run, column, whether there is one)
#pragma unroll
    for (int r = 0; r < runs; ++r) {
      int col = (r * threads + static_cast<int>(threadIdx.x)) * kRowRun;
      f(r, col, col < a.cols);
    }
  };
  auto load_next = [&](int64_t row) {
    for_each_run([&](int r, int col, bool inside) {
      auto bits_of = [&](const Floats& array) {
        const uint16_t* run = static_cast<const uint16_t*>(array.data) + row * a.cols + col;
        return inside ? *reinterpret_cast<const uint4*>(run) : uint4{0, 0, 0, 0};
      };
      next_g[r] = bits_of(a.g), next_x[r] = bits_of(a.x);
    });
  };
  int64_t band = blockIdx.x, row = band * kNormBand;
  int64_t end = a.rows - row < kNormBand ? a.rows : row + kNormBand;
  load_next(row);
  for (; row < end; ++row) {
    RunOf gw[runs] = {}, xhat[runs] = {};
    float mean = a.mean != nullptr ? a.mean[row] : 0.0f, rstd = a.rstd[row];
    for_each_run([&](int r, int col, bool inside) {
      RunOf products = {};
      if (inside) {
        Run<kRowRun> weight(a.weight, col, kRowRun, true);
        decode_run(next_g[r], a.g.dtype, gw[r]);
        decode_run(next_x[r], a.x.dtype, xhat[r]);
#pragma unroll
        for (int j = 0; j < kRowRun; ++j) {
          xhat[r][j] = norm_xhat(xhat[r][j], mean, rstd);
          dbias[r][j] += gw[r][j];
          dweight[r][j] += gw[r][j] * xhat[r][j];
        }
        weight.multiply(gw[r]);
#pragma unroll
        for (int j = 0; j < kRowRun; ++j) products[j] = gw[r][j] * xhat[r][j];
      }
      store(&terms[col], products);
      if (sums == 2) store(&terms[width + col], gw[r]);
    });
    if (row + 1 < end) load_next(row + 1);
    __syncthreads();
    for (int i = threadIdx.x; i < sums * kNormLanes; i += threads) {
      int of = i / kNormLanes, lane = i % kNormLanes;
      float sum = 0.0f;
#pragma unroll 4
      for (int c = lane; c < width; c += kNormLanes) sum += terms[of * width + c];
      partial[of][lane] = sum;
    }
    __syncthreads();
    float c1 = norm_mean(sum_of_lanes(partial[0]), k);
    float c2 = sums == 2 ? norm_mean(sum_of_lanes(partial[1]), k) : 0.0f;
    for_each_run([&](int r, int col, bool inside) {
      if (!inside) return;
      Run<kRowRun> g_total(a.g_total, row * a.cols + col, kRowRun, true);
      RunOf dx;
#pragma unroll
      for (int j = 0; j < kRowRun; ++j) dx[j] = norm_dx(gw[r][j], xhat[r][j], c1, c2, rstd);
      g_total.add(dx);
      store_rounded(a.dx, a.x.dtype, row * a.cols + col, dx, kRowRun, true);
    });
  }
  for_each_run([&](int r, int col, bool inside) {
    if (!inside) return;
    store(a.bands + band * a.cols + col, dweight[r]);
    store(a.bands + (a.bands_down() + band) * a.cols + col, dbias[r]);
  });
}

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

inline cudaError_t norm_backward(NormGradients a, const Gpu& gpu) {
  a.wide = a.cols % kRowRun == 0 &&
           all_aligned({a.g.data, a.x.data, a.weight.data, a.g_total.data, a.dx});
  bool sums = a.dweight != nullptr || a.dbias != nullptr;
  cudaError_t error = cudaSuccess;
  if (sums && a.by_bands(gpu)) {
    auto kernel = a.band_runs(gpu) == 1 ? norm_band_kernel<1> : norm_band_kernel<2>;
    error = launch(kernel, {a.bands_down(), a.band_threads(gpu)}, gpu.stream, a);
  } else {
    constexpr int64_t warps = kThreads / kWarp;
    error = launch(norm_dx_kernel, {grid_for((a.rows + warps - 1) / warps, gpu)}, gpu.stream, a);
    int64_t across = std::max<int64_t>(1, (a.cols + kThreads - 1) / kThreads);
    if (error == cudaSuccess && sums) {
      error = launch(norm_bands_kernel, {grid_for(across * a.bands_down(), gpu)}, gpu.stream, a);
    }
  }
  if (error != cudaSuccess || !sums) return error;
  return launch(norm_columns_kernel, {2 * a.column_groups()}, gpu.stream, a);
}

}  // namespace mixprec::cuda
