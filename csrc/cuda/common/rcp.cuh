// The GPU's instruction for reciprocals, and the divisions that are made of it.
//
// Tests replace this file by a model of what the PTX manual says of the instruction
// (tests/emulated/shim/cuda/common/rcp.cuh).
#pragma once

#include <cuda_runtime.h>

namespace mixprec::cuda::ptx {

// 1 / x within one unit in the last place, x and 1 / x normal.
__device__ __forceinline__ float rcp(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace mixprec::cuda::ptx
