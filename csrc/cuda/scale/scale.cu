// scale_from_amax_, inv_scale, clip_coef and update_scale_ on CUDA tensors.
#include <cmath>

#include "cuda/common/on_device.h"
#include "cuda/scale/scale.cuh"

namespace mixprec::cuda {

namespace {

template <class T>
T* data_of(const Tensor& t) {
  return static_cast<T*>(t.mutable_data_ptr());
}

void scale_from_amax_(Tensor scale, Tensor scale_inv, Tensor amax, ScalarType type, int64_t margin,
                      bool power_of_two) {
  float fmt_max = format_max(dtype_of(type, "scale_from_amax_: dtype"));
  STD_TORCH_CHECK(fmt_max > 0.0f, "scale_from_amax_: dtype must be fp8, fp16 or bf16");
  STD_TORCH_CHECK(margin >= -64 && margin <= 64, "scale_from_amax_: margin must be in [-64, 64]");
  for (const Tensor* t : {&scale, &scale_inv, &amax}) {
    STD_TORCH_CHECK(t->scalar_type() == ScalarType::Float && on_device_of(*t, scale) &&
                        same_shape(*t, scale) && (t == &amax || is_writable(*t)),
                    "scale_from_amax_: scale, scale_inv and amax must be fp32 of one shape");
  }

  OnDevice device(scale);
  Tensor flat = row_major(scale), flat_inv = row_major(scale_inv);
  amax = row_major(amax);
  float shift = std::ldexp(1.0f, static_cast<int>(-margin));
  check_launch(scale_from_amax(data_of<float>(flat), data_of<float>(flat_inv),
                               static_cast<const float*>(amax.const_data_ptr()), scale.numel(),
                               fmt_max, shift, power_of_two, device.stream),
               "scale_from_amax_");
  write_back(scale, flat);
  write_back(scale_inv, flat_inv);
}

Tensor inv_scale_op(Tensor scale) {
  check_scalar_on(scale, ScalarType::Float, scale, "inv_scale: scale");
  OnDevice device(scale);
  Tensor result = empty_on(scale, scale.sizes(), ScalarType::Float);
  check_launch(inv_scale(data_of<float>(scale), data_of<float>(result), device.stream),
               "inv_scale");
  return result;
}

Tensor clip_coef_op(Tensor sum_sq, double max_norm) {
  STD_TORCH_CHECK(sum_sq.scalar_type() == ScalarType::Double && sum_sq.is_cuda() &&
                      sum_sq.is_contiguous() && max_norm > 0,
                  "clip_coef: sum_sq must be fp64, contiguous, on a CUDA device, and max_norm "
                  "positive");
  OnDevice device(sum_sq);
  Tensor result = empty_on(sum_sq, {}, ScalarType::Float);
  check_launch(clip_coef(static_cast<const double*>(sum_sq.const_data_ptr()), sum_sq.numel(),
                         max_norm, data_of<float>(result), device.stream),
               "clip_coef");
  return result;
}

void update_scale_(Tensor scale, Tensor growth_tracker, Tensor hysteresis_tracker, Tensor counters,
                   Tensor found_inf, MaybeTensor underflow, double growth_factor,
                   double backoff_factor, int64_t growth_interval, double min_scale,
                   double max_scale, int64_t hysteresis, double grow_on_underflow) {
  check_scalar_on(scale, ScalarType::Float, scale, "update_scale_: scale");
  check_scalar_on(growth_tracker, ScalarType::Int, scale, "update_scale_: growth_tracker");
  check_scalar_on(hysteresis_tracker, ScalarType::Int, scale, "update_scale_: hysteresis_tracker");
  check_scalar_on(found_inf, ScalarType::Float, scale, "update_scale_: found_inf");
  const float* underflows = scalar_on(underflow, scale, "update_scale_: underflow");
  STD_TORCH_CHECK(counters.scalar_type() == ScalarType::Long && counters.dim() == 1 &&
                      counters.numel() == 3 && counters.is_contiguous() &&
                      on_device_of(counters, scale),
                  "update_scale_: counters must be int64 [3], contiguous, on scale's device");
  STD_TORCH_CHECK(growth_factor >= 1 && std::isfinite(growth_factor) && backoff_factor > 0 &&
                      backoff_factor <= 1 && growth_interval >= 1 && min_scale >= 0 &&
                      std::isfinite(min_scale) && max_scale > 0 && hysteresis >= 1 &&
                      grow_on_underflow >= 0 && grow_on_underflow <= 1,
                  "update_scale_: a setting is out of its range");

  OnDevice device(scale);
  LossScaleState state = {data_of<float>(scale), data_of<int32_t>(growth_tracker),
                          data_of<int32_t>(hysteresis_tracker), data_of<int64_t>(counters)};
  LossScaleRule rule = {growth_factor,
                        backoff_factor,
                        growth_interval,
                        static_cast<float>(min_scale),
                        static_cast<float>(max_scale),
                        static_cast<int32_t>(hysteresis)};
  check_launch(update_scale(state, static_cast<const float*>(found_inf.const_data_ptr()),
                            underflows, static_cast<float>(grow_on_underflow), rule, device.stream),
               "update_scale_");
}

}  // namespace

}  // namespace mixprec::cuda

STABLE_TORCH_LIBRARY_IMPL(mixprec, CUDA, m) {
  m.impl("scale_from_amax_", TORCH_BOX(&mixprec::cuda::scale_from_amax_));
  m.impl("inv_scale", TORCH_BOX(&mixprec::cuda::inv_scale_op));
  m.impl("clip_coef", TORCH_BOX(&mixprec::cuda::clip_coef_op));
  m.impl("update_scale_", TORCH_BOX(&mixprec::cuda::update_scale_));
}
