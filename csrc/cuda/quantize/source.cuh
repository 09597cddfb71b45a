// What the casting kernels read. A source has
//
//   Element                    the type of a value in a register
//   kRun                       how many values a thread loads at once
//   kOutputs                   how many values it has for an element, each with a cast of its own
//   outputs()                  the first so many of them are wanted
//   kFused                     it computes its values; kLong: and a load takes many registers
//   kSearched                  an earlier launch, of searched_blocks blocks, has written their
//                              maxima, and cast what needs no amax and no transpose
//   load(i, values, count, together)
//                              values <- those of elements [i, i + count), 0 beyond; together:
//                              they may be loaded at once, as whole packs are by default. Of
//                              several outputs: values[output]
//   load_of(row, col, ...)     the same, for a source that would have to divide i
//   aligned(n)                 whether runs of n that start at a multiple of n may be so loaded
//   span<n>(start, count, q)   the packs of elements [start, start + count), which are also q's
//   only(output)               the source of one of several outputs
//
// Plain is an array as it is; csrc/cuda/fused has sources that compute their values.
#pragma once

#include "cuda/common/vec.cuh"

namespace mixprec::cuda {

// A T for each output of a source.
template <class Source, class T>
struct PerOutput {
  T of[Source::kOutputs];
};

// f(output) for each that is wanted
template <class Source, class F>
__device__ __forceinline__ void for_outputs(const Source& source, const F& f) {
#pragma unroll
  for (int k = 0; k < Source::kOutputs; ++k) {
    if (k < source.outputs()) f(k);
  }
}

// values[output], as Source::load takes them.
template <class X, int outputs, int n>
__device__ __forceinline__ auto& for_load(X (&values)[outputs][n]) {
  if constexpr (outputs == 1) {
    return values[0];
  } else {
    return values;
  }
}

template <class Source>
__device__ __forceinline__ decltype(auto) only(const Source& source, int output) {
  if constexpr (Source::kOutputs == 1) {
    return (source);
  } else {
    return source.only(output);
  }
}

// The packs of source.span that are packs of all of q[output], too.
template <int n, class Source, class Q>
__device__ __forceinline__ Span span_of(const Source& source, int64_t start, int64_t count,
                                        Q* const (&q)[Source::kOutputs]) {
  Span span = source.template span<n>(start, count, q[0]);
#pragma unroll
  for (int k = 1; k < Source::kOutputs; ++k) {
    if (k < source.outputs() && !is_aligned(q[k])) span = {count, 0, 0};
  }
  return span;
}

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
  static constexpr int kRun = kVector<X>, kOutputs = 1;
  static constexpr bool kFused = false, kSearched = false;

  const X* __restrict__ x;

  static constexpr int outputs() { return 1; }

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
