// amax on the GPU. Each block writes its own maximum, so that nothing has to be cleared first.
//
// |x| as the bits of an fp32 without its sign: as integers NaN > Inf > finite, so the largest
// integer is the amax, in any order of reduction.
#pragma once

#include "cuda/common/launch.h"
#include "cuda/quantize/cast.cuh"
#include "cuda/quantize/source.cuh"
#include "dispatch.h"

namespace mixprec::cuda {

// Shared by the blocks of a launch that computes amax while it casts; cleared by the previous
// launch.
struct AmaxState {
  unsigned largest, done;
};

// The maximum over the block, returned to all its threads, which must all call it. May be called in
// a loop.
__device__ __forceinline__ uint32_t block_max(uint32_t value) {
  __shared__ uint32_t of_all;
  value = block_reduce<kThreads, Max>(value);
  if (threadIdx.x == 0) of_all = value;
  __syncthreads();
  return of_all;
}

__device__ __forceinline__ uint32_t max_of_partials(const uint32_t* partials, int count) {
  uint32_t largest = 0;
  for (int i = threadIdx.x; i < count; i += kThreads) largest = Max::apply(largest, partials[i]);
  return block_max(largest);
}

// Must be called once by all threads of all blocks, with the largest magnitude that each has seen.
__device__ __forceinline__ void finish_amax(uint32_t largest, AmaxState* state, float* amax) {
  largest = block_reduce<kThreads, Max>(largest);
  if (threadIdx.x != 0) return;
  atomicMax(&state->largest, largest);
  __threadfence();  // this block's maximum before its count
  if (atomicAdd(&state->done, 1u) + 1u != gridDim.x) return;
  __threadfence();  // and the counts before the maximum of all
  *amax = bits_float(atomicExch(&state->largest, 0u));
}

// partials [gridDim.x]. Returns at once if a scale is given and not 0. Clears `state`, if any.
template <class Source>
__global__ void __launch_bounds__(kThreads)
    amax_kernel(const Source source, int64_t count, const float* given, uint32_t* partials,
                AmaxState* state) {
  if (state != nullptr && blockIdx.x == 0 && threadIdx.x == 0) *state = {0, 0};
  if (given != nullptr && *given != 0.0f) return;
  constexpr int n = 2 * Source::kRun;
  uint32_t largest = 0;
  int64_t first = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  for_each<n>(source.template span<n>(count), first, int64_t{gridDim.x} * kThreads,
              [&](auto width, int64_t i) {
                typename Source::Element in[decltype(width)::value];
                source.load(i, in);
                largest = largest_of(in, largest);
              });
  largest = block_reduce<kThreads, Max>(largest);
  if (threadIdx.x == 0) partials[blockIdx.x] = largest;
}

static __global__ void __launch_bounds__(kThreads)
    amax_of_partials_kernel(const uint32_t* partials, int count, float* amax) {
  uint32_t largest = max_of_partials(partials, count);
  if (threadIdx.x == 0) *amax = bits_float(largest);
}

// 32-bit words of scratch for the maxima of the blocks of any launch.
inline int64_t partials_for(int sms) { return int64_t{sms} * kBlocksPerSm; }

template <class Source>
int64_t amax_grid(int64_t count, int sms) {
  return grid_for(count / (2 * Source::kRun) / kThreads, sms);
}

}  // namespace mixprec::cuda
