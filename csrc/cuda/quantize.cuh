// quantize and dequantize on the GPU: one read of x gives q, amax and, if asked, q^T.
#pragma once

#include "cuda/amax.cuh"
#include "cuda/transpose.cuh"

namespace mixprec::cuda {

struct AmaxOut {
  AmaxState* state;  // null: amax is known already
  float* amax;
  ScaleOut scale;
};

template <class X, class Q>
__global__ void __launch_bounds__(kThreads)
    quantize_kernel(const X* __restrict__ x, Q* __restrict__ q, int64_t count, const float* scale,
                    const AmaxOut out) {
  constexpr int n = kVector<Q>;
  float s = scale != nullptr ? *scale : 1.0f;
  uint32_t largest = 0;
  int64_t first = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  for_each<n>(split<n>(count, q, x), first, int64_t{gridDim.x} * kThreads,
              [&](auto width, int64_t i) {
                X in[decltype(width)::value];
                Q rounded[decltype(width)::value];
                load(x + i, in);
#pragma unroll
                for (int j = 0; j < decltype(width)::value; ++j) {
                  float value = decode(in[j]);
                  largest = Max::apply(largest, magnitude_bits(value));
                  rounded[j] = Convert<Q>::encode(value, s);
                }
                store(q + i, rounded);
              });
  if (out.state != nullptr) finish_amax(largest, out.state, out.amax, out.scale);
}

// x, q [rows, cols], q_t [cols, rows]
template <class X, class Q>
__global__ void __launch_bounds__(kThreads)
    quantize_transpose_kernel(const X* __restrict__ x, Q* __restrict__ q, Q* __restrict__ q_t,
                              int64_t rows, int64_t cols, const float* scale, const AmaxOut out) {
  using Tile = QuantizeTile<Q>;
  constexpr int side = Tile::kSide, run = Tile::kRun, n = kVector<X> < run ? kVector<X> : run;
  __shared__ Tile tile;
  float s = scale != nullptr ? *scale : 1.0f;
  uint32_t largest = 0;
  bool x_vectors = is_aligned(x) && cols % n == 0;
  bool q_vectors = is_aligned(q) && cols % run == 0;
  bool q_t_vectors = is_aligned(q_t) && rows % run == 0;
  int64_t across = (cols + side - 1) / side, tiles = across * ((rows + side - 1) / side);

  for (int64_t t = blockIdx.x; t < tiles; t += gridDim.x) {
    int64_t row0 = t / across * side, col0 = t % across * side;
    int height = static_cast<int>(rows - row0 < side ? rows - row0 : side);
    int breadth = static_cast<int>(cols - col0 < side ? cols - col0 : side);
#pragma unroll 4
    for (int i = threadIdx.x; i < side * side / n; i += kThreads) {
      int r = i / (side / n), c = i % (side / n) * n;
      if (r >= height || c >= breadth) continue;
      const X* from = x + (row0 + r) * cols + col0 + c;
      X in[n];
      Q rounded[n];
      if (x_vectors) {
        load(from, in);
      } else {
#pragma unroll
        for (int j = 0; j < n; ++j) in[j] = c + j < breadth ? from[j] : X{};
      }
#pragma unroll
      for (int j = 0; j < n; ++j) {
        float value = decode(in[j]);
        largest = Max::apply(largest, magnitude_bits(value));
        rounded[j] = Convert<Q>::encode(value, s);
      }
      store(&tile.at[tile.offset(r, c)], rounded);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < side * side / run; i += kThreads) {
      int r = i / 8, c = i % 8 * run;
      if (r >= height || c >= breadth) continue;
      Q line[run];
      load(&tile.at[tile.offset(r, c)], line);
      store_run(q + (row0 + r) * cols + col0 + c, line, breadth - c, q_vectors);
    }
    for (int i = threadIdx.x; i < side * side / run; i += kThreads) {
      int c = i / 8, r = i % 8 * run;
      if (r >= height || c >= breadth) continue;
      Q line[run];
      tile.gather(r, c, line);
      store_run(q_t + (col0 + c) * rows + row0 + r, line, height - r, q_t_vectors);
    }
    __syncthreads();  // the tile is read before the next one overwrites it
  }
  if (out.state != nullptr) finish_amax(largest, out.state, out.amax, out.scale);
}

struct Quantize {
  Dtype x_dtype, q_dtype;
  const void* x;  // [rows, cols], row-major
  void* q;        // [rows, cols]
  void* q_t;      // [cols, rows], if `transpose`
  int64_t rows, cols;
  bool transpose, power_of_two_scale;
  const float* scale;  // null: from this x's amax for fp8, else 1
  float* scale_inv;
  float* amax;
  float* current_scale;  // scratch of one element, for the scale that is null
  AmaxState* state;
};

// One launch; two where the scale comes from this x's amax. Also for empty x: amax 0.
inline cudaError_t quantize(const Quantize& a, int sms, cudaStream_t stream) {
  int64_t count = a.rows * a.cols;
  const float* scale = a.scale;
  AmaxOut out = {a.state, a.amax, {nullptr, a.scale_inv, scale, 0.0f, false}};
  bool is_fp8 = a.q_dtype == Dtype::e4m3 || a.q_dtype == Dtype::e5m2;
  if (scale == nullptr && is_fp8) {
    ScaleOut current = {a.current_scale, a.scale_inv, nullptr, format_max(a.q_dtype),
                        a.power_of_two_scale};
    cudaError_t error = amax(a.x_dtype, a.x, count, a.state, a.amax, current, sms, stream);
    if (error != cudaSuccess || count == 0) return error;
    scale = a.current_scale;
    out.state = nullptr;
  }
  cudaError_t error = cudaSuccess;
  with_float(a.x_dtype, [&](auto tx) {
    with_low(a.q_dtype, [&](auto tq) {
      using X = typename decltype(tx)::type;
      using Q = typename decltype(tq)::type;
      const X* x = static_cast<const X*>(a.x);
      Q *q = static_cast<Q*>(a.q), *q_t = static_cast<Q*>(a.q_t);
      if (a.transpose) {
        constexpr int64_t side = QuantizeTile<Q>::kSide;
        int64_t tiles = ((a.rows + side - 1) / side) * ((a.cols + side - 1) / side);
        error = launch(quantize_transpose_kernel<X, Q>, grid_for(tiles, sms), kThreads, 0, stream,
                       x, q, q_t, a.rows, a.cols, scale, out);
      } else {
        int64_t packs = count / kVector<Q>;
        error = launch(quantize_kernel<X, Q>, grid_for(packs / kThreads, sms), kThreads, 0, stream,
                       x, q, count, scale, out);
      }
    });
  });
  return error;
}

}  // namespace mixprec::cuda
