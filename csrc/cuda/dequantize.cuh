// dequantize on the GPU: out = data * scale_inv in fp32, one rounding to out's dtype.
#pragma once

#include "cuda/launch.h"
#include "cuda/vec.cuh"
#include "dispatch.h"

namespace mixprec::cuda {

template <class Q, class O>
__global__ void __launch_bounds__(kThreads)
    dequantize_kernel(const Q* __restrict__ data, O* __restrict__ out, int64_t count,
                      const float* scale_inv) {
  constexpr int n = kVector<Q>;
  float s = *scale_inv;
  int64_t first = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  for_each<n>(split<n>(count, data, out), first, int64_t{gridDim.x} * kThreads,
              [&](auto width, int64_t i) {
                Q in[decltype(width)::value];
                O result[decltype(width)::value];
                load(data + i, in);
#pragma unroll
                for (int j = 0; j < decltype(width)::value; ++j) {
                  result[j] = Convert<O>::encode(decode(in[j]) * s);
                }
                store(out + i, result);
              });
}

inline cudaError_t dequantize(Dtype data_dtype, Dtype out_dtype, const void* data, void* out,
                              int64_t count, const float* scale_inv, int sms, cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  cudaError_t error = cudaSuccess;
  with_low(data_dtype, [&](auto tq) {
    with_float(out_dtype, [&](auto to) {
      using Q = typename decltype(tq)::type;
      using O = typename decltype(to)::type;
      int64_t packs = count / kVector<Q>;
      error = launch(dequantize_kernel<Q, O>, grid_for(packs / kThreads, sms), kThreads, 0, stream,
                     static_cast<const Q*>(data), static_cast<O*>(out), count, scale_inv);
    });
  });
  return error;
}

}  // namespace mixprec::cuda
