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
  if constexpr (ptx::kHasMaxOfPairs && sizeof(X) == 2 && n % 2 == 0) {
    uint32_t pair = 0;
#pragma unroll
    for (int j = 0; j < n; j += 2) {
      pair = ptx::max_u16x2(pair, static_cast<uint32_t>(pack<2>(x + j)) & 0x7FFF7FFFu);
    }
    uint16_t bits = static_cast<uint16_t>(Max::apply(pair & 0xFFFFu, pair >> 16));
    return Max::apply(largest, magnitude_bits(to_float(X{bits})));
  } else {
#pragma unroll
    for (X value : x) largest = Max::apply(largest, magnitude_bits(to_float(value)));
    return largest;
  }
}

// q <- cast(x[j] * scale(j)), without a rounding if Q is float. largest: of these elements, or of
// more. The instruction for fp8 would turn Inf into the largest value, so elements that include
// one, which is rare, are cast by convert.h.
template <int n, class X, class Q, class Scale>
__device__ __forceinline__ void encode_run(const X (&x)[n], Q (&q)[n], const Scale& scale,
                                           uint32_t largest) {
  float wide[n];
  decode_all(x, wide);
  if constexpr (sizeof(Q) > 1) {
#pragma unroll
    for (int j = 0; j < n; ++j) wide[j] = wide[j] * scale(j);
    round_all(wide, q);
  } else if constexpr (ptx::kConvertsFp8 && n % 4 == 0) {
    uint32_t codes[n / 4] = {};  // which both ways fill: nvcc would join them byte by byte
    if (largest < 0x7F800000u) {
#pragma unroll
      for (int j = 0; j < n; ++j) wide[j] = wide[j] * scale(j);
#pragma unroll
      for (int j = 0; j < n; j += 4) {
        codes[j / 4] = std::is_same_v<Q, E4m3> ? ptx::e4m3x4(wide + j) : ptx::e5m2x4(wide + j);
      }
    } else {
#pragma unroll
      for (int j = 0; j < n; ++j) {
        uint32_t code = Convert<Q>::encode(wide[j], scale(j)).bits;
        codes[j / 4] |= code << (j % 4 * 8);
      }
    }
#pragma unroll
    for (int j = 0; j < n; ++j) q[j].bits = static_cast<uint8_t>(codes[j / 4] >> (j % 4 * 8));
  } else {
#pragma unroll
    for (int j = 0; j < n; ++j) q[j] = Convert<Q>::encode(wide[j], scale(j));
  }
}
template <int n, class X, class Q, class Scale>
__device__ __forceinline__ void encode_run(const X (&x)[n], Q (&q)[n], const Scale& scale) {
  encode_run(x, q, scale, largest_of(x, 0u));
}

}  // namespace mixprec::cuda
