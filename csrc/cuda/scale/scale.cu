// scale_from_amax_, inv_scale, clip_coef and update_scale_ on CUDA tensors.
#include "arguments/step.h"
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
  float fmt_max = check_scale_from_amax(scale, scale_inv, amax, type);
  float shift = check_margin(margin, "scale_from_amax_");

  OnDevice device(scale);
  Tensor flat = row_major(scale), flat_inv = row_major(scale_inv);
  amax = row_major(amax);
  check_launch(scale_from_amax(data_of<float>(flat), data_of<float>(flat_inv), read_fp32(amax),
                               scale.numel(), fmt_max, shift, power_of_two, device.stream),
               "scale_from_amax_");
  write_back(scale, flat);
  write_back(scale_inv, flat_inv);
}

Tensor inv_scale_op(Tensor scale) {
  check_scalar(scale, ScalarType::Float, scale, "inv_scale", "scale");
  OnDevice device(scale);
  Tensor result = empty_on(scale, scale.sizes(), ScalarType::Float);
  check_launch(inv_scale(data_of<float>(scale), data_of<float>(result), device.stream),
               "inv_scale");
  return result;
}

Tensor clip_coef_op(Tensor sum_sq, double max_norm) {
  check_clip_coef(sum_sq, max_norm);
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
  check_loss_scale(scale, growth_tracker, hysteresis_tracker, counters, found_inf, underflow);
  LossScaleRule rule = loss_scale_rule(growth_factor, backoff_factor, growth_interval, min_scale,
                                       max_scale, hysteresis, grow_on_underflow);
  const float* underflows = underflow.has_value() ? read_fp32(*underflow) : nullptr;

  OnDevice device(scale);
  LossScaleState state = {data_of<float>(scale), data_of<int32_t>(growth_tracker),
                          data_of<int32_t>(hysteresis_tracker), data_of<int64_t>(counters)};
  check_launch(update_scale(state, read_fp32(found_inf), underflows,
                            static_cast<float>(grow_on_underflow), rule, device.stream),
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
