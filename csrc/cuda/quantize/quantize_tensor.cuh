// quantize with one scale for all of x, in two launches: first amax, which does nothing if a scale
// is given; then the cast, which also computes amax if it is not known yet.
#pragma once

#include "cuda/quantize/amax.cuh"
#include "cuda/quantize/tile.cuh"
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
  bool searched;  // `partials` are there even if a scale is given

  __device__ __forceinline__ bool needs_amax(float given_scale) const {
    return given_scale == 0.0f && fmt_max != 0.0f;
  }
  __device__ __forceinline__ float given_scale() const { return given != nullptr ? *given : 0.0f; }
};

// Returned to all threads of the block, which must all call it.
__device__ __forceinline__ float scale_of_tensor(const TensorScale& t, bool& amax_known) {
  float scale = t.given_scale(), amax = 0.0f;
  bool writes = blockIdx.x == 0 && threadIdx.x == 0, needs_amax = t.needs_amax(scale);
  amax_known = needs_amax || t.searched;
  if (amax_known) {
    amax = bits_float(max_of_partials(t.partials, t.count));
    if (writes) *t.amax = amax;
  }
  if (needs_amax) {
    scale = scale_from_amax(amax, t.fmt_max, 1.0f, t.power_of_two, 1.0f);
  } else {
    scale = scale == 0.0f ? 1.0f : checked_scale(scale);
  }
  if (writes) *t.scale_inv = 1.0f / scale;
  return scale;
}

template <class Q>
struct TensorOut {
  Q* __restrict__ q;    // [rows, cols]
  Q* __restrict__ q_t;  // [cols, rows]
  TensorScale scale;
};

// The scales of the outputs, and the largest magnitudes that the thread has seen.
template <class Source, class Q>
struct TensorScales {
  bool amax_known[Source::kOutputs];
  float scale[Source::kOutputs];
  uint32_t largest[Source::kOutputs] = {};

  __device__ __forceinline__ TensorScales(const Source& source,
                                          const PerOutput<Source, TensorOut<Q>>& out) {
    for_outputs(source, [&](int k) { scale[k] = scale_of_tensor(out.of[k].scale, amax_known[k]); });
  }

  template <int n>
  __device__ __forceinline__ void encode(int k, const typename Source::Element (&in)[n],
                                         Q (&rounded)[n]) {
    uint32_t of_run = largest_of(in, 0u);
    largest[k] = Max::apply(largest[k], of_run);
    encode_run(in, rounded, [&](int) { return scale[k]; }, of_run);
  }

  __device__ __forceinline__ void finish(const Source& source,
                                         const PerOutput<Source, TensorOut<Q>>& out) const {
    for_outputs(source, [&](int k) {
      if (!amax_known[k]) finish_amax(largest[k], out.of[k].scale.state, out.of[k].scale.amax);
    });
  }
};

template <class Source, class Q>
__global__ void __launch_bounds__(kThreads, 1)
    quantize_kernel(const Source source, int64_t count, const PerOutput<Source, TensorOut<Q>> out) {
  constexpr int n = kVector<Q>;
  TensorScales<Source, Q> scales(source, out);
  if constexpr (Source::kSearched) {  // one output
    const TensorScale& scale = out.of[0].scale;
    if (!scale.needs_amax(scale.given_scale())) return;
  }
  Q* q[Source::kOutputs];
  for_outputs(source, [&](int k) { q[k] = out.of[k].q; });
  int64_t first = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  for_each<n>(span_of<n>(source, 0, count, q), first, int64_t{gridDim.x} * kThreads,
              [&]<int width>(Int<width>, int64_t i) {
                typename Source::Element in[Source::kOutputs][width];
                source.load(i, for_load(in));
                for_outputs(source, [&](int k) {
                  Q rounded[width];
                  scales.encode(k, in[k], rounded);
                  store(q[k] + i, rounded);
                });
              });
  scales.finish(source, out);
}

template <class Source, class Q>
__global__ void __launch_bounds__(kThreads, Source::kFused ? 1 : 4)
    quantize_transpose_kernel(const Source source, int64_t rows, int64_t cols,
                              const PerOutput<Source, TensorOut<Q>> out) {
  using Tile = QuantizeTile<Q>;
  constexpr int side = Tile::kSide, n = Source::kRun < Tile::kRun ? Source::kRun : Tile::kRun;
  constexpr int lanes = side / n, step = kThreads / lanes;  // threads per row, rows at once
  constexpr int most = side / step < 4 ? side / step : 4;   // loads in flight
  __shared__ Tile tile[Source::kOutputs];
  TensorScales<Source, Q> scales(source, out);
  bool x_vectors = source.aligned(n) && cols % n == 0;
  int64_t across = (cols + side - 1) / side, tiles = across * ((rows + side - 1) / side);
  int row = threadIdx.x / lanes, col = threadIdx.x % lanes * n;

  for (int64_t t = blockIdx.x; t < tiles; t += gridDim.x) {
    TileAt at = {rows, cols, t / across * side, t % across * side};
    // Rows first + row, first + row + step, ...: all are loaded before the first is cast.
    auto cast = [&]<bool whole, int count>(std::bool_constant<whole>, Int<count>, int first) {
      typename Source::Element in[count][Source::kOutputs][n];
#pragma unroll
      for (int i = 0; i < count; ++i) {
        at.load<n, whole>(source, first + row + i * step, col, for_load(in[i]), x_vectors);
      }
#pragma unroll
      for (int i = 0; i < count; ++i) {
        for_outputs(source, [&](int k) {
          Q rounded[n];
          scales.encode(k, in[i][k], rounded);
          store(&tile[k].at[tile[k].offset(first + row + i * step, col)], rounded);
        });
      }
    };
    if (!Source::kFused && x_vectors && at.height() >= side && at.width() >= side) {
#pragma unroll
      for (int first = 0; first < side; first += most * step) {
        cast(std::true_type{}, Int<most>{}, first);
      }
    } else {  // its code is long
#pragma unroll 1
      for (int first = 0; first < side; first += step) cast(std::false_type{}, Int<1>{}, first);
    }
    __syncthreads();
    for_outputs(source, [&](int k) {
      at.store_rows(tile[k], out.of[k].q);
      at.store_columns(tile[k], out.of[k].q_t);
    });
    __syncthreads();  // the tile is read before the next one overwrites it
  }
  scales.finish(source, out);
}

}  // namespace mixprec::cuda
