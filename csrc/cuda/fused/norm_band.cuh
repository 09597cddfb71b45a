// dx, and the sums of dweight and dbias over a band of rows, in one pass over g and x.
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
  int band_runs(int sms) const {
    return cols > (bands_down() > sms ? kThreads : kBandThreads) * kRowRun ? 2 : 1;
  }
  int band_threads(int sms) const {
    int64_t of_warp = kNormLanes * band_runs(sms);
    return static_cast<int>((cols + of_warp - 1) / of_warp * kWarp);
  }
  // Whether it takes these arrays, and gives each SM as many threads as a block of the others has.
  bool by_bands(int sms) const {
    bool narrow = g.dtype != Dtype::f32 && x.dtype != Dtype::f32;
    return wide && narrow && cols * (mean != nullptr ? 2 : 1) <= kBandTerms &&
           bands_down() * band_threads(sms) >= int64_t{sms} * kThreads;
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

}  // namespace mixprec::cuda
