// The arguments of unscale_ and grad_stats_, on every device.
#pragma once

#include "arguments/check.h"
#include "arguments/overlap.h"

namespace mixprec {

// Returns the dtypes of the gradients.
inline std::vector<Dtype> check_grads(const TensorList& grads, const MaybeTensor& inv_scale,
                                      const Tensor& found_inf, const MaybeTensor& counts,
                                      const char* op) {
  check_scalar(found_inf, ScalarType::Float, found_inf, op, "found_inf");
  if (inv_scale.has_value()) {
    check_scalar(*inv_scale, ScalarType::Float, found_inf, op, "inv_scale");
  }
  int64_t count = static_cast<int64_t>(grads.size());
  if (counts.has_value()) {
    check_table(*counts, ScalarType::Long, {count, 4}, found_inf, op, "counts");
  }
  std::vector<Dtype> dtypes;
  dtypes.reserve(grads.size());
  for (const Tensor& grad : grads) {
    dtypes.push_back(dtype_of(grad, op));
    STD_TORCH_CHECK(!is_fp8(dtypes.back()) && same_device(grad, found_inf), op,
                    ": gradients must be floating point, on found_inf's device");
  }
  return dtypes;
}

inline void check_written(const TensorList& grads, const char* op) {
  for (const Tensor& grad : grads) {
    STD_TORCH_CHECK(is_writable(grad), op, ": the elements of a gradient share memory");
  }
  check_disjoint(grads, op, "grads");
}

}  // namespace mixprec
