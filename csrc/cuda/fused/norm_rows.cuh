// The statistics of the rows of LayerNorm and RMSNorm, and in the same pass whatever of the casts
// needs no more than a row: x is read from memory once. Sums are in the order that math/norm.h
// fixes.
#pragma once

#include "cuda/common/launch.h"
#include "cuda/quantize/amax.cuh"
#include "cuda/quantize/source.cuh"
#include "cuda/quantize/tile.cuh"
#include "math/norm.h"
#include "math/scale.h"

namespace mixprec::cuda {

constexpr int kRowRun = kNormLanes / kWarp;  // consecutive elements of a row that a lane adds
// Of shared memory, for the rows of a block. A row of more than half of it stays where it is.
constexpr int kHeldBytes = 32 << 10;

// The rows of a matrix [rows, cols], one warp for each.
struct Rows {
  int64_t rows, cols;
  bool wide;  // runs of kRowRun are aligned

  // f(row) for each row of this warp
  template <class F>
  __device__ __forceinline__ void for_each_row(const F& f) const {
    int64_t of_block = blockDim.x / kWarp, warps = gridDim.x * of_block;
    int64_t first = blockIdx.x * of_block + threadIdx.x / kWarp;
    for (int64_t row = first; row < rows; row += warps) f(row);
  }

