// quantize without a transpose, with a scale per row or for each 1 x 128 block.
#pragma once

#include "cuda/quantize/amax.cuh"
#include "cuda/quantize/tile.cuh"

namespace mixprec::cuda {

template <class Q>
struct RowsOut {
  Q* __restrict__ q;   // [rows, cols]
  float* scale_inv;    // [rows], or [rows, blocks across]
  uint32_t* partials;  // [gridDim.x]
};

// One warp or block per row, which is read twice; the second read hits the cache. lanes: threads
// per row.
template <class Source, class Q, int lanes>
__global__ void __launch_bounds__(kThreads, 1)
    quantize_rows_kernel(const Source source, const CastByParts by,
                         const PerOutput<Source, RowsOut<Q>> out) {
  using Element = typename Source::Element;
  static_assert(lanes == kWarp || lanes == kThreads);
  constexpr int n = kVector<Q>, together = kThreads / lanes;
  const int64_t rows = by.rows, cols = by.cols;
  int lane = threadIdx.x % lanes;
  uint32_t of_all[Source::kOutputs] = {};
  for (int64_t r = int64_t{blockIdx.x} * together; r < rows; r += int64_t{gridDim.x} * together) {
    int64_t row = r + threadIdx.x / lanes, start = row * cols;
    Q* to[Source::kOutputs];
    for_outputs(source, [&](int k) { to[k] = out.of[k].q + start; });
    Span span = span_of<n>(source, start, row < rows ? cols : 0, to);
    uint32_t largest[Source::kOutputs] = {};
    for_each<n>(span, lane, lanes, [&]<int width>(Int<width>, int64_t i) {
      Element in[Source::kOutputs][width];
      source.load(start + i, for_load(in));
      for_outputs(source, [&](int k) { largest[k] = largest_of(in[k], largest[k]); });
    });
    float s[Source::kOutputs];
    for_outputs(source, [&](int k) {
      if constexpr (lanes == kWarp) {
        largest[k] = warp_reduce<Max>(largest[k], kWarp);
      } else {
        largest[k] = block_max(largest[k]);
      }
      of_all[k] = Max::apply(of_all[k], largest[k]);
      s[k] = by.scale(largest[k]);
      if (lane == 0 && row < rows) out.of[k].scale_inv[row] = 1.0f / s[k];
    });
    for_each<n>(span, lane, lanes, [&]<int width>(Int<width>, int64_t i) {
      Element in[Source::kOutputs][width];
      source.load(start + i, for_load(in));
      for_outputs(source, [&](int k) {
        Q rounded[width];
        encode_run(in[k], rounded, [&](int) { return s[k]; });
        store(to[k] + i, rounded);
      });
    });
  }
  for_outputs(source, [&](int k) {
    uint32_t of_block = block_reduce<kThreads, Max>(of_all[k]);
    if (threadIdx.x == 0) out.of[k].partials[blockIdx.x] = of_block;
  });
}

// Some threads of a warp have a block of 1 x 128 in registers, which are read once.
template <class Source>
struct BlockLanes {
  static constexpr int n = Source::kRun, kLanes = kTile / n;  // threads per block
  static constexpr int kTogether = kThreads / kLanes;         // blocks at once
  static constexpr int kLoads = Source::kFused ? 1 : 4;       // that a thread has in flight
};

template <class Source, class Q>
__global__ void __launch_bounds__(kThreads, 1)
    quantize_blocks_kernel(const Source source, const CastByParts by,
                           const PerOutput<Source, RowsOut<Q>> out) {
  using Lanes = BlockLanes<Source>;
  constexpr int n = Lanes::n;
  const int64_t rows = by.rows, cols = by.cols;
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
  auto cast = [&]<bool whole, int count>(std::bool_constant<whole>, Int<count>, int64_t first) {
    typename Source::Element in[count][Source::kOutputs][n];
#pragma unroll
    for (int i = 0; i < count; ++i) {
      place(first + own + i * Lanes::kTogether)
          .template load<n, whole>(source, 0, 0, for_load(in[i]), x_vectors);
    }
#pragma unroll
    for (int i = 0; i < count; ++i) {
      int64_t block = first + own + i * Lanes::kTogether;
      TileAt at = place(block);
      bool inside = whole || block < blocks;
      for_outputs(source, [&](int k) {
        uint32_t amax = warp_reduce<Max>(largest_of(in[i][k], 0u), Lanes::kLanes);
        of_all[k] = Max::apply(of_all[k], amax);
        float s = by.scale(amax);
        if (lane == 0 && inside) out.of[k].scale_inv[block] = 1.0f / s;
        Q rounded[n];
        encode_run(in[i][k], rounded, [&](int) { return s; }, amax);
        Q* to = out.of[k].q + at.row0 * cols + at.col0;
        if constexpr (whole) {
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
