// Casts of several elements times a scale, and their largest magnitude.
#pragma once

#include "cuda/common/convert.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/common/vec.cuh"

namespace mixprec::cuda {

__device__ __forceinline__ uint32_t magnitude_bits(float x) { return float_bits(x) & 0x7FFFFFFFu; }

// The largest magnitude in x, and in `largest`.
template <int n, class X>
__device__ __forceinline__ uint32_t largest_of(const X (&x)[n], uint32_t largest) {
#pragma unroll
  for (X value : x) largest = Max::apply(largest, magnitude_bits(to_float(value)));
  return largest;
}

// q <- cast(x[j] * scale(j)), without a rounding if Q is float. The instruction for fp8 would turn
// Inf into the largest value, so elements that include one, which is rare, are cast by convert.h.
template <int n, class X, class Q, class Scale>
__device__ __forceinline__ void encode_run(const X (&x)[n], Q (&q)[n], const Scale& scale) {
  if constexpr (sizeof(Q) > 1) {
    float scaled[n];
#pragma unroll
    for (int j = 0; j < n; ++j) scaled[j] = to_float(x[j]) * scale(j);
    round_all(scaled, q);
  } else {
    if constexpr (ptx::kConvertsFp8 && n % 2 == 0) {
      if (largest_of(x, 0u) < 0x7F800000u) {
#pragma unroll
        for (int j = 0; j < n; j += 2) {
          float first = to_float(x[j]) * scale(j), second = to_float(x[j + 1]) * scale(j + 1);
          uint16_t codes =
              std::is_same_v<Q, E4m3> ? ptx::e4m3x2(first, second) : ptx::e5m2x2(first, second);
          q[j].bits = static_cast<uint8_t>(codes);
          q[j + 1].bits = static_cast<uint8_t>(codes >> 8);
        }
        return;
      }
    }
#pragma unroll
    for (int j = 0; j < n; ++j) q[j] = Convert<Q>::encode(to_float(x[j]), scale(j));
  }
}

}  // namespace mixprec::cuda
