// The arguments of scale_from_amax_, update_scale_ and update_delayed_scales_, on every device.
#pragma once

#include <cmath>

#include "arguments/check.h"
#include "arguments/overlap.h"
#include "math/scale.h"

namespace mixprec {

inline float check_margin(int64_t margin, const char* op) {
  STD_TORCH_CHECK(margin >= -64 && margin <= 64, op, ": margin must be in [-64, 64]");
  return std::ldexp(1.0f, static_cast<int>(-margin));
}

// Returns the largest number of the format.
inline float check_scale_from_amax(const Tensor& scale, const Tensor& scale_inv, const Tensor& amax,
                                   ScalarType type) {
  float fmt_max = format_max(dtype_of(type, "scale_from_amax_: dtype"));
  STD_TORCH_CHECK(fmt_max > 0.0f, "scale_from_amax_: dtype must be fp8, fp16 or bf16");
  for (const Tensor* t : {&scale, &scale_inv, &amax}) {
    STD_TORCH_CHECK(t->scalar_type() == ScalarType::Float && same_device(*t, scale) &&
                        same_shape(*t, scale) && (t == &amax || is_writable(*t)),
                    "scale_from_amax_: scale, scale_inv and amax must be fp32 of one shape");
  }
  return fmt_max;
}

inline void check_clip_coef(const Tensor& sum_sq, double max_norm) {
  STD_TORCH_CHECK(sum_sq.scalar_type() == ScalarType::Double && sum_sq.is_contiguous(),
                  "clip_coef: sum_sq must be fp64, contiguous");
  STD_TORCH_CHECK(max_norm > 0, "clip_coef: max_norm must be positive");
}

inline void check_loss_scale(const Tensor& scale, const Tensor& growth_tracker,
                             const Tensor& hysteresis_tracker, const Tensor& counters,
                             const Tensor& found_inf, const MaybeTensor& underflow) {
  const char* op = "update_scale_";
  check_scalar(scale, ScalarType::Float, scale, op, "scale");
  check_scalar(growth_tracker, ScalarType::Int, scale, op, "growth_tracker");
  check_scalar(hysteresis_tracker, ScalarType::Int, scale, op, "hysteresis_tracker");
  check_table(counters, ScalarType::Long, {3}, scale, op, "counters");
  check_scalar(found_inf, ScalarType::Float, scale, op, "found_inf");
  if (underflow.has_value()) check_scalar(*underflow, ScalarType::Float, scale, op, "underflow");
}

inline LossScaleRule loss_scale_rule(double growth_factor, double backoff_factor,
                                     int64_t growth_interval, double min_scale, double max_scale,
                                     int64_t hysteresis, double grow_on_underflow) {
  STD_TORCH_CHECK(growth_factor >= 1 && std::isfinite(growth_factor) && backoff_factor > 0 &&
                      backoff_factor <= 1 && growth_interval >= 1 && min_scale >= 0 &&
                      std::isfinite(min_scale) && max_scale > 0 && hysteresis >= 1 &&
                      grow_on_underflow >= 0 && grow_on_underflow <= 1,
                  "update_scale_: a setting is out of its range");
  return {growth_factor,
          backoff_factor,
          growth_interval,
          static_cast<float>(min_scale),
          static_cast<float>(max_scale),
          static_cast<int32_t>(hysteresis)};
}

inline void check_delayed_scales(const TensorList& amax_histories, const TensorList& scales,
                                 const TensorList& amaxes, const std::vector<double>& fmt_max) {
  const char* op = "update_delayed_scales_";
  size_t n = scales.size();
  STD_TORCH_CHECK(amax_histories.size() == n && amaxes.size() == n && fmt_max.size() == n, op,
                  ": the lists must be of one length");
  for (size_t i = 0; i < n; ++i) {
    const Tensor& history = amax_histories[i];
    STD_TORCH_CHECK(history.dim() == 1 && history.numel() > 0 &&
                        same_shape(history, amax_histories[0]) && same_device(history, scales[0]) &&
                        history.scalar_type() == ScalarType::Float && is_writable(history),
                    op, ": amax_histories must be fp32 [L] on one device");
    check_scalar(scales[i], ScalarType::Float, scales[0], op, "scales");
    check_scalar(amaxes[i], ScalarType::Float, scales[0], op, "amaxes");
    STD_TORCH_CHECK(scales[i].dim() == 0 && amaxes[i].dim() == 0, op,
                    ": scales and amaxes must have shape []");
    STD_TORCH_CHECK(fmt_max[i] > 0 && std::isfinite(fmt_max[i]), op,
                    ": fmt_max must be positive and finite");
  }
  check_disjoint(amax_histories, op, "amax_histories");
}

}  // namespace mixprec
