// Casts of several elements by the GPU's conversion instructions, also times a scale, and their
// largest magnitude. The results are those of csrc/math/convert.h, but for the bits of a NaN.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "cuda/common/cvt.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/common/vec.cuh"
#include "dispatch.h"

namespace mixprec::cuda {

template <class T>
__device__ __forceinline__ float to_float(T x) {
  if constexpr (std::is_same_v<T, Fp16>) {
    return ptx::widen(x);
  } else if constexpr (std::is_same_v<T, E5m2>) {  // the high byte of fp16
    return ptx::widen({static_cast<uint16_t>(x.bits << 8)});
  } else {
    return decode(x);
  }
}

// x <- q, exactly. Real: float, or T itself.
template <class T, class Real, int n>
__device__ __forceinline__ void decode_all(const T (&q)[n], Real (&x)[n]) {
  if constexpr (std::is_same_v<T, Real>) {
#pragma unroll
    for (int j = 0; j < n; ++j) x[j] = q[j];
  } else if constexpr (ptx::kConvertsFp8 && std::is_same_v<T, E4m3> && n % 2 == 0) {
#pragma unroll
    for (int j = 0; j < n; j += 2) {
      uint32_t pair = ptx::fp16x2_of_e4m3x2(static_cast<uint16_t>(q[j].bits | q[j + 1].bits << 8));
      x[j] = ptx::widen({static_cast<uint16_t>(pair)});
      x[j + 1] = ptx::widen({static_cast<uint16_t>(pair >> 16)});
    }
  } else if constexpr (std::is_same_v<T, Bf16> && n % 2 == 0) {
#pragma unroll
    for (int j = 0; j < n; j += 2) {
      ptx::widen_bf16x2(static_cast<uint32_t>(pack<2>(q + j)), x[j], x[j + 1]);
    }
  } else {
#pragma unroll
    for (int j = 0; j < n; ++j) x[j] = to_float(q[j]);
  }
}

// Two numbers rounded to T, which is Bf16 or Fp16; the first one in the low half.
template <class T>
__device__ __forceinline__ uint32_t rounded_pair(float first, float second) {
  static_assert(std::is_same_v<T, Bf16> || std::is_same_v<T, Fp16>);
  return std::is_same_v<T, Bf16> ? ptx::bf16x2(first, second) : ptx::fp16x2(first, second);
}

// q <- x rounded to T, which is Bf16, Fp16 or Real
template <class T, class Real, int n>
__device__ __forceinline__ void round_all(const Real (&x)[n], T (&q)[n]) {
  if constexpr (std::is_same_v<T, Real>) {
#pragma unroll
    for (int j = 0; j < n; ++j) q[j] = x[j];
  } else {
#pragma unroll
    for (int j = 0; j < n; j += 2) {
      uint32_t pair = rounded_pair<T>(x[j], x[j + 1 < n ? j + 1 : j]);
      q[j].bits = static_cast<uint16_t>(pair);
      if (j + 1 < n) q[j + 1].bits = static_cast<uint16_t>(pair >> 16);
    }
  }
}

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

__device__ __forceinline__ float load_float(const void* from, Dtype dtype, int64_t i) {
  if (dtype == Dtype::f32) return static_cast<const float*>(from)[i];
  uint16_t bits = static_cast<const uint16_t*>(from)[i];
  return dtype == Dtype::bf16 ? to_float(Bf16{bits}) : to_float(Fp16{bits});
}

// Two 16-bit elements in one register, the first one in the low half.
__device__ __forceinline__ uint32_t pack_pair(Dtype dtype, float first, float second) {
  uint32_t bf16 = ptx::bf16x2(first, second), fp16 = ptx::fp16x2(first, second);
  return dtype == Dtype::bf16 ? bf16 : fp16;
}

__device__ __forceinline__ void store_float(void* to, Dtype dtype, int64_t i, float x) {
  if (dtype == Dtype::f32) {
    static_cast<float*>(to)[i] = x;
  } else {
    static_cast<uint16_t*>(to)[i] = static_cast<uint16_t>(pack_pair(dtype, x, x));
  }
}

}  // namespace mixprec::cuda
