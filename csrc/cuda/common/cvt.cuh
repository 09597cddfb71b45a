// The GPU's conversion instructions: of compute capability 8.0; for fp8, of 8.9; for FP4, of the
// families of 10.0 and 12.0, for which setup.py builds some files; a maximum, of 9.0; a store. They
// round to nearest, ties to even, and keep subnormal numbers. The first element is the lowest part
// of a result.
//
// Tests replace this file by a model of what the PTX manual says of each instruction
// (tests/emulated/shim/cuda/common/cvt.cuh).
#pragma once

#include <cuda_runtime.h>

#include "math/convert.h"

namespace mixprec::cuda::ptx {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
constexpr bool kConvertsFp8 = true;
#else
constexpr bool kConvertsFp8 = false;
#endif
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
constexpr bool kHasMaxOfPairs = true;
#else
constexpr bool kHasMaxOfPairs = false;
#endif
#if defined(__CUDA_ARCH_FAMILY_SPECIFIC__) && __CUDA_ARCH_FAMILY_SPECIFIC__ >= 1000
constexpr bool kConvertsFp4 = true;
#else
constexpr bool kConvertsFp4 = false;
#endif

// The larger ones of two pairs of 16-bit integers.
__device__ __forceinline__ uint32_t max_u16x2(uint32_t a, uint32_t b) {
  uint32_t pair;
  asm("max.u16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
  return pair;
}

__device__ __forceinline__ uint32_t bf16x2(float first, float second) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
}
__device__ __forceinline__ uint32_t fp16x2(float first, float second) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
}
__device__ __forceinline__ float widen(Fp16 x) {
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x.bits));
  return wide;
}
// x, as if it were another number: nvcc then keeps nothing in registers that it has made of x.
__device__ __forceinline__ void forget(uint32_t& x) { asm volatile("" : "+r"(x)); }

// 16 bytes that are the first to leave the L2 cache.
__device__ __forceinline__ void store_early(void* p, uint64_t low, uint64_t high) {
  asm volatile("st.cs.v2.b64 [%0], {%1, %2};" : : "l"(p), "l"(low), "l"(high) : "memory");
}

// Two BF16 numbers. In C++ nvcc would first move each into a register of its own.
__device__ __forceinline__ void widen_bf16x2(uint32_t pair, float& first, float& second) {
  asm("shl.b32 %0, %1, 16;" : "=f"(first) : "r"(pair));
  asm("and.b32 %0, %1, 0xFFFF0000;" : "=f"(second) : "r"(pair));
}

// Saturating: Inf becomes the largest number, NaN becomes 0x7F. Four codes take two instructions,
// the second of which puts its pair beside that of the first.
__device__ __forceinline__ uint32_t e4m3x4(const float* x) {
  uint32_t codes;
  asm("{\n\t"
      ".reg .b16 a, b;\n\t"
      "cvt.rn.satfinite.e4m3x2.f32 a, %2, %1;\n\t"
      "cvt.rn.satfinite.e4m3x2.f32 b, %4, %3;\n\t"
      "mov.b32 %0, {a, b};\n\t"
      "}"
      : "=r"(codes)
      : "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]));
  return codes;
}
__device__ __forceinline__ uint32_t e5m2x4(const float* x) {
  uint32_t codes;
  asm("{\n\t"
      ".reg .b16 a, b;\n\t"
      "cvt.rn.satfinite.e5m2x2.f32 a, %2, %1;\n\t"
      "cvt.rn.satfinite.e5m2x2.f32 b, %4, %3;\n\t"
      "mov.b32 %0, {a, b};\n\t"
      "}"
      : "=r"(codes)
      : "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]));
  return codes;
}
// Two E4M3 codes as FP16, exactly.
__device__ __forceinline__ uint32_t fp16x2_of_e4m3x2(uint16_t codes) {
  uint32_t pair;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(codes));
  return pair;
}

// Eight E2M1 codes, saturated too; NaN becomes the largest number.
__device__ __forceinline__ uint32_t e2m1x8(const float* x) {
  uint32_t codes;
  asm("{\n\t"
      ".reg .b8 a, b, c, d;\n\t"
      "cvt.rn.satfinite.e2m1x2.f32 a, %2, %1;\n\t"
      "cvt.rn.satfinite.e2m1x2.f32 b, %4, %3;\n\t"
      "cvt.rn.satfinite.e2m1x2.f32 c, %6, %5;\n\t"
      "cvt.rn.satfinite.e2m1x2.f32 d, %8, %7;\n\t"
      "mov.b32 %0, {a, b, c, d};\n\t"
      "}"
      : "=r"(codes)
      : "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "f"(x[4]), "f"(x[5]), "f"(x[6]), "f"(x[7]));
  return codes;
}
// Two E2M1 codes as FP16, exactly.
__device__ __forceinline__ uint32_t fp16x2_of_e2m1x2(uint8_t codes) {
  uint32_t pair;
  asm("{\n\t"
      ".reg .b8 a, b;\n\t"
      "mov.b16 {a, b}, %1;\n\t"
      "cvt.rn.f16x2.e2m1x2 %0, a;\n\t"
      "}"
      : "=r"(pair)
      : "h"(static_cast<uint16_t>(codes)));
  return pair;
}

// 1 / x within one unit in the last place, x and 1 / x normal.
__device__ __forceinline__ float rcp(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace mixprec::cuda::ptx