  // f(column, count) for the runs of this lane, in ascending order; beyond the row, the last one
  // has less than kRowRun elements, unless cols is a multiple of kRowRun (`whole`).
  template <bool whole = false, class F>
  __device__ __forceinline__ void for_each_run(const F& f) const {
    for (int64_t c = threadIdx.x % kWarp * kRowRun; c < cols; c += kNormLanes) {
      f(c, whole || cols - c >= kRowRun ? kRowRun : static_cast<int>(cols - c));
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

struct NormRows : Rows {
  Floats x, residual, weight, bias;  // weight, bias [cols]
  bool wide_vectors;                 // runs of weight and bias are aligned
  void* total;                       // [rows, cols] of x's dtype, with a residual
  float eps;
  float *mean, *rstd;  // [rows]; mean: null for RMSNorm

  int64_t row_bytes() const { return (cols * element_size(x.dtype) + 15) / 16 * 16; }
  bool held() const { return row_bytes() <= kHeldBytes / 2; }
  int64_t warps() const {
    int64_t most = kThreads / kWarp;
    return held() ? std::min(most, kHeldBytes / std::max<int64_t>(16, row_bytes())) : most;
  }
};

enum class RowCast : int32_t {
  none,    // statistics alone
  tensor,  // and the maxima of the blocks; if q is given and the scale known, the cast
  row,     // and the cast, with scales of the rows
};

template <class Q>
struct NormRowsOut {
  RowCast how;
  Q* q;                // [rows, cols]
  const float* scale;  // of the tensor; null or pointing at 0: not given
  float fmt_max;       // 0: a scale of 1
  bool power_of_two;
  float* scale_inv;    // [rows], of the rows
  uint32_t* partials;  // [gridDim.x]
};

// to <- from[start, start + cols), by a warp, without a change of bits. together: loads of a lane.
template <int together>
__device__ __forceinline__ void hold_row(void* to, const Floats& from, int64_t start, int64_t cols,
                                         bool wide) {
  int lane = threadIdx.x % kWarp;
  auto copy = [&](auto* words, const auto* source, int64_t count) {
#pragma unroll together
    for (int64_t i = lane; i < count; i += kWarp) words[i] = source[i];
  };
  if (from.dtype == Dtype::f32) {
    const float* row = static_cast<const float*>(from.data) + start;
    if (wide) return copy(static_cast<uint4*>(to), reinterpret_cast<const uint4*>(row), cols / 4);
    return copy(static_cast<float*>(to), row, cols);
  }
  const uint16_t* row = static_cast<const uint16_t*>(from.data) + start;
  if (wide) return copy(static_cast<uint4*>(to), reinterpret_cast<const uint4*>(row), cols / 8);
  copy(static_cast<uint16_t*>(to), row, cols);
}

// values <- 8 elements of 16 bits
__device__ __forceinline__ void decode_run(const uint4& bits, Dtype dtype,
                                           float (&values)[kRowRun]) {
  uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
  for (int j = 0; j < kRowRun; ++j) {
    uint16_t code = static_cast<uint16_t>(words[j / 2] >> (j % 2 * 16));
    values[j] = dtype == Dtype::bf16 ? to_float(Bf16{code}) : to_float(Fp16{code});
  }
}

// whole: x has 16 bits, its rows are held, and all runs are whole and aligned.
template <class Q, bool whole>
__global__ void __launch_bounds__(kThreads, 2)
    norm_rows_kernel(const NormRows a, bool held, int64_t row_bytes, const NormRowsOut<Q> out) {
  __shared__ uint4 held_rows[kHeldBytes / 16];
  __shared__ uint32_t of_warps[kThreads / kWarp];
  int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  uint4* own = held_rows + warp * static_cast<int>(row_bytes / 16);
  held = whole || held;
  // Where a row is read again.
  Floats normalized = {a.total != nullptr ? a.total : a.x.data, a.x.dtype};
  if (held) normalized.data = own;
  bool wide = held || a.wide, wide_vectors = whole || a.wide_vectors;
  bool wide_q = whole || (is_aligned(out.q) && a.cols % kRowRun == 0);

  float given = out.scale != nullptr ? *out.scale : 0.0f, k = static_cast<float>(a.cols);
  float scale = given == 0.0f ? 1.0f : checked_scale(given);
  bool casts = out.q != nullptr && (given != 0.0f || out.fmt_max == 0.0f);
  uint32_t of_all = 0;
  a.for_each_row([&](int64_t row) {
    int64_t start = row * a.cols, from = held ? 0 : start;
    if (a.total != nullptr) {
      a.for_each_run<whole>([&](int64_t c, int count) {
        float x[kRowRun], residual[kRowRun];
        a.x.load(start + c, x, count, whole || a.wide);
        a.residual.load(start + c, residual, count, whole || a.wide);
#pragma unroll
        for (int j = 0; j < kRowRun; ++j) x[j] += residual[j];
        store_rounded(a.total, a.x.dtype, start + c, x, count, whole || a.wide);
        if (held) store_rounded(own, a.x.dtype, c, x, count, true);
      });
    } else if (held) {
      hold_row<whole ? 8 : 4>(own, a.x, start, a.cols, whole || a.wide);
    }
    __syncwarp();

    auto load_again = [&](int64_t c, float (&x)[kRowRun], int count) {
      if constexpr (whole) {
        decode_run(own[static_cast<int>(c) / kRowRun], a.x.dtype, x);
      } else {
        normalized.load(from + c, x, count, wide);
      }
    };
    auto sum_of = [&](const auto& term) {
      RowSum sum;
      a.for_each_run<whole>([&](int64_t c, int count) {
        float x[kRowRun];
        load_again(c, x, count);
#pragma unroll
        for (int j = 0; j < kRowRun; ++j) sum.partial[j] += j < count ? term(x[j]) : 0.0f;
      });
      return sum.total();
    };
    float mean = 0.0f;
    if (a.mean != nullptr) mean = norm_mean(sum_of([](float x) { return x; }), k);
    float rstd = norm_rstd(sum_of([&](float x) { return norm_square(x, mean); }), k, a.eps);
    if (lane == 0) {
      if (a.mean != nullptr) a.mean[row] = mean;
      a.rstd[row] = rstd;
    }
    if (out.how == RowCast::none) return __syncwarp();

    // By rows: the amax, then the cast. Otherwise both at once.
    uint32_t largest = 0;
    bool by_row = out.how == RowCast::row;
#pragma unroll 1
    for (int pass = 0; pass < (by_row ? 2 : 1); ++pass) {
      a.for_each_run<whole>([&](int64_t c, int count) {
        Run<kRowRun> weight(a.weight, c, count, wide_vectors), bias(a.bias, c, count, wide_vectors);
        float y[kRowRun];
        load_again(c, y, count);
#pragma unroll
        for (int j = 0; j < kRowRun; ++j) y[j] = norm_xhat(y[j], mean, rstd);
        weight.multiply(y);
        bias.add(y);
#pragma unroll
        for (int j = 0; j < kRowRun; ++j) y[j] = j < count ? y[j] : 0.0f;
        if (pass == 0) largest = largest_of(y, largest);
        if (by_row ? pass == 0 : !casts) return;
        Q rounded[kRowRun];
        encode_run(y, rounded, [&](int) { return scale; });
        store_run(out.q + start + c, rounded, count, wide_q);
      });
      if (pass == 0 && by_row) {
        largest = warp_reduce<Max>(largest, kWarp);
        scale = scale_from_amax(bits_float(largest), out.fmt_max, 1.0f, out.power_of_two, 1.0f);
        if (lane == 0) out.scale_inv[row] = 1.0f / scale;
      }
    }
    of_all = Max::apply(of_all, largest);
    __syncwarp();  // all of the row has been read
  });
  if (out.how == RowCast::none) return;
  of_all = warp_reduce<Max>(of_all, kWarp);
  if (lane == 0) of_warps[warp] = of_all;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (unsigned w = 1; w < blockDim.x / kWarp; ++w) of_all = Max::apply(of_all, of_warps[w]);
  out.partials[blockIdx.x] = of_all;
}

}  // namespace mixprec::cuda
