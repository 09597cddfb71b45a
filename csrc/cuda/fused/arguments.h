// What the launchers of the fused ops share: checks of arguments, and tensors as arrays.
#pragma once

#include "cuda/fused/computed.cuh"
#include "cuda/quantize/results.h"

namespace mixprec::cuda {

// x's shape, or [K], on x's device; row-major, or a copy that is.
inline Tensor checked(const Tensor& t, const Tensor& x, bool is_vector, const std::string& what) {
  bool fits = is_vector ? t.dim() == 1 && x.dim() > 0 && t.size(0) == x.size(x.dim() - 1)
                        : same_shape(t, x);
  float_dtype(t, what);
  STD_TORCH_CHECK(same_device(t, x), what, " must be on x's device");
  STD_TORCH_CHECK(fits, what,
                  is_vector ? " must be [K], x's last dimension" : " must be of x's shape");
  return row_major(t);
}

inline MaybeTensor checked(const MaybeTensor& t, const Tensor& x, bool is_vector,
                           const std::string& what) {
  return t.has_value() ? MaybeTensor(checked(*t, x, is_vector, what)) : std::nullopt;
}

inline Floats floats(const Tensor& t) { return {t.const_data_ptr(), dtype_of(t, "")}; }
inline Floats floats(const MaybeTensor& t) {
  return t.has_value() ? floats(*t) : Floats{nullptr, Dtype::f32};
}

// fp32 of `count` elements; none unless it is wanted.
inline Tensor vector_on(const Tensor& x, int64_t count, bool wanted) {
  return empty_on(x, {wanted ? count : 0}, ScalarType::Float);
}
inline float* vector_of(const Tensor& t, bool wanted) { return wanted ? fp32_of(t) : nullptr; }

}  // namespace mixprec::cuda
