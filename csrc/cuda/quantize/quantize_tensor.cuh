// quantize with one scale for all of x. Without a given scale a launch before has found the maxima
// of its blocks. The cast walks backwards, so that it begins with what that launch left in the L2
// cache.
#pragma once

#include "cuda/quantize/amax.cuh"
#include "cuda/quantize/tile.cuh"
#include "math/scale.h"

namespace mixprec::cuda {

// Where a given scale is 0, as that of delayed scaling is in the first step, so many blocks find
// the amax, each of all elements, and cast: no launch before is needed, and no block waits for
// another.
constexpr int kFirstUseBlocks = 64;

struct TensorScale {
  const float* given;  // null or pointing at 0: not given
  float fmt_max;       // used to compute the scale from amax; 0: scale 1
  bool power_of_two;
  uint32_t* partials;  // the maxima of blocks, written unless `searched`
  int searched;        // blocks of the launch before that has written them
  float* scale_inv;
  float* amax;    // null: not wanted
  float* record;  // null, or the largest amax until now, which is replaced by a larger one

  __device__ __forceinline__ bool needs_amax() const {
    return fmt_max != 0.0f && (given == nullptr || *given == 0.0f);
  }
  __device__ __forceinline__ float scale(uint32_t amax) const {
    if (needs_amax()) {
      return scale_from_amax(bits_float(amax), fmt_max, 1.0f, power_of_two, 1.0f);
    }
    return given == nullptr || *given == 0.0f ? 1.0f : checked_scale(*given);
  }
  // By one thread of a launch or, with the maximum of its block, of each block.
  __device__ __forceinline__ void raise(uint32_t largest) const {
    // As signed integers: NaN is above all, and -1, where nothing was seen yet, below.
    if (record != nullptr) atomicMax(reinterpret_cast<int*>(record), static_cast<int>(largest));
  }
};

template <class Q>
struct TensorOut {
  Q* __restrict__ q;    // [rows, cols]
  Q* __restrict__ q_t;  // [cols, rows]; null: not wanted
  TensorScale scale;
};

template <class Source, class Q>
struct TensorCast {
  Source source;
  int64_t rows, cols;
  PerOutput<Source, TensorOut<Q>> out;
};

// The scales of the outputs, and the largest magnitudes that the thread has seen. All threads of
// all blocks must make and finish it.
template <class Source, class Q>
struct TensorScales {
  float scale[Source::kOutputs];
  uint32_t largest[Source::kOutputs] = {};
  bool searched;

  // part: what blocks that have nothing to cast are no part of
  __device__ __forceinline__ TensorScales(const TensorCast<Source, Q>& a, Part& part)
      : searched(a.out.of[0].scale.searched != 0) {
    int block = part.index;
    auto of_all = [&](const auto& amax) {
      for_outputs(a.source, [&](int k) { largest[k] = amax(k); });
    };
    if (searched) {
      of_all([&](int k) {
        return max_of_partials(a.out.of[k].scale.partials, a.out.of[k].scale.searched);
      });
      for_outputs(a.source, [&](int k) {
        const TensorScale& scale = a.out.of[k].scale;
        if (block != 0 || threadIdx.x != 0) return;
        if (scale.amax != nullptr) *scale.amax = bits_float(largest[k]);
        scale.raise(largest[k]);
      });
    } else if constexpr (!Source::kSearched && sizeof(Q) == 1) {
      bool first_use = false;
      for_outputs(a.source, [&](int k) { first_use |= a.out.of[k].scale.needs_amax(); });
      if (first_use) {
        if (part.count > kFirstUseBlocks) part.count = kFirstUseBlocks;
        if (block < part.count) search(a.source, a.rows * a.cols, {0, 1}, largest);
        of_all([&](int k) { return block_max(largest[k]); });
      }
    }
    for_outputs(a.source, [&](int k) {
      scale[k] = a.out.of[k].scale.scale(largest[k]);
      if (block == 0 && threadIdx.x == 0) *a.out.of[k].scale.scale_inv = 1.0f / scale[k];
    });
  }

