// quantize with a scale for each 1 x 128 block, without a transpose: some threads of a warp have a
// block in registers, which are read once.
#pragma once

#include "cuda/quantize/amax.cuh"
#include "cuda/quantize/transpose.cuh"
#include "math/scale.h"

namespace mixprec::cuda {

template <class Q>
struct BlocksOut {
  Q* __restrict__ q;   // [rows, cols]
  float* scale_inv;    // [rows, blocks across]
  uint32_t* partials;  // [gridDim.x]
};

template <class Source>
struct BlockLanes {
  static constexpr int n = Source::kRun, kLanes = kTile / n;  // threads per block
  static constexpr int kTogether = kThreads / kLanes;         // blocks at once
  static constexpr int kLoads = Source::kFused ? 1 : 4;       // that a thread has in flight
};

template <class Source, class Q>
__global__ void __launch_bounds__(kThreads, 1)
    quantize_blocks_kernel(const Source source, int64_t rows, int64_t cols, float fmt_max,
                           bool power_of_two, const PerOutput<Source, BlocksOut<Q>> out) {
  using Lanes = BlockLanes<Source>;
  constexpr int n = Lanes::n;
  int64_t across = (cols + kTile - 1) / kTile, blocks = rows * across;
  int64_t own = threadIdx.x / Lanes::kLanes;
  int lane = threadIdx.x % Lanes::kLanes;
  bool x_vectors = source.aligned(n) && cols % n == 0, q_vectors = cols % n == 0;
  for_outputs(source, [&](int k) { q_vectors = q_vectors && is_aligned(out.of[k].q); });
  uint32_t of_all[Source::kOutputs] = {};

  auto place = [&](int64_t block) {
    // 64-bit divisions are slow, and few tensors need them.
    int64_t row = blocks >> 32 == 0 && block >> 32 == 0
                      ? static_cast<uint32_t>(block) / static_cast<uint32_t>(across)
                      : block / across;
    return TileAt{rows, cols, row, (block - row * across) * kTile + lane * n};
  };
  // Blocks first + own, first + own + kTogether, ...
  auto cast = [&](auto whole, auto loads, int64_t first) {
    constexpr int count = decltype(loads)::value;
    typename Source::Element in[count][Source::kOutputs][n];
#pragma unroll
    for (int i = 0; i < count; ++i) {
      place(first + own + i * Lanes::kTogether)
          .template load<n, decltype(whole)::value>(source, 0, 0, for_load(in[i]), x_vectors);
    }
#pragma unroll
    for (int i = 0; i < count; ++i) {
      int64_t block = first + own + i * Lanes::kTogether;
      TileAt at = place(block);
      bool inside = decltype(whole)::value || block < blocks;
      for_outputs(source, [&](int k) {
        uint32_t amax = warp_reduce<Max>(largest_of(in[i][k], 0u), Lanes::kLanes);
        of_all[k] = Max::apply(of_all[k], amax);
        float s = scale_from_amax(bits_float(amax), fmt_max, 1.0f, power_of_two, 1.0f);
        if (lane == 0 && inside) out.of[k].scale_inv[block] = 1.0f / s;
        Q rounded[n];
        encode_run(in[i][k], rounded, [&](int) { return s; }, amax);
        Q* to = out.of[k].q + at.row0 * cols + at.col0;
        if constexpr (decltype(whole)::value) {
          store(to, rounded);
        } else if (inside) {
          store_run(to, rounded, at.width(), q_vectors);
        }
      });
    }
  };
  int64_t first = int64_t{blockIdx.x} * Lanes::kTogether;
  int64_t stride = int64_t{gridDim.x} * Lanes::kTogether;
  if (!Source::kFused && x_vectors && q_vectors && cols % kTile == 0) {
    constexpr int at_once = Lanes::kLoads * Lanes::kTogether;
    first *= Lanes::kLoads;
    for (; first + at_once <= blocks; first += stride * Lanes::kLoads) {
      cast(std::true_type{}, Int<Lanes::kLoads>{}, first);
    }
    // The thread block whose turn it is casts what remains.
    for (int64_t end = first + at_once; first < blocks && first < end; first += Lanes::kTogether) {
      cast(std::false_type{}, Int<1>{}, first);
    }
  } else {
    for (; first < blocks; first += stride) cast(std::false_type{}, Int<1>{}, first);
  }
  for_outputs(source, [&](int k) {
    uint32_t of_block = block_reduce<kThreads, Max>(of_all[k]);
    if (threadIdx.x == 0) out.of[k].partials[blockIdx.x] = of_block;
  });
}

}  // namespace mixprec::cuda
