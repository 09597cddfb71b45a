// The casts of the values that a fused op computes: those of quantize, and MX.
#pragma once

#include "cuda/quantize/quantize.cuh"
#include "cuda/quantize_mx/quantize_mx.cuh"

namespace mixprec::cuda {

inline QuantizeMx mx_cast(const Quantize& a) {
  BlockFormat format = a.q_dtype == Dtype::e4m3 ? BlockFormat::mxfp8_e4m3 : BlockFormat::mxfp8_e5m2;
  auto lines = [](void* q, float* scale_inv, int64_t lines, int64_t length, Stream stream) {
    return MxLines{static_cast<uint8_t*>(q), reinterpret_cast<uint8_t*>(scale_inv), lines, length,
                   stream};
  };
  return {format,
          scale_rule(format, ScaleMode::rceil, 0.0f, false),
          lines(a.q, a.scale_inv, a.rows, a.cols, kParamStream),
          lines(a.q_t, a.scale_inv_t, a.cols, a.rows, kFirstStateStream),
          a.transpose,
          false,
          nullptr,
          a.amax,
          nullptr,
          a.scratch};
}

template <class Source>
cudaError_t cast_from(const Source& source, const Casts<Source>& casts, int sms,
                      cudaStream_t stream) {
  if (casts.of[0].granularity != Granularity::mx) {
    return quantize_from(source, casts, sms, stream);
  }
  return quantize_mx_from(source, of_casts(source, casts, mx_cast), sms, stream);
}

}  // namespace mixprec::cuda
