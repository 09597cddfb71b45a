// amax on the GPU. Each block writes its own maximum, so that nothing has to be cleared first.
//
// |x| as the bits of an fp32 without its sign: as integers NaN > Inf > finite, so the largest
// integer is the amax, in any order of reduction.
#pragma once

#include "cuda/common/convert.cuh"
#include "cuda/common/launch.h"
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

struct AmaxOut {
  const float* given;  // null or pointing at 0: not given
  uint32_t* partials;  // [gridDim.x]
  AmaxState* state;    // cleared, if any
};

template <class Source>
constexpr int kAmaxRun = 2 * Source::kRun / Source::kOutputs;

// Returns at once if all scales are given.
template <class Source>
__global__ void __launch_bounds__(kThreads)
    amax_kernel(const Source source, int64_t count, const PerOutput<Source, AmaxOut> out) {
  bool given = true;
  for_outputs(source, [&](int k) {
    const AmaxOut& to = out.of[k];
    if (to.state != nullptr && blockIdx.x == 0 && threadIdx.x == 0) *to.state = {0, 0};
    given = given && to.given != nullptr && *to.given != 0.0f;
  });
  if (given) return;
  constexpr int n = kAmaxRun<Source>;
  uint32_t largest[Source::kOutputs] = {};
  int64_t first = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  for_each<n>(source.template span<n>(count), first, int64_t{gridDim.x} * kThreads,
              [&]<int width>(Int<width>, int64_t i) {
                typename Source::Element in[Source::kOutputs][width];
                source.load(i, for_load(in));
                for_outputs(source, [&](int k) { largest[k] = largest_of(in[k], largest[k]); });
              });
  for_outputs(source, [&](int k) {
    uint32_t of_block = block_reduce<kThreads, Max>(largest[k]);
    if (threadIdx.x == 0) out.of[k].partials[blockIdx.x] = of_block;
  });
}

constexpr int kMaxOutputs = 2;
struct AmaxOfPartials {
  const uint32_t* partials[kMaxOutputs];
  float* amax[kMaxOutputs];
};

// A block for each output.
static __global__ void __launch_bounds__(kThreads)
    amax_of_partials_kernel(const __grid_constant__ AmaxOfPartials of, int count) {
  uint32_t largest = max_of_partials(of.partials[blockIdx.x], count);
  if (threadIdx.x == 0) *of.amax[blockIdx.x] = bits_float(largest);
}

// 32-bit words of scratch for the maxima of the blocks of any launch.
inline int64_t partials_for(const Gpu& gpu) { return int64_t{gpu.sms} * kBlocksPerSm; }

template <class Source>
int64_t amax_grid(int64_t count, const Gpu& gpu) {
  return grid_for(amax_kernel<Source>, count / kAmaxRun<Source> / kThreads, gpu);
}

// casts: with `amax`, and the maxima of `blocks` blocks as partials(), for each output
template <class Source, class Cast>
AmaxOfPartials maxima_of(const Source& source, const PerOutput<Source, Cast>& casts) {
  AmaxOfPartials of = {};
  for (int k = 0; k < source.outputs(); ++k) {
    of.partials[k] = casts.of[k].partials();
    of.amax[k] = casts.of[k].amax;
  }
  return of;
}
template <class Source, class Cast>
cudaError_t finish_partials(const Source& source, const PerOutput<Source, Cast>& casts,
                            int64_t blocks, const Gpu& gpu) {
  return launch(amax_of_partials_kernel, {source.outputs()}, gpu.stream, maxima_of(source, casts),
                blocks);
}

// Also for count = 0: amax 0. partials: scratch of partials_for(gpu).
template <class X>
cudaError_t amax(const X* x, int64_t count, uint32_t* partials, float* amax, const Gpu& gpu) {
  Plain<X> source = {x};
  int64_t blocks = amax_grid<Plain<X>>(count, gpu);
  cudaError_t error = launch(amax_kernel<Plain<X>>, {blocks}, gpu.stream, source, count,
                             PerOutput<Plain<X>, AmaxOut>{{{nullptr, partials, nullptr}}});
  if (error != cudaSuccess) return error;
  return launch(amax_of_partials_kernel, {1}, gpu.stream, AmaxOfPartials{{partials}, {amax}},
                blocks);
}

}  // namespace mixprec::cuda
