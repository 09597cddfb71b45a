// The scale of a whole tensor: given, or from the amax that a first launch has found. That launch
// leaves one maximum per block, which every block of the second one reduces for itself: nothing has
// to be zeroed, and no block waits for another.
#pragma once

#include "cuda/amax.cuh"

namespace mixprec::cuda {

struct ScaleIn {
  const float* given;  // null, or 0 where it is not initialised yet: from the amax
  uint32_t* maxima;    // one per block of the first launch
  int blocks;
  float fmt_max;  // 0: a 16-bit format, whose scale is 1 unless given
  bool power_of_two;
};

__device__ __forceinline__ bool is_given(const ScaleIn& in) {
  return in.given != nullptr && *in.given != 0.0f;
}

// The first launch. Clears the state of the second one, too; does nothing else if nobody asks.
template <class X>
__global__ void __launch_bounds__(kThreads)
    maxima_kernel(const X* x, int64_t count, const ScaleIn in, AmaxState* state) {
  if (blockIdx.x == 0 && threadIdx.x == 0) *state = {0, 0};
  if (in.fmt_max == 0.0f || is_given(in)) return;
  uint32_t largest = block_reduce<kThreads, Max>(largest_of(x, count));
  if (threadIdx.x == 0) in.maxima[blockIdx.x] = largest;
}

// `in` learns how many blocks there are.
inline cudaError_t find_maxima(Dtype dtype, const void* x, int64_t count, bool wanted, ScaleIn& in,
                               AmaxState* state, int sms, cudaStream_t stream) {
  cudaError_t error = cudaSuccess;
  with_float(dtype, [&](auto t) {
    using X = typename decltype(t)::type;
    in.blocks = wanted ? static_cast<int>(amax_grid<X>(count, sms)) : 1;
    error = launch(maxima_kernel<X>, in.blocks, kThreads, 0, stream, static_cast<const X*>(x),
                   count, in, state);
  });
  return error;
}

struct CurrentScale {
  float scale;
  bool amax_is_known;
  float amax;
};

// In the second launch, by all threads of a block.
__device__ __forceinline__ CurrentScale current_scale(const ScaleIn& in) {
  __shared__ uint32_t shared;
  if (is_given(in)) return {*in.given, false, 0.0f};
  if (in.fmt_max == 0.0f) return {1.0f, false, 0.0f};
  uint32_t largest = 0;
  for (int i = threadIdx.x; i < in.blocks; i += kThreads)
    largest = Max::apply(largest, in.maxima[i]);
  largest = block_reduce<kThreads, Max>(largest);
  if (threadIdx.x == 0) shared = largest;
  __syncthreads();
  float amax = bits_float(shared);
  return {scale_from_amax(amax, in.fmt_max, 1.0f, in.power_of_two, 1.0f), true, amax};
}

}  // namespace mixprec::cuda
