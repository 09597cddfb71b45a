// Loads, stores and casts of several elements, with the GPU's conversion instructions where
// available. They round as csrc/math/convert.h does, which is used elsewhere.
#pragma once

#include "cuda/common/reduce.cuh"
#include "cuda/common/vec.cuh"
#include "math/convert.h"

namespace mixprec::cuda {

__device__ __forceinline__ uint32_t magnitude_bits(float x) { return float_bits(x) & 0x7FFFFFFFu; }

template <class T>
__device__ __forceinline__ float to_float(T x) {
#if defined(__CUDA_ARCH__)
  if constexpr (std::is_same_v<T, Fp16>) {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x.bits));
    return wide;
  }
#endif
  return decode(x);
}

// The largest magnitude in x, and in `largest`.
template <int n, class X>
__device__ __forceinline__ uint32_t largest_of(const X (&x)[n], uint32_t largest) {
#pragma unroll
  for (X value : x) largest = Max::apply(largest, magnitude_bits(to_float(value)));
  return largest;
}

// q <- cast(x[j] * scale(j)), without a rounding if Q is float. The instruction would turn Inf into
// the largest value, so elements that include one, which is rare, are cast by convert.h.
template <int n, class X, class Q, class Scale>
__device__ __forceinline__ void encode_run(const X (&x)[n], Q (&q)[n], const Scale& scale) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  if constexpr (sizeof(Q) == 1 && n % 2 == 0) {
    if (largest_of(x, 0u) < 0x7F800000u) {
#pragma unroll
      for (int j = 0; j < n; j += 2) {
        float first = to_float(x[j]) * scale(j), second = to_float(x[j + 1]) * scale(j + 1);
        uint16_t codes;
        if constexpr (std::is_same_v<Q, E4m3>) {
          asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(second), "f"(first));
        } else {
          asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(second), "f"(first));
        }
        q[j].bits = static_cast<uint8_t>(codes);
        q[j + 1].bits = static_cast<uint8_t>(codes >> 8);
      }
      return;
    }
  }
#endif
#pragma unroll
  for (int j = 0; j < n; ++j) {
    if constexpr (std::is_same_v<Q, float>) {
      q[j] = to_float(x[j]) * scale(j);
    } else {
      q[j] = Convert<Q>::encode(to_float(x[j]), scale(j));
    }
  }
}

}  // namespace mixprec::cuda
