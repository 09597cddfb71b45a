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

// A launch works on one array or, of sources that are arrays, on two: the first blocks on the
// first.
template <class Source>
constexpr int kArrays = Source::kFused ? 1 : 2;

// The blocks that work on one array: this is one of `count`.
struct Part {
  int index, count;
};

// Work: what is to be done with an array.
template <class Source, class Work>
struct Arrays {
  Work of[kArrays<Source>];
  int blocks[kArrays<Source>];

  int64_t all_blocks() const {
    int64_t sum = 0;
    for (int count : blocks) sum += count;
    return sum;
  }
  __device__ __forceinline__ const Work& mine(Part& part) const {
    part = {static_cast<int>(blockIdx.x), blocks[0]};
    if constexpr (kArrays<Source> == 2) {
      if (part.index >= blocks[0]) {
        part = {part.index - blocks[0], blocks[1]};
        return of[1];
      }
    }
    return of[0];
  }
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

template <class Source>
constexpr int kAmaxRun = 2 * Source::kRun / Source::kOutputs;

// largest <- those of the elements that a thread of this part meets
template <class Source>
__device__ __forceinline__ void search(const Source& source, int64_t count, Part part,
                                       uint32_t (&largest)[Source::kOutputs]) {
  constexpr int n = kAmaxRun<Source>;
  int64_t first = int64_t{part.index} * kThreads + threadIdx.x;
  for_each<n>(source.template span<n>(count), first, int64_t{part.count} * kThreads,
              [&]<int width>(Int<width>, int64_t i) {
                typename Source::Element in[Source::kOutputs][width];
                source.load(i, for_load(in));
                for_outputs(source, [&](int k) { largest[k] = largest_of(in[k], largest[k]); });
              });
}

template <class Source>
struct AmaxOf {
  Source source;
  int64_t count;
  PerOutput<Source, uint32_t*> partials;  // [blocks]
};

template <class Source>
__global__ void __launch_bounds__(kThreads)
    amax_kernel(const __grid_constant__ Arrays<Source, AmaxOf<Source>> arrays) {
  Part part;
  const AmaxOf<Source>& a = arrays.mine(part);
  uint32_t largest[Source::kOutputs] = {};
  search(a.source, a.count, part, largest);
  for_outputs(a.source, [&](int k) {
    uint32_t of_block = block_reduce<kThreads, Max>(largest[k]);
    if (threadIdx.x == 0) a.partials.of[k][part.index] = of_block;
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
  if (of.amax[blockIdx.x] == nullptr) return;
  uint32_t largest = max_of_partials(of.partials[blockIdx.x], count);
  if (threadIdx.x == 0) *of.amax[blockIdx.x] = bits_float(largest);
}

// 32-bit words of scratch for the maxima of the blocks of any launch.
inline int64_t partials_for(const Gpu& gpu) { return int64_t{gpu.sms} * kBlocksPerSm; }

template <class Source>
int64_t amax_grid(int64_t count, const Gpu& gpu) {
  return grid_for(amax_kernel<Source>, count / kAmaxRun<Source> / kThreads, gpu);
}

// casts: with `amax`, and the maxima of `blocks` blocks as partials(), for each output; nothing is
// done where no amax is wanted
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
  if (casts.of[source.outputs() - 1].amax == nullptr) return cudaSuccess;  // nor another
  return launch(amax_of_partials_kernel, {source.outputs()}, gpu.stream, maxima_of(source, casts),
                blocks);
}

// Also for count = 0: amax 0. partials: scratch of partials_for(gpu).
template <class X>
cudaError_t amax(const X* x, int64_t count, uint32_t* partials, float* amax, const Gpu& gpu) {
  int64_t blocks = amax_grid<Plain<X>>(count, gpu);
  Arrays<Plain<X>, AmaxOf<Plain<X>>> one = {{{{x}, count, {{partials}}}},
                                            {static_cast<int>(blocks)}};
  cudaError_t error = launch(amax_kernel<Plain<X>>, {blocks}, gpu.stream, one);
  if (error != cudaSuccess) return error;
  return launch(amax_of_partials_kernel, {1}, gpu.stream, AmaxOfPartials{{partials}, {amax}},
                blocks);
}

}  // namespace mixprec::cuda
