// quantize with a scale per row: one warp or block per row, which is read twice; the second read
// hits the cache.
#pragma once

#include "cuda/quantize/amax.cuh"
#include "math/scale.h"

namespace mixprec::cuda {

// source, q [rows, cols], scale_inv [rows], partials [gridDim.x]; lanes: threads per row.
template <class Source, class Q, int lanes>
__global__ void __launch_bounds__(kThreads, 1)
    quantize_rows_kernel(const Source source, Q* __restrict__ q, int64_t rows, int64_t cols,
                         float* scale_inv, float fmt_max, bool power_of_two, uint32_t* partials) {
  using Element = typename Source::Element;
  static_assert(lanes == kWarp || lanes == kThreads);
  constexpr int n = kVector<Q>, together = kThreads / lanes;
  int lane = threadIdx.x % lanes;
  uint32_t of_all = 0;
  for (int64_t r = int64_t{blockIdx.x} * together; r < rows; r += int64_t{gridDim.x} * together) {
    int64_t row = r + threadIdx.x / lanes, start = row * cols;
    Q* to = q + start;
    Span span = source.template span<n>(start, row < rows ? cols : 0, to);
    uint32_t largest = 0;
    for_each<n>(span, lane, lanes, [&](auto width, int64_t i) {
      Element in[decltype(width)::value];
      source.load(start + i, in);
      largest = largest_of(in, largest);
    });
    if constexpr (lanes == kWarp) {
      largest = warp_reduce<Max>(largest, kWarp);
    } else {
      largest = block_max(largest);
    }
    of_all = Max::apply(of_all, largest);
    float s = scale_from_amax(bits_float(largest), fmt_max, 1.0f, power_of_two, 1.0f);
    if (lane == 0 && row < rows) scale_inv[row] = 1.0f / s;
    for_each<n>(span, lane, lanes, [&](auto width, int64_t i) {
      Element in[decltype(width)::value];
      Q rounded[decltype(width)::value];
      source.load(start + i, in);
      encode_run(in, rounded, [&](int) { return s; });
      store(to + i, rounded);
    });
  }
  of_all = block_reduce<kThreads, Max>(of_all);
  if (threadIdx.x == 0) partials[blockIdx.x] = of_all;
}

}  // namespace mixprec::cuda
