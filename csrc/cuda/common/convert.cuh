// Casts of several elements by the GPU's conversion instructions. Their results are those of
// csrc/math/convert.h, but for the bits of a NaN.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "cuda/common/cvt.cuh"
#include "cuda/common/vec.cuh"

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

}  // namespace mixprec::cuda
