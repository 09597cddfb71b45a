// Elements whose dtype (fp32, bf16 or fp16) is known only at run time. For few elements, one branch
// each costs less than another instance of the kernel.
#pragma once

#include "dispatch.h"

namespace mixprec::cuda {

__device__ __forceinline__ float load_float(const void* from, Dtype dtype, int64_t i) {
  if (dtype == Dtype::f32) return static_cast<const float*>(from)[i];
  uint16_t bits = static_cast<const uint16_t*>(from)[i];
  return dtype == Dtype::bf16 ? decode(Bf16{bits}) : decode(Fp16{bits});
}

__device__ __forceinline__ void store_float(void* to, Dtype dtype, int64_t i, float x) {
  if (dtype == Dtype::f32) {
    static_cast<float*>(to)[i] = x;
  } else {
    static_cast<uint16_t*>(to)[i] =
        dtype == Dtype::bf16 ? Convert<Bf16>::encode(x).bits : Convert<Fp16>::encode(x).bits;
  }
}

// Two 16-bit elements in one register, the first one in the low half. The GPU's instruction rounds
// as csrc/math/convert.h does.
__device__ __forceinline__ uint32_t pack_pair(Dtype dtype, float first, float second) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint32_t bf16, fp16;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bf16) : "f"(second), "f"(first));
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(fp16) : "f"(second), "f"(first));
  return dtype == Dtype::bf16 ? bf16 : fp16;
#else
  if (dtype == Dtype::bf16) {
    return Convert<Bf16>::encode(first).bits | uint32_t{Convert<Bf16>::encode(second).bits} << 16;
  }
  return Convert<Fp16>::encode(first).bits | uint32_t{Convert<Fp16>::encode(second).bits} << 16;
#endif
}

}  // namespace mixprec::cuda
