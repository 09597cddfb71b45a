// quantize of an array as it is. Apart from quantize.cuh, because it instantiates the casting
// kernels for all three formats in every file that includes it.
#pragma once

#include "cuda/quantize/quantize.cuh"

namespace mixprec::cuda {

// x [rows, cols], row-major
inline cudaError_t quantize(Dtype x_dtype, const void* x, const Quantize& a, int sms,
                            cudaStream_t stream) {
  return with_float(x_dtype, [&](auto tx) {
    using X = typename decltype(tx)::type;
    return quantize_from(Plain<X>{static_cast<const X*>(x)}, {{a}}, sms, stream);
  });
}

}  // namespace mixprec::cuda
