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
// Plain is an array as it is. Computed is the base of the sources that compute FP32 values from
// arrays of a format known at run time, as those of csrc/cuda/fused.
#pragma once

#include <algorithm>
#include <initializer_list>

#include "cuda/common/convert.cuh"
#include "cuda/common/vec.cuh"
#include "dispatch.h"

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

// fp32, bf16 or fp16 elements; null: not given.
struct Floats {
  const void* data;
  Dtype dtype;

  // As Source::load.
  template <int n>
  __device__ __forceinline__ void load(int64_t i, float (&values)[n], int count,
                                       bool together) const {
    if (together && count == n) return load_at_once(i, values);
    // Elements move up as they are loaded: registers have no index, and the code stays short.
#pragma unroll 1
    for (int j = 0; j < n; ++j) {
      float one[1] = {0.0f};
      if (j < count) load_at_once(i + j, one);
#pragma unroll
      for (int k = 0; k + 1 < n; ++k) values[k] = values[k + 1];
      values[n - 1] = one[0];
    }
  }

  template <int n>
  __device__ __forceinline__ void load_at_once(int64_t i, float (&values)[n]) const {
    with_float(dtype, [&]<class X>(Type<X>) {
      X in[n];
      cuda::load(static_cast<const X*>(data) + i, in);
#pragma unroll
      for (int j = 0; j < n; ++j) values[j] = to_float(in[j]);
    });
  }

  // The same, or `otherwise` if the array is not given.
  template <int n>
  __device__ __forceinline__ void load_or(float otherwise, int64_t i, float (&values)[n], int count,
                                          bool together) const {
    if (data != nullptr) return load(i, values, count, together);
#pragma unroll
    for (float& value : values) value = otherwise;
  }
};

// Elements [i, i + count) of an array, as Source::load takes them; none if it is not given. Those
// of 16 bits are loaded when this is made and converted later, so that the loads of several arrays
// are on their way together. Others, which would take more registers, are loaded when wanted.
template <int n>
struct Run {
  Floats from;
  int64_t i;
  int count;
  bool together, early;
  uint32_t word[(n + 1) / 2];

  __device__ __forceinline__ Run(const Floats& from, int64_t i, int count, bool together)
      : from(from), i(i), count(count), together(together) {
    early = n > 1 && together && count == n && from.data != nullptr && from.dtype != Dtype::f32;
    if (!early) return;
    cuda::load(reinterpret_cast<const uint32_t*>(static_cast<const uint16_t*>(from.data) + i),
               word);
  }

  __device__ __forceinline__ void decode(float (&values)[n]) const {
    if (!early) return from.load(i, values, count, together);
    auto half = [&](int j) { return static_cast<uint16_t>(word[j / 2] >> (j % 2 * 16)); };
    if (from.dtype == Dtype::bf16) {
#pragma unroll
      for (int j = 0; j < n; ++j) values[j] = to_float(Bf16{half(j)});
    } else {
#pragma unroll
      for (int j = 0; j < n; ++j) values[j] = to_float(Fp16{half(j)});
    }
  }

  // values <- values * this or values + this, if it is given
  __device__ __forceinline__ void multiply(float (&values)[n]) const {
    if (from.data == nullptr) return;
    float factor[n];
    decode(factor);
#pragma unroll
    for (int j = 0; j < n; ++j) values[j] = values[j] * factor[j];
  }
  __device__ __forceinline__ void add(float (&values)[n]) const {
    if (from.data == nullptr) return;
    float term[n];
    decode(term);
#pragma unroll
    for (int j = 0; j < n; ++j) values[j] = values[j] + term[j];
  }
};

// values <- out[i, i + count) <- values rounded to `dtype`
template <int n>
__device__ __forceinline__ void store_rounded(void* out, Dtype dtype, int64_t i, float (&values)[n],
                                              int count, bool together) {
  with_float(dtype, [&]<class X>(Type<X>) {
    X* to = static_cast<X*>(out) + i;
    X rounded[n];
    round_all(values, rounded);
    decode_all(rounded, values);
    if (together && count == n) return store(to, rounded);
#pragma unroll
    for (int j = 0; j < n; ++j) {
      if (j < count) to[j] = rounded[j];
    }
  });
}

inline bool all_aligned(std::initializer_list<const void*> arrays) {
  return std::all_of(arrays.begin(), arrays.end(),
                     [](const void* p) { return reinterpret_cast<uint64_t>(p) % 16 == 0; });
}

struct Computed {
  using Element = float;
  static constexpr int kRun = 8, kOutputs = 1;
  static constexpr bool kFused = true, kSearched = false;
  static constexpr bool kLong = false;  // a load takes many registers beside its result

  bool wide;  // runs of up to 16 elements that start at a multiple of their length are aligned

  static constexpr int outputs() { return 1; }
  __device__ __forceinline__ bool aligned(int) const { return wide; }

  template <int n, class Q>
  __device__ __forceinline__ Span span(int64_t start, int64_t count, const Q* q) const {
    return {count, 0, wide && start % n == 0 && is_aligned(q) ? count / n : 0};
  }
  template <int n>
  __device__ __forceinline__ Span span(int64_t count) const {
    return {count, 0, wide ? count / n : 0};
  }
};

}  // namespace mixprec::cuda
