// norm_quantize: the pass over the rows, and the normalized rows as a source of the casting kernels
// for the casts that need more than a row.
#pragma once

#include "cuda/fused/norm_rows.cuh"
#include "cuda/quantize/quantize.cuh"

namespace mixprec::cuda {

// The normalized rows, a source. wide: cols is a multiple of 16, too.
struct Norm : Computed {
  static constexpr bool kSearched = true, kLong = true;

  Floats x, weight, bias;
  const float *mean, *rstd;
  int64_t cols, searched_blocks;

  template <int n>
  __device__ __forceinline__ void load(int64_t i, float (&y)[n]) const {
    // 64-bit divisions are slow, and few tensors need them.
    bool is_short = i >> 32 == 0 && cols >> 32 == 0;
    int64_t row = is_short ? static_cast<uint32_t>(i) / static_cast<uint32_t>(cols) : i / cols;
    int64_t col = i - row * cols;
    Run<n> of_x(x, i, n, true), w(weight, col, n, true), b(bias, col, n, true);
    of_x.decode(y);
    normalize(row, y);
    w.multiply(y);
    b.add(y);
  }

  // One load after the other: the kernels that use it have few registers to spare.
  template <int n>
  __device__ __forceinline__ void load_of(int64_t row, int64_t col, float (&y)[n], int count,
                                          bool together) const {
    int64_t i = row * cols + col;
    x.load(i, y, count, together);
    if (count == 0) return;  // there may be no such row
    normalize(row, y);
    float w[n];
    weight.load_or(1.0f, col, w, count, together);
#pragma unroll
    for (int j = 0; j < n; ++j) y[j] = y[j] * w[j];
    bias.load_or(-0.0f, col, w, count, together);
#pragma unroll
    for (int j = 0; j < n; ++j) y[j] = j < count ? y[j] + w[j] : 0.0f;
  }

 private:
  template <int n>
  __device__ __forceinline__ void normalize(int64_t row, float (&y)[n]) const {
    float m = mean != nullptr ? mean[row] : 0.0f, r = rstd[row];
#pragma unroll
    for (int j = 0; j < n; ++j) y[j] = norm_xhat(y[j], m, r);
  }
};

// rows: those of the matrix that is cast. One launch, and that of the cast unless the scales are of
// rows, without a transpose; then a tiny one that finds the amax.
inline cudaError_t norm_quantize(NormRows rows, const Quantize& a, const Gpu& gpu) {
  const void* normalized = rows.total != nullptr ? rows.total : rows.x.data;
  bool by_runs = rows.cols % kRowRun == 0;
  rows.wide = by_runs && all_aligned({rows.x.data, rows.residual.data, rows.total});
  rows.wide_vectors = by_runs && all_aligned({rows.weight.data, rows.bias.data});
  bool by_tensor = a.granularity == Granularity::tensor;
  bool by_row = a.granularity == Granularity::row && !a.transpose;
  RowCast how = by_tensor ? RowCast::tensor : by_row ? RowCast::row : RowCast::none;
  bool casts = (by_tensor || by_row) && !a.transpose;
  bool whole = rows.x.dtype != Dtype::f32 && rows.held() && rows.wide && rows.wide_vectors &&
               (!casts || all_aligned({a.q}));
  int64_t blocks = 0;
  auto run = [&]<class Q>(Type<Q>) {
    auto kernel = whole ? norm_rows_kernel<Q, true> : norm_rows_kernel<Q, false>;
    int warps = static_cast<int>(rows.warps());
    blocks = grid_for(kernel, (rows.rows + warps - 1) / warps, gpu, warps * kWarp);
    NormRowsOut<Q> out = {how,
                          casts ? static_cast<Q*>(a.q) : nullptr,
                          a.scale,
                          a.fmt_max(),
                          a.power_of_two_scale,
                          a.scale_inv,
                          a.partials()};
    return launch(kernel, {blocks, warps * kWarp}, gpu.stream, rows, rows.held(), rows.row_bytes(),
                  out);
  };
  bool needs_type = casts && a.q_dtype != Dtype::f32;
  cudaError_t error = needs_type ? with_low(a.q_dtype, run) : run(Type<float>{});
  if (error != cudaSuccess) return error;

  bool wide = rows.cols % 16 == 0 && all_aligned({normalized, rows.weight.data, rows.bias.data});
  Norm source = {
      {wide}, {normalized, rows.x.dtype}, rows.weight, rows.bias, rows.mean, rows.rstd, rows.cols,
      blocks};
  if (by_row) return finish_partials(source, Casts<Norm>{{a}}, blocks, gpu);
  return quantize_from(source, {{a}}, gpu);
}

}  // namespace mixprec::cuda
