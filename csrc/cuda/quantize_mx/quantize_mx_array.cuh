// quantize_mx of an array as it is. Apart from quantize_mx.cuh, because it instantiates the kernel
// for all three formats in every file that includes it.
#pragma once

#include "cuda/quantize/amax_array.cuh"
#include "cuda/quantize_mx/quantize_mx.cuh"

namespace mixprec::cuda {

// MX: two launches. NVFP4: three, because its scales need the amax of x. Also for empty x.
inline cudaError_t quantize_mx(Dtype dtype, const void* x, const QuantizeMx& a, int sms,
                               cudaStream_t stream) {
  cudaError_t error = cudaSuccess;
  if (a.format == BlockFormat::nvfp4) {
    error = amax(dtype, x, a.rows.lines * a.rows.length, a.scratch, a.amax, sms, stream);
  }
  if (error != cudaSuccess) return error;
  return with_float(dtype, [&](auto t) {
    using X = typename decltype(t)::type;
    return quantize_mx_from(Plain<X>{static_cast<const X*>(x)}, {{a}}, sms, stream);
  });
}

}  // namespace mixprec::cuda
