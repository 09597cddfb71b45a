// What the fused ops read and write: arrays of a format known at run time, and the base of the
// sources (quantize/source.cuh) that compute FP32 values from them.
#pragma once

#include <algorithm>
#include <initializer_list>

#include "cuda/quantize/cast.cuh"
#include "cuda/quantize/source.cuh"
#include "dispatch.h"

namespace mixprec::cuda {

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
    with_float(dtype, [&](auto t) {
      using X = typename decltype(t)::type;
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

// values <- out[i, i + count) <- values rounded to `dtype`
template <int n>
__device__ __forceinline__ void store_rounded(void* out, Dtype dtype, int64_t i, float (&values)[n],
                                              int count, bool together) {
  with_float(dtype, [&](auto t) {
    using X = typename decltype(t)::type;
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