  template <int n>
  __device__ __forceinline__ void encode(int k, const typename Source::Element (&in)[n],
                                         Q (&rounded)[n]) {
    uint32_t of_run = largest_of(in, 0u);
    largest[k] = Max::apply(largest[k], of_run);
    encode_run(in, rounded, [&](int) { return scale[k]; }, of_run);
  }

  __device__ __forceinline__ void finish(const TensorCast<Source, Q>& a, int block) const {
    if (Source::kSearched || searched) return;
    for_outputs(a.source, [&](int k) {
      const TensorScale& scale = a.out.of[k].scale;
      uint32_t of_block = block_reduce<kThreads, Max>(largest[k]);
      if (threadIdx.x != 0) return;
      if (scale.amax != nullptr) scale.partials[block] = of_block;
      scale.raise(of_block);
    });
  }
};

template <class Source, class Q>
__global__ void __launch_bounds__(kThreads, !Source::kFused         ? 4
                                            : Source::kOutputs == 1 ? 3
                                                                    : 1)
    quantize_kernel(const __grid_constant__ Arrays<Source, TensorCast<Source, Q>> arrays) {
  constexpr int n = kVector<Q>;
  Part part;
  const TensorCast<Source, Q>& a = arrays.mine(part);
  const Source& source = a.source;
  TensorScales<Source, Q> scales(a, part);
  Q* q[Source::kOutputs];
  for_outputs(source, [&](int k) { q[k] = a.out.of[k].q; });
  bool cast = !Source::kSearched || a.out.of[0].scale.needs_amax();  // else the launch before has
  int64_t count = cast && part.index < part.count ? a.rows * a.cols : 0;
  for_each<n, true>(span_of<n>(source, 0, count, q), int64_t{part.index} * kThreads + threadIdx.x,
                    int64_t{part.count} * kThreads, [&]<int width>(Int<width>, int64_t i) {
                      typename Source::Element in[Source::kOutputs][width];
                      source.load(i, for_load(in));
                      for_outputs(source, [&](int k) {
                        Q rounded[width];
                        scales.encode(k, in[k], rounded);
                        store(q[k] + i, rounded, scales.searched);
                      });
                    });
  scales.finish(a, part.index);
}

template <class Source, class Q>
__global__ void __launch_bounds__(kThreads, Source::kFused ? 1 : 4) quantize_transpose_kernel(
    const __grid_constant__ Arrays<Source, TensorCast<Source, Q>> arrays) {
  using Tile = QuantizeTile<Q>;
  constexpr int side = Tile::kSide, n = Source::kRun < Tile::kRun ? Source::kRun : Tile::kRun;
  constexpr int lanes = side / n, step = kThreads / lanes;  // threads per row, rows at once
  constexpr int most = side / step < 4 ? side / step : 4;   // loads in flight
  __shared__ Tile tile[Source::kOutputs];
  Part part;
  const TensorCast<Source, Q>& a = arrays.mine(part);
  const Source& source = a.source;
  const int64_t rows = a.rows, cols = a.cols;
  TensorScales<Source, Q> scales(a, part);
  bool x_vectors = source.aligned(n) && cols % n == 0;
  int64_t across = (cols + side - 1) / side, tiles = across * ((rows + side - 1) / side);
  int row = threadIdx.x / lanes, col = threadIdx.x % lanes * n;

  if (part.index >= part.count) tiles = 0;
  for (int64_t t = tiles - 1 - part.index; t >= 0; t -= part.count) {
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
      at.store_rows(tile[k], a.out.of[k].q, scales.searched);
      if (a.out.of[k].q_t != nullptr) at.store_columns(tile[k], a.out.of[k].q_t, scales.searched);
    });
    __syncthreads();  // the tile is read before the next one overwrites it
  }
  scales.finish(a, part.index);
}

}  // namespace mixprec::cuda
