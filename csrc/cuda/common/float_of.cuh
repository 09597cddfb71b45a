// Elements whose dtype (fp32, bf16 or fp16) is known only at run time. For few elements, one branch
// each costs less than another instance of the kernel.
#pragma once

#include "cuda/common/convert.cuh"
#include "dispatch.h"

namespace mixprec::cuda {

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
