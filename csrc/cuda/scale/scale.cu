// scale_from_amax_, update_delayed_scales_, inv_scale, clip_coef and update_scale_ on CUDA tensors.
#include "arguments/step.h"
#include "cuda/common/on_device.h"
#include "cuda/scale/scale.cuh"

namespace mixprec::cuda {

namespace {

void scale_from_amax_(Tensor scale, Tensor scale_inv, Tensor amax, ScalarType type, int64_t margin,
                      bool power_of_two) {
  float fmt_max = check_scale_from_amax(scale, scale_inv, amax, type);
  float shift = check_margin(margin, "scale_from_amax_");
  int64_t count = scale.numel();
  if (count == 0) return;

  OnDevice device(scale);
  Tensor flat = row_major(scale), flat_inv = row_major(scale_inv);
  amax = row_major(amax);
  check_launch(launch(scale_from_amax_kernel, {(count + kThreads - 1) / kThreads}, device.stream,
                      fp32_of(flat), fp32_of(flat_inv), read_fp32(amax), count, fmt_max, shift,
                      power_of_two),
               "scale_from_amax_");
  write_back(scale, flat);
  write_back(scale_inv, flat_inv);
}

void update_delayed_scales_(Tensors amax_histories, Tensors scales, Tensors amaxes,
                            std::vector<double> fmt_max, int64_t margin, bool power_of_two,
                            bool most_recent) {
  check_delayed_scales(amax_histories, scales, amaxes, fmt_max);
  float shift = check_margin(margin, "update_delayed_scales_");
  size_t n = scales.size();
  if (n == 0) return;

  OnDevice device(scales[0]);
  Tensors histories;
  std::vector<DelayedScale> list;
  for (size_t i = 0; i < n; ++i) {
    histories.push_back(row_major(amax_histories[i]));
    list.push_back({fp32_of(histories[i]), fp32_of(scales[i]), fp32_of(amaxes[i]),
                    static_cast<float>(fmt_max[i])});
  }
  DelayedRule rule = {histories[0].numel(), shift, power_of_two, most_recent};
  check_launch(update_delayed_scales(list.data(), static_cast<int64_t>(n), rule, device.stream),
               "update_delayed_scales_");
  for (size_t i = 0; i < n; ++i) write_back(amax_histories[i], histories[i]);
}

Tensor inv_scale_op(Tensor scale) {
  check_scalar(scale, ScalarType::Float, scale, "inv_scale", "scale");
  OnDevice device(scale);
  Tensor result = empty_on(scale, scale.sizes(), ScalarType::Float);
  check_launch(launch(inv_scale_kernel, {1, 1}, device.stream, read_fp32(scale), fp32_of(result)),
               "inv_scale");
  return result;
}

Tensor clip_coef_op(Tensor sum_sq, double max_norm) {
  check_clip_coef(sum_sq, max_norm);
  OnDevice device(sum_sq);
  Tensor result = empty_on(sum_sq, {}, ScalarType::Float);
  check_launch(launch(clip_coef_kernel, {1}, device.stream,
                      static_cast<const double*>(sum_sq.const_data_ptr()), sum_sq.numel(), max_norm,
                      fp32_of(result)),
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
  LossScaleState state = {fp32_of(scale), static_cast<int32_t*>(growth_tracker.mutable_data_ptr()),
                          static_cast<int32_t*>(hysteresis_tracker.mutable_data_ptr()),
                          static_cast<int64_t*>(counters.mutable_data_ptr())};
  check_launch(launch(update_scale_kernel, {1, 1}, device.stream, state, read_fp32(found_inf),
                      underflows, static_cast<float>(grow_on_underflow), rule),
               "update_scale_");
}

}  // namespace

}  // namespace mixprec::cuda

STABLE_TORCH_LIBRARY_IMPL(mixprec, CUDA, m) {
  m.impl("scale_from_amax_", TORCH_BOX(&mixprec::cuda::scale_from_amax_));
  m.impl("update_delayed_scales_", TORCH_BOX(&mixprec::cuda::update_delayed_scales_));
  m.impl("inv_scale", TORCH_BOX(&mixprec::cuda::inv_scale_op));
  m.impl("clip_coef", TORCH_BOX(&mixprec::cuda::clip_coef_op));
  m.impl("update_scale_", TORCH_BOX(&mixprec::cuda::update_scale_));
}
