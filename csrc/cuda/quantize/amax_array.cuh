// amax of an array as it is. Apart from amax.cuh, because it instantiates the kernel for all three
// formats in every file that includes it.
#pragma once

#include "cuda/quantize/amax.cuh"

namespace mixprec::cuda {

// Also for count = 0: amax 0. partials: scratch of partials_for(sms).
inline cudaError_t amax(Dtype dtype, const void* x, int64_t count, uint32_t* partials, float* amax,
                        int sms, cudaStream_t stream) {
  cudaError_t error = cudaSuccess;
  int64_t grid = 0;
  with_float(dtype, [&](auto t) {
    using X = typename decltype(t)::type;
    Plain<X> source = {static_cast<const X*>(x)};
    grid = amax_grid<Plain<X>>(count, sms);
    error = launch(amax_kernel<Plain<X>>, grid, kThreads, 0, stream, source, count,
                   PerOutput<Plain<X>, AmaxOut>{{{nullptr, partials, nullptr}}});
  });
  if (error != cudaSuccess) return error;
  return launch(amax_of_partials_kernel, 1, kThreads, 0, stream, AmaxOfPartials{{partials}, {amax}},
                grid);
}

}  // namespace mixprec::cuda
