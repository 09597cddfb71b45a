// quantize with one scale for all of x, in two launches: first amax, which does nothing if a scale
// is given; then the cast, which also computes amax if it is not known yet.
#pragma once

#include "cuda/quantize/amax.cuh"
#include "cuda/quantize/transpose.cuh"
#include "math/scale.h"

namespace mixprec::cuda {

struct TensorScale {
  const float* given;  // null or pointing at 0: not given
  float fmt_max;       // used to compute the scale from amax; 0: scale 1
  bool power_of_two;
  const uint32_t* partials;  // the maxima from the previous launch
  int count;
  float *scale_inv, *amax;
  AmaxState* state;
};

// Returned to all threads of the block, which must all call it.
__device__ __forceinline__ float scale_of_tensor(const TensorScale& t, bool& amax_known) {
  float scale = t.given != nullptr ? *t.given : 0.0f;
  bool writes = blockIdx.x == 0 && threadIdx.x == 0;
  amax_known = scale == 0.0f && t.fmt_max != 0.0f;
  if (amax_known) {
    float amax = bits_float(max_of_partials(t.partials, t.count));
    scale = scale_from_amax(amax, t.fmt_max, 1.0f, t.power_of_two, 1.0f);
    if (writes) *t.amax = amax;
  } else {
    scale = scale == 0.0f ? 1.0f : checked_scale(scale);
  }
  if (writes) *t.scale_inv = 1.0f / scale;
  return scale;
}

template <class Source, class Q>
__global__ void __launch_bounds__(kThreads, 1)
    quantize_kernel(const Source source, Q* __restrict__ q, int64_t count,
                    const TensorScale scale) {
  constexpr int n = kVector<Q>;
  bool amax_known;
  float s = scale_of_tensor(scale, amax_known);
  uint32_t largest = 0;
  int64_t first = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  for_each<n>(source.template span<n>(0, count, q), first, int64_t{gridDim.x} * kThreads,
              [&](auto width, int64_t i) {
                typename Source::Element in[decltype(width)::value];
                Q rounded[decltype(width)::value];
                source.load(i, in);
                largest = largest_of(in, largest);
                encode_run(in, rounded, [&](int) { return s; });
                store(q + i, rounded);
              });
  if (!amax_known) finish_amax(largest, scale.state, scale.amax);
}

// source, q [rows, cols], q_t [cols, rows]
template <class Source, class Q>
__global__ void __launch_bounds__(kThreads, 1)
    quantize_transpose_kernel(const Source source, Q* __restrict__ q, Q* __restrict__ q_t,
                              int64_t rows, int64_t cols, const TensorScale scale) {
  using Tile = QuantizeTile<Q>;
  constexpr int side = Tile::kSide, run = Tile::kRun, n = Source::kRun < run ? Source::kRun : run;
  __shared__ Tile tile;
  bool amax_known;
  float s = scale_of_tensor(scale, amax_known);
  uint32_t largest = 0;
  bool x_vectors = source.aligned(n) && cols % n == 0;
  int64_t across = (cols + side - 1) / side, tiles = across * ((rows + side - 1) / side);

  for (int64_t t = blockIdx.x; t < tiles; t += gridDim.x) {
    TileAt at = {rows, cols, t / across * side, t % across * side};
#pragma unroll(Source::kFused ? 1 : 4)
    for (int i = threadIdx.x; i < side * side / n; i += kThreads) {
      int r = i / (side / n), c = i % (side / n) * n;
      typename Source::Element in[n];
      Q rounded[n];
      at.load(source, r, c, in, x_vectors);
      largest = largest_of(in, largest);
      encode_run(in, rounded, [&](int) { return s; });
      store(&tile.at[tile.offset(r, c)], rounded);
    }
    __syncthreads();
    at.store_rows(tile, q);
    at.store_columns(tile, q_t);
    __syncthreads();  // the tile is read before the next one overwrites it
  }
  if (!amax_known) finish_amax(largest, scale.state, scale.amax);
}

}  // namespace mixprec::cuda
