// What the casting kernels read. A source has
//
//   Element                    the type of a value in a register
//   kRun                       how many values a thread loads at once
//   load(i, values, count, together)
//                              values <- those of elements [i, i + count), 0 beyond; together:
//                              they may be loaded at once, as whole packs are by default
//   load_of(row, col, ...)     the same, for a source that would have to divide i
//   aligned(n)                 whether runs of n that start at a multiple of n may be so loaded
//   span<n>(start, count, q)   the packs of elements [start, start + count), which are also q's
//
// Plain is an array as it is; csrc/cuda/fused has sources that compute their values.
#pragma once

#include "cuda/common/vec.cuh"

namespace mixprec::cuda {

// values <- p[0, count), 0 beyond
template <int n, class X>
__device__ __forceinline__ void load_run(const X* p, X (&values)[n], int count, bool together) {
  if (together && count == n) {
    load(p, values);
  } else {
#pragma unroll
    for (int j = 0; j < n; ++j) values[j] = j < count ? p[j] : X{};
  }
}

template <class X>
struct Plain {
  using Element = X;
  static constexpr int kRun = kVector<X>;
  static constexpr bool kFused = false;

  const X* __restrict__ x;

  template <int n>
  __device__ __forceinline__ void load(int64_t i, X (&values)[n], int count = n,
                                       bool together = true) const {
    load_run(x + i, values, count, together);
  }
  __device__ __forceinline__ bool aligned(int) const { return is_aligned(x); }

  template <int n, class Q>
  __device__ __forceinline__ Span span(int64_t start, int64_t count, const Q* q) const {
    return split<n>(count, q, x + start);
  }
  template <int n>
  __device__ __forceinline__ Span span(int64_t count) const {
    return split<n>(count, x);
  }
};

}  // namespace mixprec::cuda
