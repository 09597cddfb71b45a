// scale_from_amax_, inv_scale, clip_coef, update_scale_, update_delayed_scales_: a few scalars
// each, computed on one thread.
#include "arguments/step.h"

namespace mixprec::cpu {

namespace {

template <class T>
T& scalar(const Tensor& t) {
  return *static_cast<T*>(t.mutable_data_ptr());
}

}  // namespace

// scale, scale_inv, amax: fp32, all of the same shape
void scale_from_amax_(Tensor scale, Tensor scale_inv, Tensor amax, ScalarType type, int64_t margin,
                      bool power_of_two) {
  float fmt_max = check_scale_from_amax(scale, scale_inv, amax, type);
  float shift = check_margin(margin, "scale_from_amax_");
  Tensor old = to_contiguous(scale), in = to_contiguous(amax);
  Tensor s = empty(scale.sizes(), ScalarType::Float), inv = empty(scale.sizes(), ScalarType::Float);
  const float *previous = read_fp32(old), *a = read_fp32(in);
  float *out = fp32_of(s), *out_inv = fp32_of(inv);
  for (int64_t i = 0; i < s.numel(); ++i) {
    out[i] = scale_from_amax(a[i], fmt_max, shift, power_of_two, previous[i]);
    out_inv[i] = 1.0f / out[i];
  }
  torch::stable::copy_(scale, s);
  torch::stable::copy_(scale_inv, inv);
}

// scale: fp32, one element -> the same shape
Tensor inv_scale(Tensor scale) {
  check_scalar(scale, ScalarType::Float, scale, "inv_scale", "scale");
  Tensor result = empty(scale.sizes(), ScalarType::Float);
  scalar<float>(result) = static_cast<float>(1.0 / static_cast<double>(scalar<float>(scale)));
  return result;
}

// sum_sq: fp64, any shape -> fp32 []
Tensor clip_coef(Tensor sum_sq, double max_norm) {
  check_clip_coef(sum_sq, max_norm);
  const double* part = static_cast<const double*>(sum_sq.const_data_ptr());
  double total = 0.0;
  for (int64_t i = 0; i < sum_sq.numel(); ++i) total += part[i];
  return empty_scalar(mixprec::clip_coef(total, max_norm));
}

// one element each: scale, found_inf and underflow fp32, the trackers int32; counters: int64 [3]
void update_scale_(Tensor scale, Tensor growth_tracker, Tensor hysteresis_tracker, Tensor counters,
                   Tensor found_inf, MaybeTensor underflow, double growth_factor,
                   double backoff_factor, int64_t growth_interval, double min_scale,
                   double max_scale, int64_t hysteresis, double grow_on_underflow) {
  check_loss_scale(scale, growth_tracker, hysteresis_tracker, counters, found_inf, underflow);
  LossScaleRule rule = loss_scale_rule(growth_factor, backoff_factor, growth_interval, min_scale,
                                       max_scale, hysteresis, grow_on_underflow);
  bool underflows =
      underflow.has_value() && *read_fp32(*underflow) > static_cast<float>(grow_on_underflow);
  int64_t* counts = static_cast<int64_t*>(counters.mutable_data_ptr());
  LossScale now =
      update_loss_scale({scalar<float>(scale), scalar<int32_t>(growth_tracker),
                         scalar<int32_t>(hysteresis_tracker), counts[0], counts[1], counts[2]},
                        scalar<float>(found_inf) != 0.0f, underflows, rule);
  scalar<float>(scale) = now.scale;
  scalar<int32_t>(growth_tracker) = now.growth_tracker;
  scalar<int32_t>(hysteresis_tracker) = now.hysteresis_tracker;
  counts[0] = now.skipped;
  counts[1] = now.applied;
  counts[2] = now.skipped_in_a_row;
}

// lists of n: amax_histories [L], scales and amaxes one element, all fp32; fmt_max: n numbers
void update_delayed_scales_(TensorList amax_histories, TensorList scales, TensorList amaxes,
                            std::vector<double> fmt_max, int64_t margin, bool power_of_two,
                            bool most_recent) {
  check_delayed_scales(amax_histories, scales, amaxes, fmt_max);
  float shift = check_margin(margin, "update_delayed_scales_");
  for (size_t i = 0; i < scales.size(); ++i) {
    Tensor history = to_contiguous(amax_histories[i]);  // usually no copy
    float& scale = *fp32_of(scales[i]);
    float& amax = *fp32_of(amaxes[i]);
    scale = update_delayed_scale(fp32_of(history), history.numel(), amax, scale,
                                 static_cast<float>(fmt_max[i]), shift, power_of_two, most_recent);
    amax = kUnused;
    if (!amax_histories[i].is_contiguous()) torch::stable::copy_(amax_histories[i], history);
  }
}

}  // namespace mixprec::cpu

STABLE_TORCH_LIBRARY_IMPL(mixprec, CPU, m) {
  m.impl("scale_from_amax_", TORCH_BOX(&mixprec::cpu::scale_from_amax_));
  m.impl("inv_scale", TORCH_BOX(&mixprec::cpu::inv_scale));
  m.impl("clip_coef", TORCH_BOX(&mixprec::cpu::clip_coef));
  m.impl("update_scale_", TORCH_BOX(&mixprec::cpu::update_scale_));
  m.impl("update_delayed_scales_", TORCH_BOX(&mixprec::cpu::update_delayed_scales_));
}
