// amax on the GPU, and the scale that follows from it.
//
// |x| as the bits of an fp32 without its sign: as integers NaN > Inf > finite, so the largest
// integer is the amax, and the order in which it was found does not matter.
#pragma once

#include "cuda/launch.h"
#include "cuda/reduce.cuh"
#include "cuda/vec.cuh"
#include "dispatch.h"
#include "math/scale.h"

namespace mixprec::cuda {

// Shared by the blocks of a launch; zeros before and after.
struct AmaxState {
  unsigned largest, done;
};

// What the last block of a launch writes besides amax. Null: not asked for.
struct ScaleOut {
  float* scale;      // from this amax
  float* scale_inv;  // 1 / scale; where scale is null, 1 / *given (1 without that)
  const float* given;
  float fmt_max;
  bool power_of_two;
};

__device__ __forceinline__ uint32_t magnitude_bits(float x) { return float_bits(x) & 0x7FFFFFFFu; }

// To be called once by all threads of all blocks, with the largest magnitude each has seen.
__device__ __forceinline__ void finish_amax(uint32_t largest, AmaxState* state, float* amax,
                                            const ScaleOut& out) {
  largest = block_reduce<kThreads, Max>(largest);
  if (threadIdx.x != 0) return;
  atomicMax(&state->largest, largest);
  __threadfence();  // this block's maximum before its count
  if (atomicAdd(&state->done, 1u) + 1u != gridDim.x) return;
  __threadfence();  // and the counts before the maximum of all
  *amax = bits_float(atomicExch(&state->largest, 0u));
  state->done = 0;
  float scale = out.given != nullptr ? *out.given : 1.0f;
  if (out.scale != nullptr) {
    scale = scale_from_amax(*amax, out.fmt_max, 1.0f, out.power_of_two, 1.0f);
    *out.scale = scale;
  }
  if (out.scale_inv != nullptr) *out.scale_inv = 1.0f / scale;
}

template <class X>
__global__ void __launch_bounds__(kThreads)
    amax_kernel(const X* x, int64_t count, AmaxState* state, float* amax, const ScaleOut out) {
  constexpr int n = 2 * kVector<X>;
  uint32_t largest = 0;
  int64_t first = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  for_each<n>(split<n>(count, x), first, int64_t{gridDim.x} * kThreads, [&](auto width, int64_t i) {
    X in[decltype(width)::value];
    load(x + i, in);
#pragma unroll
    for (X value : in) largest = Max::apply(largest, magnitude_bits(decode(value)));
  });
  finish_amax(largest, state, amax, out);
}

// Also for count = 0: amax 0.
inline cudaError_t amax(Dtype dtype, const void* x, int64_t count, AmaxState* state, float* amax,
                        const ScaleOut& out, int sms, cudaStream_t stream) {
  cudaError_t error = cudaSuccess;
  with_float(dtype, [&](auto t) {
    using X = typename decltype(t)::type;
    int64_t packs = count / (2 * kVector<X>);
    error = launch(amax_kernel<X>, grid_for(packs / kThreads, sms), kThreads, 0, stream,
                   static_cast<const X*>(x), count, state, amax, out);
  });
  return error;
}

}  // namespace mixprec::cuda
