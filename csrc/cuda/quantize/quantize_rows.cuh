// quantize with a scale per row: one warp or block per row, which is read twice; the second read
// hits the cache.
#pragma once

#include "cuda/quantize/amax.cuh"
#include "math/scale.h"

namespace mixprec::cuda {

template <class Q>
struct RowsOut {
  Q* __restrict__ q;   // [rows, cols]
  float* scale_inv;    // [rows]
  uint32_t* partials;  // [gridDim.x]
};

// lanes: threads per row.
template <class Source, class Q, int lanes>
__global__ void __launch_bounds__(kThreads, 1)
    quantize_rows_kernel(const Source source, int64_t rows, int64_t cols, float fmt_max,
                         bool power_of_two, const PerOutput<Source, RowsOut<Q>> out) {
  using Element = typename Source::Element;
  static_assert(lanes == kWarp || lanes == kThreads);
  constexpr int n = kVector<Q>, together = kThreads / lanes;
  int lane = threadIdx.x % lanes;
  uint32_t of_all[Source::kOutputs] = {};
  for (int64_t r = int64_t{blockIdx.x} * together; r < rows; r += int64_t{gridDim.x} * together) {
    int64_t row = r + threadIdx.x / lanes, start = row * cols;
    Q* to[Source::kOutputs];
    for_outputs(source, [&](int k) { to[k] = out.of[k].q + start; });
    Span span = span_of<n>(source, start, row < rows ? cols : 0, to);
    uint32_t largest[Source::kOutputs] = {};
    for_each<n>(span, lane, lanes, [&](auto width, int64_t i) {
      Element in[Source::kOutputs][decltype(width)::value];
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
      s[k] = scale_from_amax(bits_float(largest[k]), fmt_max, 1.0f, power_of_two, 1.0f);
      if (lane == 0 && row < rows) out.of[k].scale_inv[row] = 1.0f / s[k];
    });
    for_each<n>(span, lane, lanes, [&](auto width, int64_t i) {
      Element in[Source::kOutputs][decltype(width)::value];
      source.load(start + i, for_load(in));
      for_outputs(source, [&](int k) {
        Q rounded[decltype(width)::value];
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

}  // namespace mixprec::cuda
